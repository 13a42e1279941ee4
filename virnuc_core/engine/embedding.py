"""Compute the shards of one run with a pool of workers, and measure how long each part takes.

What evaluates the measurements (`stage_times`, `telemetry/log.py`) needs pandas, which takes longer
to import than the rest of this package. It is imported while the workers compute.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from virnuc_core.config import ClassifySpec, EngineSpec, OnShare, TraceSpec
from virnuc_core.encoders.composition import UNKNOWN_TRAINING, ComparedReads
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
from virnuc_core.telemetry.journal import journal
from virnuc_core.telemetry.live import InferenceProgressReporter
from virnuc_core.telemetry.metrics_file import MetricsFile, require_metrics_file
from virnuc_core.telemetry.sampler import Sampler
from virnuc_core.telemetry.tables import ShardDone, StageClock, StageTime

if TYPE_CHECKING:
    from virnuc_core.telemetry.log import Telemetry

# Bytes of a shard's file besides embeddings and scores, and of its last, partly filled disk block.
SHARD_OVERHEAD_BYTES: Final = 4_096


@dataclass(frozen=True, slots=True)
class RunMonitor:
    """How a run is observed. Nothing here changes the results."""

    sample_s: float = 0.5  # seconds between two measurements of the devices
    window_s: float = 30.0  # seconds over which the telemetry file averages
    on_progress: OnShare | None = None  # called with the share of the work that is done
    on_status: Callable[[str], None] | None = None  # called with a line of live figures, likewise
    # Called while the workers compute, or load. It imports what is needed after that.
    meanwhile: Callable[[], None] | None = None
    # False if other runs are computed at the same time. Their progress and their times would mix
    # with those of this run, so they are not shown.
    alone: bool = True
    # False if the classifier has random weights, as in a training: its verdicts mean nothing.
    has_verdicts: bool = True


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


class Embedding:
    """The computation of a job's shards, and what is measured meanwhile.

    Call `run` first, then `record_times`, then `write`.

    Attributes:
        measured: The telemetry. It exists after `run` has returned.
        ended_s: When the computation ended, in seconds of `time.monotonic()`. It exists after
            `run` has returned.
    """

    measured: "Telemetry"
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
                logs = job.run.root.resolve() / "logs"
                pooled_job = pool.compute(tasks, logs, on_event, meanwhile=self._load_evaluation)
            except StorageError as error:
                needed = format_bytes(job.shard_bytes(remaining))
                problem = f"{error}; the shards still to come take about {needed}"
                raise StorageError(problem) from error
        self.ended_s = time.monotonic()
        self.measured = self._read_journal(write_journal.error)
        return pooled_job

    def _load_evaluation(self) -> None:
        """Import what evaluates the measurements, and what the monitor wants to be loaded.

        A damaged package may raise errors of any type here. None of them ends the run before its
        shards are committed: the same import raises the error again when it is needed.
        """
        with suppress(Exception):
            import virnuc_core.engine.stage_times  # noqa: F401 - only to be loaded

            if self._monitor.meanwhile is not None:
                self._monitor.meanwhile()

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
            has_verdicts=monitor.has_verdicts,
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

    def _read_journal(self, write_error: OSError | None) -> "Telemetry":
        """Read the journal back and return what was measured.

        Args:
            write_error: The error with which a line could not be written, if there was one.

        Raises:
            StorageError: The journal could not be written.
            ConfigError: The run directory was renamed or removed.
        """
        from virnuc_core.telemetry.log import read_journal

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

        Args:
            clock: Collects the times of the run's stages. It is changed.
            job: What `run` returned. The record of a worker gets a new entry, `first_batch_s`.
        """
        from virnuc_core.engine.stage_times import StageTimes

        times = StageTimes(
            self.measured,
            origin_s=self._origin_s,
            began_s=self._began_s,
            ended_s=self.ended_s,
        )
        times.record(clock, job)

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
        from virnuc_core.telemetry.log import write_telemetry

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
    if all(spec.engine.int8_kernels == kernels for spec in pool.specs):
        return
    if kernels == "hopper":
        # The nodes took others because at least one of them cannot run these.
        way_out = "use nodes that have only H100 or H200 GPUs, or start over with --force"
    else:
        way_out = f"use --int8-kernels {kernels}"
    raise ConfigError(
        f"{job.run.root} began with int8 kernels '{kernels}', and the nodes would use others; "
        f"{way_out}"
    )
