"""The shards of a job embedded, on one worker a device, watched and measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from virnuc_core.config import EngineSpec, TraceSpec
from virnuc_core.engine.pool import Pool
from virnuc_core.engine.process import LocalWorkers, WorkerSpec
from virnuc_core.engine.shards import JobSpec, ShardPlan, ShardTask
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import Device, ModelFlops
from virnuc_core.telemetry.live import InferenceProgressReporter, RunMonitor, Sampler
from virnuc_core.telemetry.log import Telemetry, write_telemetry
from virnuc_core.telemetry.statistics import device_busy, embedding_span
from virnuc_core.telemetry.tables import Encoder, ShardDone, Stage, StageClock, StageTime

log = logging.getLogger(__name__)

WORKER: Final = "virnuc_core.engine.worker"
ENCODER_STAGES: Final[tuple[tuple[Stage, Encoder], ...]] = (("DNABERT-S", "dnabert_s"), ("ESM-2", "esm2"))


@dataclass(frozen=True, slots=True)
class Watch:
    """How a run is observed: none of it changes results."""

    sample_s: float = 0.5
    window_s: float = 30.0
    show: bool = False  # the live display on standard error
    on_progress: Callable[[float], None] | None = None  # hears the share that is done, 0 to 1


@dataclass(frozen=True, slots=True)
class Job:
    """A run made ready: everything decided, nothing computed."""

    run: RunDir
    store: OrfStore
    models: Path
    devices: tuple[Device, ...]
    engine: EngineSpec
    plan: ShardPlan
    todo: tuple[int, ...]
    damaged: tuple[str, ...]
    threshold: float
    flops: ModelFlops | None = None
    trace: TraceSpec | None = None  # what workers record with torch's profiler
    worker: str = WORKER  # module that says what a worker does


def worker_specs(
    models: Path, devices: Sequence[Device], engine: EngineSpec, trace: TraceSpec | None = None
) -> list[WorkerSpec]:
    """One worker a device."""
    root = str(models.resolve())
    return [WorkerSpec(models=root, device=device, engine=engine, trace=trace) for device in devices]


class Embedding:
    """One embedding of a job's shards, with all that is measured of it."""

    def __init__(self, job: Job, watch: Watch, started_s: float) -> None:
        self._job, self._watch = job, watch
        ids = [device.id for device in job.devices]
        self._sampler = Sampler(ids, interval_s=watch.sample_s)
        self._shards: list[ShardDone] = []
        self._origin_s, self._started = started_s, datetime.now(UTC)
        self._monitor = RunMonitor(self._sampler)

    def run(self, prewarmed: LocalWorkers | None = None) -> Pool:
        """Compute the shards that are left; the pool says what happened."""
        job, root, store = self._job, self._job.run.root.resolve(), self._job.store
        ranges = {shard: job.plan.range(shard) for shard in job.todo}
        tasks = [ShardTask(shard=shard, lo=lo, hi=hi) for shard, (lo, hi) in ranges.items()]
        done = store.n_uniques - sum(task.hi - task.lo for task in tasks)

        def on_done(shard: ShardDone) -> None:
            nonlocal done
            done += shard.rows
            self._shards.append(shard)
            self._monitor.add_shard(shard)
            if live is not None:
                live.update(done)

        reporter: AbstractContextManager[InferenceProgressReporter | None] = nullcontext(None)
        if tasks and (self._watch.show or self._watch.on_progress):
            reporter = InferenceProgressReporter(
                store.n_uniques,
                self._monitor,
                already_done=done,
                plain=None if self._watch.show else lambda line: log.info("%s", line),
                on_progress=self._watch.on_progress or (lambda _: None),
            )
        specs = worker_specs(job.models, job.devices, job.engine, job.trace)
        told = JobSpec(run=str(root), store=str(store.path.resolve()), reads=store.fingerprint)
        with self._sampler, reporter as live:
            pool = Pool(specs, told, root / "logs", prewarmed or LocalWorkers(job.worker), on_done)
            pool.run(tasks)
        return pool

    def tell(self, clock: StageClock) -> None:
        """Put the embedding's stages on the run's clock: seconds of the busiest device, and when they passed."""
        measured = self._measured(())
        busy = max(device_busy(measured.shards), key=lambda one: one.busy_s, default=None)
        for name, encoder in ENCODER_STAGES:
            seconds = 0.0 if busy is None else busy.esm2_s if encoder == "esm2" else busy.dnabert_s
            clock.add(name, seconds, embedding_span(measured.batches[measured.batches.encoder == encoder]))
        clock.fuse("Feature Merging", "ESM-2")
        clock.add("Model Prediction", busy.head_s if busy else 0.0)

    def write(self, stages: Sequence[StageTime], wall_s: float) -> Path:
        """Write the telemetry; returns its JSON file."""
        n_reads, window_s = self._job.store.n_reads, self._watch.window_s
        measured = self._measured(stages)
        return write_telemetry(self._job.run.telemetry, measured, n_reads=n_reads, wall_s=wall_s, window_s=window_s)

    def _measured(self, stages: Sequence[StageTime]) -> Telemetry:
        samples, host = self._sampler.samples(), self._sampler.host_samples()
        return Telemetry.of(self._shards, samples, host, stages, origin_s=self._origin_s, started=self._started)
