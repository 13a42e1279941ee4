"""Embed one run's shards by a pool of workers, and watch and measure it."""

import itertools
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

import pandas as pd

from virnuc_core.config import ClassifySpec, EngineSpec, OnShare, TraceSpec
from virnuc_core.encoders.registry import ENCODERS
from virnuc_core.engine.pool import MAX_NOT_FINITE_SHARE, Pool, PooledJob
from virnuc_core.engine.process import WORKER, local_workers, worker_specs
from virnuc_core.engine.shards import ShardPlan, ShardTask
from virnuc_core.errors import StorageError, format_bytes
from virnuc_core.lease import require_lease
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import Device, ModelFlops, read_record
from virnuc_core.telemetry.live import InferenceProgressReporter
from virnuc_core.telemetry.log import Telemetry, journal, read_journal, write_telemetry
from virnuc_core.telemetry.sampler import Sampler
from virnuc_core.telemetry.statistics import DeviceBusy, device_busy, embedding_span
from virnuc_core.telemetry.tables import (
    OVERLAPPED,
    START_UP,
    ShardDone,
    Stage,
    StageClock,
    StageTime,
)

# Of a shard's file besides embeddings and scores, and of its last block on the disk.
SHARD_OVERHEAD_BYTES: Final = 4_096
KERNELS: Final = START_UP[-2]  # the part of a start in which kernels are compiled


@dataclass(frozen=True, slots=True)
class RunMonitor:
    """How a run is observed. None of it changes results."""

    sample_s: float = 0.5
    window_s: float = 30.0
    on_progress: OnShare | None = None
    alone: bool = True  # not one of several runs at once: its progress and its times are shown


@dataclass(frozen=True, slots=True)
class Job:
    """A run made ready: everything is decided, nothing is computed."""

    run: RunDir
    store: OrfStore
    devices: tuple[Device, ...]
    engine: EngineSpec
    plan: ShardPlan
    todo: tuple[int, ...]
    damaged: tuple[str, ...]
    lost: int  # rows set aside in shards that are committed
    spec: ClassifySpec  # as it was asked for
    unique_bytes: int  # of the embeddings and scores of one distinct sequence
    uncertain: tuple[float, float] | None = None  # scores of which no verdict is wanted
    remarks: tuple[str, ...] = ()  # on reads and classifier
    flops: ModelFlops | None = None
    trace: TraceSpec | None = None  # what workers record with torch's profiler
    worker: str = WORKER  # module that says what a worker does

    def shard_bytes(self, shards: Iterable[int]) -> int:
        """Estimate the disk space that the files of some shards take."""
        total = 0
        for shard in shards:
            lo, hi = self.plan.range(shard)
            total += SHARD_OVERHEAD_BYTES + (hi - lo) * self.unique_bytes
        return total

    def tasks(self, shards: Sequence[int]) -> list[ShardTask]:
        """Return the tasks for workers to compute some shards."""
        fingerprints = read_record(self.run).fingerprints
        weights = {name: digest for name, digest in fingerprints.items() if name != "reads"}
        n_allowed = max(1, int(MAX_NOT_FINITE_SHARE * self.store.n_uniques))
        max_not_finite = max(0, n_allowed - self.lost)
        tasks = []
        for shard in shards:
            lo, hi = self.plan.range(shard)
            task = ShardTask(
                run=str(self.run.root.resolve()),
                store=str(self.store.path.resolve()),
                reads=fingerprints["reads"],
                weights=weights,
                max_not_finite=max_not_finite,
                threshold=self.spec.threshold,
                shard=shard,
                lo=lo,
                hi=hi,
            )
            tasks.append(task)
        return tasks


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The moments of a worker's start, in their order, by `time.monotonic()`."""

    asked_s: float  # the command began, or something first asked for this worker
    spawned_s: float
    imported_s: float
    loaded_s: float
    ready_s: float
    launched_s: float  # the first batch

    def spans(self) -> list[tuple[float, float]]:
        """Return the time between each two moments, as start and end; one for each `START_UP`."""
        moments: tuple[float, ...] = astuple(self)
        return list(itertools.pairwise(moments))


