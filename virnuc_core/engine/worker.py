"""The engine's worker process: one device, pinned; shard tasks come in, committed shards go out.

Messages in: a `WorkerSpec`; any number of `ShardTask`s of any runs, which may come much later (the
weights are loaded meanwhile); then `Closed`. Messages out: `Ready`, `Computed`, `Failed`. Nothing
in the launch loop makes the device wait.
"""

import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from virnuc_core.encoders.checkpoint import check_finite, load_models, open_part, shape_of
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.encoders.layers import Encoder
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.encoders.registry import (
    ENCODERS,
    HEAD,
    PART_SHAPES,
    EncoderName,
    embedding_columns,
)
from virnuc_core.engine.loader import (
    Batch,
    Loader,
    Source,
    Take,
    TokenRows,
    group_bounds,
    open_source,
    packed,
    shapes,
)
from virnuc_core.engine.process import Parent, Ready, WorkerSpec
from virnuc_core.engine.shards import (
    Computed,
    ShardResult,
    ShardTask,
    commit,
    read_plan,
    repeats_near_threshold,
)
from virnuc_core.errors import NotFiniteError, RunMismatchError, join_first
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import find_mismatches
from virnuc_core.telemetry.tables import BatchRecord, ShardDone

if TYPE_CHECKING:
    from virnuc_core.engine.repeats import Repeater

MAX_PENDING_COMMITS: Final = 2  # results that may wait for the disk before the launch loop does
TERM_GRACE_S: Final = 3.5
POLL_S: Final = 0.2  # how soon SIGTERM is noticed while waiting for a message

# Two moments of the device: events on CUDA, the host's clock on a CPU.
Span = tuple[Any, Any]


def milliseconds(span: Span) -> float:
    """Return the device time of a launch; valid once the device has passed its end."""
    start, end = span
    if isinstance(start, torch.cuda.Event):
        return float(start.elapsed_time(end))
    return float(1e3 * (end - start))


