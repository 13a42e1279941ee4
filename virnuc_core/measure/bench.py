"""One way to measure the engine: a job over a staged store, embedded with given settings, and what its telemetry says.

Every tool stands on it, so that a rate means the same in all of them.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from virnuc_core.config import Devices, EngineSpec
from virnuc_core.encoders.checkpoint import fingerprint
from virnuc_core.engine.devices import Device, resolve, resolve_engine
from virnuc_core.engine.embedding import Job, Watch, measure_embedding
from virnuc_core.pipeline import ClassifySpec, prepare
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunFile
from virnuc_core.telemetry.log import read_telemetry
from virnuc_core.telemetry.statistics import batch_metrics, committed_tokens_per_s, device_usage, embedding_span


@dataclass(frozen=True, slots=True)
class Bench:
    """What stays the same through a series of measurements."""

    store: Path
    models: Path
    devices: Devices
    sample_s: float = 0.5

    def resolved(self) -> tuple[Device, ...]:
        """The devices; `DeviceError` for one that is not here."""
        return resolve(self.devices)

    def job(self, run: RunDir, engine: EngineSpec) -> Job:
        """A fresh job over the store in `run`; what was there is removed. Errors: those of `prepare`."""
        asked = {"commit": engine.commit}
        spec = ClassifySpec(
            store=self.store, models=self.models, devices=self.devices, engine=engine, force=True, asked=asked
        )
        return prepare(run, spec)

    def fingerprint(self, engine: EngineSpec, *more: Any) -> str:
        """Digest of all that a measurement depends on: reads, weights, settings, devices, and `more` (JSON)."""
        found = self.resolved()
        body = {
            "reads": OrfStore.open(self.store).fingerprint,
            "weights": asdict(fingerprint(self.models)),
            "engine": resolve_engine(engine, found[0].kind).model_dump(mode="json"),
            "devices": [device.record() for device in found],
            "more": more,
        }
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class Measurement(RunFile):
    """What one embedding run came to. Rates count both encoders' real tokens."""

    tokens_per_s: float  # from the first launch to the last finish
    committed_tokens_per_s: float  # from the first launch to the last commit
    window_s: float  # first launch to last finish
    committed_s: float  # first launch to last commit
    wall_s: float  # with loading of the weights
    packing: float | None  # 0 to 1
    starved: float | None  # share of batches waited for longer than 50 ms
    utilisation: float | None  # percent, of the device with the lowest
    peak_bytes: float | None  # of the device with the highest
    shards: int  # computed
    restarts: int  # of workers
    reduced: tuple[tuple[int, int], ...]  # shard, and what its token budgets were divided by for want of memory


def measure(job: Job, *, shards: int | None = None, sample_s: float = 0.5) -> Measurement:
    """Embed a job's shards, or the first `shards` of them; its telemetry stays in the run directory.

    Nothing launched is a rate of 0. Errors: those of the pool.
    """
    timed = measure_embedding(replace(job, todo=job.todo[:shards]), Watch(sample_s=sample_s))
    found = read_telemetry(timed.telemetry.h5)
    whole, window = batch_metrics(found.batches), embedding_span(found.batches)
    stats = [device_usage(found.samples, device.id, window) for device in job.devices]
    committed = committed_tokens_per_s(found.batches, found.shards) or 0.0
    return Measurement(
        tokens_per_s=whole.tokens_per_s or 0.0,
        committed_tokens_per_s=committed,
        window_s=whole.span_s,
        committed_s=whole.tokens / committed if committed else 0.0,
        wall_s=timed.wall_s,
        packing=whole.packing_efficiency,
        starved=None if whole.queue is None else whole.queue.starved,
        utilisation=min((s.gpu_util_avg for s in stats if s.gpu_util_avg is not None), default=None),
        peak_bytes=max((s.mem_used_peak for s in stats if s.mem_used_peak is not None), default=None),
        shards=timed.pool.computed,
        restarts=timed.pool.restarts,
        reduced=timed.pool.reduced,
    )


def median(values: Sequence[float]) -> float:
    """The median; 0 of nothing."""
    return statistics.median(values) if values else 0.0


def spread(values: Sequence[float]) -> float:
    """(Largest − least) ÷ median; 0 of one measurement.

    >>> spread((90.0, 100.0, 120.0))
    0.3
    """
    middle = median(values)
    return (max(values) - min(values)) / middle if middle else 0.0
