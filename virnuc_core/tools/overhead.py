"""Measure what commits, the sampler and loading the models anew cost.

Each is measured by pairs of runs over the same shards: one run with it, and one without.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from virnuc_core.config import EngineSpec, OnShare, Switch
from virnuc_core.engine.devices import resolve
from virnuc_core.errors import VirnucError
from virnuc_core.rundir import SHARD_FILES, RunDir, discard, run_lock
from virnuc_core.runfiles import write
from virnuc_core.tools.bench import Bench, Measurement, measure_job
from virnuc_core.validation import MIN_PAIRS, OVERHEAD, OverheadFile, OverheadPair, read_usable

log = logging.getLogger(__name__)

# A minute or so on a GPU: long beside the first batches, short beside a whole run.
SHARDS_PER_DEVICE: Final = 16
NEVER_S: Final = 86_400.0  # between two samples of the devices: no sample is taken


@dataclass(frozen=True, slots=True)
class _Series:
    """What all runs of a measurement have in common."""

    out: Path
    bench: Bench
    engine: EngineSpec
    max_shards: int  # of a run


@dataclass(frozen=True, slots=True)
class _SwitchedRun:
    """A run in which one feature was switched on or off."""

    name: str  # run directory, relative to the validation's
    tokens_per_s: float  # 0 if nothing was launched
    seconds: float
    restarts: int  # of workers
    shards: int


def measure_overhead(
    out: Path,
    bench: Bench,
    engine: EngineSpec,
    *,
    switches: Sequence[Switch] = ("commits",),
    pairs: int = MIN_PAIRS,
    shards: int = SHARDS_PER_DEVICE,
    force: bool = False,
    on_run: OnShare = lambda _: None,
) -> OverheadFile:
    """Measure how much slower features make a run, and write `out/checkpoint_overhead.json`.

    For each feature, pairs of runs compute the same shards: one run with the feature, and one
    without. The telemetry of the runs stays in `out/overhead/`.

    If the result of an earlier measurement of the same reads, weights, settings and devices has
    enough pairs of each feature, it is returned, and nothing is run. Its pairs of other features
    are kept in the file.

    Args:
        out: The directory of the validation.
        bench: The reads, models and devices.
        engine: Settings of the runs.
        switches: The features that are switched on and off.
        pairs: Pairs of runs for each feature.
        shards: Shards of each run, for each device.
        force: Measure again, whatever is there.
        on_run: Called with the share of the pairs that are done.

    Returns:
        The content of the file.

    Raises:
        VirnucError: No batch was launched, or a run failed.
    """
    job_digest = bench.fingerprint(engine)
    device_ids = tuple(device.id for device in resolve(bench.devices))
    earlier = read_usable(out / OVERHEAD, OverheadFile)
    if earlier is not None and (earlier.job, earlier.devices) != (job_digest, device_ids):
        earlier = None
    if earlier is not None and not force:
        n_pairs_of_switch = Counter(pair.switch for pair in earlier.pairs)
        if all(n_pairs_of_switch[switch] >= pairs for switch in switches):
            return earlier

    series = _Series(out, bench, engine, max_shards=shards * len(device_ids))
    measured_pairs: list[OverheadPair] = []
    n_shards: list[int] = []
    for number in range(1, pairs + 1):
        for switch in switches:
            run_with, run_without = _run_pair(series, switch, number)
            measured_pairs.append(_compare(switch, run_with, run_without))
            n_shards.append(run_with.shards)
            log.info(
                "%s, pair %d: %.0f tokens/s with, %.0f without",
                switch,
                number,
                run_with.tokens_per_s,
                run_without.tokens_per_s,
            )
        on_run(number / pairs)
    measured = OverheadFile(
        job=job_digest,
        devices=device_ids,
        shards=n_shards[0],  # all runs compute the same shards
        shard_tokens=engine.shard_tokens,
        pairs=tuple(measured_pairs),
    )
    measured = _with_other_switches(measured, earlier)
    write(out / OVERHEAD, measured)
    return measured


def _with_other_switches(measured: OverheadFile, earlier: OverheadFile | None) -> OverheadFile:
    """Return a measurement with the earlier pairs of the features that were not measured now.

    A verdict may stand on them, for example on the cost of commits. Pairs over other numbers of
    shards are left out, because the file names one number for all pairs.

    Args:
        measured: The new measurement.
        earlier: The earlier one of the same reads, weights, settings and devices, or None.
    """
    if earlier is None:
        return measured
    if (earlier.shards, earlier.shard_tokens) != (measured.shards, measured.shard_tokens):
        return measured
    switches = {pair.switch for pair in measured.pairs}
    kept_pairs = [pair for pair in earlier.pairs if pair.switch not in switches]
    return measured.model_copy(update={"pairs": (*kept_pairs, *measured.pairs)})


def _run_pair(series: _Series, switch: Switch, number: int) -> tuple[_SwitchedRun, _SwitchedRun]:
    """Run the same shards with and without a feature, and return both runs in this order.

    The order of execution alternates from pair to pair, so that a drift of clocks or caches does
    not favour one side.

    Args:
        series: What all runs of the measurement have in common.
        switch: The feature.
        number: The number of the pair, from 1. Pairs with an even number run without the feature
            first.

    Raises:
        VirnucError: No batch was launched, or a run failed.
    """
    execution_order = (True, False)
    if number % 2 == 0:
        execution_order = (False, True)
    run_by_state = {}
    for is_on in execution_order:
        run_by_state[is_on] = _run_switched(series, switch, number, is_on=is_on)
    if not all(run.tokens_per_s for run in run_by_state.values()):
        raise VirnucError(f"{series.out}: no batch was launched, so {switch} cannot be timed")
    return run_by_state[True], run_by_state[False]


def _run_switched(series: _Series, switch: Switch, number: int, *, is_on: bool) -> _SwitchedRun:
    """Run the first shards with or without a feature, in a run directory of its own.

    The feature "commits" writes each shard to the disk, and "sampler" reads the devices while the
    run goes on. "models" keeps the loaded models from shard to shard: if it is switched off, the
    second half of the shards is computed by new workers, which load the models again. For
    "models" the total time counts, including the loading.

    Args:
        series: What all runs of the measurement have in common.
        switch: The feature.
        number: The number of the pair of runs, from 1.
        is_on: Run with the feature.
    """
    # Names of old results have no feature, because commits were the only one.
    prefix = "" if switch == "commits" else f"{switch}-"
    state = "on" if is_on else "off"
    name = f"overhead/{number}-{prefix}{state}"
    commit = is_on or switch != "commits"
    sample_s = series.bench.sample_s
    if switch == "sampler" and not is_on:
        sample_s = NEVER_S

    run = RunDir(series.out / name)
    with run_lock(run.root):
        engine = series.engine.model_copy(update={"commit": commit})
        job = series.bench.job(run, engine)
        shards = job.todo[: series.max_shards]
        groups = [shards]  # each group of shards is computed by new workers
        if switch == "models" and not is_on:
            half = len(shards) // 2
            groups = [shards[:half], shards[half:]]
        measurements = []
        for group in groups:
            if group:  # half of a single shard is none
                measurements.append(measure_job(replace(job, todo=group), sample_s=sample_s))
        discard(run.root, *SHARD_FILES)  # the embeddings are not needed

    seconds = sum(_seconds(measurement, switch) for measurement in measurements)
    tokens = sum(measurement.tokens_per_s * measurement.span_s for measurement in measurements)
    tokens_per_s = 0.0
    if seconds:
        tokens_per_s = tokens / seconds
    return _SwitchedRun(
        name=name,
        tokens_per_s=tokens_per_s,
        seconds=seconds,
        restarts=sum(measurement.restarts for measurement in measurements),
        shards=len(shards),
    )


def _seconds(measurement: Measurement, switch: Switch) -> float:
    """Return the time of a run that is compared with the other run of its pair.

    For "models" it is the whole time, because loading them counts. For the other features it is
    the time from the first batch to the last committed shard.
    """
    if switch == "models":
        return measurement.wall_s
    return measurement.committed_s


def _compare(switch: Switch, run_with: _SwitchedRun, run_without: _SwitchedRun) -> OverheadPair:
    """Return the record of a pair of runs, with the speed of each."""
    return OverheadPair(
        switch=switch,
        with_run=run_with.name,
        without_run=run_without.name,
        with_tokens_per_s=run_with.tokens_per_s,
        without_tokens_per_s=run_without.tokens_per_s,
        seconds=min(run_with.seconds, run_without.seconds),  # a pair is as good as its shorter run
        restarts=run_with.restarts + run_without.restarts,
    )
