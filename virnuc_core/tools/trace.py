"""Record a few shards of a run with torch's profiler: traces, and tables of operations.

The traces are for chrome://tracing or Perfetto. They are recorded by the engine's own workers:
`work` is what such a worker runs. Recording slows the launch loop, so that its times are good for
shares and for finding things, never for rates.
"""

import gzip
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from virnuc_core.config import EngineSpec, TraceSpec
from virnuc_core.encoder_names import ENCODER_NAMES
from virnuc_core.encoders.registry import HEAD
from virnuc_core.engine.loader import Batch, Item, Take
from virnuc_core.engine.process import Parent, WorkerSpec
from virnuc_core.engine.shards import ShardTask
from virnuc_core.engine.worker import Worker
from virnuc_core.errors import VirnucError
from virnuc_core.lease import make_folder
from virnuc_core.rundir import RUN_FILES, TRACE_FILES, RunDir, atomic_file, discard
from virnuc_core.runfiles import Device, RunFile, read, write
from virnuc_core.system_errors import is_regular_file
from virnuc_core.tools.bench import Bench, measure_job
from virnuc_core.tools.memory_history import MemoryRecord, MemoryRecorder

TABLE: Final = "{}.operations.json"  # of a device
TRACE: Final = "{}.json.gz"
TENSORBOARD_TRACE: Final = "{}.pt.trace.json.gz"  # TensorBoard's plugin reads no other names
MEMORY_HISTORY: Final = "{}.memory.pickle"
WAIT: Final = "dataloader_fetch"
SHAPES_WIDTH: Final = 200  # characters
MARKS: Final = (WAIT, *ENCODER_NAMES, HEAD)  # the launch loop's own ranges, in its order
# Ranges around the others, for those who read the trace: from a batch to the next one, and what is
# launched for it. Their time is that of the ranges inside, so that no table adds them.
FORWARD: Final = "model_forward"
STEP: Final = "ProfilerStep"
US_PER_MS: Final = 1e3

Side = Literal["host", "device"]

log = logging.getLogger(__name__)


class Operation(RunFile):
    """One operation, or one mark of the launch loop, added up over the recorded shards."""

    name: str
    on: Side  # a kernel runs on the device, what launches it on the host
    calls: int
    host_ms: float  # of an operation without those it calls, of a mark with them
    device_ms: float  # of a kernel, or of all kernels within a mark; 0 on CPU
    shapes: str = ""

    @property
    def own_ms(self) -> float:
        """Time on the side that the operation runs on."""
        if self.on == "device":
            return self.device_ms
        return self.host_ms


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
    trace: str | None  # file name; None if it was too large to keep
    trace_bytes: int
    memory: MemoryRecord = MemoryRecord()
    shard_numbers: tuple[int, ...] = ()  # which shards of the plan; an older version did not say


def trace(bench: Bench, engine: EngineSpec, spec: TraceSpec) -> tuple[TraceTable, ...]:
    """Record new traces, one for each device, and their tables in `spec.folder`.

    Earlier traces there are removed. Each device computes a few shards to warm up, and then
    records a few. The results of all these shards are thrown away.

    Args:
        bench: The reads, models and devices.
        engine: Settings of the engine.
        spec: How many shards each device skips and records, and the folder.

    Returns:
        The table of each device that recorded something.

    Raises:
        VirnucError: Nothing was recorded, or the run failed.
    """
    folder = Path(spec.folder)
    scratch = RunDir(folder / "recording")
    discard(folder, *TRACE_FILES)
    make_folder(folder)
    job = bench.job(scratch, engine.model_copy(update={"commit": False}))
    n_devices = len(job.devices)
    if len(job.plan) < (spec.skip + spec.traced_shards) * n_devices:
        # There are so few reads that no shard is left to warm up with.
        spec = spec.model_copy(update={"skip": 0})
    # The worker processes run the function `work` of this module.
    job = replace(job, trace=spec, worker=__name__)
    measure_job(job, shards=(spec.skip + spec.traced_shards) * n_devices)
    discard(scratch.root, *RUN_FILES)
    # The workers wrote the tables. A device that came too late for a shard has none.
    paths = [folder / TABLE.format(device.id) for device in job.devices]
    tables = tuple(read(path, TraceTable) for path in paths if is_regular_file(path))
    if not tables:
        raise VirnucError(f"{folder}: no shard was recorded; give more reads")
    for table in tables:
        if table.trace is None:
            n_bytes = f"{table.trace_bytes:,}"
            log.warning("%s: a trace of %s bytes was not kept", table.device, n_bytes)
    return tables


# --- In a worker ----------------------------------------------------------------------------------


