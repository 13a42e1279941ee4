"""A pool of worker processes, one per device, that computes the shards of jobs.

A job is the computation of one run; a shard is a range of its sequences. Shards are sent to
workers one by one, so that a slow device takes fewer. A worker that dies is replaced, and the
shards that it had are sent to another one. A worker that makes no progress for too long is killed.

If workers die at the same shard repeatedly, the pool searches for the row that kills them
(`poison_rows`). That row is left out, and so are a few rows whose results are not finite. If it is
not clear at which of several shards a worker died, each of them is computed alone. A device
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
from virnuc_core.engine.shards import Computed, ShardTask, Waiting
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
    ready_record: dict[str, Any] | None = None
    tasks: deque[ShardTask] = field(default_factory=deque)  # sent and not answered, oldest first
    # Of the oldest of these, how many are computed and wait for later ones (`Waiting`).
    n_waiting: int = 0
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
    ready_records: dict[str, dict[str, Any]] = field(default_factory=dict)
    # By device: seconds between the last commit before a death and the new worker's readiness.
    restart_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    reduced_budgets: dict[int, int] = field(default_factory=dict)  # shard → token budget divisor
    n_not_finite: int = 0  # rows with NaN or infinity as a result
    n_repeated: int = 0  # rows near the threshold that were embedded again in fp16
    # By shard: the scores of a run without commits, see `shards.scores_from_texts`
    scores: dict[int, str] = field(default_factory=dict)
    deaths_at_shard: Counter[int] = field(default_factory=Counter)  # workers that died there
    # For each death that has not been charged to a shard yet: the shards that may have caused it.
    unclear_deaths: list[set[int]] = field(default_factory=list)
    searches: dict[int, Probes] = field(default_factory=dict)  # by shard: the search for bad rows
    error: Exception | None = None  # the error that ends this job; other jobs go on
    # Is done when no worker has a shard of the job any more. `Pool.compute` waits for it.
    completion: Future[None] = field(default_factory=Future)
    # Is set when the free workers have tasks of the job, and at its end.
    is_begun: threading.Event = field(default_factory=threading.Event)

    @property
    def is_over(self) -> bool:
        """Return true if all shards are committed, or if an error has ended the job."""
        return self.error is not None or not self.remaining

    def is_suspect(self, shard: int) -> bool:
        """Return true if workers have died at a shard, or may have done so."""
        if self.deaths_at_shard[shard] > 0:
            return True
        return any(shard in causes for causes in self.unclear_deaths)

    def charge_death(self, shard: int) -> int:
        """Charge a shard with the death of a worker that had no other one to compute.

        Earlier deaths of which it was a possible cause are charged to it as well, so that the
        search for the row begins as early as if their cause had been known.

        Returns:
            How many workers have died at this shard.
        """
        explained_deaths = [causes for causes in self.unclear_deaths if shard in causes]
        self.unclear_deaths = [causes for causes in self.unclear_deaths if shard not in causes]
        self.deaths_at_shard[shard] += 1 + len(explained_deaths)
        return self.deaths_at_shard[shard]

    def clear_shard(self, shard: int) -> None:
        """Suspect a shard no more, because it is committed.

        An earlier death without any cause left came from outside.
        """
        self.deaths_at_shard.pop(shard, None)
        other_causes = [causes - {shard} for causes in self.unclear_deaths]
        self.unclear_deaths = [causes for causes in other_causes if causes]


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """What is known about a worker process that has ended."""

    worker: process.Child
    status: int  # exit status
    tasks: tuple[ShardTask, ...]  # tasks that it had not answered, oldest first
    was_ready: bool  # it had loaded the weights
    n_waiting: int = 0  # of the oldest tasks, those that were computed and waited for later ones

    @property
    def has_several_possible_causes(self) -> bool:
        """Return true if the worker may have died at any of its tasks.

        Rows of the shards that wait are computed again in one batch, with rows of the next shard.
        A worker without shards that wait is taken to have died at its oldest task.
        """
        return self.n_waiting > 0 and len(self.tasks) > 1

    @property
    def out_of_memory(self) -> bool:
        """Return true if the worker reported that its device ran out of memory."""
        failure = self.worker.failure
        return failure is not None and failure.kind == "OutOfMemoryError"

    @property
    def reason(self) -> str:
        """Return the error that the worker reported, or else its last line on standard error.

        A worker that was killed from outside has reported no error.
        """
        failure = self.worker.failure
        if failure is None:
            return self.worker.last_words
        return f"{failure.kind}: {failure.message}"

    @property
    def traceback(self) -> str:
        """Return the traceback that the worker reported, or an empty string."""
        failure = self.worker.failure
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
        # Measures devices of other machines. None for devices of this machine.
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
        """Accept no more jobs, and wait until the pool's thread has ended all workers.

        Jobs that are not finished get an error, which `compute` raises in their threads.
        """
        with self._submit_lock:
            self._closed = True
        # The thread may be waiting for a worker that another process lends, or for a message.
        self._workers.stop_borrowing()
        self._workers.wake()
        self._thread.join()
        self._workers.__exit__()

    def compute(
        self,
        tasks: Sequence[ShardTask],
        logs: Path,
        on_event: Callable[..., None],
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> PooledJob:
        """Compute the shards of one job, and wait until all are committed.

        When this returns or raises, no worker computes any of them. If the pool keeps its workers,
        an error that has its cause in one job (`JOB_ERRORS`) ends only that job. Any other error
        ends all jobs and all workers.

        Args:
            tasks: The shards of one run.
            logs: Folder for what workers write to standard error.
            on_event: Called with a `ShardDone` for each committed shard, and with a line of text
                for each worker that died.
            meanwhile: Called once in this thread, when the free workers have their tasks. It must
                not raise an error.

        Returns:
            The job, with all shards committed.

        Raises:
            VirnucError: A worker raised one of our own errors.
            ShardError: A shard kills workers, although none of its rows does so alone.
            WorkerError: Workers never became ready, or `end_all_children` was called.
        """
        run = tasks[0].run if tasks else ""
        shards = {task.shard for task in tasks}
        job = PooledJob(run, logs, on_event, remaining=shards, tasks=tasks)
        job.completion.add_done_callback(lambda _: job.is_begun.set())
        if not tasks:
            return job  # there is nothing to compute
        with self._submit_lock:
            if self._closed:
                raise errors.VirnucError(process.INTERRUPTED)
            self._submitted.append(job)
        self._workers.wake()  # the pool's thread may be waiting for a message
        if meanwhile is not None:
            # Python runs one thread at a time. An import in this thread would delay the pool's
            # thread, which has to pass on the tasks first.
            job.is_begun.wait()
            meanwhile()
        job.completion.result()  # waits, and raises the error that has ended the job
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
            # Other threads wait in `compute` for this thread, so it must not end without answering
            # them. Jobs that were submitted a moment ago are accepted only to get their error.
            with self._submit_lock:
                self._closed = True
            self._accept_jobs()
            self._end(errors.VirnucError(process.INTERRUPTED))

    def _step(self) -> None:
        """Start workers and send them tasks, then wait for one message and handle it.

        If no message comes within `TICK_S`, this returns without one. The caller repeats the step,
        so that workers which have hung are found even if nobody sends a message.
        """
        self._accept_jobs()
        self._end_silent()
        self._add_new_devices()
        if self._todo or self._warm:
            self._start_workers()
            self._feed()
        for job in self._jobs.values():
            job.is_begun.set()
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
        """Take over the jobs that threads have submitted, and queue their shards.

        Only the pool's own thread calls this. Other threads only add to `_submitted`.
        """
        while self._submitted:
            job = self._submitted.popleft()
            self._jobs[job.run] = job
            self._todo.extend(job.tasks)

    def _end_silent(self) -> None:
        """End workers that have hung.

        A worker with tasks is ended if it has made no progress for `silence_s`. Its end comes as a
        message (`Closed`), and its tasks are sent to another worker then. A worker without tasks
        has nothing to make progress with. It is ended only if its heartbeats have stopped, because
        it may occupy the device.
        """
        now_s = time.monotonic()
        silence_s = self.specs[0].engine.silence_s
        for slot in self._slots:
            worker = slot.worker
            if worker is None:
                continue
            if slot.tasks:
                if now_s - worker.last_progress_s > silence_s:
                    device = worker.device
                    log.error(
                        "%s has been silent for more than %.0f s; ending it", device, silence_s
                    )
                    # So that the next step does not end it again before its end is reported.
                    worker.last_progress_s = now_s
                    worker.end(grace_s=0.5)
            elif worker.is_silent:
                # No task has to be queued again, so the message of its end is not waited for.
                worker.end(grace_s=0)
                slot.worker = None

    def _add_new_devices(self) -> None:
        """Add a slot for each device that has joined the cluster.

        A cluster learns by this call how many tasks wait for a worker. On one machine there are
        never new devices.
        """
        for device in self._workers.new_devices(n_waiting=len(self._todo)):
            spec = self.specs[0].model_copy(update={"device": device})
            self._slots.append(WorkerSlot(spec))

    def _start_workers(self) -> None:
        """Start workers on devices without one, but not more workers than there are tasks.

        In a pool that was made with `warm`, the first call starts a worker on every device.
        """
        n_sent = sum(len(slot.tasks) for slot in self._slots)
        n_wanted = len(self._todo) + n_sent
        if self._warm:
            n_wanted = len(self._slots)
            self._warm = False  # later calls start only as many workers as there are tasks
        idle = [slot for slot in self._slots if slot.worker is None]
        n_running = len(self._slots) - len(idle)
        n_missing = max(0, n_wanted - n_running)  # more may run than there are tasks
        for slot in idle[:n_missing]:
            slot.worker = self._workers.start(slot.spec)
            slot.ready_record = None

    def _feed(self) -> None:
        """Send tasks until each worker has `TASKS_PER_WORKER` of them, or none is left.

        Every worker gets its first task before any worker gets a second one. A second task lets a
        worker prepare it while it computes the first.
        """
        for max_tasks in range(1, TASKS_PER_WORKER + 1):
            for slot in self._slots:
                while self._may_take_next(slot, max_tasks):
                    self._send_next(slot)

    def _may_take_next(self, slot: WorkerSlot, max_tasks: int) -> bool:
        """Return true if the next task may be sent to this worker now.

        A task at which a worker has died before is a suspect. A worker that has it gets no other
        task: if this worker dies as well, it is clear which task is the cause.

        Args:
            slot: The slot of the worker.
            max_tasks: How many unanswered tasks the worker may have, with the next one. Those that
                are computed and wait for later ones do not count.
        """
        n_to_compute = len(slot.tasks) - slot.n_waiting
        if not self._todo or slot.worker is None or n_to_compute >= max_tasks:
            return False
        if not slot.tasks:
            return True
        next_task = self._todo[0]
        tasks_together = (next_task, *slot.tasks)
        return not any(self._is_suspect(task) for task in tasks_together)

    def _is_suspect(self, task: ShardTask) -> bool:
        """Return true if this task may kill its worker.

        That is the case if workers have died at its shard, or may have done so, or if it is a
        probe: a part of a shard that is computed in search of the row that kills workers.
        """
        return task.is_probe or self._jobs[task.run].is_suspect(task.shard)

    def _send_next(self, slot: WorkerSlot) -> None:
        """Send the next task in the queue to a worker, and note it in the worker's slot.

        A batch may hold a certain number of tokens, its budget. If the shard or the device has run
        out of memory before, the task carries a divisor above 1, and the worker makes its batches
        that many times smaller.
        """
        assert slot.worker is not None
        task = self._todo.popleft()
        budget_divisor = max(task.budget_divisor, slot.spec.budget_divisor)
        task = task.model_copy(update={"budget_divisor": budget_divisor})
        slot.tasks.append(task)
        self._choose_log(slot)  # what the worker writes to standard error belongs to this run
        if slot.ready_record is not None:
            # The worker was ready before this job began, and will not report it again. Jobs put
            # these records into their summary. The first worker of a device counts.
            records = self._jobs[task.run].ready_records
            records.setdefault(slot.spec.device.id, slot.ready_record)
        slot.worker.send(task)

    def _choose_log(self, slot: WorkerSlot) -> None:
        """Choose the file for a worker's standard error: a log of the run that it computes now.

        A pool that keeps its workers between jobs lets a worker without a task write to no log, so
        that nothing is written into a run that is over. Otherwise the worker keeps its last log.
        """
        assert slot.worker is not None
        if slot.tasks:
            current_task = slot.tasks[0]
            logs = self._jobs[current_task.run].logs
            slot.worker.log = logs / f"worker-{slot.worker.device}.log"
        elif self._keep:
            slot.worker.log = None

    def _handle_for_jobs(
        self, slot: WorkerSlot, worker: process.Child, message: process.Message
    ) -> None:
        """Handle a message of a worker. An error in it ends one job, or is raised for all jobs.

        An error that has its cause in one job (`JOB_ERRORS`) ends only the job that the worker
        computes, if the pool keeps its workers. Otherwise it is raised like any other error.

        Raises:
            Exception: Any other error, which ends the pool's workers and all its jobs.
        """
        was_ready = slot.ready_record is not None
        current_task = slot.tasks[0] if slot.tasks else None
        try:
            self._handle_message(slot, worker, message)
        except JOB_ERRORS as error:
            # A worker that was not ready has met the error while it loaded, so it belongs to no
            # job.
            if not self._keep or not was_ready or current_task is None:
                raise
            # The job is over. Remove its tasks that no worker has yet. Tasks that workers have are
            # still computed, but are not sent again if a worker dies.
            self._jobs[current_task.run].error = error
            other_tasks = [task for task in self._todo if task.run != current_task.run]
            self._todo = deque(other_tasks)

    def _handle_message(
        self, slot: WorkerSlot, worker: process.Child, message: process.Message
    ) -> None:
        """Handle one message of a worker: it is ready, a task is done, it has failed or ended.

        Raises:
            VirnucError: The worker met an error that another worker would meet, too.
        """
        match message:
            case process.Ready():
                self._handle_ready(slot, worker, message)
            case Waiting():
                slot.n_waiting += 1
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

        What it reports about itself is kept for the summaries of the jobs. If it replaces a worker
        that died, the device has done nothing useful since the dead worker committed its last
        shard, or, if it committed none, since it was ready. This time is added to `restart_s`.
        """
        record = {"asked_s": worker.requested_s, "spawned_s": worker.started_s, **ready.record}
        now_s = time.monotonic()
        for job in self._jobs_of(slot.tasks):
            # The record of the device's first worker in this job stays. So if this process has
            # another id, it is a replacement: the second, third or later worker of the device.
            first_record = job.ready_records.setdefault(worker.device, record)
            if first_record["pid"] != record["pid"]:
                job.restart_s[worker.device] += now_s - slot.active_since_s
        slot.ready_record = record
        slot.unready_deaths = 0
        slot.active_since_s = now_s
        log.info("%s ready after %.1f s", worker.device, record["ready_s"])

    def _handle_computed(self, slot: WorkerSlot, computed: Computed) -> None:
        """Handle the message that a worker has computed its oldest task.

        For a whole shard the commit is counted. A probe is a part of a shard, computed in search of
        a row that kills workers. The search (a generator) is told that the worker survived, and the
        next probe that it gives is sent before all other tasks.
        """
        task = slot.tasks.popleft()
        slot.n_waiting = max(0, slot.n_waiting - 1)  # the oldest tasks are those that wait
        self._choose_log(slot)
        job = self._jobs[task.run]
        if job.error is not None:
            return  # the job is over, so nobody needs the result
        if computed.done is None:
            worker_survived = True
            next_probe = job.searches[task.shard].send(worker_survived)
            self._todo.appendleft(next_probe)
        else:
            slot.active_since_s = time.monotonic()
            job.n_repeated += computed.n_repeated
            if computed.scores is not None:
                job.scores[task.shard] = computed.scores
            self._count_commit(job, task, computed.done)

    def _count_commit(self, job: PooledJob, task: ShardTask, done: ShardDone) -> None:
        """Count a committed shard in its job, and call the job's `on_event`.

        Args:
            job: The job of the shard.
            task: The task that was computed.
            done: What the worker reported about it.

        Raises:
            NotFiniteError: Too many of the run's rows have results that are not finite.
        """
        if task.budget_divisor > 1:
            job.reduced_budgets[task.shard] = task.budget_divisor
        job.clear_shard(task.shard)
        job.remaining.discard(task.shard)
        job.on_event(done)
        # `skipped` also counts the rows that the task itself told the worker to leave out.
        n_not_finite = done.skipped - len(task.skipped_rows)
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
        """Return the jobs to which a worker's tasks belong.

        Without any task, return all jobs: the worker may be meant for each of them.
        """
        runs = dict.fromkeys(task.run for task in tasks)
        if not runs:
            return list(self._jobs.values())
        return [self._jobs[run] for run in runs]

    def _handle_death(self, slot: WorkerSlot, worker: process.Child) -> None:
        """Handle the end of a worker that died, or that was ended because it had hung.

        Its tasks are queued again. The slot is left without a worker, so that the next step starts
        another one. If the worker's whole node is lost, the slot is removed.

        Raises:
            WorkerError: The run was interrupted, or too many workers died before they were ready.
            ShardError: The shard kills workers, although none of its rows does so alone.
            DeviceError: The memory of the device is too small for the smallest token budget.
        """
        # Its output has ended, but the process, or others that it has started, may still exist.
        status = worker.end(grace_s=0.5)
        was_ready = slot.ready_record is not None
        death = WorkerDeath(worker, status, tuple(slot.tasks), was_ready, slot.n_waiting)
        slot.worker = None
        slot.tasks = deque()
        slot.n_waiting = 0
        if self._workers.cancelled:
            raise errors.WorkerError(process.INTERRUPTED)
        if worker.node_lost:
            # The node is gone, and the device with it. If the node comes back, its devices are
            # added as new ones.
            self._slots.remove(slot)
        log.warning("%s", death)
        affected_jobs = self._jobs_of(death.tasks)
        for job in affected_jobs:
            job.deaths.append(str(death))
            job.on_event(str(death))
        # Put its tasks at the head of the queue, in their order. Jobs with an error are over.
        tasks = [task for task in death.tasks if self._jobs[task.run].error is None]
        self._todo.extendleft(reversed(tasks))
        if worker.node_lost:
            return  # the worker is not to blame
        if was_ready and death.has_several_possible_causes and not death.out_of_memory:
            # No shard is charged with this death yet. From now on each is computed alone, so that
            # the next death there has one cause, which is taken for that of this death, too.
            for job in affected_jobs:
                causes = {task.shard for task in tasks if task.run == job.run}
                if causes:
                    job.unclear_deaths.append(causes)
        # The worker computed its oldest task when it died, and that task may be the cause. If it
        # was put back into the queue, it is the first task there, and is replaced by another one.
        elif was_ready and tasks and tasks[0] is death.tasks[0]:
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
            # for this token budget, whatever the shard. Its next workers get half of it.
            if not was_ready or len(slot.oom_shards) > 1:
                budget_divisor = _next_divisor(slot.spec.budget_divisor, worker.device)
                slot.spec = slot.spec.model_copy(update={"budget_divisor": budget_divisor})
                slot.oom_shards.clear()
        elif not was_ready and affected_jobs:  # without a job, no run has to be given up
            self._count_unready_death(slot, death)

    def _count_unready_death(self, slot: WorkerSlot, death: WorkerDeath) -> None:
        """Count a worker that died before it was ready.

        Such a worker has computed no shard, so the cause is its device, the models, or a compiled
        kernel that a machine without power has left damaged. So the next worker on a GPU compiles
        all kernels anew. After a few deaths in a row the run is given up.

        Raises:
            WorkerError: `MAX_DEATHS_BEFORE_READY` workers in a row have died so on this device.
        """
        slot.unready_deaths += 1
        if slot.unready_deaths < MAX_DEATHS_BEFORE_READY:
            if slot.spec.device.kind == "cuda" and not slot.spec.fresh_kernels:
                slot.spec = slot.spec.model_copy(update={"fresh_kernels": True})
                log.warning(
                    "%s: the next worker compiles its kernels anew; if it starts, a kept kernel "
                    "may be damaged: remove the folder ~/.triton/cache",
                    slot.spec.device.id,
                )
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
            budget_divisor = _next_divisor(task.budget_divisor, f"shard {task.shard:05d}")
            return task.model_copy(update={"budget_divisor": budget_divisor})
        job = self._jobs[task.run]
        if task.is_probe:
            worker_survived = False
            return job.searches[task.shard].send(worker_survived)
        n_deaths = job.charge_death(task.shard)
        if n_deaths < self.specs[0].engine.max_shard_attempts:
            return task  # the worker may have been killed from outside
        if bus_error:
            # No row of the shard is the cause, so a search would find none.
            raise errors.UnreadableError(
                f"{task.store}: cannot be read: the system ended {n_deaths} workers that read it "
                "with a bus error. The disk or the file server has failed, or the file was cut "
                "off; mend that and run again, what was committed stays"
            )
        log.warning("shard %05d ended %d workers; searching for the row", task.shard, n_deaths)
        # A search is a generator. It gives the first probe now, or the next one if a worker has
        # died at the whole shard although the search had excluded some rows.
        if task.shard not in job.searches:
            job.searches[task.shard] = bisect_poison_rows(task)
        probe = next(job.searches[task.shard], None)
        if probe is None:
            problem = "ends workers, and no single row of it is the cause"
            raise errors.ShardError(f"{problem}; last words: {reason}", shard=task.shard)
        return probe

    def _finish_jobs(self) -> None:
        """Release the jobs that are over and of which no worker has a task any more.

        The thread that waits for such a job in `compute` goes on: the job is returned, or its error
        is raised. Before that, if no job is left and the pool does not keep its workers, they are
        ended.
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
        """End all workers, also those with unanswered tasks, and empty their slots.

        The slots remain, so that new workers can be started for later jobs.
        """
        workers = [slot.worker for slot in self._slots if slot.worker is not None]
        for worker in workers:
            # Says that no more tasks will come. A worker without a task ends by itself then.
            worker.send(process.Closed())
        process.end_children(workers)
        for slot in self._slots:
            slot.worker = None
            slot.tasks = deque()
            slot.n_waiting = 0
            slot.unready_deaths = 0


def _next_divisor(budget_divisor: int, name: str) -> int:
    """Return twice the divisor, so that the token budget is halved after memory ran out.

    The token budget is the size of a batch. A warning is logged.

    Args:
        budget_divisor: The token budget was divided by this when memory ran out.
        name: The device or the shard, for messages.

    Raises:
        DeviceError: The token budget cannot be made smaller.
    """
    if budget_divisor >= MAX_DIVISOR:
        problem = f"out of memory even with 1/{budget_divisor} of the token budget"
        way_out = "free the device or use a smaller model"
        raise errors.DeviceError(f"{name}: {problem}; {way_out}")
    log.warning("%s: out of memory, trying 1/%d of the token budget", name, budget_divisor * 2)
    return budget_divisor * 2
