"""A pool of workers, one a device, that computes the shards of jobs.

Shards are handed out one by one: a slow device takes fewer. A worker that dies is restarted and what it held is handed
out again; one that is silent for too long is ended first. A shard at which workers die repeatedly is searched for the
row that does it (`search`), which is set aside, as a few rows are that are not finite. A device that runs out of
memory gets the shard again with half the token budget. Errors of reads, weights, settings and devices stop the run."""

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from virnuc_core import errors
from virnuc_core.engine import process
from virnuc_core.engine.process import WorkerSpec
from virnuc_core.engine.shards import Computed, ShardTask
from virnuc_core.telemetry.tables import ShardDone

log = logging.getLogger(__name__)

TASKS_AHEAD: Final = 2  # in a worker's hands: the one it computes and the one its loader prepares
TICK_S: Final = 0.5
MAX_DEATHS_BEFORE_READY: Final = 3  # in a row, of workers that never got to work
MAX_DIVISOR: Final = 64
PROOFS: Final = 2  # deaths of workers that had one row alone, before it is the cause
MAX_SEARCHES: Final = 3  # in vain, before the shard is given up
APART: Final = 5  # rows that lie apart; where each of them alone ends a worker, no row is the cause
MAX_GUILTY: Final = 16  # of one shard: more is not a poisoned row but a broken machine
# what other jobs need not meet
OF_A_JOB: Final = (
    errors.InputError,
    errors.ConfigError,
    errors.NotFiniteError,
    errors.StorageError,
    errors.ShardError,
)
MOST_NOT_FINITE: Final = (
    0.01  # of a run's rows: more are no odd rows, but weights or a precision of no use
)


@dataclass(slots=True)
class WorkerSlot:
    """A device's place in the pool: who works there now, and what it holds."""

    spec: WorkerSpec
    worker: process.Child | None = None
    record: dict[str, Any] | None = None  # what the present worker said when it was ready
    held: deque[ShardTask] = field(default_factory=deque)  # given and not answered, oldest first
    unready_deaths: int = 0
    too_large: set[tuple[str, int]] = field(
        default_factory=set
    )  # runs and shards at which its memory ran out
    since_s: float = 0.0  # when it last was ready, or had a shard committed


@dataclass(slots=True, eq=False)
class PooledJob:
    """A job in a pool's hands; what there was to count can be read afterwards."""

    run: str
    logs: Path
    note: Callable[..., None]  # hears of every shard, and of every death in a line
    left: set[int]  # shards that are not committed
    deaths: list[str] = field(default_factory=list)  # one line each
    records: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # by device: what its first worker said when ready
    lost_s: dict[str, float] = field(
        default_factory=lambda: defaultdict(float)
    )  # by device, from its last commit on
    reduced: dict[int, int] = field(
        default_factory=dict
    )  # shards, and what their token budgets were divided by
    lost: int = 0  # rows that were not finite
    repeated: int = 0  # rows near the threshold that were embedded again
    killed: Counter[int] = field(default_factory=Counter)  # deaths with this shard first in line
    searches: dict[int, Generator[ShardTask, bool, None]] = field(default_factory=dict)
    error: Exception | None = None  # which ends this job alone
    ended: Future[None] = field(default_factory=Future)


