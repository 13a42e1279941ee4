"""Tells where the time of a computation went: in which stages, and what a worker's start cost.

pandas comes with this module. A command imports it while its workers compute.
"""

import itertools
from dataclasses import astuple, dataclass
from typing import Any, Final, cast

import pandas as pd

from virnuc_core.encoders.registry import ENCODERS
from virnuc_core.engine.pool import PooledJob
from virnuc_core.telemetry.log import Telemetry
from virnuc_core.telemetry.statistics import DeviceBusy, device_busy, embedding_span
from virnuc_core.telemetry.tables import OVERLAPPED, START_UP, Stage, StageClock

# The part of a worker's start in which kernels are compiled.
KERNELS: Final = START_UP[-2]


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


class StageTimes:
    """The times of a computation that has ended, by stage."""

    def __init__(
        self, telemetry: Telemetry, *, origin_s: float, began_s: float, ended_s: float
    ) -> None:
        """Note when the parts of a run began and ended, in seconds of `time.monotonic()`.

        Args:
            telemetry: What was measured meanwhile.
            origin_s: When the run began.
            began_s: When it began to compute.
            ended_s: When it had computed everything.
        """
        self._telemetry = telemetry
        self._origin_s = origin_s
        self._began_s = began_s
        self._ended_s = ended_s

    def record(self, clock: StageClock, job: PooledJob) -> None:
        """Add to the stage clock how long each phase of the computation took.

        The phases of all devices overlap. Those of the device that computed longest are taken,
        because it decides how long the run takes.

        Args:
            clock: Collects the times of the run's stages. It is changed.
            job: What happened to the workers. The record of the device's worker gets a new entry,
                `first_batch_s`.
        """
        shards = self._telemetry.shards
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
        clock.add("Shutdown", self._ended_s - committed_s)

    def _batches_of(self, device: DeviceBusy) -> pd.DataFrame:
        """Return the rows of the batch table that belong to a device."""
        batches = self._telemetry.batches
        return batches[batches.device == device.device]

    def _record_stages(self, clock: StageClock, busiest: DeviceBusy | None) -> None:
        """Add the time that the busiest device spent in each encoder and in the classifier.

        Args:
            clock: Collects the times of the run's stages. It is changed.
            busiest: The device. None if nothing was computed; all times are 0 then.
        """
        batches = self._telemetry.batches
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
        shards = self._telemetry.shards
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
