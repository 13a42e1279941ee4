"""The shards of a job embedded by a pool of workers, one a device, watched and measured.

Shards are handed out one by one: a slow device takes fewer. A worker that dies is restarted and what it held is handed
out again; one that is silent for too long is ended first. A shard at which workers die repeatedly is searched for the
row that does it (`poison_rows`), which is set aside, as a few rows are that are not finite. A device that runs out of
memory gets the shard again with half the token budget. Errors of reads, weights, settings and devices stop the run.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from virnuc_core.config import ClassifySpec, EngineSpec, TraceSpec
from virnuc_core.engine.process import INTERRUPTED, Child, Closed, Failed, LocalWorkers, Message, Ready, WorkerSpec
from virnuc_core.engine.shards import Computed, JobSpec, ShardPlan, ShardTask
from virnuc_core.errors import DeviceError, NotFiniteError, ShardError, StorageError, WorkerError, named, size
from virnuc_core.lease import still_held
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import Device, ModelFlops
from virnuc_core.telemetry.live import InferenceProgressReporter, Sampler
from virnuc_core.telemetry.log import journal, read_journal, write_telemetry
from virnuc_core.telemetry.statistics import device_busy, embedding_span
from virnuc_core.telemetry.tables import ENCODERS, OVERLAPPED, START_UP, ShardDone, StageClock, StageTime

log = logging.getLogger(__name__)

WORKER: Final = "virnuc_core.engine.worker"
TASKS_AHEAD: Final = 2  # in a worker's hands: the one it computes and the one its loader prepares
TICK_S: Final = 0.5
SHARD_BYTES: Final = 4_096  # of a shard's file besides embeddings and scores, and of its last block
MAX_DEATHS_BEFORE_READY: Final = 3  # in a row, of workers that never got to work
MAX_DIVISOR: Final = 64
MOST_NOT_FINITE: Final = 0.01  # of a run's rows: more are no odd rows, but weights or a precision of no use


@dataclass(frozen=True, slots=True)
class Watch:
    """How a run is observed: none of it changes results."""

    sample_s: float = 0.5
    window_s: float = 30.0
    on_progress: Callable[[float], None] | None = None  # hears the share that is done, 0 to 1


@dataclass(frozen=True, slots=True)
class Job:
    """A run made ready: everything decided, nothing computed."""

    run: RunDir
    store: OrfStore
    devices: tuple[Device, ...]
    engine: EngineSpec
    plan: ShardPlan
    todo: tuple[int, ...]
    damaged: tuple[str, ...]
    lost: int  # rows set aside in shards that are committed
    spec: ClassifySpec  # as it was asked for
    unique_bytes: int  # of a unique's embeddings and scores
    uncertain: tuple[float, float] | None = None  # scores of which no verdict is wanted
    remarks: tuple[str, ...] = ()  # on reads and head
    flops: ModelFlops | None = None
    trace: TraceSpec | None = None  # what workers record with torch's profiler
    worker: str = WORKER  # module that says what a worker does

    def shard_bytes(self, shards: Iterable[int]) -> int:
        """Room that the files of some shards take, about."""
        return sum(SHARD_BYTES + (hi - lo) * self.unique_bytes for lo, hi in map(self.plan.range, shards))


def worker_specs(
    models: Path, devices: Sequence[Device], engine: EngineSpec, trace: TraceSpec | None = None
) -> list[WorkerSpec]:
    """One worker a device."""
    root = str(models.resolve())
    return [WorkerSpec(models=root, device=device, engine=engine, trace=trace) for device in devices]


@dataclass(slots=True)
class WorkerSlot:
    """A device's place in the pool: who works there now, and what it holds."""

    spec: WorkerSpec
    worker: Child = field(init=False)
    held: deque[ShardTask] = field(default_factory=deque)  # given and not answered, oldest first
    ready: bool = False  # whether the present worker has said so
    unready_deaths: int = 0
    since_s: float = 0.0  # when it last was ready, or had a shard committed


