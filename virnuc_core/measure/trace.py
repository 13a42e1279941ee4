"""A few shards of a run under torch's profiler: traces for chrome://tracing or Perfetto, and tables of operations.

They are recorded by the engine's own workers: `work` is what such a worker runs. Recording slows the launch loop, so
that its times are for shares and for finding things, never for rates.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from virnuc_core.config import EngineSpec, TraceSpec
from virnuc_core.engine.loader import Batch, Item, ShardEnd, Take
from virnuc_core.engine.process import Parent, WorkerSpec
from virnuc_core.engine.shards import ShardTask
from virnuc_core.engine.worker import Worker
from virnuc_core.errors import VirnucError
from virnuc_core.measure.bench import Bench, measure
from virnuc_core.rundir import RunDir, whole_file, write_text_whole
from virnuc_core.runfiles import Device, RunFile, RunSummary, read, write

SCHEMA_VERSION: Final = 1
TABLE: Final = "{}.operations.json"  # of a device
WAIT: Final = "dataloader_fetch"
SHAPES_WIDTH: Final = 200
MARKS: Final = (WAIT, "dnabert_s", "esm2", "head")  # the launch loop's own ranges, in its order

log = logging.getLogger(__name__)


class Operation(RunFile):
    """One operation, or one mark of the launch loop, added up over the recorded shards."""

    name: str
    on: Literal["host", "device"]  # a kernel runs on the device, what launches it on the host
    calls: int
    host_ms: float  # of an operation without those it calls, of a mark with them
    device_ms: float  # of a kernel, or of all kernels within a mark; 0 on CPU
    shapes: str = ""


class TraceTable(RunFile):
    """`<device>.operations.json`: what one device's recording adds up to."""

    schema_version: int = SCHEMA_VERSION
    device: str
    kind: str
    shards: int
    batches: int
    tokens: int
    window_ms: float  # from the first recorded shard's start to the last one's end
    marks: tuple[Operation, ...]
    operations: tuple[Operation, ...]  # kernels, then what the host did; most time first
    trace: str | None  # file name; None when it would have been too large
    trace_bytes: int


@dataclass(frozen=True, slots=True)
class Traces:
    """What was recorded."""

    folder: Path
    tables: tuple[TraceTable, ...]  # one a device

    @property
    def trace_bytes(self) -> int:
        """Of all traces that were kept."""
        return sum(table.trace_bytes for table in self.tables if table.trace is not None)

    def write(self, run: RunSummary) -> None:
        """`profile.json` beside the traces: the nine stages of the undisturbed `run`, and what was recorded."""
        recorded = [table.model_dump(exclude={"schema_version"}) for table in self.tables]
        told = {"total_s": run.total_s or 0.0, "stages": run.stages}
        body = {"schema_version": SCHEMA_VERSION, "run": told, "recorded": recorded}
        write_text_whole(self.folder / "profile.json", json.dumps(body, indent=1) + "\n")

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
        spec = spec.model_copy(update={"skip": 0})  # so few reads that there is nothing to warm up with
    job = replace(job, trace=spec, worker=__name__)
    measure(job, shards=(spec.skip + spec.shards) * len(job.devices))
    shutil.rmtree(scratch.root)
    paths = [folder / TABLE.format(device.id) for device in job.devices]
    tables = tuple(read(path, TraceTable) for path in paths if path.is_file())
    if not tables:
        raise VirnucError(f"{folder}: no shard was recorded; give more reads")
    for table in tables:
        if table.trace is None:
            log.warning("%s: a trace of %s bytes was not kept", table.device, f"{table.trace_bytes:,}")
    return Traces(folder, tables)