class Pool(AbstractContextManager["Pool"]):
    """Workers, one a device, for the jobs that threads give it; they are gone when the `with` block ends. Several jobs
    may be computed at once, the shards of the first before those of the next. Workers stay up between jobs if the pool
    is to `keep` them; else they are gone as soon as nothing is left to compute. In a `warm` pool all load the weights
    while there is no job yet. A thread of the pool's own starts them, for they die with whoever did."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        workers: process.LocalWorkers,
        *,
        keep: bool = False,
        warm: bool = False,
    ) -> None:
        self.specs, self._workers, self._keep = tuple(specs), workers, keep
        self._slots, self.reader = [WorkerSlot(spec) for spec in specs], workers.reader
        self._jobs: dict[str, PooledJob] = {}  # by run
        self._todo: deque[ShardTask] = deque()
        self._given: deque[tuple[PooledJob, Sequence[ShardTask]]] = deque()  # and not taken up yet
        self._warm, self._closed = warm, False
        self._giving, self._thread = (
            threading.Lock(),
            threading.Thread(target=self._work, name="pool", daemon=True),
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._giving:
            self._closed = True
        self._workers.wake()
        self._thread.join()
        self._workers.__exit__()

    def compute(
        self, tasks: Sequence[ShardTask], logs: Path, note: Callable[..., None]
    ) -> PooledJob:
        """Compute shards of one job; returns when all are committed, and no worker holds any when it raises. Errors:
        our own as a worker raised them; `ShardError` for a shard that ends workers though no row of it does alone;
        `WorkerError` for workers that never get ready, and after `end_all_children`. What lies with the data of one job
        (`OF_A_JOB`) ends that job, where workers are kept; all else ends every job, and the workers."""
        job = PooledJob(tasks[0].run if tasks else "", logs, note, {task.shard for task in tasks})
        if tasks:
            with self._giving:
                if self._closed:
                    raise errors.VirnucError(process.INTERRUPTED)
                self._given.append((job, tasks))
            self._workers.wake()
            job.ended.result()
        return job

    def _work(self) -> None:
        while not self._closed:
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001 - raised by `compute`
                self._end(error)
        self._take_up()
        self._end(errors.VirnucError(process.INTERRUPTED))

    def _turn(self) -> None:
        """Start and feed workers, and hear one message."""
        self._take_up()
        self._end_silent()
        for device in self._workers.joined(len(self._todo)):
            self._slots.append(WorkerSlot(self.specs[0].model_copy(update={"device": device})))
        if self._todo or self._warm:
            # a worker on each device, but no more of them than there are tasks, unless all are to be warm
            wanted = (
                len(self._slots)
                if self._warm
                else len(self._todo) + sum(len(slot.held) for slot in self._slots)
            )
            wanted -= sum(slot.worker is not None for slot in self._slots)
            self._warm = False
            for slot in [slot for slot in self._slots if slot.worker is None][: max(0, wanted)]:
                slot.worker, slot.record = self._workers.start(slot.spec), None
            self._feed()
        if (received := self._workers.receive(TICK_S)) is None:
            return
        child, heard = received
        for slot in [*self._slots]:  # none for an earlier worker's last message
            if slot.worker is child:
                ready, first = slot.record is not None, slot.held[0] if slot.held else None
                try:
                    self._hear(slot, child, heard)
                except OF_A_JOB as error:
                    if not (self._keep and ready and first):
                        raise
                    self._jobs[
                        first.run
                    ].error = error  # what workers hold of it is not handed out again
                    self._todo = deque(task for task in self._todo if task.run != first.run)
                self._settle()

    def _take_up(self) -> None:
        while self._given:
            job, tasks = self._given.popleft()
            self._jobs[job.run] = job
            self._todo.extend(tasks)

    def _feed(self) -> None:
        """Give workers tasks until each holds enough; a suspect travels alone, so that a death names it."""
        for most in range(1, TASKS_AHEAD + 1):
            for slot in self._slots:
                while self._todo and slot.worker is not None and len(slot.held) < most:
                    task = self._todo[0]
                    both = (task, *slot.held) if slot.held else ()
                    if any(one.probe or self._jobs[one.run].killed[one.shard] > 0 for one in both):
                        break
                    task = self._todo.popleft().model_copy(
                        update={"divisor": max(task.divisor, slot.spec.divisor)}
                    )
                    slot.held.append(task)
                    self._tell_log(slot)
                    if slot.record is not None:
                        self._jobs[task.run].records.setdefault(slot.spec.device.id, slot.record)
                    slot.worker.send(task)

    def _tell_log(self, slot: WorkerSlot) -> None:
        """What a worker says on standard error goes to the run whose shard it computes."""
        assert slot.worker is not None
        logs = [self._jobs[task.run].logs for task in slot.held]
        if logs or self._keep:
            slot.worker.log = logs[0] / f"worker-{slot.worker.device}.log" if logs else None

    def _hear(self, slot: WorkerSlot, worker: process.Child, heard: process.Message) -> None:
        match heard:
            case process.Ready(record=record):
                slot.record = {"asked_s": worker.asked_s, "spawned_s": worker.started_s, **record}
                slot.unready_deaths = 0
                for job in self._concerned(slot.held):
                    if job.records.setdefault(worker.device, slot.record)["pid"] != record["pid"]:
                        job.lost_s[worker.device] += time.monotonic() - slot.since_s
                slot.since_s = time.monotonic()
                log.info("%s ready after %.1f s", worker.device, record["ready_s"])
            case Computed(done=done, repeated=repeated):
                task = slot.held.popleft()
                self._tell_log(slot)
                job = self._jobs[task.run]
                if job.error is None and done is None:
                    self._todo.appendleft(job.searches[task.shard].send(True))
                elif job.error is None and done is not None:
                    slot.since_s = time.monotonic()
                    job.repeated += repeated
                    self._count(job, task, done)
            case process.Failed():  # what no other try mends ends the job, or all; all else is left to its death
                log.error("%s: %s: %s", worker.device, heard.kind, heard.message)
                if (error := errors.error_from_name(heard.kind, heard.message)) is not None:
                    raise error
            case process.Closed():
                self._died(slot, worker)

    def _count(self, job: PooledJob, task: ShardTask, done: ShardDone) -> None:
        """A shard was committed. Errors: `NotFiniteError` when too many rows of its run are not finite."""
        if task.divisor > 1:
            job.reduced[task.shard] = task.divisor
        job.killed.pop(task.shard, None)
        job.left.discard(task.shard)
        job.note(done)
        if lost := done.skipped - len(task.skip):
            log.warning(
                "shard %05d: %d rows are not finite and are set aside (failed.tsv)",
                done.shard,
                lost,
            )
            job.lost += lost
        if job.lost > task.most_lost:
            told = f"{job.lost} rows are not finite, more than {100 * MOST_NOT_FINITE:.0f} % of the run's"
            raise errors.NotFiniteError(
                f"{told}; run virnuc models verify, or use another --precision"
            )

    def _concerned(self, held: Iterable[ShardTask]) -> list[PooledJob]:
        """The jobs whose shards a worker holds, or, of one that holds none, all."""
        return [self._jobs[run] for run in dict.fromkeys(task.run for task in held)] or [
            *self._jobs.values()
        ]

    def _end_silent(self) -> None:
        """End workers that hold work and have not moved for too long, a death like any other, and idle stopped ones."""
        now, most_s = time.monotonic(), self.specs[0].engine.silence_s
        for slot in self._slots:
            if (
                (worker := slot.worker) is not None
                and slot.held
                and now - worker.progress_s > most_s
            ):
                log.error(
                    "%s has been silent for more than %.0f s; ending it", worker.device, most_s
                )
                worker.progress_s = now
                worker.end(0.5)
            elif worker is not None and not slot.held and worker.silent:
                worker.end(0)  # it may hold the device
                slot.worker = None

    def _died(self, slot: WorkerSlot, worker: process.Child) -> None:
        """Take back what a dead worker held, to be handed out again; another will be started in its place."""
        status, failed, held, ready = (
            worker.end(0.5),
            worker.failed,
            [*slot.held],
            slot.record is not None,
        )
        slot.worker, slot.held = None, deque()
        if self._workers.cancelled:
            raise errors.WorkerError(process.INTERRUPTED)
        if worker.lost:  # with its node; should that come back, so does the device
            self._slots.remove(slot)
        said = f"{failed.kind}: {failed.message}" if failed else worker.last_words
        shards = [task.shard for task in held]
        line = f"worker on {worker.device} ended (status {status}), holding shards {shards}; it said: {said}"
        log.warning("%s", line)
        concerned = self._concerned(held)
        for job in concerned:
            job.deaths.append(line)
            job.note(line)
        out_of_memory = failed is not None and failed.kind == "OutOfMemoryError"
        alive = [task for task in held if self._jobs[task.run].error is None]
        self._todo.extendleft(reversed(alive))
        if worker.lost:
            return
        if ready and alive and alive[0] is held[0]:
            self._todo[0] = self._after_death(held[0], said, out_of_memory=out_of_memory)
            slot.too_large |= {(held[0].run, held[0].shard)} if out_of_memory else set()
        if out_of_memory and (
            not ready or len(slot.too_large) > 1
        ):  # not one shard's matter: the device has no room
            slot.spec = slot.spec.model_copy(
                update={"divisor": _doubled(slot.spec.divisor, worker.device)}
            )
            slot.too_large.clear()
        elif not ready and not out_of_memory and concerned:
            slot.unready_deaths += 1
            if slot.unready_deaths >= MAX_DEATHS_BEFORE_READY:
                problem = f"workers on {worker.device} ended {slot.unready_deaths} times before they were ready"
                told, trace = (
                    f"{problem}; last words: {said}; see {worker.log}",
                    failed.traceback if failed else "",
                )
                raise errors.WorkerError(told, worker_traceback=trace)

    def _after_death(self, task: ShardTask, said: str, *, out_of_memory: bool) -> ShardTask:
        """What to try next with the task at which a worker died."""
        if out_of_memory:
            return task.model_copy(
                update={"divisor": _doubled(task.divisor, f"shard {task.shard:05d}")}
            )
        job = self._jobs[task.run]
        if task.probe:
            return job.searches[task.shard].send(False)
        job.killed[task.shard] += 1
        if job.killed[task.shard] < self.specs[0].engine.max_shard_attempts:
            return task
        log.warning(
            "shard %05d ended %d workers; searching for the row", task.shard, job.killed[task.shard]
        )
        if (probe := next(job.searches.setdefault(task.shard, search(task)), None)) is None:
            problem = f"ends workers, and no single row of it is the cause; last words: {said}"
            raise errors.ShardError(problem, shard=task.shard)
        return probe

    def _settle(self) -> None:
        """Let go of the jobs that are committed or have failed, once no worker holds a shard of theirs."""
        if not (
            over := [job for job in self._jobs.values() if job.error is not None or not job.left]
        ):
            return
        held = {task.run for slot in self._slots for task in slot.held}
        over = [self._jobs.pop(job.run) for job in over if job.run not in held]
        if not self._jobs and not self._keep:
            self._end_workers()
        for job in over:
            job.ended.set_result(None) if job.error is None else job.ended.set_exception(job.error)

    def _end(self, error: Exception) -> None:
        """End the workers, and every job with an error."""
        self._end_workers()
        self._todo.clear()
        while self._jobs:
            self._jobs.popitem()[1].ended.set_exception(error)

    def _end_workers(self) -> None:
        living = [slot.worker for slot in self._slots if slot.worker is not None]
        for worker in living:
            worker.send(process.Closed())
        process.end_children(living)
        for slot in self._slots:
            slot.worker, slot.held, slot.unready_deaths = None, deque(), 0


def _doubled(divisor: int, what: str) -> int:
    """The next smaller budget for a device or shard that ran out of memory."""
    if divisor >= MAX_DIVISOR:
        problem = f"out of memory even with 1/{divisor} of the token budget; free the device or use a smaller model"
        raise errors.DeviceError(f"{what}: {problem}")
    log.warning("%s: out of memory, trying 1/%d of the token budget", what, divisor * 2)
    return divisor * 2


def search(whole: ShardTask) -> Generator[ShardTask, bool, None]:
    """What to try next within one shard, which has ended workers. Each is answered by whether a worker survived it.
    They are probes, and after each round the shard again without the rows found, which is answered only when it has
    ended workers again. They end when the shard cannot be cleared; soon, where rows that lie apart end a worker each.
    As workers may be killed from outside, too, a row is found only when it has ended `PROOFS` workers all alone."""
    guilty, in_vain = list[int](), 0

    def probe(lo: int, hi: int) -> ShardTask:
        skip = tuple(row for row in guilty if lo <= row < hi)
        return whole.model_copy(update={"lo": lo, "hi": hi, "skip": skip, "probe": True})

    apart = range(whole.lo, whole.hi, max(1, (whole.hi - whole.lo) // APART))[:APART]
    for row in apart:
        if (yield probe(row, row + 1)):
            break
    else:
        if len(apart) == APART:
            yield whole
            return
    while in_vain < MAX_SEARCHES and len(guilty) <= MAX_GUILTY:
        lo, hi, alone, in_vain = whole.lo, whole.hi, 0, in_vain + 1
        while alone < PROOFS:
            middle = max(lo + 1, (lo + hi) // 2)
            if not (yield probe(lo, middle)):
                hi = middle  # it is in here; what is outside is looked at when the shard runs again
            elif middle < hi and not (yield probe(middle, hi)):
                lo = middle
            else:
                break
            alone += hi - lo == 1
        if alone == PROOFS:
            guilty, in_vain = sorted([*guilty, lo]), 0
        yield whole.model_copy(update={"skip": tuple(guilty)})
