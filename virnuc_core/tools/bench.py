"""Measure the rate of an embedding run, in the same way for every tool."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pandas as pd

from virnuc_core.config import ClassifySpec, Devices, EngineSpec
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.engine.embedding import Embedding, Job, RunMonitor
from virnuc_core.pipeline import prepare
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import Device
from virnuc_core.telemetry.statistics import (
    BatchMetrics,
    batch_metrics,
    committed_span_s,
    device_usage,
    embedding_span,
)

# Fields of a device that are the same for all devices of one model
MODEL_FIELDS: Final = {"kind", "name", "capability"}


@dataclass(frozen=True, slots=True)
class Bench:
    """What stays the same through a series of measurements."""

    store: Path  # the staged reads
    models: Path
    devices: Devices
    sample_s: float = 0.5  # between two samples of the devices

    def job(self, run: RunDir, engine: EngineSpec) -> Job:
        """Prepare a run over the staged reads, and return what it needs to compute.

        What its run directory held from an earlier run is removed.

        Args:
            run: The run directory.
            engine: Settings of the engine.

        Returns:
            The job: inputs, settings, devices, and the shards that are to be computed, all.

        Raises:
            VirnucError: The settings, weights or devices cannot be used.
        """
        # `force` replaces what is in the directory.
        spec = ClassifySpec(models=self.models, devices=self.devices, engine=engine, force=True)
        return prepare(run, self.store, spec)

    def fingerprint(self, engine: EngineSpec, *more: Any, by_model: bool = False) -> str:
        """Return a digest of all that a measurement depends on.

        Two measurements with the same digest can stand for each other.

        Args:
            engine: Settings of the engine.
            more: Further things that it depends on, as JSON can hold them.
            by_model: Of the devices, only their models count. Embeddings are the same on two GPUs
                of one model, while times are not.
        """
        devices = resolve(self.devices)
        device_facts = [device.model_dump() for device in devices]
        if by_model:
            device_facts = [device.model_dump(include=MODEL_FIELDS) for device in devices]
        body = {
            "reads": OrfStore.open(self.store).fingerprint,
            "weights": fingerprint(self.models, engine.precision),
            "engine": resolve_engine(engine, devices).model_dump(mode="json"),
            "devices": device_facts,
            "more": more,
        }
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class Measurement(BatchMetrics):
    """What was measured of an embedding run: the metrics of its batches, and these."""

    tokens_per_s: float  # 0 if nothing was launched
    committed_s: float  # first launch to last commit
    wall_s: float  # with loading of the weights
    utilisation: float | None  # percent, of the device with the lowest
    shards: int  # computed
    restarts: int  # of workers
    # Shards that ran out of memory, and what their token budgets were divided by.
    reduced: tuple[tuple[int, int], ...]


def measure_job(job: Job, *, shards: int | None = None, sample_s: float = 0.5) -> Measurement:
    """Embed the shards of a job, and measure it. Its telemetry stays in the run directory.

    Args:
        job: The inputs, settings, devices and shards of a run.
        shards: Number of shards to embed, the first ones. None: all.
        sample_s: Seconds between two samples of the devices.

    Raises:
        VirnucError: Devices or workers failed.
    """
    job = replace(job, todo=job.todo[:shards])
    started_s = time.monotonic()
    embedding = Embedding(job, RunMonitor(sample_s=sample_s), started_s)
    pool = embedding.run()  # of the workers, whose deaths and reduced budgets it recorded
    wall_s = time.monotonic() - started_s
    embedding.write(stages=(), wall_s=wall_s)  # there were no other stages than the embedding
    measured = embedding.measured
    metrics = dict(batch_metrics(measured.batches))
    metrics["tokens_per_s"] = metrics["tokens_per_s"] or 0.0
    return Measurement(
        **metrics,
        committed_s=committed_span_s(measured.batches, measured.shards),
        wall_s=wall_s,
        utilisation=_lowest_utilisation(job.devices, measured.batches, measured.samples),
        shards=len(job.todo),
        restarts=len(pool.deaths),
        reduced=tuple(pool.reduced_budgets.items()),
    )


def _lowest_utilisation(
    devices: Sequence[Device], batches: pd.DataFrame, samples: pd.DataFrame
) -> float | None:
    """Return how busy the least used device was while batches ran, on average, in percent.

    It is None if no device has samples.
    """
    span = embedding_span(batches)
    mean_utilisations = []
    for device in devices:
        usage = device_usage(samples, device.id, span)
        if usage.gpu_util_avg is not None:
            mean_utilisations.append(usage.gpu_util_avg)
    return min(mean_utilisations, default=None)
