"""What commits cost, measured: the same shards computed with commits and without, in pairs, one after the other."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from virnuc_core.config import Devices, EngineSpec, Profile
from virnuc_core.errors import ConfigError, VirnucError
from virnuc_core.measure.bench import Bench, Measurement, measure
from virnuc_core.rundir import RunDir, run_lock
from virnuc_core.runfiles import (
    MIN_PAIRS,
    OVERHEAD,
    OverheadFile,
    OverheadPair,
    ValidationRecord,
    read_usable,
    write,
)

FOLDER: Final = "overhead"  # of the pairs' run directories
SHARDS_A_DEVICE: Final = 16  # a minute or so on a GPU: long beside the first batches, short beside a whole run

log = logging.getLogger(__name__)


def measure_overhead(
    out: Path,
    bench: Bench,
    engine: EngineSpec,
    *,
    pairs: int = MIN_PAIRS,
    shards_a_device: int = SHARDS_A_DEVICE,
    force: bool = False,
    on_run: Callable[[float], None] = lambda share: None,
) -> OverheadFile:
    """Run the pairs, leave their telemetry in `out/overhead/` and write `out/checkpoint_overhead.json`.

    What was measured before of the same reads, weights, settings and devices is used as it is, unless `force`.
    `on_run` hears the share of runs done. Errors: those of `prepare` and of the pool; `VirnucError` when nothing was
    launched.
    """
    job, ids = bench.fingerprint(engine), tuple(device.id for device in bench.resolved())
    before = None if force else read_usable(out / OVERHEAD, OverheadFile)[0]
    if before is not None and (before.job, before.devices) == (job, ids) and len(before.pairs) >= pairs:
        return before
    shutil.rmtree(out / FOLDER, ignore_errors=True)
    found, shards = [], 0
    for number in range(1, pairs + 1):
        pair, shards = _pair(out, bench, engine, number, shards_a_device * len(ids))
        found.append(pair)
        on_run(number / pairs)
    measured = OverheadFile(job=job, devices=ids, shards=shards, shard_tokens=engine.shard_tokens, pairs=tuple(found))
    write(out / OVERHEAD, measured)
    return measured


def measure_again(
    out: Path, *, models: Path | None, devices: str | None, pairs: int, shards_a_device: int, force: bool = False
) -> Profile:
    """Measure in the directory of a finished validation, with its own settings; returns the profile to judge it by.

    Errors: `ConfigError` when `out` is no validation; those of `measure_overhead`.
    """
    record = read_usable(RunDir(out).record, ValidationRecord)[0]
    if record is None or record.profile is None:
        raise ConfigError(f"{out}: no validation (its run.json names no profile); run virnuc validate first")
    settings, store = record.spec, RunDir(out).store
    bench = Bench(store, models or Path(settings.get("models", "")), Devices.parse(devices or settings["devices"]))
    engine = EngineSpec.model_validate(record.profile.engine.model_dump() | dict(settings.get("engine", {})))
    measure_overhead(out, bench, engine, pairs=pairs, shards_a_device=shards_a_device, force=force)
    return record.profile


def _pair(out: Path, bench: Bench, engine: EngineSpec, number: int, shards: int) -> tuple[OverheadPair, int]:
    """One pair; every other begins without commits, so that a drift of clocks and caches favours neither side."""
    names = {commit: f"{FOLDER}/{number}-{'on' if commit else 'off'}" for commit in (True, False)}
    order = (True, False) if number % 2 else (False, True)
    made = {commit: _run(out / names[commit], bench, engine, shards, commit=commit) for commit in order}
    on, off = made[True], made[False]
    if not on.committed_tokens_per_s or not off.committed_tokens_per_s:
        raise VirnucError(f"{out / FOLDER}: no batch was launched, so commits cannot be timed")
    log.info(
        "pair %d: %.0f tokens/s with commits, %.0f without",
        number,
        on.committed_tokens_per_s,
        off.committed_tokens_per_s,
    )
    pair = OverheadPair(
        with_run=names[True],
        without_run=names[False],
        with_tokens_per_s=on.committed_tokens_per_s,
        without_tokens_per_s=off.committed_tokens_per_s,
        seconds=min(on.committed_s, off.committed_s),
        restarts=on.restarts + off.restarts,
    )
    return pair, made[order[-1]].shards


def _run(folder: Path, bench: Bench, engine: EngineSpec, shards: int, *, commit: bool) -> Measurement:
    """One run over the first shards. Its shards are removed, as nobody asks for them."""
    run = RunDir(folder)
    with run_lock(run.root):
        job = bench.job(run, engine.model_copy(update={"commit": commit}))
        measured = measure(job, shards=shards, sample_s=bench.sample_s)
        shutil.rmtree(run.shards)
    return measured
