"""Compute the shards of one run with a pool of workers, and measure how long each part takes."""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, cast

import pandas as pd

from virnuc_core.config import ClassifySpec, EngineSpec, OnShare, TraceSpec
from virnuc_core.encoders.composition import UNKNOWN_TRAINING, ComparedReads
from virnuc_core.encoders.registry import ENCODERS
from virnuc_core.engine.pool import MAX_NOT_FINITE_SHARE, Pool, PooledJob
from virnuc_core.engine.process import WORKER, local_workers, worker_specs
from virnuc_core.engine.shards import ShardPlan, ShardTask
from virnuc_core.errors import ConfigError, StorageError, format_bytes
from virnuc_core.lease import require_lease
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import Device, ModelFlops, read_record
from virnuc_core.safe_files import remove_file
from virnuc_core.system_errors import describe_system_error
from virnuc_core.telemetry.live import InferenceProgressReporter
from virnuc_core.telemetry.log import Telemetry, journal, read_journal, write_telemetry
from virnuc_core.telemetry.metrics_file import MetricsFile, require_metrics_file
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

# Bytes of a shard's file besides embeddings and scores, and of its last, partly filled disk block.
SHARD_OVERHEAD_BYTES: Final = 4_096
# The part of a worker's start in which kernels are compiled.
KERNELS: Final = START_UP[-2]


@dataclass(frozen=True, slots=True)
class RunMonitor:
    """How a run is observed. Nothing here changes the results."""

    sample_s: float = 0.5  # seconds between two measurements of the devices
    window_s: float = 30.0  # seconds over which the telemetry file averages
    on_progress: OnShare | None = None  # called with the share of the work that is done
    on_status: Callable[[str], None] | None = None  # called with a line of live figures, likewise
    # False if other runs are computed at the same time. Their progress and their times would mix
    # with those of this run, so they are not shown.
    alone: bool = True


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that must be decided before a run can compute: inputs, settings, devices, plan."""

    run: RunDir
    store: OrfStore
    devices: tuple[Device, ...]
    engine: EngineSpec  # with every `auto` replaced by the choice that was made
    plan: ShardPlan
    todo: tuple[int, ...]  # numbers of the shards that are not computed yet
    damaged: tuple[str, ...]  # a line for each shard whose file was damaged and moved
    n_lost: int  # sequences without a result in the shards that are computed already
    spec: ClassifySpec  # the settings as the user gave them
    bytes_per_sequence: int  # bytes of the embeddings and scores of one distinct sequence
    # Reads with a score between these two get no verdict.
    uncertain: tuple[float, float] | None = None
    compared: ComparedReads = UNKNOWN_TRAINING  # with the reads of the classifier's training
    domain_note: str = ""  # for which reads the card's thresholds hold, if the run uses them
    # How the reads differ from those that the classifier was trained on, a sentence each
    remarks: tuple[str, ...] = ()
    device_remark: str = ""  # why `auto` took a CPU core, for the summary; empty if it did not
    flops: ModelFlops | None = None
    trace: TraceSpec | None = None  # what workers record with torch's profiler
    worker: str = WORKER  # the module whose `work` function a worker process runs

    def shard_bytes(self, shards: Iterable[int]) -> int:
        """Estimate how many bytes the files of some shards take on the disk."""
        total = 0
        for shard in shards:
            lo, hi = self.plan.range(shard)
            total += SHARD_OVERHEAD_BYTES + (hi - lo) * self.bytes_per_sequence
        return total

    def tasks(self, shards: Sequence[int]) -> list[ShardTask]:
        """Return the messages that tell workers to compute some shards, one for each shard."""
        # The record of the run holds the fingerprint of the reads, and one of each model.
        fingerprints = read_record(self.run).fingerprints
        model_digests = {name: digest for name, digest in fingerprints.items() if name != "reads"}
        # A run may have a small share of sequences without an embedding, because its numbers were
        # not finite, and at least one. `n_lost` are those of the shards that exist already.
        n_allowed = max(1, int(MAX_NOT_FINITE_SHARE * self.store.n_uniques))
        max_not_finite = max(0, n_allowed - self.n_lost)
        tasks = []
        for shard in shards:
            lo, hi = self.plan.range(shard)
            task = ShardTask(
                run=str(self.run.root.resolve()),
                store=str(self.store.path.resolve()),
                reads_fingerprint=fingerprints["reads"],
                plan_fingerprint=self.plan.fingerprint,
                model_digests=model_digests,
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
    """The moments of a worker's start in their order, in seconds of `time.monotonic()`."""

    requested_s: float  # the command began, or the pool decided to start this worker
    spawned_s: float  # the process was started
    imported_s: float  # its Python modules were imported
    loaded_s: float  # the weights were on the device
    ready_s: float  # it could take a task
    launched_s: float  # it started its first batch

    def spans(self) -> list[tuple[float, float]]:
        """Return the spans between neighbouring moments, as (start, end).

        There is one span for each part of a start that `START_UP` names, in the same order.
        """
        moments: tuple[float, ...] = astuple(self)
        return list(itertools.pairwise(moments))


