"""The engine's worker process: one device, pinned; shard tasks in, committed shards out.

Messages in: a WorkerSpec, any number of ShardTasks of any runs (which may come much later: the weights are loaded
meanwhile), then Closed. Out: Ready, Computed, Failed. In the launch loop nothing makes the device wait."""

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
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from virnuc_core.encoders.checkpoint import check_finite, fingerprint, load_all, open_part, shape_of
from virnuc_core.encoders.layers import Encoder
from virnuc_core.encoders.model_config import KINDS, DnabertShape, HeadShape
from virnuc_core.encoders.models import Esm2
from virnuc_core.engine.loader import Batch, Loader, Take, group_bounds, opened, packed, shapes
from virnuc_core.engine.process import Parent, Ready, WorkerSpec
from virnuc_core.engine.shards import Computed, ShardResult, ShardTask, commit, read_plan, repeats
from virnuc_core.errors import NotFiniteError, RunMismatchError, join_first
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import find_mismatches
from virnuc_core.telemetry.tables import BatchRecord, ShardDone

if TYPE_CHECKING:
    from virnuc_core.engine.repeats import Repeater

COMMITS_AHEAD = 2  # results that may wait for the disk before the launch loop does
TERM_GRACE_S = 3.5
POLL_S = 0.2  # how soon SIGTERM is noticed by who waits for a message

Span = tuple[Any, Any]  # two moments of the device: events on CUDA, the host's clock on CPU


def milliseconds(span: Span) -> float:
    """Device time of a launch; valid once the device has passed its end."""
    start, end = span
    return float(
        start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else 1e3 * (end - start)
    )


