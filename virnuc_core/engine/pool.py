"""A pool of worker processes, one per device, that computes the shards of jobs.

A job is the computation of one run; a shard is a range of its sequences. Shards are sent to
workers one by one, so that a slow device takes fewer. A worker that dies is replaced, and the
shards that it had are sent to another one. A worker that makes no progress for too long is killed.

If workers die at the same shard repeatedly, the pool searches for the row that kills them
(`poison_rows`). That row is left out, and so are a few rows whose results are not finite. A device
that runs out of memory gets the shard again with half the token budget. Errors of reads, weights,
settings and devices stop the run.
"""

import logging
import signal
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

# A worker computes one task, and its loader prepares the next one meanwhile.
TASKS_PER_WORKER: Final = 2
# Seconds that the pool's thread waits for a message before it checks for silent workers.
TICK_S: Final = 0.5
# After this many workers in a row that died on one device while they loaded, the run stops.
MAX_DEATHS_BEFORE_READY: Final = 3
# A device that runs out of memory with this part of the token budget is too small.
MAX_DIVISOR: Final = 64
# Errors that have their cause in one job. Other jobs of the pool may still succeed.
JOB_ERRORS: Final = (
    errors.InputError,
    errors.ConfigError,
    errors.NotFiniteError,
    errors.StorageError,
    errors.ShardError,
)
# Share of a run's rows that may give NaN or infinity. With more, the weights or the precision are
# unusable.
MAX_NOT_FINITE_SHARE: Final = 0.01


@dataclass(slots=True)
class WorkerSlot:
    """A device of the pool, the worker process that runs there now, and the tasks it was sent."""

    spec: WorkerSpec
    worker: process.Child | None = None  # None if no process runs on this device
    # What the present worker reported when it was ready to compute. None before that.
    record: dict[str, Any] | None = None
    tasks: deque[ShardTask] = field(default_factory=deque)  # sent and not answered, oldest first
    unready_deaths: int = 0  # workers in a row that died before they were ready
    # (run, shard) of the shards at which the device ran out of memory
    oom_shards: set[tuple[str, int]] = field(default_factory=set)
    # When the device last became ready or committed a shard, `time.monotonic()`.
    active_since_s: float = 0.0


@dataclass(slots=True, eq=False)
class PooledJob:
    """A job that the pool computes, with its counts, which the caller reads afterwards."""

    run: str  # path of the run directory, which identifies the job
    logs: Path  # folder for what workers write to standard error
    on_event: Callable[..., None]  # called with each `ShardDone`, and with a line for each death
    remaining: set[int]  # numbers of the shards that are not committed
    tasks: Sequence[ShardTask] = ()
    deaths: list[str] = field(default_factory=list)  # a line for each worker that died
    # By device: what the first worker that took one of the job's shards reported when ready.
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    # By device: seconds between the last commit before a death and the new worker's readiness.
    restart_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    reduced_budgets: dict[int, int] = field(default_factory=dict)  # shard → token budget divisor
    n_not_finite: int = 0  # rows with NaN or infinity as a result
    n_repeated: int = 0  # rows near the threshold that were embedded again in fp16
    deaths_at_shard: Counter[int] = field(default_factory=Counter)  # workers that died there
    searches: dict[int, Probes] = field(default_factory=dict)  # by shard: the search for bad rows
    error: Exception | None = None  # the error that ends this job; other jobs go on
    # Is done when no worker has a shard of the job any more. `Pool.compute` waits for it.
    completion: Future[None] = field(default_factory=Future)

    @property
    def is_over(self) -> bool:
        """Return true if all shards are committed, or if an error has ended the job."""
        return self.error is not None or not self.remaining


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """What is known about a worker process that has ended."""

    worker: process.Child
    status: int  # exit status
    tasks: tuple[ShardTask, ...]  # tasks that it had not answered, oldest first
    was_ready: bool  # it had loaded the weights

    @property
    def out_of_memory(self) -> bool:
        """Return true if the worker reported that its device ran out of memory."""
        failure = self.worker.failed
        return failure is not None and failure.kind == "OutOfMemoryError"

    @property
    def reason(self) -> str:
        """Return the error that the worker reported, or else its last line on standard error."""
        failure = self.worker.failed
        if failure is None:
            return self.worker.last_words
        return f"{failure.kind}: {failure.message}"

    @property
    def traceback(self) -> str:
        """Return the traceback that the worker reported, or an empty string."""
        failure = self.worker.failed
        return "" if failure is None else failure.traceback

    def __str__(self) -> str:
        shards = [task.shard for task in self.tasks]
        ending = f"worker on {self.worker.device} ended (status {self.status})"
        return f"{ending}, holding shards {shards}; it said: {self.reason}"


