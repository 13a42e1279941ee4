"""A few shards of a run under torch's profiler, inside the very workers that a run starts."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from virnuc_core.config import EngineSpec
from virnuc_core.engine.messages import TraceSpec
from virnuc_core.errors import VirnucError
from virnuc_core.measure import recording
from virnuc_core.measure.bench import Bench, measure
from virnuc_core.measure.recording import TraceTable, read_table, table_path
from virnuc_core.rundir import RunDir, write_text_whole

SCHEMA_VERSION: Final = 1

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

    def __str__(self) -> str:
        batches, shards = (sum(getattr(t, name) for t in self.tables) for name in ("batches", "shards"))
        return f"{batches} batches of {counted(shards, 'shard')} on {counted(len(self.tables), 'device')} recorded"


def trace(bench: Bench, engine: EngineSpec, spec: TraceSpec) -> Traces:
    """Traces and tables in `spec.folder`; whatever was there is removed.

    As many shards as every device needs to record its own are computed and thrown away. Errors: those of `prepare` and
    of the pool; `VirnucError` when no device recorded anything.
    """
    folder, scratch = Path(spec.folder), RunDir(Path(spec.folder) / "recording")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    job = bench.job(scratch, engine.model_copy(update={"commit": False}))
    if len(job.plan) < (spec.skip + spec.shards) * len(job.devices):
        spec = replace(spec, skip=0)  # so few reads that there is nothing to warm up with
    job = replace(job, trace=spec, worker=recording.__name__)
    measure(job, shards=(spec.skip + spec.shards) * len(job.devices))
    shutil.rmtree(scratch.root)
    paths = [table_path(folder, device.id) for device in job.devices]
    tables = tuple(read_table(path) for path in paths if path.is_file())
    if not tables:
        raise VirnucError(f"{folder}: no shard was recorded; give more reads")
    for table in tables:
        if table.trace is None:
            log.warning("%s: a trace of %s bytes was not kept", table.device, f"{table.trace_bytes:,}")
    return Traces(folder, tables)


def write_profile(found: Traces, stages: Mapping[str, float | None], total_s: float) -> Path:
    """`profile.json` beside the traces: the nine stages of the undisturbed run, and what was recorded."""
    body = {
        "schema_version": SCHEMA_VERSION,
        "run": {"total_s": total_s, "stages": dict(stages)},
        "recorded": [table.model_dump(exclude={"schema_version"}) for table in found.tables],
    }
    path = found.folder / "profile.json"
    write_text_whole(path, json.dumps(body, indent=1) + "\n")
    return path


def counted(number: int, noun: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