def warm_up(encoder: Encoder, budget: int, device: torch.device, length: int) -> None:
    """Launch a full batch of rows of this length (tokens), or raise `torch.OutOfMemoryError`."""
    rows = max(1, budget // length)
    tokens = np.random.default_rng().integers(5, 9, rows * length)
    _, batch = next(packed((tokens, np.arange(rows + 1) * length), budget, pad=5))
    with torch.inference_mode():
        encoder.embed(batch.to(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(slots=True)
class Pending:
    """A shard whose batches have been launched; its results arrive on a side stream."""

    task: ShardTask
    started_s: float
    embeddings: Tensor  # float32 [rows, dna + protein], on the device, then on the host
    launched: list[tuple[BatchRecord, Span]] = field(default_factory=list)
    head: Span = (0.0, 0.0)
    scores: Tensor | None = None  # host, float32 [rows, 2]
    arrived: torch.cuda.Event | None = None


class Worker:
    """Everything between the parent's messages and the device."""

    def __init__(
        self,
        parent: Parent,
        spec: WorkerSpec,
        recording: Callable[[Take], AbstractContextManager[Take]] = nullcontext,
    ) -> None:
        self.parent, self.spec, self._recording = parent, spec, recording
        self._moved_s = time.monotonic()
        self._held = deque[int]()  # shards told of and not answered
        self.stopping = threading.Event()
        self._writes: queue.Queue[Pending | None] = queue.Queue(maxsize=COMMITS_AHEAD)
        # loading, and waiting with no task in hand, is doing something
        parent.progress = lambda: self._moved_s if self._held else time.monotonic()
        signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, *_: object) -> None:
        """On SIGTERM: what has been launched is committed, if that takes no longer than a few seconds."""
        self.stopping.set()
        threading.Timer(TERM_GRACE_S, os._exit, (143,)).start()

    def _receive(self) -> ShardTask | None:
        """The next task; None when told to stop."""
        while not self.stopping.is_set():
            message = self.parent.receive(POLL_S)
            if isinstance(message, ShardTask):
                self._moved_s = time.monotonic()
                self._held.append(message.shard)
                return message
            if message is not None:
                self.stopping.set()
        return None

    def run(self) -> None:
        """Load, then compute shards until told to stop."""
        self._load()
        loaded_s = time.monotonic()
        if (first := self._receive()) is None:
            return
        waited_s = time.monotonic() - loaded_s
        engine, given = self.spec.engine, [first]
        loader = Loader(
            Path(self.spec.models), engine, pin=engine.pin_memory and self.device.type == "cuda"
        )
        depth = engine.prefetch_factor * max(1, engine.num_workers)
        taking = loader.feed(lambda: given.pop() if given else self._receive(), depth)
        ready_s = time.monotonic() - self.parent.started_s - waited_s
        self.parent.send(Ready(record={**self.said, "ready_s": ready_s, "waited_s": waited_s}))
        writer = threading.Thread(target=self._write, name="writer", daemon=True)
        writer.start()
        try:
            with self._recording(taking) as take:
                self._launch_all(take)
        finally:  # what was computed before an error is told before it: the error is of the first task not answered
            self._writes.put(None)
            writer.join()

    def _load(self) -> None:
        """Both encoders and the head on the device; on a GPU with kernels compiled, and proof that the budgets fit."""
        import_s, loaded_s = time.monotonic() - self.parent.started_s, list[float]()
        models, engine, cuda = (
            Path(self.spec.models),
            self.spec.engine,
            self.spec.device.kind == "cuda",
        )
        self.device = device = torch.device("cuda:0" if cuda else "cpu")
        # of what is loaded now; nobody waits for it before the first commit
        self._weights = ThreadPoolExecutor(1).submit(fingerprint, models, engine.precision)
        head = open_part(models, HeadShape)[0]
        longest = head.model_length // 3 + 2
        self._usual: list[int] = np.unique(group_bounds(np.arange(2, longest + 1))).tolist()

        def warm(encoder: Encoder) -> None:
            loaded_s.append(time.monotonic() - self.parent.started_s)
            if cuda:
                budget = (
                    engine.token_budget if isinstance(encoder, Esm2) else engine.dna_token_budget
                )
                self._warm_up(encoder, budget // self.spec.divisor)

        with ThreadPoolExecutor(1) as thread:  # beside the others
            again = thread.submit(self._repeater, longest) if repeats(engine, head) else None
            self.esm2, self.dnabert_s, self.head = load_all(models, device, engine, warm)
        self.repeater = again.result() if again else None
        self._side = torch.cuda.Stream(device) if cuda else None
        self.said = {
            "device": self.spec.device.id,
            "pid": os.getpid(),
            "started_s": self.parent.started_s,  # `time.monotonic()`; the other seconds count from here
            "import_s": import_s,
            "load_s": max(
                loaded_s[:2]
            ),  # of the later one; the other's kernels may have been compiled by then
            "torch": torch.__version__,
            "attention": {"esm2": self.esm2.attention, "dnabert_s": self.dnabert_s.attention},
            "precision": {"esm2": self.esm2.precision, "dnabert_s": self.dnabert_s.precision},
        }

    def _warm_up(self, encoder: Encoder, budget: int) -> None:
        """Compile kernels for the rows that come, shortest first: reads are mostly staged by then, if weights are not.
        Those of other lengths are compiled when such come, once for each user and machine."""
        warmed = list[int]()
        while left := [bound for bound in self._bounds(encoder) if bound not in warmed]:
            warm_up(encoder, shapes(budget)[-1] if warmed else budget, self.device, left[0])
            warmed.append(left[0])

    def _bounds(self, encoder: Encoder) -> list[int]:
        """Of the groups in which an encoder's first rows come, about; all usual ones as long as no task is known."""
        if isinstance(task := self.parent.peek(), ShardTask):
            with suppress(Exception):  # what is wrong with a task is told when its turn has come
                store, _ = opened(Path(task.store), task.reads, Path(self.spec.models))
                residues = np.diff(store.protein_offsets[task.lo : task.hi + 1])
                tokens = (
                    residues + 2 if isinstance(encoder, Esm2) else residues * 3 // 4 + 2
                )  # of some four bases
                return cast(list[int], np.unique(group_bounds(tokens)).tolist())
        return self._usual

    def _repeater(self, longest: int) -> "Repeater":
        """What embeds rows near the threshold again, its kernels compiled."""
        from virnuc_core.engine.repeats import Repeater  # int8 needs it alone

        repeater = Repeater(Path(self.spec.models), self.device, self.spec.engine, longest)
        if repeater.stream is not None:
            with torch.cuda.stream(repeater.stream):
                self._warm_up(repeater.esm2, repeater.slots(self.spec.divisor))
        return repeater

    def _launch_all(self, take: Take) -> None:
        """Launch all that `take` gives; each finished shard goes to the writer, for which this may wait."""
        pending: Pending | None = None
        while True:
            item, wait_ms = take()
            self._moved_s = time.monotonic()
            if item is None:
                return
            if isinstance(item, Batch):
                assert pending is not None
                self._launch(pending, item, wait_ms)
            elif pending is None:
                size = item.hi - item.lo, self.dnabert_s.width + self.esm2.width
                pending = Pending(
                    item,
                    time.monotonic(),
                    torch.zeros(size, dtype=torch.float32, device=self.device),
                )
            else:
                self._finish(pending)
                self._writes.put(pending)
                pending = None

    def _mark(self) -> torch.cuda.Event | float:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def _launch(self, pending: Pending, batch: Batch, wait_ms: float) -> None:
        launched_s = time.monotonic()
        start = self._mark()
        dna = batch.encoder == "dnabert_s"
        encoder, first = (self.dnabert_s, 0) if dna else (self.esm2, self.dnabert_s.width)
        with torch.inference_mode(), torch.profiler.record_function(batch.encoder):
            pooled = encoder.embed(batch.packed.to(self.device))  # [row_capacity, width]
            rows = batch.rows.to(self.device, non_blocking=True)
            pending.embeddings[:, first : first + encoder.width].index_copy_(
                0, rows, pooled[: batch.packed.rows]
            )
        record = BatchRecord(
            device=self.spec.device.id,
            encoder=batch.encoder,
            shard=pending.task.shard,
            index=batch.index,
            rows=batch.packed.rows,
            tokens=batch.packed.real_tokens,
            slots=batch.packed.slots,
            wait_ms=wait_ms,
            arrived_s=batch.arrived_s,
            launched_s=launched_s,
            device_ms=None,  # not known yet
        )
        pending.launched.append((record, (start, self._mark())))

    def _finish(self, pending: Pending) -> None:
        """Score the shard, and send its results to the host."""
        start, features = self._mark(), pending.embeddings
        with torch.inference_mode(), torch.profiler.record_function("head"):
            if pending.task.skip:
                left_out = torch.tensor(pending.task.skip, device=self.device) - pending.task.lo
                features[left_out] = torch.nan
            scores = self.head.scores(features)  # [rows, 2]
        pending.head = start, self._mark()
        if self._side is None:
            pending.scores = scores
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            pending.embeddings = features.to("cpu", non_blocking=True)  # to page-locked memory
            pending.scores = scores.to("cpu", non_blocking=True)
            pending.arrived = self._side.record_event()
        for tensor in (features, scores):
            tensor.record_stream(self._side)

    def _write(self) -> None:
        try:
            while (pending := self._writes.get()) is not None:
                self._commit(pending)
        except Exception as error:  # noqa: BLE001 - said at once: the launch loop may be waiting for tasks that never come
            self.parent.give_up(error)

    def _commit(self, pending: Pending) -> None:
        """Put a shard on disk and say so; of a probe, only that it was computed. Errors: also of `judge_not_finite`."""
        if pending.arrived is not None:
            pending.arrived.synchronize()
        assert pending.scores is not None
        result = ShardResult(pending.embeddings.numpy(), pending.scores.numpy())
        task = pending.task
        repeated = self.repeater.repeat(result, task, self.head) if self.repeater is not None else 0
        finished_s = time.monotonic()
        if task.probe:
            self._answer(Computed(done=None))
            return
        self._check_weights(task.weights)
        fine = np.isfinite(result.embeddings).all(axis=1) & np.isfinite(result.scores).all(axis=1)
        lost = np.flatnonzero(~fine)
        if len(lost) > len(task.skip):
            judge_not_finite(result, task, Path(self.spec.models))
            result.embeddings[lost] = result.scores[lost] = np.nan
        if self.spec.engine.commit:
            run = RunDir(Path(task.run))
            commit(run, read_plan(run), task.shard, result)
        commit_s = time.monotonic() - finished_s
        batches = tuple(
            replace(record, device_ms=milliseconds(span)) for record, span in pending.launched
        )
        done = ShardDone(
            device=self.spec.device.id,
            shard=task.shard,
            rows=task.hi - task.lo,
            protein_tokens=sum(b.tokens for b in batches if b.encoder == "esm2"),
            dna_tokens=sum(b.tokens for b in batches if b.encoder == "dnabert_s"),
            started_s=pending.started_s,
            finished_s=finished_s,
            dnabert_s=sum(b.device_ms or 0.0 for b in batches if b.encoder == "dnabert_s") / 1e3,
            esm2_s=sum(b.device_ms or 0.0 for b in batches if b.encoder == "esm2") / 1e3,
            head_s=milliseconds(pending.head) / 1e3,
            commit_s=commit_s,
            batches=batches,
            budget_divisor=task.divisor,
            skipped=len(lost),
            allocated_bytes=torch.cuda.max_memory_allocated()
            if pending.arrived is not None
            else None,
        )
        self._answer(Computed(done=done, n_repeated=repeated))

    def _check_weights(self, wanted: dict[str, str]) -> None:
        """See that a run is made from what is loaded here. Errors: `RunMismatchError` when that is no longer there,
        `RuntimeError` when it came later: whoever takes this worker's place loads it."""
        if wanted not in ({}, self._weights.result()):
            models = self.spec.models
            others = join_first(
                find_mismatches(
                    wanted, fingerprint(Path(models), self.spec.engine.precision), strict=True
                )
            )
            problem = f"{others} is no longer what the run began with; put it back, or choose another directory"
            raise (
                RunMismatchError(f"{models}: {problem}")
                if others
                else RuntimeError(f"{models} has other models now")
            )

    def _answer(self, computed: Computed) -> None:
        self._held.popleft()
        self.parent.send(computed)


def judge_not_finite(result: ShardResult, task: ShardTask, models: Path) -> None:
    """Let up to `task.max_not_finite` rows of a shard pass that hold NaN or infinity; those of `task.skip` are known to.

    Errors: `NotFiniteError` names the model that gives more of them, `WeightsError` its tensor that is not finite."""
    most, (dna, protein) = (
        task.max_not_finite,
        np.split(result.embeddings, [shape_of(models, DnabertShape).width], axis=1),
    )
    left = np.ones(len(result.scores), bool)  # [rows] without a cause so far
    left[np.array(task.skip, np.int64) - task.lo] = False
    for part, values in {"dnabert_s": dna, "esm2": protein, "head": result.scores}.items():
        lost = np.flatnonzero(left & ~np.isfinite(values).all(axis=1))
        left[lost] = False
        most -= len(lost)
        if len(lost):
            _examine(models, part)
        if most < 0:
            store, _ = opened(Path(task.store), task.reads, models)
            names = join_first(
                store.row_ids(row, row + 1)[0] for row in store.unique_row[lost + task.lo].tolist()
            )
            raise NotFiniteError(
                f"{models / part}: of {len(left)} rows of a shard it gives NaN or infinity for {len(lost)} "
                f"({names}), though its weights are finite; use another --precision, or other weights"
            )


@cache
def _examine(models: Path, part: str) -> None:
    """See, once, that the weights of a model are finite. Errors: `WeightsError`."""
    check_finite(models / part, *open_part(models, KINDS[part]))


def work(parent: Parent, spec: WorkerSpec) -> None:
    """Compute shards until the parent says stop, closes its input or dies."""
    Worker(parent, spec).run()
