"""Tune: the engine's real throughput under one set of settings, on all the reads, and whether the scores stay."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from tasks.artifacts import cell
from tasks.guard import device_slots
from tasks.logs import core_logs
from tasks.retries import POLICY
from tasks.states import done
from tasks.sweep import Candidate, Entry, Recommendation, Trial
from tasks.tables import Rows, percent, with_unit
from virnuc_core import provenance
from virnuc_core.config import Devices, EngineSpec
from virnuc_core.encoders.checkpoint import fingerprint
from virnuc_core.engine import shards
from virnuc_core.engine.devices import resolve
from virnuc_core.engine.messages import resolve_engine
from virnuc_core.errors import ConfigError, DeviceError, ShardError
from virnuc_core.pipeline import ClassifySpec, EmbeddingMeasured, Job, Watch, measure_embedding, prepare
from virnuc_core.reads.store import OrfStore
from virnuc_core.results import THRESHOLD
from virnuc_core.rundir import RunDir, lock_device, run_lock, whole_file, write_text_whole
from virnuc_core.telemetry.batches import embedding_window, summarise
from virnuc_core.telemetry.log import read_telemetry
from virnuc_core.telemetry.usage import device_stats

SCHEMA_VERSION: Final = 1
DEVICE_WAIT_S: Final = 60.0  # a device that another run is just leaving is waited for, not held against a candidate


@dataclass(frozen=True, slots=True)
class Bench:
    """What stays the same through a sweep."""

    out: Path
    store: Path
    models: Path
    devices: Devices
    base: EngineSpec
    sample_s: float = 0.5

    @property
    def trials(self) -> Path:
        """Where each measurement is kept."""
        return self.out / "trials"

    @property
    def reference(self) -> Path:
        """The base's scores, which those of all others are held against."""
        return self.trials / f"{_fingerprint(self, self.base)}.npy"


@task(name="measure", task_run_name="{name}", cache_policy=NO_CACHE, **POLICY)
def measure(bench: Bench, candidate: Candidate, repeat: int, *, name: str) -> State[Trial]:
    """One measurement of a candidate; one that was made before, over the same all, is used as it is."""
    with core_logs(), device_slots(resolve(bench.devices)):
        found = measured(bench, candidate, repeat)
    return done(found, describe(found), reused=found.reused)


def describe(trial: Trial) -> str:
    """A measurement in a sentence."""
    if trial.refused:
        return f"cannot run: {trial.refused}"
    same = "" if not trial.score_difference else f", scores differ by up to {trial.score_difference:.2g}"
    return f"{trial.tokens_per_s:,.0f} tokens/s in {trial.window_s:.1f} s{same}"


def measured(bench: Bench, candidate: Candidate, repeat: int) -> Trial:
    """Run the engine over the whole store with the candidate's settings, or read what an earlier run measured.

    Settings that this machine refuses are an answer, not an error. Errors: what a retry can help, and `ConfigError` of
    a store or models that do not fit.
    """
    try:
        resolve_engine(candidate.engine, resolve(bench.devices)[0].kind)
    except ConfigError as error:
        return _refused(str(error))
    print_ = _fingerprint(bench, candidate.engine)
    run = RunDir(bench.trials / f"{print_}-{repeat}")
    kept = run.root / "trial.json"
    with run_lock(run.root):
        before = _read(kept)
        if before is not None and (candidate.number or bench.reference.exists()):
            return before
        trial = _run(bench, candidate, run)
        if not trial.refused:  # what refuses today may run after an update
            write_text_whole(kept, json.dumps({"settings": candidate.label, "trial": asdict(trial)}, indent=1) + "\n")
    return trial


def _run(bench: Bench, candidate: Candidate, run: RunDir) -> Trial:
    engine = candidate.engine.model_copy(update={"device_wait_s": DEVICE_WAIT_S})
    spec = ClassifySpec(store=bench.store, models=bench.models, devices=bench.devices, engine=engine, force=True)
    job = prepare(run, spec)
    try:
        timed = measure_embedding(job, Watch(sample_s=bench.sample_s))
        scores = shards.read_scores(run)[0]
    except (ConfigError, DeviceError, ShardError) as error:
        if isinstance(error, DeviceError) and _taken(job):
            raise
        return _refused(str(error))
    finally:
        shutil.rmtree(run.shards, ignore_errors=True)  # the embeddings of every trial would fill the disk
    if timed.pool.reduced:
        count, divisor = len(timed.pool.reduced), timed.pool.reduced[0][1]
        return _refused(f"the device cannot hold these budgets: {count} shards ran on 1/{divisor} of them")
    if candidate.number == 0:
        _keep_reference(bench.reference, scores)
    difference, changed = compare(np.load(bench.reference), scores)
    return _trial(job, timed, difference, changed)


def _taken(job: Job) -> bool:
    """Whether another run holds a device: then nothing has been said about these settings."""
    for device in job.devices:
        if device.kind == "cuda":
            try:
                os.close(lock_device(device.id, 0.0))
            except DeviceError:
                return True
    return False


def _refused(reason: str) -> Trial:
    return Trial(0.0, 0.0, 0.0, None, None, None, None, None, 0, refused=reason)