class Pool:
    """Computes shards on workers. Use `run` once; what there was to count can be read afterwards."""

    def __init__(
        self, specs: Sequence[WorkerSpec], job: JobSpec, logs: Path, workers: LocalWorkers, note: Callable[..., None]
    ) -> None:
        self.deaths: list[str] = []  # one line each
        self.records: dict[str, dict[str, Any]] = {}  # by device: what its first worker said when ready
        self.lost_s = defaultdict[str, float](float)  # by device: from the last commit before a death on
        self.reduced: dict[int, int] = {}  # shards, and what their token budgets were divided by
        self._job, self._logs, self._workers, self._note = job, logs, workers, note
        self._slots = [WorkerSlot(spec) for spec in specs]
        self._attempts, self._silence_s = specs[0].engine.max_shard_attempts, specs[0].engine.silence_s
        self._todo: deque[ShardTask] = deque()
        self._lost = 0  # rows that were not finite
        self._killed: Counter[int] = Counter()  # deaths with this shard first in line
        self._searches: dict[int, Generator[ShardTask, bool, None]] = {}

    def run(self, tasks: Sequence[ShardTask]) -> None:
        """Compute shards; returns when all are committed. Workers are gone when it returns or raises.

        Errors: our own as a worker raised them; `ShardError` for a shard that ends workers though no row of it does
        alone; `WorkerError` for workers that never get ready, and after `end_all_children`.
        """
        self._todo.extend(tasks)
        del self._slots[len(tasks) :]
        left = {task.shard for task in tasks}
        with self._workers:
            for slot in self._slots:
                self._start(slot)
            while left:
                self._end_silent()
                if (received := self._workers.receive(TICK_S)) is None:
                    continue
                child, heard = received
                for slot in self._slots:  # none for an earlier worker's last message
                    if slot.worker is child:
                        self._hear(slot, heard)
                if isinstance(heard, Computed) and heard.done is not None:
                    left.discard(heard.done.shard)
            for slot in self._slots:
                slot.worker.send(Closed())

    def _start(self, slot: WorkerSlot) -> None:
        slot.ready = False
        slot.worker = self._workers.start(slot.spec, self._logs / f"worker-{slot.spec.device.id}.log")
        slot.worker.send(self._job)
        self._feed(slot)

    def _feed(self, slot: WorkerSlot) -> None:
        """Give the worker tasks until it holds enough; a suspect travels alone, so that a death names it."""
        while self._todo and len(slot.held) < TASKS_AHEAD:
            suspects = [task for task in (self._todo[0], *slot.held) if task.probe or self._killed[task.shard]]
            if slot.held and suspects:
                return
            task = self._todo.popleft()
            task = task.model_copy(update={"divisor": max(task.divisor, slot.spec.divisor)})
            slot.held.append(task)
            slot.worker.send(task)

    def _hear(self, slot: WorkerSlot, heard: Message) -> None:
        device = slot.worker.device
        match heard:
            case Ready(record=record):
                slot.ready, slot.unready_deaths = True, 0
                first = self.records.setdefault(device, {"spawned_s": slot.worker.started_s, **record})
                if first["pid"] != record["pid"]:
                    self.lost_s[device] += time.monotonic() - slot.since_s
                slot.since_s = time.monotonic()
                log.info("%s ready after %.1f s", device, record["ready_s"])
            case Computed(done=done):
                task = slot.held.popleft()
                if done is None:
                    self._todo.appendleft(self._searches[task.shard].send(True))
                else:
                    if task.divisor > 1:
                        self.reduced[task.shard] = task.divisor
                    self._killed.pop(task.shard, None)
                    slot.since_s = time.monotonic()
                    self._note(done)
                    if lost := done.skipped - len(task.skip):
                        told = "shard %05d: %d rows are not finite and are set aside (failed.tsv)"
                        log.warning(told, done.shard, lost)
                        self._lost += lost
                    if self._lost > self._job.most_lost:
                        told = f"{self._lost} rows are not finite, more than {100 * MOST_NOT_FINITE:.0f} % of the run's"
                        raise NotFiniteError(f"{told}; run virnuc models verify, or use another --precision")
                self._feed(slot)
            case Failed():  # what another try cannot mend stops the run; the rest is left to the death that follows
                log.error("%s: %s: %s", device, heard.kind, heard.message)
                if (error := named(heard.kind, heard.message)) is not None:
                    raise error
            case Closed():
                self._died(slot)

    def _end_silent(self) -> None:
        """End workers that hold work and have not moved for too long; their death is then like any other."""
        now = time.monotonic()
        for slot in self._slots:
            if slot.held and now - slot.worker.progress_s > self._silence_s:
                log.error("%s has been silent for more than %.0f s; ending it", slot.worker.device, self._silence_s)
                slot.worker.progress_s = now
                slot.worker.end(0.5)

    def _died(self, slot: WorkerSlot) -> None:
        """Hand out again what a dead worker held, and start another in its place."""
        worker = slot.worker
        status, failed = worker.end(0.5), worker.failed
        if self._workers.cancelled:
            raise WorkerError(INTERRUPTED)
        said = f"{failed.kind}: {failed.message}" if failed else worker.last_words
        held = [task.shard for task in slot.held]
        self.deaths.append(f"worker on {worker.device} ended (status {status}), holding shards {held}; it said: {said}")
        log.warning("%s", self.deaths[-1])
        self._note(self.deaths[-1])
        out_of_memory = failed is not None and failed.kind == "OutOfMemoryError"
        if slot.ready and slot.held:
            slot.held[0] = self._after_death(slot.held[0], said, out_of_memory=out_of_memory)
        elif not slot.ready and out_of_memory:
            slot.spec = slot.spec.model_copy(update={"divisor": _doubled(slot.spec.divisor, worker.device)})
        elif not slot.ready:
            slot.unready_deaths += 1
            if slot.unready_deaths >= MAX_DEATHS_BEFORE_READY:
                raise WorkerError(
                    f"workers on {worker.device} ended {slot.unready_deaths} times before they were ready; "
                    f"last words: {said}; see {worker.log}",
                    worker_traceback=failed.traceback if failed else "",
                )
        self._todo.extendleft(reversed(slot.held))
        slot.held.clear()
        self._start(slot)

    def _after_death(self, task: ShardTask, said: str, *, out_of_memory: bool) -> ShardTask:
        """What to try next with the task at which a worker died."""
        if out_of_memory:
            return task.model_copy(update={"divisor": _doubled(task.divisor, f"shard {task.shard:05d}")})
        if task.probe:
            return self._searches[task.shard].send(False)
        self._killed[task.shard] += 1
        if self._killed[task.shard] < self._attempts:
            return task
        from virnuc_core.engine.poison_rows import search  # few runs need it

        log.warning("shard %05d ended %d workers; searching for the row", task.shard, self._killed[task.shard])
        if (probe := next(self._searches.setdefault(task.shard, search(task)), None)) is None:
            problem = f"ends workers, and no single row of it is the cause; last words: {said}"
            raise ShardError(problem, shard=task.shard)
        return probe


