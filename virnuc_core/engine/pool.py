"""A pool of workers, one per device, that computes the shards of jobs.

Shards are handed out one by one, so a slow device takes fewer. A worker that dies is replaced, and
its shards are handed out again. A worker that is silent for too long is killed first. A shard at
which workers die repeatedly is searched for the row that kills them (`poison_rows`). That row is
set aside, and so are a few rows whose results are not finite. A device that runs out of memory
gets the shard again with half the token budget. Errors of reads, weights, settings and devices
stop the run.
"""

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from virnuc_core import errors
from virnuc_core.engine import process
from virnuc_core.engine.poison_rows import Probes, bisect_poison_rows
from virnuc_core.engine.process import WorkerSpec
from virnuc_core.engine.shards import Computed, ShardTask
from virnuc_core.telemetry.tables import ShardDone

log = logging.getLogger(__name__)

# A worker holds the task that it computes and the one that its loader prepares.
TASKS_PER_WORKER: Final = 2
TICK_S: Final = 0.5
# Deaths in a row of workers on one device that never became ready.
MAX_DEATHS_BEFORE_READY: Final = 3
MAX_DIVISOR: Final = 64
# Errors that lie with one job: other jobs need not meet them.
JOB_ERRORS: Final = (
    errors.InputError,
    errors.ConfigError,
    errors.NotFiniteError,
    errors.StorageError,
    errors.ShardError,
)
# Of a run's rows. More are not a few odd rows: the weights or the precision are unusable.
MAX_NOT_FINITE_SHARE: Final = 0.01


@dataclass(slots=True)
class WorkerSlot:
    """A device's place in the pool: which worker runs there now, and which tasks it holds."""

    spec: WorkerSpec
    worker: process.Child | None = None
    record: dict[str, Any] | None = None  # what the present worker reported when it became ready
    tasks: deque[ShardTask] = field(default_factory=deque)  # sent and not answered, oldest first
    unready_deaths: int = 0
    # (run, shard) of the shards at which the device ran out of memory
    oom_shards: set[tuple[str, int]] = field(default_factory=set)
    active_since_s: float = 0.0  # when it last became ready or had a shard committed


@dataclass(slots=True, eq=False)
class PooledJob:
    """A job that a pool computes. Its counts can be read afterwards."""

    run: str
    logs: Path
    on_event: Callable[..., None]  # called with each `ShardDone`, and with a line for each death
    remaining: set[int]  # shards that are not committed
    tasks: Sequence[ShardTask] = ()
    deaths: list[str] = field(default_factory=list)  # one line each
    # by device: what the first worker that took one of the job's shards reported when ready
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    # by device: time between the last commit before a death and the new worker's readiness
    restart_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    reduced_budgets: dict[int, int] = field(default_factory=dict)  # shard → token budget divisor
    n_not_finite: int = 0  # rows whose results were not finite
    n_repeated: int = 0  # rows near the threshold that were embedded again
    deaths_at_shard: Counter[int] = field(default_factory=Counter)
    searches: dict[int, Probes] = field(default_factory=dict)  # by shard, for poison rows
    error: Exception | None = None  # ends this job alone
    completion: Future[None] = field(default_factory=Future)

    @property
    def is_over(self) -> bool:
        """Tell whether nothing of this job is left to compute."""
        return self.error is not None or not self.remaining


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """What is known of a worker process that has ended."""

    worker: process.Child
    status: int
    tasks: tuple[ShardTask, ...]  # it held these, oldest first
    was_ready: bool

    @property
    def out_of_memory(self) -> bool:
        """Tell whether its device ran out of memory."""
        failure = self.worker.failed
        return failure is not None and failure.kind == "OutOfMemoryError"

    @property
    def reason(self) -> str:
        """Return its own word on why it ended, or its last line on standard error."""
        failure = self.worker.failed
        if failure is None:
            return self.worker.last_words
        return f"{failure.kind}: {failure.message}"

    @property
    def traceback(self) -> str:
        """Return the traceback of its error, or an empty string."""
        failure = self.worker.failed
        return "" if failure is None else failure.traceback

    def __str__(self) -> str:
        shards = [task.shard for task in self.tasks]
        ending = f"worker on {self.worker.device} ended (status {self.status})"
        return f"{ending}, holding shards {shards}; it said: {self.reason}"


