"""What commits cost, measured: the same shards computed with commits and without, in pairs, one after the other."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from virnuc_core.config import Devices, EngineSpec, Profile
from virnuc_core.encoders.checkpoint import fingerprint
from virnuc_core.engine.devices import resolve
from virnuc_core.engine.messages import Fingerprints, job_fingerprint, resolve_engine
from virnuc_core.errors import ConfigError, VirnucError
from virnuc_core.pipeline import ClassifySpec, Watch, measure_embedding, prepare
from virnuc_core.reads.store import OrfStore
from virnuc_core.report.files import RECORD, RawFolder, mapping, text
from virnuc_core.report.model import Report
from virnuc_core.report.overhead import (
    FOLDER,
    MIN_PAIRS,
    OverheadFile,
    OverheadPair,
    rate_of,
    read_overhead,
    write_overhead,
)
from virnuc_core.report.render import write_report
from virnuc_core.rundir import RunDir, run_lock

SHARDS_A_DEVICE: Final = 16  # a minute or so on a GPU: long beside the first batches, short beside a whole run

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OverheadSpec:
    """How much is measured."""

    pairs: int = MIN_PAIRS
    shards_a_device: int = SHARDS_A_DEVICE


@dataclass(frozen=True, slots=True)
class _Bench:
    """What every run of the measurement shares."""

    out: Path
    store: Path
    models: Path
    devices: Devices
    engine: EngineSpec
    watch: Watch
    shards: int


def measure_overhead(
    out: Path,
    *,
    store: Path,
    models: Path,
    devices: Devices,
    engine: EngineSpec,
    spec: OverheadSpec | None = None,
    watch: Watch | None = None,
    force: bool = False,
    on_run: Callable[[float], None] = lambda share: None,
) -> OverheadFile:
    """Run the pairs, leave their telemetry in `out/overhead/` and write `out/checkpoint_overhead.json`.

    What was measured before of the same reads, weights, settings and devices is used as it is, unless `force`.
    `on_run` hears the share of runs done. Errors: those of `prepare` and of the pool; `VirnucError` when nothing was
    launched.
    """
    spec = spec or OverheadSpec()
    job, ids = _job(store, models, devices, engine)
    before = None if force else read_overhead(RawFolder(out))
    if before is not None and (before.job, before.devices) == (job, ids) and len(before.pairs) >= spec.pairs:
        return before
    shutil.rmtree(out / FOLDER, ignore_errors=True)
    bench = _Bench(out, store, models, devices, engine, watch or Watch(), spec.shards_a_device * len(ids))
    pairs, computed = [], 0
    for number in range(1, spec.pairs + 1):
        found, computed = _pair(bench, number)
        pairs.append(found)
        on_run(number / spec.pairs)
    measured = OverheadFile(job=job, devices=ids, shards=computed, shard_tokens=engine.shard_tokens, pairs=tuple(pairs))
    write_overhead(out, measured)
    return measured


def measure_again(
    out: Path, *, models: Path | None, devices: str | None, spec: OverheadSpec, force: bool = False
) -> Report:
    """Measure in the directory of a finished validation, with its own settings, and judge it anew by its own profile.

    Errors: `ConfigError` when `out` is no validation; those of `measure_overhead`.
    """
    record = RawFolder(out).json(RECORD)
    if not mapping(record, "profile"):
        raise ConfigError(f"{out}: no validation (its run.json names no profile); run virnuc validate first")
    profile = Profile.model_validate(record["profile"])
    settings = mapping(record, "spec")
    measure_overhead(
        out,
        store=RunDir(out).store,
        models=models or Path(text(settings, "models") or ""),
        devices=Devices.parse(devices or text(settings, "devices") or "auto"),
        engine=EngineSpec.model_validate(profile.engine.model_dump() | dict(mapping(settings, "engine"))),
        spec=spec,
        force=force,
    )
    return write_report(out, profile)


def _job(store: Path, models: Path, devices: Devices, engine: EngineSpec) -> tuple[str, tuple[str, ...]]:
    """Digest of all that decides the work, and the devices' ids."""
    found, weights = resolve(devices), fingerprint(models)
    prints = Fingerprints(OrfStore.open(store).fingerprint, weights.esm2, weights.dnabert_s, weights.head)
    kind = found[0].kind
    loaders = {name: getattr(engine, name) for name in ("num_workers", "prefetch_factor", "pin_memory")}
    digest = job_fingerprint(prints, resolve_engine(engine, kind), kind) + json.dumps(loaders, sort_keys=True)
    return hashlib.sha256(digest.encode()).hexdigest(), tuple(device.id for device in found)


def _pair(bench: _Bench, number: int) -> tuple[OverheadPair, int]:
    """One pair; every other begins without commits, so that a drift of clocks and caches favours neither side."""
    names = {commit: f"{FOLDER}/{number}-{'on' if commit else 'off'}" for commit in (True, False)}
    restarts = computed = 0
    for commit in (True, False) if number % 2 else (False, True):
        died, computed = _run(bench, names[commit], commit=commit)
        restarts += died
    with_commits, without = (rate_of(RawFolder(bench.out), names[commit]) for commit in (True, False))
    if with_commits is None or without is None:
        raise VirnucError(f"{bench.out / FOLDER}: no batch was launched, so commits cannot be timed")
    log.info("pair %d: %.0f tokens/s with commits, %.0f without", number, with_commits[0], without[0])
    found = OverheadPair(
        with_run=names[True],
        without_run=names[False],
        with_tokens_per_s=with_commits[0],
        without_tokens_per_s=without[0],
        seconds=min(with_commits[1], without[1]),
        restarts=restarts,
    )
    return found, computed


def _run(bench: _Bench, name: str, *, commit: bool) -> tuple[int, int]:
    """One run over the first shards: worker restarts and shards computed. Its shards are removed, as nobody asks."""
    run = RunDir(bench.out / name)
    with run_lock(run.root):
        engine = bench.engine.model_copy(update={"commit": commit})
        asked = {"commit": commit}
        spec = ClassifySpec(
            store=bench.store, models=bench.models, devices=bench.devices, engine=engine, force=True, asked=asked
        )
        job = prepare(run, spec)
        measured = measure_embedding(replace(job, todo=job.todo[: bench.shards]), bench.watch)
        shutil.rmtree(run.shards)
    return measured.pool.restarts, measured.pool.computed