class Embedding:
    """The computation of a job's shards, and what is measured meanwhile.

    Call `run` first, then `record_times`, then `write`.

    Attributes:
        measured: The telemetry. It exists after `run` has returned.
        ended_s: When the computation ended, in seconds of `time.monotonic()`. It exists after
            `run` has returned.
    """

    measured: Telemetry
    ended_s: float

    def __init__(self, job: Job, monitor: RunMonitor, started_s: float) -> None:
        """Note what to compute and how to observe it. Nothing is started.

        Args:
            job: What is computed.
            monitor: How the run is observed.
            started_s: When the run began, `time.monotonic()`.
        """
        self._job = job
        self._monitor = monitor
        self._origin_s = started_s
        # The date and time at which the run began, for the journal
        self._started = datetime.now(UTC) - timedelta(seconds=time.monotonic() - started_s)

    def run(self, pool: Pool | None = None) -> PooledJob:
        """Compute the shards that are not computed yet. Workers write their files.

        What happens is written to the journal, a file in the run directory, while it happens.

        Args:
            pool: Running workers. They are used if they were started with the settings of this
                job. Otherwise a new pool is started, and ended before this returns.

        Returns:
            What happened to the workers and the shards.

        Raises:
            StorageError: The disk is full, or fails. The message names the space that is still
                needed.
            ConfigError: A run on a cluster began with other kernels for int8 than the nodes use.
            VirnucError: See `Pool.compute`.
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
                # How to measure the devices of other machines. None for those of this machine.
                read=None if pool is None else pool.reader,
            )
            stack.enter_context(sampler)
            reporter = self._reporter(sampler, tasks)
            if reporter is not None:
                stack.enter_context(reporter)
            metrics_file = self._metrics_file(sampler, tasks)
            if metrics_file is not None:
                stack.enter_context(metrics_file)
            # On a cluster the devices are those of the nodes, which may come and go. So its pool is
            # used in any case.
            if job.spec.cluster and pool is not None:
                _require_same_kernels(job, pool)
            is_pool_usable = pool is not None and (pool.specs == specs or job.spec.cluster)
            if pool is None or not is_pool_usable:
                pool = stack.enter_context(Pool(specs, local_workers(job.worker, specs)))

            def on_event(event: ShardDone | str) -> None:
                """Record a computed shard, or a line about a dead worker.

                If another process has taken over the run directory, raise an error instead, which
                ends the computation.
                """
                # The lease files show who owns the directory. They are not read again here
                # (`reread`), because another thread reads them at regular times.
                require_lease(job.run.root, reread=False)
                write_journal(event)
                if metrics_file is not None:
                    metrics_file.update(event)
                if isinstance(event, ShardDone):
                    remaining.discard(event.shard)
                    if reporter is not None:
                        reporter.update(event)

            try:
                pooled_job = pool.compute(tasks, job.run.root.resolve() / "logs", on_event)
            except StorageError as error:
                needed = format_bytes(job.shard_bytes(remaining))
                problem = f"{error}; the shards still to come take about {needed}"
                raise StorageError(problem) from error
        self.ended_s = time.monotonic()
        self.measured = self._read_journal(write_journal.error)
        return pooled_job

    def _reporter(
        self, sampler: Sampler, tasks: Sequence[ShardTask]
    ) -> InferenceProgressReporter | None:
        """Return the object that reports the progress of the run to `on_progress`.

        Args:
            sampler: Measures the devices. The reports show its latest values.
            tasks: The shards that are computed now. Earlier ones count as done.

        Returns:
            The object. None if nothing is to be computed, or if nobody wants to know the progress.
        """
        monitor = self._monitor
        if not tasks or not monitor.on_progress:
            return None
        return InferenceProgressReporter(
            self._job.store.n_uniques,
            sampler,
            monitor.on_progress,
            on_status=monitor.on_status,
            already_done=self._already_done(tasks),
        )

    def _metrics_file(self, sampler: Sampler, tasks: Sequence[ShardTask]) -> MetricsFile | None:
        """Return the object that keeps the file of live figures up to date.

        Args:
            sampler: Measures the devices. The file has its latest values.
            tasks: The shards that are computed now. Earlier ones count as done.

        Returns:
            The object. None if nothing is to be computed, or if no such file is wanted.

        Raises:
            ConfigError: The file cannot be used, because it is not one of virnuc's.
        """
        path = self._job.spec.metrics_file
        if path is None or not tasks:
            return None
        require_metrics_file(path)
        n_uniques = self._job.store.n_uniques
        return MetricsFile(path, n_uniques, sampler, already_done=self._already_done(tasks))

    def _already_done(self, tasks: Sequence[ShardTask]) -> int:
        """Return how many distinct sequences have a score, apart from those of these tasks."""
        return self._job.store.n_uniques - sum(task.hi - task.lo for task in tasks)

    def _read_journal(self, write_error: OSError | None) -> Telemetry:
        """Read the journal back and return what was measured.

        Args:
            write_error: The error with which a line could not be written, if there was one.

        Raises:
            StorageError: The journal could not be written.
            ConfigError: The run directory was renamed or removed.
        """
        path = self._job.run.journal
        recorded = read_journal(path)
        if recorded is None:
            # If another process has the run directory now, that is the reason, and is raised here.
            require_lease(path)
            problem = f"{path}: what was measured is missing"
            if write_error is None:
                raise StorageError(f"{problem}; run again")
            reason = describe_system_error(write_error)
            raise StorageError(f"{problem}: {reason} and run again") from write_error
        return recorded.telemetry

    def record_times(self, clock: StageClock, job: PooledJob) -> None:
        """Add to the stage clock how long each phase of the computation took.

        The phases of all devices overlap. Those of the device that computed longest are taken,
        because it decides how long the run takes.

        Args:
            clock: Collects the times of the run's stages. It is changed.
            job: What `run` returned. The record of the device's worker gets a new entry,
                `first_batch_s`.
        """
        shards = self.measured.shards
        # None if everything was computed already by an earlier run.
        busiest = max(device_busy(shards), key=lambda device: device.busy_s, default=None)
        self._record_stages(clock, busiest)
        clock.add("Preparation", self._began_s - self._origin_s)
        committed_s = self._began_s
        if busiest is not None:
            own_batches = self._batches_of(busiest)
            self._record_start_up(clock, own_batches, job.ready_records[busiest.device])
            finished_s = self._record_gaps(clock, own_batches, busiest, job)
            # When the last shard of any device was committed. From the end of this device's work
            # until then, the run waits for commits.
            committed_s = (shards.finished_s + shards.commit_s).max()
            clock.add("Commits", committed_s - finished_s)
        clock.add("Shutdown", self.ended_s - committed_s)

    def _batches_of(self, device: DeviceBusy) -> pd.DataFrame:
        """Return the rows of the batch table that belong to a device."""
        batches = self.measured.batches
        return batches[batches.device == device.device]

    def _record_stages(self, clock: StageClock, busiest: DeviceBusy | None) -> None:
        """Add the time that the busiest device spent in each encoder and in the classifier.

        Args:
            clock: Collects the times of the run's stages. It is changed.
            busiest: The device. None if nothing was computed; all times are 0 then.
        """
        batches = self.measured.batches
        for encoder in ENCODERS:
            seconds = 0.0 if busiest is None else busiest.encoder_s(encoder.molecule)
            # From the first batch of this encoder to its last one, on any device.
            span = embedding_span(batches[batches.encoder == encoder.name])
            clock.add(encoder.title, seconds, span)
        # The original program joins the embeddings in a separate stage. Here each encoder writes
        # them into its columns of the joined table, so this stage has no time of its own.
        last_encoder = cast(Stage, ENCODERS[-1].title)
        clock.fuse("Feature Merging", last_encoder)
        clock.add("Model Prediction", 0.0 if busiest is None else busiest.head_s)

    def _record_start_up(
        self, clock: StageClock, batches: pd.DataFrame, record: dict[str, Any]
    ) -> None:
        """Add to the stage clock how long each part of a worker's start took.

        The parts are those that `START_UP` names, such as the import of modules and the loading of
        weights.

        Args:
            clock: Collects the times of the run's stages. It is changed.
            batches: The batches of the worker's device.
            record: What the worker reported when it was ready. `started_s` is when its process
                began; `import_s`, `load_s` and `ready_s` are seconds since then. `waited_s` is how
                long it waited for a task with the models loaded. It gets a new entry,
                `first_batch_s`: seconds from the command to the first batch.
        """
        # Names such as `ready_s` are moments here. In the record they are seconds since the start.
        launched_s = batches.launched_s.min()
        ready_s = record["started_s"] + record["ready_s"] + record["waited_s"]
        if ready_s < self._began_s:
            # The worker was started for an earlier job. Its start took no time of this run, so
            # all its moments are the beginning of this job.
            began_s = self._began_s
            start = WorkerStart(
                requested_s=began_s,
                spawned_s=began_s,
                imported_s=began_s,
                loaded_s=began_s,
                ready_s=began_s,
                launched_s=launched_s,
            )
            waited_s = 0.0
        else:
            # A worker that replaces a dead one was spawned after the beginning. The time until
            # then is counted as "Restarts", not as a part of its start.
            spawned_s = min(record["spawned_s"], self._began_s)
            start = WorkerStart(
                requested_s=min(record["asked_s"], spawned_s),
                spawned_s=spawned_s,
                imported_s=record["started_s"] + record["import_s"],
                loaded_s=record["started_s"] + record["load_s"],
                ready_s=ready_s,
                launched_s=launched_s,
            )
            waited_s = record["waited_s"]
        record["first_batch_s"] = launched_s - start.requested_s
        for part, (began_s, ended_s) in zip(START_UP, start.spans(), strict=True):
            clock.add(part, ended_s - began_s, (began_s, ended_s))
        # With the weights loaded, the worker waited for the job. This time lies in the span in
        # which kernels are compiled, but was not spent on them.
        clock.add(KERNELS, -waited_s)
        # The part of the start that ran while reads were staged. It is in the times of both, so the
        # clock subtracts it from the sum.
        overlap_s = self._began_s - start.requested_s - waited_s
        clock.add(OVERLAPPED, max(0.0, overlap_s))  # negative if the worker was started later

    def _record_gaps(
        self, clock: StageClock, batches: pd.DataFrame, device: DeviceBusy, job: PooledJob
    ) -> float:
        """Add the time that a device did nothing between its first batch and its last shard.

        The idle time is divided among the known causes, in a fixed order. Causes may overlap, so
        that each gets at most the idle time that is not explained yet. What is left in the end is
        counted as "Device idle".

        Args:
            clock: Collects the times of the run's stages. It is changed.
            batches: The batches of the device.
            device: The device, with the seconds that it was busy.
            job: The computed job, which counts the time that dead workers have cost.

        Returns:
            When the device finished its last shard, in seconds of `time.monotonic()`.
        """
        shards = self.measured.shards
        finished_s: float = shards.finished_s[shards.device == device.device].max()
        idle_s = max(0.0, finished_s - batches.launched_s.min() - device.busy_s)
        causes = {
            "Restarts": job.restart_s[device.device],
            # The wait for the first batch is part of the worker's start.
            "Waiting for batches": batches.wait_ms[1:].sum() / 1e3,
            "Commits": device.commit_s,
            "Device idle": idle_s,  # takes all that no other cause explains
        }
        for name, seconds in causes.items():
            explained_s = min(idle_s, seconds)
            clock.add(name, explained_s)
            idle_s -= explained_s
        return finished_s

    def write(
        self, stages: Sequence[StageTime], wall_s: float, sequences_per_hour: float | None = None
    ) -> Path:
        """Write the telemetry files, and then remove the journal.

        The journal is the file in which measurements were kept while the run was computed.

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
        remove_file(run.journal, run.root)
        return path


def _require_same_kernels(job: Job, pool: Pool) -> None:
    """Raise an error if the workers of a cluster round rows to int8 in another way than the run.

    Nodes choose their kernels before the record of the run is read. Workers of this machine are
    started anew in that case.
    """
    kernels = job.engine.int8_kernels
    if any(spec.engine.int8_kernels != kernels for spec in pool.specs):
        raise ConfigError(
            f"{job.run.root} began with int8 kernels '{kernels}', and the nodes would use others; "
            f"use --int8-kernels {kernels}"
        )