class Pool(AbstractContextManager["Pool"]):
    """Worker processes, one per device, that compute the jobs which threads submit.

    Use it in a `with` block; all workers have ended when the block ends. Any thread may call
    `compute`. Several jobs may be computed at the same time: the shards of the first job are sent
    to workers before those of the next.

    One thread of the pool starts the workers, feeds them and handles their messages. The kernel
    ends a worker when the thread that started it ends, so this thread lives as long as the pool.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        workers: process.LocalWorkers,
        *,
        keep: bool = False,
        warm: bool = False,
        device_remark: str = "",
    ) -> None:
        """Prepare the pool. No process is started before the `with` block begins.

        Args:
            specs: What each worker loads, one specification per device.
            workers: Starts the worker processes, on this machine or on a cluster.
            keep: Keep workers between jobs. Otherwise they end when nothing is left to compute.
            warm: Start all workers before there is a job, so that they load the weights.
            device_remark: A sentence about the choice of devices, for the record of a run. The pool
                only keeps it.
        """
        self.specs = tuple(specs)
        self.device_remark = device_remark
        self.reader = workers.reader
        self._workers = workers
        self._keep = keep
        self._warm = warm
        self._slots = [WorkerSlot(spec) for spec in specs]
        self._jobs: dict[str, PooledJob] = {}  # by run
        self._todo: deque[ShardTask] = deque()  # tasks for the next free workers, in order
        self._submitted: deque[PooledJob] = deque()  # jobs that the pool's thread has not seen yet
        self._closed = False
        self._submit_lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="pool", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Accept no more jobs, and wait until the pool's thread has ended all workers."""
        with self._submit_lock:
            self._closed = True
        self._workers.wake()
        self._thread.join()
        self._workers.__exit__()

    def compute(
        self, tasks: Sequence[ShardTask], logs: Path, on_event: Callable[..., None]
    ) -> PooledJob:
        """Compute the shards of one job, and wait until all are committed.

        When this returns or raises, no worker computes any of them. If the pool keeps its workers,
        an error of the kinds `JOB_ERRORS` ends only the job that caused it. Any other error ends
        all jobs and all workers.

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
        """Compute jobs until the pool is closed. This is the function of the pool's thread.

        At the end, all workers are ended, and all jobs that are left get an error.
        """
        try:
            while not self._closed:
                try:
                    self._step()
                except Exception as error:  # noqa: BLE001 - `compute` raises it in its thread
                    self._end(error)
        finally:
            # Other threads wait in `compute` for this thread. It must not end without answering.
            with self._submit_lock:
                self._closed = True
            self._accept_jobs()
            self._end(errors.VirnucError(process.INTERRUPTED))

    def _step(self) -> None:
        """Start workers and send them tasks, then wait for one message and handle it.

        If no message comes within `TICK_S`, return: the next step checks for silent workers.
        """
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
        # A message of a worker that was replaced meanwhile belongs to no slot, and is ignored.
        for slot in self._slots:
            if slot.worker is worker:
                self._handle_for_jobs(slot, worker, message)
                self._finish_jobs()
                return

    def _accept_jobs(self) -> None:
        """Take over the jobs that threads have submitted, and queue their shards."""
        while self._submitted:
            job = self._submitted.popleft()
            self._jobs[job.run] = job
            self._todo.extend(job.tasks)

    def _end_silent(self) -> None:
        """End workers that have hung.

        A worker with tasks is ended if it has made no progress for `silence_s`. Its end comes as a
        message and is handled like any other death. A worker without tasks is ended if its
        heartbeats have stopped, because it may occupy the device.
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
                worker.end(0)
                slot.worker = None

    def _add_new_devices(self) -> None:
        """Add a slot for each device that has joined the cluster."""
        for device in self._workers.new_devices(len(self._todo)):
            spec = self.specs[0].model_copy(update={"device": device})
            self._slots.append(WorkerSlot(spec))

    def _start_workers(self) -> None:
        """Start workers on devices without one, but not more workers than there are tasks.

        The first call of a pool with `warm` starts a worker on every device.
        """
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
        """Send tasks until each worker has `TASKS_PER_WORKER` of them, or none is left.

        Every worker gets its first task before any worker gets a second one.
        """
        for max_tasks in range(1, TASKS_PER_WORKER + 1):
            for slot in self._slots:
                while self._may_take_next(slot, max_tasks):
                    self._send_next(slot)

    def _may_take_next(self, slot: WorkerSlot, max_tasks: int) -> bool:
        """Return true if the next task may be sent to this worker now.

        A task at which a worker has died before is sent only to a worker without other tasks. If
        this worker dies as well, the task is the cause.
        """
        if not self._todo or slot.worker is None or len(slot.tasks) >= max_tasks:
            return False
        if not slot.tasks:
            return True
        tasks_together = (self._todo[0], *slot.tasks)
        return not any(self._is_suspect(task) for task in tasks_together)

    def _is_suspect(self, task: ShardTask) -> bool:
        """Return true if workers have died at this shard, or if the task is part of a search."""
        return task.probe or self._jobs[task.run].deaths_at_shard[task.shard] > 0

    def _send_next(self, slot: WorkerSlot) -> None:
        """Send the next task in the queue to a worker, and note it in the worker's slot.

        If the device has run out of memory before, the task gets a smaller token budget.
        """
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
        """Choose the file for a worker's standard error: a log of the run that it computes now.

        A worker of a lasting pool that has no task writes to no log.
        """
        assert slot.worker is not None
        if slot.tasks:
            logs = self._jobs[slot.tasks[0].run].logs
            slot.worker.log = logs / f"worker-{slot.worker.device}.log"
        elif self._keep:
            slot.worker.log = None

    def _handle_for_jobs(
        self, slot: WorkerSlot, worker: process.Child, message: process.Message
    ) -> None:
        """Handle a message of a worker. An error in it ends one job, or is raised for all jobs.

        An error of the kinds `JOB_ERRORS` ends only the job that the worker computes, if the pool
        keeps its workers.

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
            # The job is over. Drop its tasks that no worker has yet. Tasks that workers have are
            # not sent again, because the job has an error.
            self._jobs[current_task.run].error = error
            other_tasks = [task for task in self._todo if task.run != current_task.run]
            self._todo = deque(other_tasks)

    def _handle_message(
        self, slot: WorkerSlot, worker: process.Child, message: process.Message
    ) -> None:
        """Handle one message of a worker.

        Raises:
            VirnucError: The worker met an error that another worker would meet, too.
        """
        match message:
            case process.Ready():
                self._handle_ready(slot, worker, message)
            case Computed():
                self._handle_computed(slot, message)
            case process.Failed():
                log.error("%s: %s: %s", worker.device, message.kind, message.message)
                error = errors.error_from_name(message.kind, message.message)
                # None stands for an error that is not ours, such as a failure of CUDA. Another
                # worker may not meet it. The worker ends, and its end is handled as a death.
                if error is not None:
                    raise error
            case process.Closed():
                self._handle_death(slot, worker)

    def _handle_ready(self, slot: WorkerSlot, worker: process.Child, ready: process.Ready) -> None:
        """Handle the message that a worker has loaded the weights and can compute.

        Its record is kept for the jobs. If it replaces a worker that died, the time since that
        worker's last commit is counted as lost.
        """
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
        """Handle the message that a worker has computed its oldest task.

        For a whole shard the commit is counted. For a probe, the search for a bad row learns that
        the worker survived, and its next probe becomes the next task.
        """
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
        """Count a committed shard, and tell the job's `on_event`.

        Args:
            job: The job of the shard.
            task: The task that was computed.
            done: What the worker reported about it.

        Raises:
            NotFiniteError: Too many of the run's rows have results that are not finite.
        """
        if task.divisor > 1:
            job.reduced_budgets[task.shard] = task.divisor
        job.deaths_at_shard.pop(task.shard, None)
        job.remaining.discard(task.shard)
        job.on_event(done)
        # `skipped` also counts the rows that the task itself told the worker to leave out.
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
        """Return the jobs to which a worker's tasks belong. Without any task, return all jobs."""
        runs = dict.fromkeys(task.run for task in tasks)
        if not runs:
            return list(self._jobs.values())
        return [self._jobs[run] for run in runs]

    def _handle_death(self, slot: WorkerSlot, worker: process.Child) -> None:
        """Handle the end of a worker that was not asked to end.

        Its tasks are queued again. The slot is left without a worker, so that the next step starts
        another one. If the worker's whole node is lost, the slot is removed.

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
        if worker.lost:
            # The node is gone, and the device with it. If the node comes back, its devices are
            # added as new ones.
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
        # The worker computed its oldest task when it died. That task may be the cause.
        if was_ready and tasks and tasks[0] is death.tasks[0]:
            first_task = tasks[0]
            self._todo[0] = self._task_after_death(
                first_task,
                death.reason,
                out_of_memory=death.out_of_memory,
                bus_error=death.status == -signal.SIGBUS,
            )
            if death.out_of_memory:
                slot.oom_shards.add((first_task.run, first_task.shard))
        if death.out_of_memory:
            # Memory ran out at two different shards, or while loading. So the device is too small
            # for this token budget, whatever the shard.
            if not was_ready or len(slot.oom_shards) > 1:
                divisor = _next_divisor(slot.spec.divisor, worker.device)
                slot.spec = slot.spec.model_copy(update={"divisor": divisor})
                slot.oom_shards.clear()
        elif not was_ready and affected_jobs:
            self._count_unready_death(slot, death)

    def _count_unready_death(self, slot: WorkerSlot, death: WorkerDeath) -> None:
        """Count a worker that died before it was ready.

        Raises:
            WorkerError: `MAX_DEATHS_BEFORE_READY` workers in a row have died so on this device.
        """
        slot.unready_deaths += 1
        if slot.unready_deaths < MAX_DEATHS_BEFORE_READY:
            return
        device = death.worker.device
        problem = f"workers on {device} ended {slot.unready_deaths} times before they were ready"
        details = f"last words: {death.reason}; see {death.worker.log}"
        raise errors.WorkerError(f"{problem}; {details}", worker_traceback=death.traceback)

    def _task_after_death(
        self, task: ShardTask, reason: str, *, out_of_memory: bool, bus_error: bool = False
    ) -> ShardTask:
        """Return the task to send next after a worker died while it computed `task`.

        After the first deaths this is the same task, then probes that search for the row that
        kills workers. After a lack of memory it is the same task with half the token budget.

        Args:
            task: The task.
            reason: What the worker said last, for the message of the error.
            out_of_memory: The device ran out of memory.
            bus_error: The system could not read a part of a file that the worker had mapped.

        Raises:
            ShardError: The search for poison rows has ended without clearing the shard.
            DeviceError: Even the smallest token budget does not fit into memory.
            UnreadableError: The system cannot read the store of the sequences.
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
        if bus_error:
            raise errors.UnreadableError(
                f"{task.store}: cannot be read: the system ended {n_deaths} workers that read it "
                "with a bus error. The disk or the file server has failed, or the file was cut "
                "off; mend that and run again, what was committed stays"
            )
        log.warning("shard %05d ended %d workers; searching for the row", task.shard, n_deaths)
        if task.shard not in job.searches:
            job.searches[task.shard] = bisect_poison_rows(task)
        probe = next(job.searches[task.shard], None)
        if probe is None:
            problem = "ends workers, and no single row of it is the cause"
            raise errors.ShardError(f"{problem}; last words: {reason}", shard=task.shard)
        return probe

    def _finish_jobs(self) -> None:
        """Let `compute` return for the jobs that are over, once no worker has a task of theirs.

        If this was the last job and the pool does not keep its workers, they are ended.
        """
        jobs_over = [job for job in self._jobs.values() if job.is_over]
        if not jobs_over:
            return
        busy_runs = {task.run for slot in self._slots for task in slot.tasks}
        released_jobs = [job for job in jobs_over if job.run not in busy_runs]
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
        """End all workers, and let `compute` raise `error` for all jobs.

        The jobs get their error even if ending the workers fails. Otherwise the threads that
        called `compute` would wait without end.
        """
        try:
            self._end_workers()
        finally:
            self._todo.clear()
            while self._jobs:
                _, job = self._jobs.popitem()
                job.completion.set_exception(error)

    def _end_workers(self) -> None:
        """End all workers, also those with unanswered tasks, and empty their slots."""
        workers = [slot.worker for slot in self._slots if slot.worker is not None]
        for worker in workers:
            worker.send(process.Closed())
        process.end_children(workers)
        for slot in self._slots:
            slot.worker = None
            slot.tasks = deque()
            slot.unready_deaths = 0


def _next_divisor(divisor: int, name: str) -> int:
    """Return the doubled divisor, which halves the token budget, after memory ran out.

    Args:
        divisor: The token budget was divided by this.
        name: The device or the shard, for messages.

    Raises:
        DeviceError: The token budget cannot be made smaller.
    """
    if divisor >= MAX_DIVISOR:
        problem = f"out of memory even with 1/{divisor} of the token budget"
        way_out = "free the device or use a smaller model"
        raise errors.DeviceError(f"{name}: {problem}; {way_out}")
    log.warning("%s: out of memory, trying 1/%d of the token budget", name, divisor * 2)
    return divisor * 2