def _trial(job: Job, timed: EmbeddingMeasured, difference: float, changed: int) -> Trial:
    found = read_telemetry(timed.telemetry.h5)
    whole = summarise(found.batches)
    stats = [device_stats(found.samples, device.id, embedding_window(found.batches)) for device in job.devices]
    loads = [s.gpu_util_avg for s in stats if s.gpu_util_avg is not None]
    peaks = [s.mem_used_peak for s in stats if s.mem_used_peak is not None]
    return Trial(
        tokens_per_s=whole.tokens_per_s or 0.0,
        window_s=whole.span_s,
        wall_s=timed.wall_s,
        packing=whole.packing_efficiency,
        starved=None if whole.queue is None else whole.queue.starved,
        utilisation=min(loads, default=None),
        peak_bytes=max(peaks, default=None),
        score_difference=difference,
        labels_changed=changed,
    )


def _keep_reference(path: Path, scores: NDArray[np.float32]) -> None:
    """The base's scores; those of its first trial stay."""
    if not path.exists():
        with whole_file(path) as aside, aside.open("wb") as handle:
            np.save(handle, scores)


def compare(reference: NDArray[np.float32], scores: NDArray[np.float32]) -> tuple[float, int]:
    """Largest difference of P(virus) and the number of labels that turned; both [n, 2].

    A score that is missing on one side only counts as the largest difference there can be.
    """
    if reference.shape != scores.shape:
        return 1.0, len(scores)
    if not len(scores):
        return 0.0, 0
    a, b = reference[:, 1].astype(np.float64), scores[:, 1].astype(np.float64)
    alone = np.isnan(a) ^ np.isnan(b)
    apart = np.where(alone, 1.0, np.nan_to_num(np.abs(a - b)))
    turned = alone | ((a >= THRESHOLD) != (b >= THRESHOLD))
    return float(apart.max()), int(turned.sum())


def _fingerprint(bench: Bench, engine: EngineSpec) -> str:
    """What a measurement depends on: reads, weights, these settings and those they are held against, the devices."""
    weights = fingerprint(bench.models)
    body = {
        "reads": OrfStore.open(bench.store).fingerprint,
        "weights": asdict(weights),
        "engine": engine.model_dump(mode="json"),
        "base": bench.base.model_dump(mode="json"),
        "devices": [device.record() for device in resolve(bench.devices)],
    }
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> Trial | None:
    """A measurement that was kept; None for none, or one that cannot be read."""
    try:
        return replace(Trial(**json.loads(path.read_text(encoding="utf-8"))["trial"]), reused=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def trial_rows(entries: Sequence[Entry], chosen: Recommendation, tolerance: float) -> Rows:
    """The sweep as a table, fastest first; what cannot run stands last."""
    ordered = sorted(entries, key=lambda entry: entry.median, reverse=True)
    return [_row(entry, chosen, tolerance) for entry in ordered]


def _row(entry: Entry, chosen: Recommendation, tolerance: float) -> dict[str, str]:
    engine = entry.candidate.engine
    last = next((trial for trial in reversed(entry.trials) if not trial.refused), None)
    load = None if last is None or last.utilisation is None else last.utilisation / 100
    return {
        "settings": cell(entry.candidate.label),
        "tokens/s": cell(round(entry.median)) if entry.rates else "–",
        "spread": percent(entry.spread) if len(entry.rates) > 1 else "–",
        "runs": cell(len(entry.rates)),
        "elapsed": with_unit(None if last is None else last.window_s, "s"),
        "utilisation": percent(load),
        "packing": percent(None if last is None else last.packing),
        "starved": percent(None if last is None else last.starved),
        "queue depth": cell(engine.prefetch_factor * max(1, engine.num_workers)),
        "score difference": cell(entry.difference),
        "labels changed": cell(None if last is None else last.labels_changed),
        "verdict": "**recommended**" if entry is chosen.entry else cell(entry.verdict(tolerance)),
        "why": cell(entry.refused or ("slower, dropped by halving" if entry.dropped else "")),
    }


def write_settings(path: Path, engine: EngineSpec, names: Sequence[str], reason: str) -> None:
    """The settings as a file that `--settings` takes."""
    lines = [
        f"# {reason}".replace("\n", " "),
        "# Use with --settings of any flow. A setting given beside it wins; one left out is the profile's.",
        *(f"{name} = {json.dumps(getattr(engine, name))}" for name in names),
    ]
    write_text_whole(path, "\n".join(lines) + "\n")


def write_sweep(
    bench: Bench, entries: Sequence[Entry], chosen: Recommendation, *, profile: str, tolerance: float, search: str
) -> Path:
    """`tune.json`: every measurement, and what they were made on."""
    found = resolve(bench.devices)
    body = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "profile": profile,
        "score_tolerance": tolerance,
        "search": search,
        "devices": [device.record() for device in found],
        "cores": len(os.sched_getaffinity(0)),
        "versions": provenance.versions(),
        "base": bench.base.model_dump(mode="json"),
        "candidates": [
            {
                "number": entry.candidate.number,
                "changes": dict(entry.candidate.changes),
                "tokens_per_s": list(entry.rates),
                "median_tokens_per_s": entry.median or None,
                "spread": entry.spread if len(entry.rates) > 1 else None,
                "verdict": entry.verdict(tolerance),
                "dropped": entry.dropped,
                "reason": entry.refused,
                "trials": [asdict(trial) for trial in entry.trials],
            }
            for entry in entries
        ],
        "recommended": {
            "number": chosen.entry.candidate.number,
            "engine": chosen.entry.candidate.engine.model_dump(mode="json"),
            "gain": chosen.gain,
            "reason": chosen.reason,
        },
    }
    path = bench.out / "tune.json"
    write_text_whole(path, json.dumps(body, indent=1) + "\n")
    return path