def counted(number: int, noun: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def work(parent: Parent, spec: WorkerSpec) -> None:
    """Compute shards as `engine.worker` does, and record some."""
    wanted = spec.trace
    assert wanted is not None
    Worker(parent, spec, lambda take: Recorder(take, wanted, spec.device)).run()


class Recorder:
    """Stands before the loader and records what the launch loop does between the shards it is told.

    Recording begins when a shard is taken and ends when the item after the last shard is asked for, in the launch
    loop's own thread: by then the head of that shard has been launched.
    """

    def __init__(self, take: Take, spec: TraceSpec, device: Device) -> None:
        self._take, self._spec, self._device = take, spec, device
        self._profiler: profile | None = None
        self._begun = self._ended = self._batches = self._tokens = 0

    def take(self) -> tuple[Item, float]:
        """The next item; the wait for it is a range of the trace."""
        if self._profiler is not None and self._ended >= self._spec.shards:
            self._finish()
        with record_function(WAIT):
            item, wait_ms = self._take()
        match item:
            case ShardTask():
                self._begun += 1
                if self._begun == self._spec.skip + 1:
                    self._start()
            case Batch() if self._profiler is not None:
                self._batches += 1
                self._tokens += item.packed.real_tokens
            case ShardEnd() if self._profiler is not None:
                self._ended += 1
        return item, wait_ms

    def __enter__(self) -> Take:
        return self.take

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._profiler is not None and kind is None:
            self._finish()

    def _start(self) -> None:
        self._synchronize()
        cuda = [ProfilerActivity.CUDA] if self._device.kind == "cuda" else []
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            record_shapes=self._spec.shapes,
            profile_memory=self._spec.memory,
            acc_events=True,
        )
        self._profiler.start()

    def _synchronize(self) -> None:
        if self._device.kind == "cuda":
            torch.cuda.synchronize()

    def _finish(self) -> None:
        assert self._profiler is not None
        self._synchronize()
        self._profiler.stop()
        recorded, self._profiler = self._profiler, None
        trace = Path(self._spec.folder, f"{self._device.id}.json.gz")
        with whole_file(trace) as aside:
            gz = aside.with_name(aside.name + ".gz")  # the name decides that torch compresses
            recorded.export_chrome_trace(str(gz))
            gz.replace(aside)
        size = trace.stat().st_size
        kept = size <= self._spec.max_bytes
        if not kept:
            trace.unlink()
        averages = recorded.key_averages(group_by_input_shape=self._spec.shapes)
        spans = [event.time_range for event in recorded.events() or ()]
        first, last = min((span.start for span in spans), default=0.0), max((span.end for span in spans), default=0.0)
        table = TraceTable(
            device=self._device.id,
            kind=self._device.kind,
            shards=self._ended,
            batches=self._batches,
            tokens=self._tokens,
            window_ms=(last - first) / 1e3,
            marks=_marks(averages),
            operations=_operations(averages, self._spec.operations),
            trace=trace.name if kept else None,
            trace_bytes=size,
        )
        write(trace.with_name(TABLE.format(self._device.id)), table)


def _marks(averages: Any) -> tuple[Operation, ...]:
    """The launch loop's ranges; with shapes a range may come in several rows, and the device has a copy of each."""
    found = []
    for name in MARKS:
        rows = [row for row in averages if row.key == name and _on(row) == "host"]
        if rows:
            host, device = sum(row.cpu_time_total for row in rows), sum(row.device_time_total for row in rows)
            calls = sum(row.count for row in rows)
            found.append(Operation(name=name, on="host", calls=calls, host_ms=host / 1e3, device_ms=device / 1e3))
    return tuple(found)


def _operations(averages: Any, limit: int) -> tuple[Operation, ...]:
    """Rows of torch's table, each without the time of what it calls; those that took most time of either side."""
    rows = [
        Operation(
            name=row.key,
            on=_on(row),
            calls=row.count,
            host_ms=row.self_cpu_time_total / 1e3,
            device_ms=row.self_device_time_total / 1e3 if _on(row) == "device" else 0.0,
            shapes=str(row.input_shapes)[:SHAPES_WIDTH] if getattr(row, "input_shapes", None) else "",
        )
        for row in averages
        if row.key not in MARKS
    ]
    rows.sort(key=lambda row: row.device_ms if row.on == "device" else row.host_ms, reverse=True)
    kernels, host = ([row for row in rows if row.on == on][:limit] for on in ("device", "host"))
    return (*kernels, *host)


def _on(row: Any) -> Literal["host", "device"]:
    return "host" if row.device_type.name == "CPU" else "device"