def work(parent: Parent, spec: WorkerSpec) -> None:
    """Compute the shards that the parent sends, as every worker does, and record some of them.

    This is what a worker process of a traced run executes. It runs until the parent process ends
    it.
    """
    trace_spec = spec.trace
    assert trace_spec is not None  # `trace` has set it

    def with_recording(take: Take) -> AbstractContextManager[Take]:
        """Wrap `take`, with which the worker gets its next batch, so that it also records."""
        return recorded(take, trace_spec, spec.device)

    Worker(parent, spec, with_recording).run()


@contextmanager
def recorded(take: Take, spec: TraceSpec, device: Device) -> Iterator[Take]:
    """Record what the launch loop does with the items that `take` returns.

    The launch loop is the thread that takes batches from the loader and launches them on the
    device. When the `with` block ends, a recording that is still going on is written, too.

    Args:
        take: Returns the next item (a batch, or the mark of a shard) and how long it was waited
            for.
        spec: What to record, and where.
        device: The device of this worker.

    Yields:
        The function to call instead of `take`.
    """
    recorder = _Recorder(take, spec, device)
    yield recorder.next_item
    recorder.finish()


@dataclass(slots=True)
class Recording:
    """What was recorded so far."""

    shard_numbers: list[int] = field(default_factory=list)  # in the plan, of shards that ended
    batches: int = 0
    tokens: int = 0
    memory: MemoryRecord = field(default_factory=MemoryRecord)  # set when the recording ends


class _Recorder:
    """Records the launch loop from the beginning of a shard to the end of another.

    The recording ends when the item after the last shard is asked for. By then, the thread that
    asks has launched the head of that shard.
    """

    def __init__(self, take: Take, spec: TraceSpec, device: Device) -> None:
        """Prepare to record. Nothing is recorded yet.

        Args:
            take: Returns the next item of the loader and how long it was waited for.
            spec: How many shards to skip and to record, and where to write.
            device: The device of this worker.
        """
        self._take = take
        self._spec = spec
        self._device = device
        self._profiler: profile | None = None
        self._n_shard_marks = 0  # one before the batches of each shard, and one after them
        self._recording = Recording()
        self._forward: record_function | None = None  # the range of the batch being launched
        history_path = None
        if spec.memory_history:
            history_path = Path(spec.folder, MEMORY_HISTORY.format(device.id))
        self._memory = MemoryRecorder(device, history_path, spec.max_trace_mb)

    def next_item(self) -> tuple[Item, float]:
        """Return the next item, and how long it was waited for, in ms.

        Counts it for the trace, and ends the trace after the wanted number of shards. A `ShardTask`
        among the batches marks the beginning or the end of a shard.
        """
        self._end_forward()
        # Only now has the caller launched all that belongs to the last shard.
        if len(self._recording.shard_numbers) >= self._spec.traced_shards:
            self.finish()
        with record_function(WAIT):  # the wait is a range of the trace
            item, wait_ms = self._take()
        if isinstance(item, ShardTask):
            self._note_shard_mark(item)
        elif isinstance(item, Batch) and self._profiler is not None:
            self._recording.batches += 1
            self._recording.tokens += item.packed.real_tokens
            # The caller launches the batch next, and then asks for another item.
            self._forward = record_function(FORWARD)
            self._forward.__enter__()
        return item, wait_ms

    def _end_forward(self) -> None:
        """End the range of the batch that was launched, and with it a step of the profiler.

        Without such a batch, do nothing.
        """
        if self._forward is None:
            return
        self._forward.__exit__(None, None, None)
        self._forward = None
        if self._profiler is not None:
            self._profiler.step()

    def finish(self) -> None:
        """Stop the recording and write its files. Without a recording, do nothing."""
        if self._profiler is not None:
            self._end_forward()
            self._synchronize()
            self._profiler.stop()
            self._recording.memory = self._memory.stop()
            write_table(self._profiler, self._spec, self._device, self._recording)
            self._profiler = None

    def _note_shard_mark(self, shard: ShardTask) -> None:
        """Note the beginning or the end of a shard; start recording after the skipped shards."""
        self._n_shard_marks += 1
        is_end = self._n_shard_marks % 2 == 0  # beginnings and ends alternate
        if is_end and self._profiler is not None:
            self._recording.shard_numbers.append(shard.shard)
        n_skipped_marks = 2 * self._spec.skip
        if self._n_shard_marks == n_skipped_marks + 1:
            self._start()

    def _start(self) -> None:
        """Start torch's profiler, when the GPU has done what was launched before."""
        activities = [ProfilerActivity.CPU]
        if self._device.kind == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._synchronize()
        self._memory.start()
        self._profiler = profile(
            activities=activities,
            # Without a schedule, torch would not mark the steps in the trace.
            schedule=lambda step: ProfilerAction.RECORD,
            record_shapes=self._spec.shapes,
            profile_memory=self._spec.memory,
            with_stack=self._spec.stacks,
            acc_events=True,
        )
        self._profiler.start()

    def _synchronize(self) -> None:
        """Wait until a GPU has done what was launched."""
        if self._device.kind == "cuda":
            torch.cuda.synchronize()


