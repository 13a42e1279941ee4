"""Trace: a few shards of a run under torch's profiler, inside the very workers that a run starts."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from tasks.artifacts import cell
from tasks.guard import device_slots
from tasks.logs import core_logs
from tasks.retries import POLICY
from tasks.states import done
from tasks.tables import Rows, percent
from virnuc_core.config import Devices, EngineSpec
from virnuc_core.engine.devices import resolve
from virnuc_core.engine.messages import TraceSpec
from virnuc_core.engine.pool import Pool
from virnuc_core.engine.tracing import WAIT, Operation, TraceTable, read_table, table_path
from virnuc_core.errors import VirnucError
from virnuc_core.pipeline import ClassifySpec, job_spec, prepare, workers
from virnuc_core.rundir import RunDir, run_lock, write_text_whole

SCHEMA_VERSION: Final = 1
NAME_WIDTH: Final = 90  # kernels of templates have names of a thousand letters
STAGE_OF: Final = {"dnabert_s": "DNABERT-S", "esm2": "ESM-2", "head": "Model Prediction", WAIT: "(waiting for a batch)"}
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Traces:
    """What was recorded."""

    folder: Path
    tables: tuple[TraceTable, ...]  # one a device

    @property
    def trace_bytes(self) -> int:
        """Of all traces that were kept."""
        return sum(table.trace_bytes for table in self.tables if table.trace is not None)


@task(name="trace", task_run_name="trace {label} on {devices}", cache_policy=NO_CACHE, **POLICY)
def trace(
    run: RunDir, *, store: Path, models: Path, devices: Devices, engine: EngineSpec, spec: TraceSpec, label: str
) -> State[Traces]:
    """Traces and tables in `spec.folder`. The run's own shards are computed again for it and thrown away."""
    with core_logs(), device_slots(resolve(devices)), run_lock(run.root):
        found = recorded(run, store=store, models=models, devices=devices, engine=engine, spec=spec)
    return done(found, describe(found))


def recorded(
    run: RunDir, *, store: Path, models: Path, devices: Devices, engine: EngineSpec, spec: TraceSpec
) -> Traces:
    """Compute as many shards as every device needs to record its own, with nothing committed.

    Errors: those of `prepare` and `Pool.run`; `VirnucError` when no device recorded anything.
    """
    folder = Path(spec.folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    free = engine.model_copy(update={"commit": False})
    job = prepare(run, ClassifySpec(store=store, models=models, devices=devices, engine=free))
    wanted = spec.skip + spec.shards
    if len(job.plan) < wanted * len(job.devices):
        spec = replace(spec, skip=0)  # so few reads that there is nothing to warm up with
        wanted = spec.shards
    tracing = [replace(worker, trace=spec) for worker in workers(job)]
    shards = range(min(len(job.plan), wanted * len(job.devices)))
    Pool(job.plan, tracing, job_spec(job), lambda _: None).run(shards)
    paths = [table_path(folder, device.id) for device in job.devices]
    tables = tuple(read_table(path) for path in paths if path.is_file())
    if not tables:
        raise VirnucError(f"{run.root}: no shard was recorded; give more reads")
    for table in tables:
        if table.trace is None:
            log.warning("%s: a trace of %s bytes was not kept", table.device, f"{table.trace_bytes:,}")
    return Traces(folder, tables)


def describe(found: Traces) -> str:
    """What was recorded, in a sentence."""
    batches, shards, devices = (
        sum(t.batches for t in found.tables),
        sum(t.shards for t in found.tables),
        len(found.tables),
    )
    return f"{batches} batches of {counted(shards, 'shard')} on {counted(devices, 'device')} recorded"


def counted(number: int, noun: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def mark_rows(tables: Sequence[TraceTable]) -> Rows:
    """The stages as the launch loop marks them: the host's time to launch each, and the device's to compute it.

    The share is of the recorded window, by the device's time where it has one of its own.
    """
    return [_mark_row(table, mark) for table in tables for mark in table.marks]


def _mark_row(table: TraceTable, mark: Operation) -> dict[str, str]:
    own = mark.device_ms if table.kind == "cuda" and mark.name != WAIT else mark.host_ms
    return {
        "device": cell(table.device),
        "stage": cell(STAGE_OF.get(mark.name, mark.name)),
        "calls": cell(mark.calls),
        "host ms": cell(round(mark.host_ms, 2)),
        "device ms": cell(round(mark.device_ms, 2)) if table.kind == "cuda" else "–",
        "share of the recording": percent(own / table.window_ms if table.window_ms else None),
    }


def operation_rows(tables: Sequence[TraceTable], limit: int) -> Rows:
    """The operations that took most time on each device."""
    return [_operation_row(table, row) for table in tables for row in table.operations[:limit]]


def _operation_row(table: TraceTable, row: Operation) -> dict[str, str]:
    own = row.device_ms if row.on == "device" else row.host_ms
    shapes = {"shapes": cell(row.shapes)} if any(one.shapes for one in table.operations) else {}
    return {
        "device": cell(table.device),
        "operation": cell(row.name[:NAME_WIDTH]),
        "on": row.on,
        "calls": cell(row.calls),
        "ms": cell(round(own, 2)),
        "ms a call": cell(own / row.calls if row.calls else None),
        "share of the recording": percent(own / table.window_ms if table.window_ms else None),
        **shapes,
    }


def write_profile(folder: Path, found: Traces, stages: Mapping[str, float | None], total_s: float) -> Path:
    """`profile.json` beside the traces: the nine stages of the undisturbed run, and what was recorded."""
    body = {
        "schema_version": SCHEMA_VERSION,
        "run": {"total_s": total_s, "stages": dict(stages)},
        "recorded": [asdict(table) for table in found.tables],
    }
    path = folder / "profile.json"
    write_text_whole(path, json.dumps(body, indent=1) + "\n")
    return path