def warm_up(encoder: Encoder, budget: int, device: torch.device, length: int) -> None:
    """Launch a full batch of rows of this length, which compiles the kernels for it.

    Args:
        encoder: The encoder.
        budget: Token slots of the batch.
        device: Where the encoder is.
        length: Tokens of each row.

    Raises:
        torch.OutOfMemoryError: The device cannot hold such a batch.
    """
    n_rows = max(1, budget // length)
    tokens = np.random.default_rng().integers(5, 9, n_rows * length)
    token_rows = TokenRows(tokens, starts=np.arange(n_rows + 1) * length)
    _, batch = next(packed(token_rows, budget, pad=5))
    with torch.inference_mode():
        encoder.embed(batch.to(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class LaunchedBatch:
    """A batch that the device has been told to compute."""

    record: BatchRecord  # without the device's time, which is not known yet
    span: Span


@dataclass(slots=True)
class Pending:
    """A shard whose batches have been launched. Its results arrive on a side stream."""

    task: ShardTask
    started_s: float
    embeddings: Tensor  # float32 [rows, dna + protein], on the device, then on the host
    launched: list[LaunchedBatch] = field(default_factory=list)
    head_span: Span = (0.0, 0.0)
    scores: Tensor | None = None  # float32 [rows, 2], on the host
    arrived: torch.cuda.Event | None = None  # when the results are on the host; None on a CPU


class Worker:
    """Everything between the parent's messages and the device.

    One thread (the caller of `run`) launches, one loads and packs ahead, and one commits.
    """

    def __init__(
        self,
        parent: Parent,
        spec: WorkerSpec,
        recording: Callable[[Take], AbstractContextManager[Take]] = nullcontext,
    ) -> None:
        self._parent = parent
        self._spec = spec
        self._recording = recording  # wraps the loader's queue; a trace records there
        self._last_progress_s = time.monotonic()  # when it last did something
        self._held: deque[int] = deque()  # shards received and not answered
        self._stopping = threading.Event()
        self._writes: queue.Queue[Pending | None] = queue.Queue(maxsize=MAX_PENDING_COMMITS)

        def last_progress_s() -> float:
            # To load, or to wait with no task in hand, is no standstill.
            return self._last_progress_s if self._held else time.monotonic()

        parent.progress = last_progress_s
        signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, *_: object) -> None:
        """Commit what has been launched, if that takes no longer than a few seconds (SIGTERM)."""
        self._stopping.set()
        threading.Timer(TERM_GRACE_S, os._exit, (143,)).start()

    def _receive(self) -> ShardTask | None:
        """Return the next task; None when told to stop."""
        while not self._stopping.is_set():
            message = self._parent.receive(POLL_S)
            if isinstance(message, ShardTask):
                self._last_progress_s = time.monotonic()
                self._held.append(message.shard)
                return message
            if message is not None:
                self._stopping.set()
        return None

    def run(self) -> None:
        """Load the models, then compute shards until told to stop."""
        self._load()
        loaded_s = time.monotonic()
        first_task = self._receive()
        if first_task is None:
            return
        waited_s = time.monotonic() - loaded_s
        take = self._start_loader(first_task)
        ready_s = time.monotonic() - self._parent.started_s - waited_s
        self._parent.send(Ready(record={**self._report, "ready_s": ready_s, "waited_s": waited_s}))
        writer = threading.Thread(target=self._write, name="writer", daemon=True)
        writer.start()
        try:
            with self._recording(take) as recorded_take:
                self._launch_all(recorded_take)
        finally:
            # What was computed before an error is answered first: the parent takes the error to be
            # that of the first task without an answer.
            self._writes.put(None)
            writer.join()

    def _start_loader(self, first_task: ShardTask) -> Take:
        """Start the thread that packs batches ahead, beginning with a task already received."""
        engine = self._spec.engine
        pin = engine.pin_memory and self._device.type == "cuda"
        loader = Loader(Path(self._spec.models), engine, pin=pin)
        depth = engine.prefetch_factor * max(1, engine.num_workers)
        first_tasks = [first_task]

        def next_task() -> ShardTask | None:
            return first_tasks.pop() if first_tasks else self._receive()

        return loader.feed(next_task, depth)

    def _load(self) -> None:
        """Load all models to the device.

        On a GPU, compile the kernels and prove that the token budgets fit into memory.
        """
        import_s = time.monotonic() - self._parent.started_s
        models = Path(self._spec.models)
        engine = self._spec.engine
        on_gpu = self._spec.device.kind == "cuda"
        self._device = torch.device("cuda:0" if on_gpu else "cpu")
        # The digests are of what is loaded now. Nobody waits for them before the first commit.
        self._weights = ThreadPoolExecutor(1).submit(fingerprint, models, engine.precision)
        head_shape, _ = open_part(models, HeadShape)
        longest = head_shape.model_length // 3 + 2  # tokens of a row
        self._usual_bounds: list[int] = np.unique(group_bounds(np.arange(2, longest + 1))).tolist()
        loaded_s: list[float] = []

        def warm(encoder: Encoder) -> None:
            loaded_s.append(time.monotonic() - self._parent.started_s)
            if on_gpu:
                budget = encoder.INFO.token_budget(engine)
                self._warm_up(encoder, budget // self._spec.divisor)

        self._repeater: Repeater | None = None
        with ThreadPoolExecutor(1) as thread:
            if repeats_near_threshold(engine, head_shape):
                loading = thread.submit(self._load_repeater, longest)  # beside the others
                self._models = load_models(models, self._device, engine, warm)
                self._repeater = loading.result()
            else:
                self._models = load_models(models, self._device, engine, warm)
        self._columns = self._models.columns()
        self._copy_stream = torch.cuda.Stream(self._device) if on_gpu else None
        # Of the last encoder to come. Later entries are of a second warm-up, for want of memory.
        load_s = max(loaded_s[: len(ENCODERS)])
        self._report = self._describe(import_s, load_s)

    def _describe(self, import_s: float, load_s: float) -> dict[str, Any]:
        """Return what `summary.json` says of this worker."""
        # The largest first, as in the files of earlier versions.
        encoders = [self._models.encoders[info.name] for info in reversed(ENCODERS)]
        return {
            "device": self._spec.device.id,
            "pid": os.getpid(),
            # `time.monotonic()`; the other seconds count from here
            "started_s": self._parent.started_s,
            "import_s": import_s,
            "load_s": load_s,  # some kernels may have been compiled by then
            "torch": torch.__version__,
            "attention": {encoder.INFO.name: encoder.attention for encoder in encoders},
            "precision": {encoder.INFO.name: encoder.precision for encoder in encoders},
        }

    def _warm_up(self, encoder: Encoder, budget: int) -> None:
        """Compile kernels for the rows that will come, the shortest first.

        If the weights are not loaded yet, the reads are mostly staged by now, so that their lengths
        are known. Kernels for other lengths are compiled when such rows come, once for each user
        and machine.
        """
        warmed_bounds: list[int] = []
        while True:
            # Asked again each time, because a task may have come meanwhile.
            bounds = [bound for bound in self._bounds(encoder) if bound not in warmed_bounds]
            if not bounds:
                return
            # The largest shape proves that the budget fits; for the others, the smallest will do.
            slots = shapes(budget)[-1] if warmed_bounds else budget
            warm_up(encoder, slots, self._device, bounds[0])
            warmed_bounds.append(bounds[0])

    def _bounds(self, encoder: Encoder) -> list[int]:
        """Return the bounds of the length groups in which an encoder's first rows come, about.

        As long as no task is known, these are all usual ones.
        """
        task = self._parent.peek()
        if not isinstance(task, ShardTask):
            return self._usual_bounds
        with suppress(Exception):  # what is wrong with a task is reported when its turn comes
            store = open_source(_source_of(task, self._spec.models)).store
            residues = np.diff(store.protein_offsets[task.lo : task.hi + 1])
            tokens = encoder.INFO.estimate_tokens(residues)
            bounds: list[int] = np.unique(group_bounds(tokens)).tolist()
            return bounds
        return self._usual_bounds

    def _load_repeater(self, longest: int) -> "Repeater":
        """Load what embeds rows near the threshold again, and compile its kernels.

        Args:
            longest: Tokens of the longest row.
        """
        from virnuc_core.engine.repeats import Repeater  # only int8 needs it

        repeater = Repeater(Path(self._spec.models), self._device, self._spec.engine, longest)
        if repeater.stream is not None:
            with torch.cuda.stream(repeater.stream):
                self._warm_up(repeater.encoder, repeater.slots(self._spec.divisor))
        return repeater

    def _launch_all(self, take: Take) -> None:
        """Launch all batches that `take` gives, and hand each finished shard to the writer.

        This waits when the writer has fallen behind.
        """
        pending: Pending | None = None
        while True:
            item, wait_ms = take()
            self._last_progress_s = time.monotonic()
            if item is None:
                return
            if isinstance(item, Batch):
                assert pending is not None
                self._launch(pending, item, wait_ms)
            elif pending is None:  # the task, before its batches
                pending = self._begin_shard(item)
            else:  # the task again, after its batches
                self._finish_shard(pending)
                self._writes.put(pending)
                pending = None

    def _begin_shard(self, task: ShardTask) -> Pending:
        """Make room on the device for the embeddings of a shard."""
        width = sum(encoder.width for encoder in self._models.encoders.values())
        shape = (task.hi - task.lo, width)
        started_s = time.monotonic()
        embeddings = torch.zeros(shape, dtype=torch.float32, device=self._device)
        return Pending(task, started_s, embeddings)

    def _mark(self) -> torch.cuda.Event | float:
        """Return this moment of the device."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def _launch(self, pending: Pending, batch: Batch, wait_ms: float) -> None:
        """Launch one batch, which fills its encoder's columns of the shard's embeddings."""
        launched_s = time.monotonic()
        start = self._mark()
        encoder = self._models.encoders[batch.encoder]
        columns = self._columns[batch.encoder]
        with torch.inference_mode(), torch.profiler.record_function(batch.encoder):
            row_embeddings = encoder.embed(batch.packed.to(self._device))  # [row_capacity, width]
            rows = batch.rows.to(self._device, non_blocking=True)
            own_columns = pending.embeddings[:, columns]
            own_columns.index_copy_(0, rows, row_embeddings[: batch.packed.rows])
        record = BatchRecord(
            device=self._spec.device.id,
            encoder=batch.encoder,
            shard=pending.task.shard,
            index=batch.index,
            rows=batch.packed.rows,
            tokens=batch.packed.real_tokens,
            slots=batch.packed.slots,
            wait_ms=wait_ms,
            arrived_s=batch.arrived_s,
            launched_s=launched_s,
            device_ms=None,
        )
        pending.launched.append(LaunchedBatch(record, (start, self._mark())))

    def _finish_shard(self, pending: Pending) -> None:
        """Score a shard, and start to copy its results to the host, beside the next shard."""
        start = self._mark()
        features = pending.embeddings
        with torch.inference_mode(), torch.profiler.record_function(HEAD):
            if pending.task.skip:
                skipped_rows = (
                    torch.tensor(pending.task.skip, device=self._device) - pending.task.lo
                )
                features[skipped_rows] = torch.nan
            scores = self._models.head.scores(features)  # [rows, 2]
        pending.head_span = (start, self._mark())
        if self._copy_stream is None:
            pending.scores = scores
            return
        self._copy_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copy_stream):
            pending.embeddings = features.to("cpu", non_blocking=True)  # to page-locked memory
            pending.scores = scores.to("cpu", non_blocking=True)
            pending.arrived = self._copy_stream.record_event()
        # Their memory must not be used again before they are copied.
        for tensor in (features, scores):
            tensor.record_stream(self._copy_stream)

    def _write(self) -> None:
        """Commit finished shards, in a thread of its own, until None comes."""
        try:
            while (pending := self._writes.get()) is not None:
                self._commit(pending)
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent must hear of it
            # Reported at once: the launch loop may be waiting for tasks that never come.
            self._parent.give_up(error)

    def _commit(self, pending: Pending) -> None:
        """Put a shard on disk and report it. Of a probe, report only that it was computed.

        Raises:
            NotFiniteError: Too many rows are not finite.
            WeightsError: The weights themselves are not finite.
            RunMismatchError: The models on disk are not those of the run any more.
            StorageError: The disk is full, or fails.
        """
        if pending.arrived is not None:
            pending.arrived.synchronize()
        assert pending.scores is not None
        task = pending.task
        result = ShardResult(pending.embeddings.numpy(), pending.scores.numpy())
        n_repeated = 0
        if self._repeater is not None:
            n_repeated = self._repeater.repeat(result, task, self._models.head)
        finished_s = time.monotonic()
        if task.probe:
            self._answer(Computed(done=None))
            return
        self._require_same_weights(task.weights)
        n_skipped = self._set_aside_not_finite(result, task)
        if self._spec.engine.commit:
            run = RunDir(Path(task.run))
            commit(run, read_plan(run), task.shard, result)
        commit_s = time.monotonic() - finished_s
        done = self._shard_done(pending, finished_s, commit_s, n_skipped)
        self._answer(Computed(done=done, n_repeated=n_repeated))

    def _set_aside_not_finite(self, result: ShardResult, task: ShardTask) -> int:
        """Mark rows that are not finite by NaN throughout, and return how many are set aside.

        Raises:
            NotFiniteError: There are more such rows than the run may have.
            WeightsError: The weights themselves are not finite.
        """
        has_embedding = np.isfinite(result.embeddings).all(axis=1)
        has_score = np.isfinite(result.scores).all(axis=1)
        not_finite = np.flatnonzero(~(has_embedding & has_score))
        if len(not_finite) > len(task.skip):
            judge_not_finite(result, task, Path(self._spec.models))
            result.embeddings[not_finite] = np.nan
            result.scores[not_finite] = np.nan
        return len(not_finite)

    def _shard_done(
        self, pending: Pending, finished_s: float, commit_s: float, n_skipped: int
    ) -> ShardDone:
        """Return the record of a committed shard, with the device time of its batches."""
        task = pending.task
        batches = tuple(
            replace(launched.record, device_ms=milliseconds(launched.span))
            for launched in pending.launched
        )
        by_encoder: dict[str, Any] = {}  # columns of the record
        for encoder in ENCODERS:
            own = [batch for batch in batches if batch.encoder == encoder.name]
            by_encoder[encoder.tokens_column] = sum(batch.tokens for batch in own)
            device_ms = sum(batch.device_ms or 0.0 for batch in own)
            by_encoder[encoder.seconds_column] = device_ms / 1e3
        allocated_bytes = None
        if pending.arrived is not None:
            allocated_bytes = torch.cuda.max_memory_allocated()
        return ShardDone(
            device=self._spec.device.id,
            shard=task.shard,
            rows=task.hi - task.lo,
            **by_encoder,
            started_s=pending.started_s,
            finished_s=finished_s,
            head_s=milliseconds(pending.head_span) / 1e3,
            commit_s=commit_s,
            batches=batches,
            budget_divisor=task.divisor,
            skipped=n_skipped,
            allocated_bytes=allocated_bytes,
        )

    def _require_same_weights(self, run_digests: dict[str, str]) -> None:
        """Check that a run is made from the weights that are loaded here.

        Args:
            run_digests: Digests of the run's models; empty if the run does not say.

        Raises:
            RunMismatchError: The run's models are no longer on disk.
            RuntimeError: The run's models were put there after this worker had loaded. It ends,
                and the worker that takes its place loads them.
        """
        if not run_digests or run_digests == self._weights.result():
            return
        models = Path(self._spec.models)
        on_disk = fingerprint(models, self._spec.engine.precision)
        changed = join_first(find_mismatches(run_digests, on_disk, strict=True))
        if changed:
            problem = f"{changed} is no longer what the run began with"
            way_out = "put it back, or choose another directory"
            raise RunMismatchError(f"{models}: {problem}; {way_out}")
        raise RuntimeError(f"{models} has other models now")

    def _answer(self, computed: Computed) -> None:
        """Report to the parent that the oldest task is done."""
        self._held.popleft()
        self._parent.send(computed)


def _source_of(task: ShardTask, models: str | Path) -> Source:
    """Return where the sequences of a task come from."""
    return Source(Path(task.store), task.reads, Path(models))


def judge_not_finite(result: ShardResult, task: ShardTask, models: Path) -> None:
    """Let rows pass that hold NaN or infinity if they are few, else say which model is to blame.

    Rows of `task.skip` have been set aside before, and do not count.

    Args:
        result: What a shard's computation gave.
        task: The shard, with the number of rows that may be not finite (`max_not_finite`).
        models: Models directory.

    Raises:
        NotFiniteError: There are more such rows; names the model that gives them.
        WeightsError: The weights of a model are not finite; names the tensor.
    """
    is_unexplained = np.ones(len(result.scores), bool)  # [rows] without a cause so far
    is_unexplained[np.array(task.skip, np.int64) - task.lo] = False
    n_allowed = task.max_not_finite
    for part, values in _outputs_by_part(result, models).items():
        rows = np.flatnonzero(is_unexplained & ~np.isfinite(values).all(axis=1))
        is_unexplained[rows] = False
        n_allowed -= len(rows)
        if len(rows):
            _require_finite_weights(models, part)
        if n_allowed < 0:
            store = open_source(_source_of(task, models)).store
            first_frames = store.unique_row[rows + task.lo].tolist()
            names = join_first(store.row_ids(frame, frame + 1)[0] for frame in first_frames)
            n_rows = len(result.scores)
            problem = (
                f"of {n_rows} rows of a shard it gives NaN or infinity for {len(rows)} ({names})"
            )
            way_out = "use another --precision, or other weights"
            raise NotFiniteError(
                f"{models / part}: {problem}, though its weights are finite; {way_out}"
            )


def _outputs_by_part(result: ShardResult, models: Path) -> dict[str, NDArray[np.float32]]:
    """Return what each part of a models directory gave: encoders first, then the classifier."""
    widths: dict[EncoderName, int] = {
        encoder.name: shape_of(models, encoder.shape_type).width for encoder in ENCODERS
    }
    outputs: dict[str, NDArray[np.float32]] = {}
    for name, columns in embedding_columns(widths).items():
        outputs[name] = result.embeddings[:, columns]
    outputs[HEAD] = result.scores
    return outputs


@cache
def _require_finite_weights(models: Path, part: str) -> None:
    """Check, once, that the weights of a model are finite.

    Raises:
        WeightsError: One of its tensors is not.
    """
    shape, read = open_part(models, PART_SHAPES[part])
    check_finite(models / part, shape, read)


def work(parent: Parent, spec: WorkerSpec) -> None:
    """Compute shards until the parent says stop, closes its input, or dies."""
    Worker(parent, spec).run()