class Embedding:
    """One embedding of a job's shards, and what is measured of it.

    Attributes:
        measured: Telemetry, once `run` has returned.
        ended_s: When it ended, by `time.monotonic()`, once `run` has returned.
    """

    measured: Telemetry
    ended_s: float

    def __init__(self, job: Job, monitor: RunMonitor, started_s: float) -> None:
        self._job = job
        self._monitor = monitor
        self._origin_s = started_s  # of the run
        self._started = datetime.now(UTC)

    def run(self, pool: Pool | None = None) -> PooledJob:
        """Compute the shards that are left.

        Args:
            pool: Workers to use if they are as the job wants them. Otherwise, the job gets a pool
                of its own.

        Returns:
            What happened: deaths of workers, what they reported, rows set aside.

        Raises:
            StorageError: The disk is full, or fails. Names the space that is still needed.
            VirnucError: Those of `Pool.compute`.
        """
        job = self._job
        specs = worker_specs(job.spec.models, job.devices, job.engine, job.trace)
        self._began_s = time.monotonic()
        device_ids = [device.id for device in job.devices]
        remaining = set(job.todo)
        tasks = job.tasks(job.todo)
        with ExitStack() as stack:
            write_journal = stack.enter_context(
                journal(job.run.journal, self._origin_s, self._started, device_ids)
            )
            sampler = Sampler(
                device_ids,
                every_s=self._monitor.sample_s,
                on_samples=write_journal,
                read=None if pool is None else pool.reader,
            )
            stack.enter_context(sampler)
            reporter = self._reporter(sampler, tasks)
            if reporter is not None:
                stack.enter_context(reporter)
            is_pool_usable = pool is not None and (pool.specs == specs or job.spec.cluster)
            if pool is None or not is_pool_usable:
                pool = stack.enter_context(Pool(specs, local_workers(job.worker, specs)))

            def on_event(event: ShardDone | str) -> None:
                require_lease(job.run.root, look=False)
                write_journal(event)
                if isinstance(event, ShardDone):
                    remaining.discard(event.shard)
                    if reporter is not None:
                        reporter.update(event)

            try:
                computed = pool.compute(tasks, job.run.root.resolve() / "logs", on_event)
            except StorageError as error:
                needed = format_bytes(job.shard_bytes(remaining))
                problem = f"{error}; the shards still to come take about {needed}"
                raise StorageError(problem) from error
        self.ended_s = time.monotonic()
        self.measured = self._read_journal()
        return computed

    def _reporter(
        self, sampler: Sampler, tasks: Sequence[ShardTask]
    ) -> InferenceProgressReporter | None:
        """Return what reports the progress, if there is something to compute and a listener."""
        on_progress = self._monitor.on_progress
        if not tasks or not on_progress:
            return None
        n_uniques = self._job.store.n_uniques
        already_done = n_uniques - sum(task.hi - task.lo for task in tasks)
        return InferenceProgressReporter(n_uniques, sampler, on_progress, already_done=already_done)

    def _read_journal(self) -> Telemetry:
        """Return what was measured.

        Raises:
            StorageError: The journal could not be written.
        """
        path = self._job.run.journal
        recorded = read_journal(path)
        if recorded is None:
            problem = f"{path}: what was measured could not be kept; make room and run again"
            raise StorageError(problem)
        return recorded.telemetry

    def record_times(self, clock: StageClock, job: PooledJob) -> None:
        """Add the busiest device's time by phase to the stage clock.

        Args:
            clock: The clock of the run.
            job: What happened, as `run` returned it. The record of the device's worker gets its
                `first_batch_s`.
        """
        shards = self.measured.shards
        busiest = max(device_busy(shards), key=lambda device: device.busy_s, default=None)
        self._record_stages(clock, busiest)
        clock.add("Preparation", self._began_s - self._origin_s)
        committed_s = self._began_s
        if busiest is not None:
            own_batches = self._batches_of(busiest)
            self._record_start_up(clock, own_batches, job.records[busiest.device])
            finished_s = self._record_gaps(clock, own_batches, busiest, job)
            committed_s = (shards.finished_s + shards.commit_s).max()
            clock.add("Commits", committed_s - finished_s)
        clock.add("Shutdown", self.ended_s - committed_s)

    def _batches_of(self, device: DeviceBusy) -> pd.DataFrame:
        batches = self.measured.batches
        return batches[batches.device == device.device]

    def _record_stages(self, clock: StageClock, busiest: DeviceBusy | None) -> None:
        """Add the device time of each encoder and of the classifier."""
        batches = self.measured.batches
        for encoder in ENCODERS:
            seconds = 0.0 if busiest is None else getattr(busiest, encoder.seconds_column)
            span = embedding_span(batches[batches.encoder == encoder.name])
            clock.add(encoder.title, seconds, span)
        last_encoder = cast(Stage, ENCODERS[-1].title)
        clock.fuse("Feature Merging", last_encoder)
        clock.add("Model Prediction", 0.0 if busiest is None else busiest.head_s)

    def _record_start_up(
        self, clock: StageClock, batches: pd.DataFrame, record: dict[str, Any]
    ) -> None:
        """Add the parts of a worker's start.

        Args:
            clock: The clock of the run.
            batches: The batches of the worker's device.
            record: What the worker reported when it was ready. Gets `first_batch_s`.
        """
        launched_s = batches.launched_s.min()
        ready_s = record["started_s"] + record["ready_s"] + record["waited_s"]
        if ready_s < self._began_s:  # it was started for an earlier job: nothing of it counts here
            began_s = self._began_s
            start = WorkerStart(began_s, began_s, began_s, began_s, began_s, launched_s)
            waited_s = 0.0
        else:
            # The worker that took the place of a dead one was spawned after the beginning.
            spawned_s = min(record["spawned_s"], self._began_s)
            start = WorkerStart(
                asked_s=min(record["asked_s"], spawned_s),
                spawned_s=spawned_s,
                imported_s=record["started_s"] + record["import_s"],
                loaded_s=record["started_s"] + record["load_s"],
                ready_s=ready_s,
                launched_s=launched_s,
            )
            waited_s = record["waited_s"]
        record["first_batch_s"] = launched_s - start.asked_s
        for part, (began_s, ended_s) in zip(START_UP, start.spans(), strict=True):
            clock.add(part, ended_s - began_s, (began_s, ended_s))
        clock.add(KERNELS, -waited_s)  # it waited for the job, with the weights loaded
        clock.add(OVERLAPPED, max(0.0, self._began_s - start.asked_s - waited_s))

    def _record_gaps(
        self, clock: StageClock, batches: pd.DataFrame, device: DeviceBusy, job: PooledJob
    ) -> float:
        """Add the time that a device stood still between its first batch and its last shard.

        Known causes come first, and none gets more than the time that is left.

        Returns:
            When the device finished its last shard.
        """
        shards = self.measured.shards
        finished_s: float = shards.finished_s[shards.device == device.device].max()
        idle_s = max(0.0, finished_s - batches.launched_s.min() - device.busy_s)
        causes = {
            "Restarts": job.restart_s[device.device],
            # The first batch's wait is part of the start.
            "Waiting for batches": batches.wait_ms[1:].sum() / 1e3,
            "Commits": device.commit_s,
            "Device idle": idle_s,
        }
        for name, seconds in causes.items():
            explained_s = min(idle_s, seconds)
            clock.add(name, explained_s)
            idle_s -= explained_s
        return finished_s

    def write(
        self, stages: Sequence[StageTime], wall_s: float, sequences_per_hour: float | None = None
    ) -> Path:
        """Write the telemetry, and remove the journal, whose place it takes.

        Args:
            stages: Times of the run's stages.
            wall_s: Seconds that the run took.
            sequences_per_hour: Rate of the whole run, if it is known.

        Returns:
            The path of the telemetry's JSON file.
        """
        run = self._job.run
        path = write_telemetry(
            run.telemetry,
            replace(self.measured, stages=tuple(stages)),
            window_s=self._monitor.window_s,
            n_reads=self._job.store.n_reads,
            wall_s=wall_s,
            sequences_per_hour=sequences_per_hour,
        )
        run.journal.unlink()
        return path