# --- Tables ---------------------------------------------------------------------------------------


def write_table(profiler: profile, spec: TraceSpec, device: Device, recording: Recording) -> None:
    """Write the trace of a device, unless it is too large, and `<device>.operations.json`.

    Args:
        profiler: The stopped profiler.
        spec: How much to keep, and the folder.
        device: The device that was recorded.
        recording: Which shards, and how many batches and tokens, were recorded.
    """
    name_format = TENSORBOARD_TRACE if spec.tensorboard else TRACE
    trace_path = Path(spec.folder, name_format.format(device.id))
    n_bytes = _write_trace(profiler, trace_path)
    is_kept = n_bytes <= spec.max_trace_mb * 2**20
    if not is_kept:
        trace_path.unlink()
    averages = profiler.key_averages(group_by_input_shape=spec.shapes)
    operations = [_operation(row) for row in averages if not _is_range(row.key)]
    kernels = _longest(operations, "device", spec.operations)
    host_operations = _longest(operations, "host", spec.operations)
    table = TraceTable(
        device=device.id,
        kind=device.kind,
        shards=len(recording.shard_numbers),
        batches=recording.batches,
        tokens=recording.tokens,
        window_ms=_window_ms(profiler),
        marks=tuple(_sum_marks(averages)),
        operations=(*kernels, *host_operations),
        trace=trace_path.name if is_kept else None,
        trace_bytes=n_bytes,
        memory=recording.memory,
        shard_numbers=tuple(recording.shard_numbers),
    )
    write(trace_path.with_name(TABLE.format(device.id)), table)


def _is_range(name: str) -> bool:
    """Tell whether a row of torch's averages is a range of the launch loop, not an operation."""
    return name in (*MARKS, FORWARD) or name.startswith(STEP)


def _write_trace(profiler: profile, path: Path) -> int:
    """Write the compressed trace, and return its size in bytes."""
    with (
        tempfile.NamedTemporaryFile(suffix=".json") as plain_file,
        atomic_file(path) as temp_path,
    ):
        # torch decides by the name whether to compress, and the path of `atomic_file` has no name.
        profiler.export_chrome_trace(plain_file.name)
        with Path(plain_file.name).open("rb") as source, gzip.open(temp_path, "wb") as target:
            shutil.copyfileobj(source, target)
    return path.stat().st_size


def _window_ms(profiler: profile) -> float:
    """Return the milliseconds from the start of the first event to the end of the last one."""
    spans = [event.time_range for event in profiler.events() or ()]
    if not spans:
        return 0.0
    start_us = min(span.start for span in spans)
    end_us = max(span.end for span in spans)
    return float(end_us - start_us) / US_PER_MS


def _operation(row: Any) -> Operation:
    """Return an operation, without the time of what it calls, from a row of torch's averages."""
    side = _side(row)
    device_ms = 0.0  # of what only launches kernels: they are operations of their own
    if side == "device":
        device_ms = row.self_device_time_total / US_PER_MS
    shapes = ""
    if getattr(row, "input_shapes", None):  # recorded only on request
        shapes = str(row.input_shapes)[:SHAPES_WIDTH]
    return Operation(
        name=row.key,
        on=side,
        calls=row.count,
        host_ms=row.self_cpu_time_total / US_PER_MS,
        device_ms=device_ms,
        shapes=shapes,
    )


def _longest(operations: Sequence[Operation], side: Side, limit: int) -> list[Operation]:
    """Return the operations of one side that took most time, longest first, at most `limit`.

    The sides are the host, which launches kernels, and the device, which runs them.
    """
    operations_of_side = [operation for operation in operations if operation.on == side]
    operations_of_side.sort(key=lambda operation: operation.own_ms, reverse=True)
    return operations_of_side[:limit]


def _sum_marks(averages: Sequence[Any]) -> Iterator[Operation]:
    """Yield the steps that the launch loop has marked in the trace, each as one operation.

    The steps are waiting for a batch, each encoder and the head. One that did not occur is left
    out.

    Args:
        averages: Rows of torch's averages. If shapes were recorded, a step has a row for each
            combination of shapes. The device has a copy of each row, which does not count.
    """
    for name in MARKS:
        rows = [row for row in averages if row.key == name and _side(row) == "host"]
        if rows:
            yield Operation(
                name=name,
                on="host",
                calls=sum(row.count for row in rows),
                host_ms=sum(row.cpu_time_total for row in rows) / US_PER_MS,
                device_ms=sum(row.device_time_total for row in rows) / US_PER_MS,
            )


def _side(row: Any) -> Side:
    """Return where an operation runs, from its row of torch's averages."""
    if row.device_type.name == "CPU":
        return "host"
    return "device"
