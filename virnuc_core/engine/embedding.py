"""One run's shards embedded by a pool of workers, watched and measured."""

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from virnuc_core.config import ClassifySpec, EngineSpec, OnShare, TraceSpec
from virnuc_core.engine.pool import MAX_NOT_FINITE_SHARE, Pool, PooledJob
from virnuc_core.engine.process import WORKER, local_workers, worker_specs
from virnuc_core.engine.shards import ShardPlan, ShardTask
from virnuc_core.errors import StorageError, format_bytes
from virnuc_core.lease import require_lease
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import Device, ModelFlops, read_record
from virnuc_core.telemetry.live import InferenceProgressReporter, Sampler
from virnuc_core.telemetry.log import journal, read_journal, write_telemetry
from virnuc_core.telemetry.statistics import device_busy, embedding_span
from virnuc_core.telemetry.tables import (
    ENCODERS,
    OVERLAPPED,
    START_UP,
    ShardDone,
    StageClock,
    StageTime,
)

SHARD_BYTES: Final = 4_096  # of a shard's file besides embeddings and scores, and of its last block


@dataclass(frozen=True, slots=True)
class RunMonitor:
    """How a run is observed: none of it changes results."""

    sample_s: float = 0.5
    window_s: float = 30.0
    on_progress: OnShare | None = None
    alone: bool = True  # not one of several runs at once: its progress and its times are shown


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
        return sum(
            SHARD_BYTES + (hi - lo) * self.unique_bytes for lo, hi in map(self.plan.range, shards)
        )

    def tasks(self, chosen: Sequence[int]) -> list[ShardTask]:
        """Some shards, as workers are told of them."""
        weights = read_record(self.run).fingerprints
        most = max(0, max(1, int(MAX_NOT_FINITE_SHARE * self.store.n_uniques)) - self.lost)
        told: dict[str, Any] = {
            "run": str(self.run.root.resolve()),
            "store": str(self.store.path.resolve()),
        }
        told |= {
            "reads": weights.pop("reads"),
            "weights": weights,
            "max_not_finite": most,
            "threshold": self.spec.threshold,
        }
        spans = ((shard, *self.plan.range(shard)) for shard in chosen)
        return [ShardTask(**told, shard=shard, lo=lo, hi=hi) for shard, lo, hi in spans]


class Embedding:
    """One embedding of a job's shards, and what is measured of it."""

    def __init__(self, job: Job, watch: RunMonitor, started_s: float) -> None:
        self._job, self._watch = job, watch
        self._origin_s, self._started = started_s, datetime.now(UTC)

    def run(self, pool: Pool | None = None) -> PooledJob:
        """Compute the shards that are left, by the workers of `pool` if they are as asked for, else by its own; what is
        returned says what happened, `measured` and `ended_s` what it took."""
        job, store, heard = self._job, self._job.store, self._watch.on_progress
        specs, self._began_s = (
            worker_specs(job.spec.models, job.devices, job.engine, job.trace),
            time.monotonic(),
        )
        ids, left, tasks = [device.id for device in job.devices], set(job.todo), job.tasks(job.todo)
        done = store.n_uniques - sum(task.hi - task.lo for task in tasks)
        with ExitStack() as held:
            keep, live = (
                held.enter_context(journal(job.run.journal, self._origin_s, self._started, ids)),
                None,
            )
            watching = Sampler(
                ids, every_s=self._watch.sample_s, note=keep, read=pool.reader if pool else None
            )
            sampler = held.enter_context(watching)
            if tasks and heard:
                live = held.enter_context(
                    InferenceProgressReporter(store.n_uniques, sampler, heard, already_done=done)
                )
            if pool is None or not (pool.specs == specs or job.spec.cluster):
                pool = held.enter_context(Pool(specs, local_workers(job.worker, specs)))

            def note(noted: ShardDone | str) -> None:
                require_lease(job.run.root, look=False)
                keep(noted)
                if isinstance(noted, ShardDone):
                    left.discard(noted.shard)
                    if live is not None:
                        live.update(noted)

            try:
                found = pool.compute(tasks, job.run.root.resolve() / "logs", note)
            except StorageError as error:
                room = format_bytes(job.shard_bytes(left))
                raise StorageError(
                    f"{error}; the shards still to come take about {room}"
                ) from error
        self.ended_s = time.monotonic()
        if (noted := read_journal(job.run.journal)) is None:
            raise StorageError(
                f"{job.run.journal}: what was measured could not be kept; make room and run again"
            )
        self.measured = noted[0]
        return found

    def tell(self, clock: StageClock, job: PooledJob) -> None:
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
            own, said = batches[batches.device == busy.device], job.records[busy.device]
            launched_s, finished_s = (
                own.launched_s.min(),
                shards.finished_s[shards.device == busy.device].max(),
            )
            imported_s, loaded_s, ready_s = (
                said["started_s"] + said[n] for n in ("import_s", "load_s", "ready_s")
            )
            spawned_s = min(
                said["spawned_s"], self._began_s
            )  # later for one that took the place of a dead one
            up_s, waited_s = ready_s + said["waited_s"], said["waited_s"]
            start = [
                min(said["asked_s"], spawned_s),
                spawned_s,
                imported_s,
                loaded_s,
                up_s,
                launched_s,
            ]
            if up_s < self._began_s:  # for a job before this one
                start, waited_s = [*[self._began_s] * 5, launched_s], 0.0
            said["first_batch_s"] = (
                launched_s - start[0]
            )  # after the command began, or what first asked for a worker
            for part, began_s, ended_s in zip(START_UP, start, start[1:], strict=False):
                clock.add(part, ended_s - began_s, (began_s, ended_s))
            clock.add(START_UP[-2], -waited_s)  # for the job, with the weights loaded
            clock.add(OVERLAPPED, max(0.0, self._began_s - start[0] - waited_s))
            still_s = max(0.0, finished_s - launched_s - busy.busy_s)
            waits_s = own.wait_ms[1:].sum() / 1e3  # the first batch's is part of the start
            causes = {
                "Restarts": job.restart_s[busy.device],
                "Waiting for batches": waits_s,
                "Commits": busy.commit_s,
            }
            for part, most_s in {
                **causes,
                "Device idle": still_s,
            }.items():  # none has cost more than is left
                clock.add(part, min(still_s, most_s))
                still_s -= min(still_s, most_s)
            committed_s = (shards.finished_s + shards.commit_s).max()
            clock.add("Commits", committed_s - finished_s)
        clock.add("Shutdown", self.ended_s - committed_s)

    def write(
        self, stages: Sequence[StageTime], wall_s: float, sequences_per_hour: float | None = None
    ) -> Path:
        """Write the telemetry, which takes the journal's place; returns its JSON file."""
        run, measured = self._job.run, replace(self.measured, stages=tuple(stages))
        told = {
            "n_reads": self._job.store.n_reads,
            "wall_s": wall_s,
            "sequences_per_hour": sequences_per_hour,
        }
        path = write_telemetry(run.telemetry, measured, window_s=self._watch.window_s, **told)
        run.journal.unlink()
        return path
