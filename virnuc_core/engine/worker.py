"""The program of a worker process, which computes shards on one device.

The parent process sends a `WorkerSpec` (device and models), then any number of `ShardTask`s of any
runs, then `Closed`. Tasks may come much later than the specification; the worker loads the weights
meanwhile. The worker answers with `Ready`, one `Computed` for each task, in their order, or
`Failed`. `Waiting` says that a task will be answered after a later one is computed.

Three threads work side by side, so that the device never waits: one loads and packs the next
batches, one launches batches on the device, one writes finished shards to the disk.
"""

import os
import queue
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection
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

from virnuc_core.encoder_names import EncoderName, Molecule
from virnuc_core.encoders.checkpoint import check_finite, load_models, open_part, shape_of
from virnuc_core.encoders.digests import accept_older_digest, fingerprint
from virnuc_core.encoders.hopper import library_problem
from virnuc_core.encoders.layers import Encoder
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.encoders.registry import (
    ENCODERS,
    HEAD,
    PART_SHAPES,
    PROTEIN_ENCODER,
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
    Waiting,
    commit,
    read_plan,
    repeats_near_threshold,
    scores_as_text,
)
from virnuc_core.errors import NotFiniteError, RunMismatchError, join_first
from virnuc_core.lease import directory_gone_error, require_directory
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import find_mismatches
from virnuc_core.telemetry.tables import BatchRecord, ShardDone

if TYPE_CHECKING:
    from virnuc_core.engine.repeats import RepeatedShard, Repeater

# Finished shards that may wait for the disk. With more, the launch loop waits, because each holds
# up to a gigabyte of memory.
MAX_PENDING_COMMITS: Final = 2
# Computed shards of an int8 run that may wait until their rows near the threshold fill batches.
# Usually one waits. More do if few rows are near the threshold, or if rows of some length are rare.
# If the worker is killed, they are computed again, so that a long wait would cost more than the
# padding that it saves.
MAX_WAITING_SHARDS: Final = 6
# Bytes of results that these shards may have together. A shard has 42 MB with the usual settings,
# and up to a gigabyte with the largest ones. The rows of a large shard fill many batches anyway.
MAX_WAITING_BYTES: Final = 1 << 30
# Seconds that a worker has after SIGTERM to commit what it has launched. The parent sends SIGKILL a
# second later.
TERM_GRACE_S: Final = 3.5
# Seconds after which a worker that waits for a message looks whether it was told to stop.
POLL_S: Final = 0.2

# Start and end of some work of the device: CUDA events on a GPU, seconds of the host's clock on a
# CPU.
Span = tuple[Any, Any]


def milliseconds(span: Span) -> float:
    """Return how long the device worked, in milliseconds.

    On a GPU this may be called only after the device has reached the end of the span.
    """
    start, end = span
    if isinstance(start, torch.cuda.Event):
        return float(start.elapsed_time(end))
    return float(1e3 * (end - start))