class Pool(AbstractContextManager["Pool"]):
    """Workers, one per device, for the jobs that threads submit.

    The workers are gone when the `with` block ends. Several jobs may be computed at once; the
    shards of the first come before those of the next. With `keep`, workers stay up between jobs;
    otherwise they end as soon as nothing is left to compute. With `warm`, all of them load the
    weights before there is a job. The pool starts them in a thread of its own, because they die
    with the thread that started them.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        workers: process.LocalWorkers,
        *,
        keep: bool = False,
        warm: bool = False,
    ) -> None:
        self.specs = tuple(specs)
        self.reader = workers.reader
        self._workers = workers
        self._keep = keep
        self._warm = warm
        self._slots = [WorkerSlot(spec) for spec in specs]
        self._jobs: dict[str, PooledJob] = {}  # by run
        self._todo: deque[ShardTask] = deque()
        self._submitted: deque[PooledJob] = deque()  # not accepted by the pool's thread yet
        self._closed = False
        self._submit_lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="pool", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._submit_lock:
            self._closed = True
        self._workers.wake()
        self._thread.join()
        self._workers.__exit__()

    def compute(
        self, tasks: Sequence[ShardTask], logs: Path, on_event: Callable[..., None]
    ) -> PooledJob:
        """Compute the shards of one job.

        No worker holds any of them when this returns or raises. An error that lies with the data
        of one job (`JOB_ERRORS`) ends that job alone if the workers are kept. Any other error
        ends every job, and the workers.

        Args:
            tasks: The shards of one run.
            logs: Folder for what workers write to standard error.
            on_event: Called with a `ShardDone` for each committed shard, and with a line of text
                for each worker that died.

        Returns:
            The job, with all shards committed.

        Raises:
            VirnucError: A worker raised one of our own errors.
            ShardError: A shard kills workers, although none of its rows does so alone.
            WorkerError: Workers never became ready, or `end_all_children` was called.
        """
        run = tasks[0].run if tasks else ""
        job = PooledJob(run, logs, on_event, {task.shard for task in tasks}, tasks)
        if not tasks:
            return job
        with self._submit_lock:
            if self._closed:
                raise errors.VirnucError(process.INTERRUPTED)
            self._submitted.append(job)
        self._workers.wake()
        job.completion.result()
        return job

    def _work(self) -> None:
        """Run the pool's thread: compute jobs until the pool is closed, then end what is left."""
        try:
            while not self._closed:
                try:
                    self._step()
                except Exception as error:  # noqa: BLE001 - raised by `compute`
                    self._end(error)
        finally:  # nobody may wait for a thread that is gone
            with self._submit_lock:
                self._closed = True
            self._accept_jobs()
            self._end(errors.VirnucError(process.INTERRUPTED))

    def _step(self) -> None:
        """Start and feed workers, then wait for one message and handle it."""
        self._accept_jobs()
        self._end_silent()
        self._add_new_devices()
        if self._todo or self._warm:
            self._start_workers()
            self._feed()
        received = self._workers.receive(TICK_S)
        if received is None:
            return
        worker, message = received
        for slot in self._slots:
            if slot.worker is worker:  # no slot has an earlier worker, whose last message this is
                self._handle_for_jobs(slot, worker, message)
                self._finish_jobs()
                return

    def _accept_jobs(self) -> None:
        """Queue the shards of the jobs that threads have submitted."""
        while self._submitted:
            job = self._submitted.popleft()
            self._jobs[job.run] = job
            self._todo.extend(job.tasks)

    def _end_silent(self) -> None:
        """End workers that have stopped: a busy one without progress, an idle one without a beat.

        The end of a busy worker is then handled like any other death.
        """
        now_s = time.monotonic()
        silence_s = self.specs[0].engine.silence_s
        for slot in self._slots:
            worker = slot.worker
            if worker is None:
                continue
            if slot.tasks:
                if now_s - worker.progress_s > silence_s:
                    device = worker.device
                    log.error(
                        "%s has been silent for more than %.0f s; ending it", device, silence_s
                    )
                    worker.progress_s = now_s
                    worker.end(0.5)
            elif worker.silent:
                worker.end(0)  # it may occupy the device
                slot.worker = None

    def _add_new_devices(self) -> None:
        """Add a slot for each device that has joined the cluster."""
        for device in self._workers.new_devices(len(self._todo)):
            spec = self.specs[0].model_copy(update={"device": device})
            self._slots.append(WorkerSlot(spec))

    def _start_workers(self) -> None:
        """Start workers on idle devices: not more than there are tasks, or all for a warm start."""
        n_wanted = len(self._todo) + sum(len(slot.tasks) for slot in self._slots)
        if self._warm:
            n_wanted = len(self._slots)
            self._warm = False
        idle = [slot for slot in self._slots if slot.worker is None]
        n_running = len(self._slots) - len(idle)
        for slot in idle[: max(0, n_wanted - n_running)]:
            slot.worker = self._workers.start(slot.spec)
            slot.record = None

    def _feed(self) -> None:
        """Send tasks to workers until each holds enough; every worker gets one before a second."""
        for max_tasks in range(1, TASKS_PER_WORKER + 1):
            for slot in self._slots:
                while self._may_take_next(slot, max_tasks):
                    self._send_next(slot)

    def _may_take_next(self, slot: WorkerSlot, max_tasks: int) -> bool:
        """Return whether the next task may go to this worker now.

        A suspect travels alone, so that a death names it.
        """
        if not self._todo or slot.worker is None or len(slot.tasks) >= max_tasks:
            return False
        if not slot.tasks:
            return True
        return not any(self._is_suspect(task) for task in (self._todo[0], *slot.tasks))

    def _is_suspect(self, task: ShardTask) -> bool:
        """Return whether workers have died at this shard."""
        return task.probe or self._jobs[task.run].deaths_at_shard[task.shard] > 0

    def _send_next(self, slot: WorkerSlot) -> None:
        """Send the next task to a worker, with the token budget that its device can hold."""
        assert slot.worker is not None
        task = self._todo.popleft()
        divisor = max(task.divisor, slot.spec.divisor)
        task = task.model_copy(update={"divisor": divisor})
        slot.tasks.append(task)
        self._choose_log(slot)
        if slot.record is not None:
            self._jobs[task.run].records.setdefault(slot.spec.device.id, slot.record)
        slot.worker.send(task)

    def _choose_log(self, slot: WorkerSlot) -> None:
        """Log a worker's standard error in the run whose shard it computes."""
        assert slot.worker is not None
        if slot.tasks:
            logs = self._jobs[slot.tasks[0].run].logs
            slot.worker.log = logs / f"worker-{slot.worker.device}.log"
        elif self._keep:
            slot.worker.log = None

    def _handle_for_jobs(
        self, slot: WorkerSlot, worker: process.Child, message: process.Message
    ) -> None:
        """Handle a message. An error that lies with one job ends that job alone if workers stay.

        Raises:
            Exception: Any other error, which ends the pool's workers and all its jobs.
        """
        was_ready = slot.record is not None
        current_task = slot.tasks[0] if slot.tasks else None
        try:
            self._handle_message(slot, worker, message)
        except JOB_ERRORS as error:
            if not self._keep or not was_ready or current_task is None:
                raise
            # From now on, what workers hold of this job is not handed out again.
            self._jobs[current_task.run].error = error
            other_tasks = [task for task in self._todo if task.run != current_task.run]
            self._todo = deque(other_tasks)

    def _handle_message(
        self, slot: WorkerSlot, worker: process.Child, message: process.Message
    ) -> None:
        """Handle one message of a worker.

        Raises:
            VirnucError: An error that no other worker would avoid; it ends the job, or all jobs.
        """
        match message:
            case process.Ready():
                self._handle_ready(slot, worker, message)
            case Computed():
                self._handle_computed(slot, message)
            case process.Failed():
                log.error("%s: %s: %s", worker.device, message.kind, message.message)
                error = errors.error_from_name(message.kind, message.message)
                # An error of another kind may pass: it is handled as the worker's death.
                if error is not None:
                    raise error
            case process.Closed():
                self._handle_death(slot, worker)

    def _handle_ready(self, slot: WorkerSlot, worker: process.Child, ready: process.Ready) -> None:
        """Record when a worker became ready, and the time that was lost if it replaces another."""
        record = {"asked_s": worker.asked_s, "spawned_s": worker.started_s, **ready.record}
        now_s = time.monotonic()
        for job in self._jobs_of(slot.tasks):
            first_record = job.records.setdefault(worker.device, record)
            if first_record["pid"] != record["pid"]:
                job.restart_s[worker.device] += now_s - slot.active_since_s
        slot.record = record
        slot.unready_deaths = 0
        slot.active_since_s = now_s
        log.info("%s ready after %.1f s", worker.device, record["ready_s"])

    def _handle_computed(self, slot: WorkerSlot, computed: Computed) -> None:
        """Count a committed shard, or continue the search that a survived probe belongs to."""
        task = slot.tasks.popleft()
        self._choose_log(slot)
        job = self._jobs[task.run]
        if job.error is not None:
            return
        if computed.done is None:
            next_probe = job.searches[task.shard].send(True)
            self._todo.appendleft(next_probe)
        else:
            slot.active_since_s = time.monotonic()
            job.n_repeated += computed.n_repeated
            self._count_commit(job, task, computed.done)

    def _count_commit(self, job: PooledJob, task: ShardTask, done: ShardDone) -> None:
        """Count a committed shard.

        Raises:
            NotFiniteError: Too many of the run's rows have results that are not finite.
        """
        if task.divisor > 1:
            job.reduced_budgets[task.shard] = task.divisor
        job.deaths_at_shard.pop(task.shard, None)
        job.remaining.discard(task.shard)
        job.on_event(done)
        # rows that were left out, less those that the task named
        n_not_finite = done.skipped - len(task.skip)
        if n_not_finite:
            text = "shard %05d: %d rows are not finite and are set aside (failed.tsv)"
            log.warning(text, done.shard, n_not_finite)
            job.n_not_finite += n_not_finite
        if job.n_not_finite > task.max_not_finite:
            percent = f"{100 * MAX_NOT_FINITE_SHARE:.0f} %"
            problem = f"{job.n_not_finite} rows are not finite, more than {percent} of the run's"
            way_out = "run virnuc models verify, or use another --precision"
            raise errors.NotFiniteError(f"{problem}; {way_out}")

    def _jobs_of(self, tasks: Sequence[ShardTask]) -> list[PooledJob]:
        """Return the jobs that a worker's tasks belong to; for a worker without tasks, all jobs."""
        runs = dict.fromkeys(task.run for task in tasks)
        if not runs:
            return list(self._jobs.values())
        return [self._jobs[run] for run in runs]

    def _handle_death(self, slot: WorkerSlot, worker: process.Child) -> None:
        """Queue again what a dead worker held. Another one will be started in its place.

        Raises:
            WorkerError: The run was interrupted, or too many workers died before they were ready.
            ShardError: The shard kills workers, although none of its rows does so alone.
            DeviceError: The memory of the device is too small for the smallest token budget.
        """
        status = worker.end(0.5)
        was_ready = slot.record is not None
        death = WorkerDeath(worker, status, tuple(slot.tasks), was_ready)
        slot.worker = None
        slot.tasks = deque()
        if self._workers.cancelled:
            raise errors.WorkerError(process.INTERRUPTED)
        if worker.lost:  # with its node; if that comes back, so does the device
            self._slots.remove(slot)
        log.warning("%s", death)
        affected_jobs = self._jobs_of(death.tasks)
        for job in affected_jobs:
            job.deaths.append(str(death))
            job.on_event(str(death))
        tasks = [task for task in death.tasks if self._jobs[task.run].error is None]
        self._todo.extendleft(reversed(tasks))
        if worker.lost:
            return
        if was_ready and tasks and tasks[0] is death.tasks[0]:
            first_task = tasks[0]
            self._todo[0] = self._task_after_death(
                first_task, death.reason, out_of_memory=death.out_of_memory
            )
            if death.out_of_memory:
                slot.oom_shards.add((first_task.run, first_task.shard))
        if death.out_of_memory:
            # Two shards, or none yet: the cause is not the shard, the device has too little room.
            if not was_ready or len(slot.oom_shards) > 1:
                divisor = _next_divisor(slot.spec.divisor, worker.device)
                slot.spec = slot.spec.model_copy(update={"divisor": divisor})
                slot.oom_shards.clear()
        elif not was_ready and affected_jobs:
            self._count_unready_death(slot, death)

    def _count_unready_death(self, slot: WorkerSlot, death: WorkerDeath) -> None:
        """Count a worker that died while it loaded.

        Raises:
            WorkerError: It was the last of several in a row.
        """
        slot.unready_deaths += 1
        if slot.unready_deaths < MAX_DEATHS_BEFORE_READY:
            return
        device = death.worker.device
        problem = f"workers on {device} ended {slot.unready_deaths} times before they were ready"
        details = f"last words: {death.reason}; see {death.worker.log}"
        raise errors.WorkerError(f"{problem}; {details}", worker_traceback=death.traceback)

    def _task_after_death(self, task: ShardTask, reason: str, *, out_of_memory: bool) -> ShardTask:
        """Return what to try next after a worker died at `task`.

        Raises:
            ShardError: The search for poison rows has ended without clearing the shard.
            DeviceError: Even the smallest token budget does not fit into memory.
        """
        if out_of_memory:
            divisor = _next_divisor(task.divisor, f"shard {task.shard:05d}")
            return task.model_copy(update={"divisor": divisor})
        job = self._jobs[task.run]
        if task.probe:
            return job.searches[task.shard].send(False)
        job.deaths_at_shard[task.shard] += 1
        n_deaths = job.deaths_at_shard[task.shard]
        if n_deaths < self.specs[0].engine.max_shard_attempts:
            return task
        log.warning("shard %05d ended %d workers; searching for the row", task.shard, n_deaths)
        if task.shard not in job.searches:
            job.searches[task.shard] = bisect_poison_rows(task)
        probe = next(job.searches[task.shard], None)
        if probe is None:
            problem = f"ends workers, and no single row of it is the cause; last words: {reason}"
            raise errors.ShardError(problem, shard=task.shard)
        return probe

    def _finish_jobs(self) -> None:
        """Release the jobs that are committed or have failed, once no worker holds their shards."""
        jobs_over = [job for job in self._jobs.values() if job.is_over]
        if not jobs_over:
            return
        runs_at_work = {task.run for slot in self._slots for task in slot.tasks}
        released_jobs = [job for job in jobs_over if job.run not in runs_at_work]
        for job in released_jobs:
            del self._jobs[job.run]
        if not self._jobs and not self._keep:
            self._end_workers()
        for job in released_jobs:
            if job.error is None:
                job.completion.set_result(None)
            else:
                job.completion.set_exception(job.error)

    def _end(self, error: Exception) -> None:
        """End the workers, and every job with an error, even if workers cannot be ended."""
        try:
            self._end_workers()
        finally:
            self._todo.clear()
            while self._jobs:
                _, job = self._jobs.popitem()
                job.completion.set_exception(error)

    def _end_workers(self) -> None:
        """End all workers, whatever they hold."""
        workers = [slot.worker for slot in self._slots if slot.worker is not None]
        for worker in workers:
            worker.send(process.Closed())
        process.end_children(workers)
        for slot in self._slots:
            slot.worker = None
            slot.tasks = deque()
            slot.unready_deaths = 0


def _next_divisor(divisor: int, name: str) -> int:
    """Return the divisor of the next smaller token budget, after `name` ran out of memory.

    Raises:
        DeviceError: The token budget is as small as it may be.
    """
    if divisor >= MAX_DIVISOR:
        problem = f"out of memory even with 1/{divisor} of the token budget"
        way_out = "free the device or use a smaller model"
        raise errors.DeviceError(f"{name}: {problem}; {way_out}")
    log.warning("%s: out of memory, trying 1/%d of the token budget", name, divisor * 2)
    return divisor * 2