def _doubled(divisor: int, what: str) -> int:
    """The next smaller budget for a device or shard that ran out of memory."""
    if divisor >= MAX_DIVISOR:
        problem = f"out of memory even with 1/{divisor} of the token budget; free the device or use a smaller model"
        raise DeviceError(f"{what}: {problem}")
    log.warning("%s: out of memory, trying 1/%d of the token budget", what, divisor * 2)
    return divisor * 2


class Embedding:
    """One embedding of a job's shards, and what is measured of it."""

    def __init__(self, job: Job, watch: Watch, started_s: float) -> None:
        self._job, self._watch = job, watch
        self._origin_s, self._started = started_s, datetime.now(UTC)

    def run(self, prewarmed: LocalWorkers | None = None) -> Pool:
        """Compute the shards that are left; the pool says what happened, `measured` and `ended_s` what it took."""
        job, root, store, heard = self._job, self._job.run.root.resolve(), self._job.store, self._watch.on_progress
        ranges = {shard: job.plan.range(shard) for shard in job.todo}
        tasks = [ShardTask(shard=shard, lo=lo, hi=hi) for shard, (lo, hi) in ranges.items()]
        done = store.n_uniques - sum(task.hi - task.lo for task in tasks)
        most = max(1, int(MOST_NOT_FINITE * store.n_uniques)) - job.lost
        told = JobSpec(run=str(root), store=str(store.path.resolve()), reads=store.fingerprint, most_lost=max(0, most))
        ids, left = [device.id for device in job.devices], set(job.todo)
        specs, self._began_s = worker_specs(job.spec.models, job.devices, job.engine, job.trace), time.monotonic()
        with (
            journal(job.run.journal, self._origin_s, self._started, ids) as keep,
            Sampler(ids, interval_s=self._watch.sample_s, note=keep) as sampler,
            InferenceProgressReporter(store.n_uniques, sampler, heard, already_done=done)
            if tasks and heard
            else nullcontext() as live,
        ):

            def note(noted: ShardDone | str) -> None:
                still_held(root, look=False)
                keep(noted)
                if isinstance(noted, ShardDone):
                    left.discard(noted.shard)
                    if live is not None:
                        live.update(noted)

            pool = Pool(specs, told, root / "logs", prewarmed or LocalWorkers(job.worker), note)
            try:
                pool.run(tasks)
            except StorageError as error:
                room = size(job.shard_bytes(left))
                raise StorageError(f"{error}; the shards still to come take about {room}") from error
        self.ended_s = time.monotonic()
        if (noted := read_journal(job.run.journal)) is None:
            raise StorageError(f"{job.run.journal}: what was measured could not be kept; make room and run again")
        self.measured = noted[0]
        return pool

    def tell(self, clock: StageClock, pool: Pool) -> None:
        """Put on the run's clock where the time of the busiest device went, and when that was."""
        batches, shards = self.measured.batches, self.measured.shards
        busy = max(device_busy(shards), key=lambda one: one.busy_s, default=None)
        spent_s = (busy.dnabert_s, busy.esm2_s) if busy else (0.0, 0.0)
        for name, encoder, seconds in zip(("DNABERT-S", "ESM-2"), ENCODERS, spent_s, strict=True):
            clock.add(name, seconds, embedding_span(batches[batches.encoder == encoder]))
        clock.fuse("Feature Merging", "ESM-2")
        clock.add("Model Prediction", busy.head_s if busy else 0.0)
        clock.add("Preparation", self._began_s - self._origin_s)
        committed_s = self._began_s
        if busy is not None:
            own, said = batches[batches.device == busy.device], pool.records[busy.device]
            launched_s, finished_s = own.launched_s.min(), shards.finished_s[shards.device == busy.device].max()
            imported_s, loaded_s, ready_s = (said["started_s"] + said[n] for n in ("import_s", "load_s", "ready_s"))
            spawned_s = min(said["spawned_s"], self._began_s)  # later for one that took the place of a dead one
            start = [spawned_s, imported_s, loaded_s, ready_s + said["waited_s"], launched_s]
            for part, began_s, ended_s in zip(START_UP, start, start[1:], strict=False):
                clock.add(part, ended_s - began_s, (began_s, ended_s))
            clock.add(START_UP[2], -said["waited_s"])  # for the job, with the weights loaded
            clock.add(OVERLAPPED, max(0.0, self._began_s - spawned_s - said["waited_s"]))
            still_s = max(0.0, finished_s - launched_s - busy.busy_s)
            waits_s = own.wait_ms[1:].sum() / 1e3  # the first batch's is part of the start
            causes = {"Restarts": pool.lost_s[busy.device], "Waiting for batches": waits_s, "Commits": busy.commit_s}
            for part, most_s in {**causes, "Device idle": still_s}.items():  # none has cost more than is left
                clock.add(part, min(still_s, most_s))
                still_s -= min(still_s, most_s)
            committed_s = (shards.finished_s + shards.commit_s).max()
            clock.add("Commits", committed_s - finished_s)
        clock.add("Shutdown", self.ended_s - committed_s)

    def write(self, stages: Sequence[StageTime], wall_s: float, sequences_per_hour: float | None = None) -> Path:
        """Write the telemetry, which takes the journal's place; returns its JSON file."""
        run, measured = self._job.run, replace(self.measured, stages=tuple(stages))
        told = {"n_reads": self._job.store.n_reads, "wall_s": wall_s, "sequences_per_hour": sequences_per_hour}
        path = write_telemetry(run.telemetry, measured, window_s=self._watch.window_s, **told)
        run.journal.unlink()
        return path