def warm_up(encoder: Encoder, budget: int, device: torch.device, length: int) -> None:
    """Compute a full batch of random rows, so that the kernels for such rows are compiled.

    It waits until the device has finished. The results are dropped.

    Args:
        encoder: The encoder.
        budget: Token slots of the batch.
        device: The device on which the encoder is.
        length: Tokens of each row.

    Raises:
        torch.OutOfMemoryError: The device cannot hold such a batch.
    """
    n_rows = max(1, budget // length)  # at least one row, even if it is longer than the budget
    # Both encoders have the token ids 5 to 8 as ordinary tokens. Which ones are used does not
    # matter for the kernels.
    tokens = np.random.default_rng().integers(5, 9, n_rows * length)
    token_rows = TokenRows(tokens, starts=np.arange(n_rows + 1) * length)
    _, batch = next(packed(token_rows, budget, pad=5))
    with torch.inference_mode():
        encoder.embed(batch.to(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class LaunchedBatch:
    """A batch that was launched on the device, which computes it now or has computed it."""

    record: BatchRecord  # its `device_ms` is None, because the device may not have finished
    span: Span


@dataclass(slots=True)
class Pending:
    """A shard between its first launched batch and its commit.

    The embeddings are computed on the device. They are then copied to the host on a second CUDA
    stream, while the device computes the next shard.
    """

    task: ShardTask
    started_s: float  # `time.monotonic()`
    embeddings: Tensor  # float32 [rows, dna + protein], on the device, then on the host
    launched: list[LaunchedBatch] = field(default_factory=list)
    head_span: Span = (0.0, 0.0)  # of the classifier
    scores: Tensor | None = None  # float32 [rows, 2], on the host; None before the classifier ran
    # Is reached when the results have been copied to the host. None on a CPU, where nothing is
    # copied.
    copied: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class WaitingShard:
    """A computed shard in int8, between its last batch and its commit.

    Some of its rows are embedded again in fp16, in batches with rows of other shards.
    """

    pending: Pending
    repeated: "RepeatedShard"


class Worker:
    """The state of a worker process: models, device, tasks at hand, finished shards.

    The thread that calls `run` launches batches. A second thread loads and packs the next batches,
    and a third one commits finished shards.
    """

    def __init__(
        self,
        parent: Parent,
        spec: WorkerSpec,
        recording: Callable[[Take], AbstractContextManager[Take]] = nullcontext,
    ) -> None:
        """Tell the parent how to watch this worker, and let SIGTERM stop it. Load nothing yet.

        Args:
            parent: The connection to the process that started this one.
            spec: Device, models and settings.
            recording: Wraps the function that takes the next batch. The tracing tool passes a
                profiler here.
        """
        self._parent = parent
        self._spec = spec
        self._recording = recording
        self._last_progress_s = time.monotonic()
        # The tasks that were received and not answered, oldest first.
        self._unanswered_tasks: deque[ShardTask] = deque()
        # Shards whose rows near the threshold are embedded again with those of later shards, oldest
        # first. Only the committing thread uses it. They are the oldest tasks without an answer.
        self._waiting: deque[WaitingShard] = deque()
        self._stopping = threading.Event()  # take no more tasks
        self._in_haste = threading.Event()  # the process will be ended in a few seconds
        # Finished shards for the thread that commits them. None tells that thread to end.
        self._writes: queue.Queue[Pending | None] = queue.Queue(maxsize=MAX_PENDING_COMMITS)

        def last_progress_s() -> float:
            """Return when this worker last made progress, in seconds of `time.monotonic()`.

            The heartbeats send this to the parent, which ends a worker without progress. Without a
            task (it loads the models, or it waits) the answer is "now", so that it is not ended.
            """
            return self._last_progress_s if self._unanswered_tasks else time.monotonic()

        parent.progress = last_progress_s
        signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, *_: object) -> None:
        """Handle SIGTERM: take no more tasks, and end after at most `TERM_GRACE_S` seconds.

        Shards that are computed within this time are still committed.
        """
        self._in_haste.set()
        self._stopping.set()
        # 143 is the exit status of a process that SIGTERM ended (128 + 15).
        threading.Timer(TERM_GRACE_S, os._exit, (143,)).start()

    def _receive(self) -> ShardTask | None:
        """Wait for the next task and return it. Return None if the worker is to stop.

        The task is noted as unanswered. Progress is expected from now on.
        """
        while not self._stopping.is_set():
            message = self._parent.receive(POLL_S)
            if isinstance(message, ShardTask):
                self._last_progress_s = time.monotonic()
                self._unanswered_tasks.append(message)
                return message
            if message is not None:
                # The only other message is `Closed`: no more tasks will come.
                self._stopping.set()
        return None

    def run(self) -> None:
        """Load the models, then compute shards until the parent says that no more will come."""
        self._load()
        loaded_s = time.monotonic()
        first_task = self._receive()
        if first_task is None:
            return
        waited_s = time.monotonic() - loaded_s
        take = self._start_loader(first_task)
        # How long the start took, without the time in which it only waited for a task.
        ready_s = time.monotonic() - self._parent.started_s - waited_s
        self._parent.send(Ready(record={**self._report, "ready_s": ready_s, "waited_s": waited_s}))
        writer = threading.Thread(target=self._write, name="writer", daemon=True)
        writer.start()
        try:
            with self._recording(take) as recorded_take:
                self._launch_all(recorded_take)
        except torch.OutOfMemoryError as error:
            # The writer needs memory for the shards that wait. If it had none, this error would be
            # taken for theirs.
            free_memory_held_by(error)
            raise
        finally:
            # Also after an error, commit and answer the shards that are computed, before the caller
            # of `run` reports the error. The parent assumes that an error belongs to the oldest
            # task without an answer.
            self._writes.put(None)  # tells the writer to end
            writer.join()

    def _start_loader(self, first_task: ShardTask) -> Take:
        """Start the thread that loads and packs batches ahead of the device.

        Args:
            first_task: A task that was received already. Further tasks come from the parent.

        Returns:
            The function that takes the next batch from the thread's queue.
        """
        engine = self._spec.engine
        pin = engine.pin_memory and self._device.type == "cuda"
        loader = Loader(Path(self._spec.models), engine, pin=pin)
        # `prefetch_factor` batches for each process that tokenises. With 0 such processes, the
        # loader's thread does it.
        queue_size = engine.prefetch_factor * max(1, engine.num_workers)
        first_tasks = [first_task]

        def next_task() -> ShardTask | None:
            """Return the first task at the first call, and then what the parent sends."""
            return first_tasks.pop() if first_tasks else self._receive()

        return loader.feed(next_task, queue_size)

    def _load(self) -> None:
        """Load all models to the device, and set the attributes that `run` needs.

        On a GPU a full batch is computed with each encoder. This compiles the kernels, and shows
        that the token budgets (the sizes of batches) fit into the memory of the device.

        In an int8 run, a second copy of the protein encoder in fp16 is loaded as well. It embeds
        again the rows whose score is near the threshold (`_repeater`).
        """
        import_s = time.monotonic() - self._parent.started_s
        models = Path(self._spec.models)
        engine = self._spec.engine
        on_gpu = self._spec.device.kind == "cuda"
        self._device = torch.device("cuda:0" if on_gpu else "cpu")
        # Digests of the weights are computed in the background. The first commit needs them.
        self._loaded_digests = ThreadPoolExecutor(1).submit(fingerprint, models, engine.precision)
        head_shape, _ = open_part(models, HeadShape)
        # Tokens of the longest row: an amino acid for three bases, and a start and an end token.
        longest = PROTEIN_ENCODER.chunk_tokens(head_shape.model_length)
        # Rows are grouped by length. These are the groups that rows of 2 to `longest` tokens have,
        # each named by its largest length.
        possible_lengths = np.arange(2, longest + 1)
        self._all_length_groups: list[int] = np.unique(group_bounds(possible_lengths)).tolist()
        # Seconds from the start of the process until each encoder was loaded.
        loaded_s: list[float] = []

        def warm(encoder: Encoder) -> None:
            """Note when an encoder was loaded, and compile its kernels on a GPU.

            `load_models` calls this after each encoder.
            """
            loaded_s.append(time.monotonic() - self._parent.started_s)
            if on_gpu:
                # The divisor is above 1 after a batch of the usual size did not fit into memory.
                budget = encoder.INFO.token_budget(engine)
                self._warm_up(encoder, budget // self._spec.budget_divisor)

        self._repeater: Repeater | None = None
        with ThreadPoolExecutor(1) as thread:
            if repeats_near_threshold(engine, head_shape):
                # A second copy of the protein encoder is loaded at the same time as the others.
                loading = thread.submit(self._load_repeater, longest)
                self._models = load_models(models, self._device, engine, warm)
                self._repeater = loading.result()
            else:
                self._models = load_models(models, self._device, engine, warm)
        self._columns = self._models.columns()
        self._copy_stream = torch.cuda.Stream(self._device) if on_gpu else None
        # The time when the last encoder was loaded. If there was too little memory to warm one up
        # while others were being loaded, it is warmed up again at the end. That entry is left out.
        load_s = max(loaded_s[: len(ENCODERS)])
        self._report = self._describe(import_s, load_s)

    def _describe(self, import_s: float, load_s: float) -> dict[str, Any]:
        """Return the record of this worker for `summary.json`: process, times, precision.

        The parent gets it with the message `Ready`.

        Args:
            import_s: Seconds from the start of the process until its modules were imported.
            load_s: Seconds from the start of the process until the weights were loaded.
        """
        # The largest encoder first, in the order of summary.json of earlier versions.
        encoders = [self._models.encoders[info.name] for info in reversed(ENCODERS)]
        return {
            "device": self._spec.device.id,
            "pid": os.getpid(),
            # A time of `time.monotonic()`. The other times are seconds since then.
            "started_s": self._parent.started_s,
            "import_s": import_s,
            "load_s": load_s,
            "torch": torch.__version__,
            "attention": {encoder.INFO.name: encoder.attention for encoder in encoders},
            "precision": {encoder.INFO.name: encoder.precision for encoder in encoders},
            "gelu": {encoder.INFO.name: encoder.gelu for encoder in encoders},
            "int8_product": self._describe_int8_product(),
            "int8_kernels": self._describe_int8_kernels(),
        }

    def _describe_int8_product(self) -> str | None:
        """Return what computes int8 products here; with a reason if it is not the fast library.

        None if no encoder computes them by a kernel. Both ways give the same bits.
        """
        encoders = self._models.encoders.values()
        if not any(
            encoder.precision == "int8" and encoder.attention == "fused" for encoder in encoders
        ):
            return None
        problem = library_problem(self._device)
        return f"triton ({problem})" if problem else "hopper library"

    def _describe_int8_kernels(self) -> str | None:
        """Return what rounds rows to int8 here: hopper or triton. None if no encoder does."""
        for encoder in self._models.encoders.values():
            if encoder.precision == "int8" and encoder.attention == "fused":
                return "triton" if encoder.rows_library is None else "hopper"
        return None

    def _warm_up(self, encoder: Encoder, budget: int) -> None:
        """Compile the kernels of an encoder, group by group of row lengths, shortest rows first.

        Rows are grouped by length, and each group needs its own kernels. They are compiled by
        computing a batch of such rows. If a task has come already, this is done only for the groups
        of its rows. Kernels of other groups are compiled when such rows come, once for each user
        and machine.

        Args:
            encoder: The encoder, which is on the device.
            budget: Token slots of the largest batch.
        """
        warmed_bounds: list[int] = []
        while True:
            # A task may have come since the last round, and then fewer groups are needed.
            bounds = [
                bound for bound in self._next_length_groups(encoder) if bound not in warmed_bounds
            ]
            if not bounds:
                return
            # The first batch has the full size, which shows that the token budget fits into memory.
            # For the kernels alone the smallest batch is enough, so the other groups get that.
            if warmed_bounds:
                slots = shapes(budget)[-1]
            else:
                slots = budget
            warm_up(encoder, slots, self._device, bounds[0])
            warmed_bounds.append(bounds[0])

    def _next_length_groups(self, encoder: Encoder) -> list[int]:
        """Return the groups of lengths that the next rows will belong to, in ascending order.

        A group is named by its largest length, in tokens. If the parent has already sent the next
        task, these are the groups of its rows. Otherwise they are all groups that the classifier's
        read length allows.
        """
        task = self._parent.peek()
        if not isinstance(task, ShardTask):
            return self._all_length_groups
        # A task whose store cannot be read is reported when the task is computed. Here its error is
        # suppressed, and the last line returns all groups, as without a task.
        with suppress(Exception):
            store = open_source(_source_of(task, self._spec.models)).store
            residues = np.diff(store.protein_offsets[task.lo : task.hi + 1])
            # A DNA frame has three bases for each residue. How many of them a token holds is known
            # only on average.
            tokens = encoder.INFO.estimate_tokens(residues)
            bounds: list[int] = np.unique(group_bounds(tokens)).tolist()
            return bounds
        return self._all_length_groups

    def _load_repeater(self, longest: int) -> "Repeater":
        """Load the fp16 copy of the protein encoder, and compile its kernels on a GPU.

        In an int8 run it embeds again the rows whose score is near the threshold.

        Args:
            longest: Tokens of the longest row.
        """
        # Imported here, because only runs in int8 need the module.
        from virnuc_core.engine.repeats import Repeater

        repeater = Repeater(Path(self._spec.models), self._device, self._spec.engine, longest)
        if repeater.stream is not None:  # on a GPU
            with torch.cuda.stream(repeater.stream):
                self._warm_up(repeater.encoder, repeater.slots(self._spec.budget_divisor))
        return repeater

    def _launch_all(self, take: Take) -> None:
        """Launch all batches of all shards, and pass each finished shard to the committing thread.

        It waits if that thread has too many shards to commit.

        Args:
            take: Returns the next item and how long it took to come. A shard is a sequence of
                items: its task, its batches, its task again. None means that nothing more comes.
        """
        pending: Pending | None = None  # the shard whose batches come now; None between two shards
        while True:
            item, wait_ms = take()
            self._last_progress_s = time.monotonic()
            if item is None:
                return
            if isinstance(item, Batch):
                assert pending is not None
                self._launch(pending, item, wait_ms)
            elif pending is None:
                # The task before its batches.
                pending = self._begin_shard(item)
            else:
                # The same task again: all its batches are launched.
                self._finish_shard(pending)
                self._writes.put(pending)
                pending = None

    def _begin_shard(self, task: ShardTask) -> Pending:
        """Allocate memory on the device for the embeddings of a shard, and return its state.

        The embeddings begin as zeros. Each batch fills the rows that it computes.
        """
        width = sum(encoder.width for encoder in self._models.encoders.values())
        shape = (task.hi - task.lo, width)
        started_s = time.monotonic()
        embeddings = torch.zeros(shape, dtype=torch.float32, device=self._device)
        return Pending(task, started_s, embeddings)

    def _mark(self) -> torch.cuda.Event | float:
        """Return a point in the device's work: an event on a GPU, the time on a CPU."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def _launch(self, pending: Pending, batch: Batch, wait_ms: float) -> None:
        """Launch one batch of a shard, without waiting for the result.

        The device writes the embeddings of the batch's rows into the shard's array, in the columns
        of the batch's encoder.

        Args:
            pending: The shard. The batch is added to its `launched`.
            batch: The batch.
            wait_ms: How long the launch loop waited for the batch.
        """
        launched_s = time.monotonic()
        start = self._mark()
        encoder = self._models.encoders[batch.encoder]
        columns = self._columns[batch.encoder]
        with torch.inference_mode(), torch.profiler.record_function(batch.encoder):
            # A batch has a fixed shape, so there are results of empty rows at its end.
            row_embeddings = encoder.embed(batch.packed.to(self._device))  # [row_capacity, width]
            rows = batch.rows.to(self._device, non_blocking=True)
            own_columns = pending.embeddings[:, columns]  # a view of the shard's array
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
        """Run the classifier on a shard, and start to copy the results to the host.

        The copy runs on a second CUDA stream while the device computes the next shard. This
        function does not wait for it: the event `pending.copied` marks its end. On a CPU nothing is
        copied.

        Args:
            pending: The shard, with all its batches launched. It gets the scores.
        """
        start = self._mark()
        features = pending.embeddings
        with torch.inference_mode(), torch.profiler.record_function(HEAD):
            if pending.task.skipped_rows:
                # Rows that were left out have no embedding. NaN marks them.
                skipped_rows = torch.tensor(pending.task.skipped_rows, device=self._device)
                positions = skipped_rows - pending.task.lo  # in the shard
                features[positions] = torch.nan
            scores = self._models.head.scores(features)  # [rows, 2]
        pending.head_span = (start, self._mark())
        if self._copy_stream is None:
            pending.scores = scores
            return
        # The copy must not begin before the results are computed.
        self._copy_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copy_stream):
            # With `non_blocking`, torch copies to page-locked memory, which needs no waiting.
            pending.embeddings = features.to("cpu", non_blocking=True)
            pending.scores = scores.to("cpu", non_blocking=True)
            pending.copied = self._copy_stream.record_event()
        # These tensors are released when this function returns. Forbid torch to use their memory
        # for others before they are copied.
        for tensor in (features, scores):
            tensor.record_stream(self._copy_stream)

    def _write(self) -> None:
        """Commit finished shards until None comes. This runs in the committing thread.

        After an error the whole process ends, with a message to the parent.
        """
        try:
            if self._repeater is None:
                while (pending := self._writes.get()) is not None:
                    self._commit(pending, _wait_for_result(pending))
            else:
                self._write_with_repeats(self._repeater)
        except Exception as error:  # noqa: BLE001 - the parent must learn of every error
            # The launch loop cannot report the error. It may be waiting for a task that the parent
            # sends only after an answer to this one.
            self._parent.give_up(error)

    def _write_with_repeats(self, repeater: "Repeater") -> None:
        """Commit finished shards of an int8 run until None comes.

        The rows near the threshold are embedded again before that. A shard waits until all of its
        rows had room in a full batch, or until no shard follows whose rows can fill the batch.

        Args:
            repeater: Embeds the rows again.
        """
        while True:
            # Without a shard that waits, nothing has to be done before the next one comes.
            timeout_s = POLL_S if self._waiting else None
            try:
                pending = self._writes.get(timeout=timeout_s)
            except queue.Empty:
                if not self._is_next_shard_awaited():
                    self._finish_waiting(repeater)
                continue
            if pending is None or not self._can_join_waiting(pending.task):
                self._finish_waiting(repeater)
            if pending is None:
                return
            self._add_waiting(pending, repeater)

    def _add_waiting(self, pending: Pending, repeater: "Repeater") -> None:
        """Embed rows of a shard again, as far as they fill batches, and commit what is complete.

        Args:
            pending: The shard, which may share batches with those that wait already.
            repeater: Embeds the rows again.
        """
        result = _wait_for_result(pending)
        self._waiting.append(WaitingShard(pending, repeater.add(result, pending.task)))
        while repeater.embed_full_batch():
            self._last_progress_s = time.monotonic()
        self._commit_complete(repeater)
        while not is_waiting_allowed(self._waiting):
            self._complete_oldest(repeater)
            self._commit_complete(repeater)
        if not self._is_next_shard_awaited():
            self._finish_waiting(repeater)
        if self._waiting:
            # The parent may send another task, so that the device has work while this one waits.
            self._parent.send(Waiting())

    def _can_join_waiting(self, task: ShardTask) -> bool:
        """Return true if rows of this task may be in one batch with rows of the shards that wait.

        All shards that wait are of one run, so that an error in such a batch belongs to this run.
        Their batches have the same size.
        """
        if not self._waiting:
            return True
        waiting_task = self._waiting[0].pending.task
        is_same_run = task.run == waiting_task.run
        return is_same_run and task.budget_divisor == waiting_task.budget_divisor

    def _is_next_shard_awaited(self) -> bool:
        """Return true if a further shard comes whose rows can fill a batch of those that wait.

        The shard is being computed, or its task is here. If the worker is about to be ended, the
        shards that wait must not wait for it.
        """
        if self._in_haste.is_set():
            return False
        # A copy, because the feeder adds tasks at the same time.
        unanswered_tasks = tuple(self._unanswered_tasks)
        next_tasks: list[object] = list(unanswered_tasks[len(self._waiting) :])
        next_tasks.append(self._parent.peek())
        next_task = next_tasks[0]
        return isinstance(next_task, ShardTask) and self._can_join_waiting(next_task)

    def _complete_oldest(self, repeater: "Repeater") -> None:
        """Embed all rows of the oldest shard that waits again, also in batches that are not full.

        Args:
            repeater: Embeds the rows again.
        """
        shard = self._waiting[0].repeated
        while shard.n_left:
            repeater.embed_batch_of(shard)
            self._last_progress_s = time.monotonic()

    def _finish_waiting(self, repeater: "Repeater") -> None:
        """Commit all shards that wait, after embedding their rows again.

        Args:
            repeater: Embeds the rows again.
        """
        while self._waiting:
            self._complete_oldest(repeater)
            self._commit_complete(repeater)

    def _commit_complete(self, repeater: "Repeater") -> None:
        """Commit the shards that wait for no row, up to the first one that does.

        Tasks are answered in their order, so that a shard also waits for those before it.

        Args:
            repeater: Computes the scores of the rows that were embedded again.
        """
        while self._waiting and self._waiting[0].repeated.n_left == 0:
            # It waits no more: an error in its commit is reported for the oldest task.
            shard = self._waiting.popleft()
            n_repeated = repeater.finish(shard.repeated, self._models.head)
            self._commit(shard.pending, shard.repeated.result, n_repeated)

    def _commit(self, pending: Pending, result: ShardResult, n_repeated: int = 0) -> None:
        """Write the file of a computed shard, and answer its task.

        A probe is answered without writing anything. With the setting `commit` off no file is
        written either, and the answer holds the scores.

        Args:
            pending: The shard.
            result: Its results.
            n_repeated: Rows near the threshold that were embedded again, in fp16.

        Raises:
            NotFiniteError: Too many rows are not finite.
            WeightsError: The weights themselves are not finite.
            RunMismatchError: The models on disk are not those of the run any more.
            StorageError: The disk is full, or fails.
            ConfigError: The run directory was renamed or removed.
        """
        task = pending.task
        finished_s = time.monotonic()
        if task.is_probe:
            self._answer(Computed(done=None))
            return
        self._require_same_weights(task.model_digests)
        n_skipped = self._set_aside_not_finite(result, task)
        if self._spec.engine.commit:
            run = RunDir(Path(task.run))
            require_directory(run.root)
            plan = read_plan(run)
            if task.plan_fingerprint and task.plan_fingerprint != plan.fingerprint:
                # Another run has this path now. The result must not be written into it.
                raise directory_gone_error(run.root)
            # The folder held the plan a moment ago. If somebody has removed it meanwhile, making it
            # again would leave a run with a single shard.
            commit(run, plan, task.shard, result, make_folders=False)
        commit_s = time.monotonic() - finished_s
        done = self._shard_done(pending, finished_s, commit_s, n_skipped)
        n_viral = np.count_nonzero(result.scores[:, 1] >= task.threshold)  # NaN is not
        done = replace(done, viral=float(n_viral))
        scores = None if self._spec.engine.commit else scores_as_text(result.scores)
        self._answer(Computed(done=done, n_repeated=n_repeated, scores=scores))

    def _set_aside_not_finite(self, result: ShardResult, task: ShardTask) -> int:
        """Replace all results of rows that hold NaN or infinity by NaN, and count such rows.

        Args:
            result: The results of the shard. They are changed.
            task: The task of the shard.

        Returns:
            How many rows of the shard have no result, including those that the task left out.

        Raises:
            NotFiniteError: There are more such rows than the run may have.
            WeightsError: The weights themselves are not finite.
        """
        has_embedding = np.isfinite(result.embeddings).all(axis=1)
        has_score = np.isfinite(result.scores).all(axis=1)
        not_finite = np.flatnonzero(~(has_embedding & has_score))
        # The rows in `skipped_rows` were filled with NaN on purpose. More rows have their NaN from
        # a model.
        if len(not_finite) > len(task.skipped_rows):
            judge_not_finite(result, task, Path(self._spec.models))
            result.embeddings[not_finite] = np.nan
            result.scores[not_finite] = np.nan
        return len(not_finite)

    def _shard_done(
        self, pending: Pending, finished_s: float, commit_s: float, n_skipped: int
    ) -> ShardDone:
        """Return the telemetry of a committed shard, with the device time of its batches.

        The device has finished all of them, so that their times can be read now.

        Args:
            pending: The shard. Its results are on the host.
            finished_s: When its results were complete, `time.monotonic()`.
            commit_s: Seconds that it took to write the file.
            n_skipped: Rows without a result.
        """
        task = pending.task
        batches = tuple(
            replace(launched.record, device_ms=milliseconds(launched.span))
            for launched in pending.launched
        )
        tokens: dict[Molecule, int] = {}
        seconds: dict[Molecule, float] = {}
        for encoder in ENCODERS:
            encoder_batches = [batch for batch in batches if batch.encoder == encoder.name]
            tokens[encoder.molecule] = sum(batch.tokens for batch in encoder_batches)
            # All times are known now, although the type allows None.
            device_ms = sum(batch.device_ms or 0.0 for batch in encoder_batches)
            seconds[encoder.molecule] = device_ms / 1e3
        allocated_bytes = None
        if pending.copied is not None:  # on a GPU
            allocated_bytes = torch.cuda.max_memory_allocated()
        return ShardDone(
            device=self._spec.device.id,
            shard=task.shard,
            rows=task.hi - task.lo,
            protein_tokens=tokens["protein"],
            dna_tokens=tokens["dna"],
            started_s=pending.started_s,
            finished_s=finished_s,
            dna_s=seconds["dna"],
            protein_s=seconds["protein"],
            head_s=milliseconds(pending.head_span) / 1e3,
            commit_s=commit_s,
            batches=batches,
            budget_divisor=task.budget_divisor,
            skipped=n_skipped,
            allocated_bytes=allocated_bytes,
        )

    def _require_same_weights(self, run_digests: dict[str, str]) -> None:
        """Check that the weights in this process are those with which the run began.

        Args:
            run_digests: Digests of the run's models. Empty if the run does not record them.

        Raises:
            RunMismatchError: The models directory holds other models than the run began with.
            RuntimeError: The directory holds the run's models, but this process loaded the
                directory before they were put there. The worker ends, and the worker that replaces
                it loads the right ones.
        """
        if not run_digests:
            return
        models = Path(self._spec.models)
        digests = self._loaded_digests.result()  # computed while the models were loaded
        # Earlier versions computed another digest of the calibration for int8. If the run has
        # recorded that one, it takes the place of ours.
        digests = accept_older_digest(models, digests, run_digests)
        if digests == run_digests:
            return
        # This process has other models than the run. What does the directory hold now?
        disk_digests = fingerprint(models, self._spec.engine.precision)
        disk_digests = accept_older_digest(models, disk_digests, run_digests)
        changed_models = join_first(find_mismatches(run_digests, disk_digests, strict=True))
        if changed_models:
            problem = f"{changed_models} is no longer what the run began with"
            way_out = "put it back, or choose another directory"
            raise RunMismatchError(f"{models}: {problem}; {way_out}")
        # The directory is right, so only this process is wrong. An error that is not ours makes the
        # parent replace it.
        raise RuntimeError(f"{models} has other models now")

    def _answer(self, computed: Computed) -> None:
        """Tell the parent that the oldest task is done."""
        self._unanswered_tasks.popleft()
        self._parent.send(computed)


def free_memory_held_by(error: BaseException) -> None:
    """Give back the device memory of the functions that an error has left.

    Their local variables, the tensors of a batch, exist as long as the traceback of the error.

    Args:
        error: The error, while it is handled. Its traceback keeps the lines, without the variables.
    """
    traceback.clear_frames(error.__traceback__)
    torch.cuda.empty_cache()  # does nothing if no GPU is in use


def _wait_for_result(pending: Pending) -> ShardResult:
    """Return the results of a shard, all batches of which are launched. Wait until it has them."""
    if pending.copied is not None:
        pending.copied.synchronize()  # wait until the results are on the host
    assert pending.scores is not None
    return ShardResult(pending.embeddings.numpy(), pending.scores.numpy())


def is_waiting_allowed(shards: Collection[WaitingShard]) -> bool:
    """Return true if so many computed shards may wait.

    Args:
        shards: The shards, with their results in memory.
    """
    n_bytes = sum(shard.repeated.result.embeddings.nbytes for shard in shards)
    return len(shards) <= MAX_WAITING_SHARDS and n_bytes <= MAX_WAITING_BYTES


def _source_of(task: ShardTask, models: str | Path) -> Source:
    """Return the store that holds the sequences of a task, with the models that read it."""
    return Source(Path(task.store), task.reads_fingerprint, Path(models))


def judge_not_finite(result: ShardResult, task: ShardTask, models: Path) -> None:
    """Raise an error if a model gave NaN or infinity for too many rows of a shard.

    A few such rows are accepted, and nothing happens. Rows in `task.skipped_rows` were left out on
    purpose and do not count.

    Args:
        result: The results of the shard.
        task: The task of the shard. `max_not_finite` says how many such rows are accepted.
        models: Models directory.

    Raises:
        NotFiniteError: There are more such rows. The message names the model that gives them.
        WeightsError: The weights of a model are not finite. The message names the tensor.
    """
    # bool [rows]: no model was found yet that is the cause for this row. An encoder's NaN makes the
    # classifier's scores NaN too, so that each row is counted for the first model only.
    is_unexplained = np.ones(len(result.scores), bool)
    is_unexplained[np.array(task.skipped_rows, np.int64) - task.lo] = False
    n_still_allowed = task.max_not_finite
    for part, values in _outputs_by_part(result, models).items():
        is_not_finite = ~np.isfinite(values).all(axis=1)
        rows = np.flatnonzero(is_unexplained & is_not_finite)
        is_unexplained[rows] = False
        n_still_allowed -= len(rows)
        if len(rows):
            _require_finite_weights(models, part)
        if n_still_allowed < 0:
            # Name some of the rows, by the first reading frame that has the sequence.
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
    """Return the results of a shard by the model that computed them.

    The encoders come first, in the order of their columns, then the classifier.
    """
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
    """Check that the weights of a model are finite. A second call does not read them again.

    Args:
        models: Models directory.
        part: The model, which is the name of its folder, such as "esm2" or "head".

    Raises:
        WeightsError: One of its tensors holds NaN or infinity.
    """
    shape, read = open_part(models, PART_SHAPES[part])
    check_finite(models / part, shape, read)


def work(parent: Parent, spec: WorkerSpec) -> None:
    """Compute shards until the parent sends `Closed`, closes the connection, or dies.

    This is the function that a worker process runs (`process.serve`).
    """
    Worker(parent, spec).run()
