"""A few shards of a run under torch's profiler: traces for chrome://tracing or Perfetto, and tables of operations.

They are recorded by the engine's own workers: `work` is what such a worker runs. Recording slows the launch loop, so
that its times are for shares and for finding things, never for rates."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from virnuc_core.config import EngineSpec, TraceSpec
from virnuc_core.encoders.registry import ENCODER_NAMES, HEAD
from virnuc_core.engine.loader import Batch, Item, Take
from virnuc_core.engine.process import Parent, WorkerSpec
from virnuc_core.engine.shards import ShardTask
from virnuc_core.engine.worker import Worker
from virnuc_core.errors import VirnucError
from virnuc_core.rundir import RUN_FILES, TRACE_FILES, RunDir, atomic_file, discard
from virnuc_core.runfiles import Device, RunFile, read, write
from virnuc_core.tools.bench import Bench, measure

TABLE: Final = "{}.operations.json"  # of a device
WAIT: Final = "dataloader_fetch"
SHAPES_WIDTH: Final = 200
MARKS: Final = (WAIT, *ENCODER_NAMES, HEAD)  # the launch loop's own ranges, in its order

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

    schema_version: int = 1
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


def trace(bench: Bench, engine: EngineSpec, spec: TraceSpec) -> tuple[TraceTable, ...]:
    """The tables of new traces, one a device; both lie in `spec.folder`. As many shards as every device needs to record
    its own are computed and thrown away. Errors: those of `prepare` and of the pool; `VirnucError` for no recording."""
    folder, scratch = Path(spec.folder), RunDir(Path(spec.folder) / "recording")
    discard(folder, *TRACE_FILES)
    folder.mkdir(parents=True, exist_ok=True)
    job = bench.job(scratch, engine.model_copy(update={"commit": False}))
    if len(job.plan) < (spec.skip + spec.traced_shards) * len(job.devices):
        spec = spec.model_copy(
            update={"skip": 0}
        )  # so few reads that there is nothing to warm up with
    job = replace(job, trace=spec, worker=__name__)
    measure(job, shards=(spec.skip + spec.traced_shards) * len(job.devices))
    discard(scratch.root, *RUN_FILES)
    paths = [folder / TABLE.format(device.id) for device in job.devices]
    tables = tuple(read(path, TraceTable) for path in paths if path.is_file())
    if not tables:
        raise VirnucError(f"{folder}: no shard was recorded; give more reads")
    for table in tables:
        if table.trace is None:
            log.warning(
                "%s: a trace of %s bytes was not kept", table.device, f"{table.trace_bytes:,}"
            )
    return tables


def work(parent: Parent, spec: WorkerSpec) -> None:
    """Compute shards as `engine.worker` does, and record some."""
    wanted = spec.trace
    assert wanted is not None
    Worker(parent, spec, lambda take: recorded(take, wanted, spec.device)).run()


@contextmanager
def recorded(take: Take, spec: TraceSpec, device: Device) -> Iterator[Take]:
    """What stands before the loader, `take`, and records what the launch loop does from a shard's beginning until the
    item after the last shard is asked for: by then, in that very thread, the head of that shard has been launched."""
    profiler: profile | None = None
    told = ended = batches = tokens = 0
    on_gpu = device.kind == "cuda"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    synchronize: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None

    def finish() -> None:
        nonlocal profiler
        if profiler is not None:
            synchronize()
            profiler.stop()
            write_table(profiler, spec, device, shards=ended, batches=batches, tokens=tokens)
            profiler = None

    def next_item() -> tuple[Item, float]:
        nonlocal profiler, told, ended, batches, tokens
        if ended >= spec.traced_shards:
            finish()
        with record_function(WAIT):  # the wait for it is a range of the trace
            item, wait_ms = take()
        match item:
            case ShardTask():  # before its batches, and after them
                told += 1
                ended += profiler is not None and told % 2 == 0
                if told == 2 * spec.skip + 1:
                    synchronize()
                    profiler = profile(
                        activities=activities,
                        record_shapes=spec.shapes,
                        profile_memory=spec.memory,
                        acc_events=True,
                    )
                    profiler.start()
            case Batch() if profiler is not None:
                batches += 1
                tokens += item.packed.real_tokens
        return item, wait_ms

    yield next_item
    finish()


def write_table(
    profiler: profile, spec: TraceSpec, device: Device, *, shards: int, batches: int, tokens: int
) -> None:
    """The trace, unless it is too large, and `<device>.operations.json`."""
    trace = Path(spec.folder, f"{device.id}.json.gz")
    with atomic_file(trace) as aside:
        gz = aside.with_name(aside.name + ".gz")  # the name decides that torch compresses
        profiler.export_chrome_trace(str(gz))
        gz.replace(aside)
    if (size := trace.stat().st_size) > (spec.max_trace_mb << 20):
        trace.unlink()
    averages = profiler.key_averages(group_by_input_shape=spec.shapes)
    spans = [event.time_range for event in profiler.events() or ()]
    first, last = (
        min((span.start for span in spans), default=0.0),
        max((span.end for span in spans), default=0.0),
    )
    rows = [  # each without the time of what it calls
        Operation(
            name=row.key,
            on=_on(row),
            calls=row.count,
            host_ms=row.self_cpu_time_total / 1e3,
            device_ms=row.self_device_time_total / 1e3 if _on(row) == "device" else 0.0,
            shapes=str(row.input_shapes)[:SHAPES_WIDTH]
            if getattr(row, "input_shapes", None)
            else "",
        )
        for row in averages
        if row.key not in MARKS
    ]
    rows.sort(key=lambda row: row.device_ms if row.on == "device" else row.host_ms, reverse=True)
    kernels, host = (
        [row for row in rows if row.on == on][: spec.operations] for on in ("device", "host")
    )
    # of the launch loop's ranges; with shapes one may come in several rows, and the device has a copy of each
    by_name = {
        name: [row for row in averages if row.key == name and _on(row) == "host"] for name in MARKS
    }
    totals = ("count", "cpu_time_total", "device_time_total")
    sums = {
        name: [sum(getattr(row, of) for row in rows) for of in totals]
        for name, rows in by_name.items()
        if rows
    }
    marks = tuple(
        Operation(name=name, on="host", calls=calls, host_ms=host / 1e3, device_ms=device / 1e3)
        for name, (calls, host, device) in sums.items()
    )
    table = TraceTable(
        device=device.id,
        kind=device.kind,
        shards=shards,
        batches=batches,
        tokens=tokens,
        window_ms=(last - first) / 1e3,
        marks=marks,
        operations=(*kernels, *host),
        trace=trace.name if size <= (spec.max_trace_mb << 20) else None,
        trace_bytes=size,
    )
    write(trace.with_name(TABLE.format(device.id)), table)


def _on(row: Any) -> Literal["host", "device"]:
    return "host" if row.device_type.name == "CPU" else "device"
