"""Find the fastest engine settings here: measure candidates in rounds, and recommend one.

Only measured rates count, and a difference within the spread of the measurements counts as none.
Settings that change a label, or scores by more than the tolerance, are never recommended.
"""

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from virnuc_core.checked_files import array_bytes, read_checked_array
from virnuc_core.config import DEFAULT_THRESHOLD, EngineSpec
from virnuc_core.engine import shards
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.errors import (
    ConfigError,
    DamagedFileError,
    DeviceError,
    NotFiniteError,
    ShardError,
)
from virnuc_core.profiles import Profile
from virnuc_core.rundir import (
    SHARD_FILES,
    RunDir,
    ask_for_device,
    atomic_file,
    device_holder,
    discard,
    run_lock,
)
from virnuc_core.runfiles import Device, write
from virnuc_core.safe_files import remove_file
from virnuc_core.system_errors import path_exists, read_with_retries
from virnuc_core.tools.bench import Bench, Measurement, measure_job
from virnuc_core.validation import read_usable

Scores = NDArray[np.float32]  # [uniques, 2] P(others) and P(virus)

log = logging.getLogger(__name__)

MAX_SCORES_BYTES: Final = 64 << 30  # eight bytes for each sequence
MAX_CANDIDATES: Final = 200
MIN_TRIALS: Final = 2  # of the base, so that its rates tell the scatter
MIN_FINALISTS: Final = 3  # stay to the end, whatever the first rounds say
DIGEST_LENGTH: Final = 16  # characters of a digest in the names of files
# A device that another run is just leaving is waited for, not held against a candidate.
DEVICE_WAIT_S: Final = 60.0

Verdict = Literal["base", "usable", "changes scores", "changes labels", "cannot run"]


# --- Candidates -----------------------------------------------------------------------------------


class Trial(Measurement):
    """One measurement of one candidate; kept as `trial.json`."""

    score_difference: float  # largest, from the base
    labels_changed: int
    reused: bool = False  # measured by an earlier run over the same directory


@dataclass(slots=True)
class Candidate:
    """Settings, and what was measured of them so far.

    Number 0 is the base, which all others are compared with.
    """

    number: int
    changes: dict[str, Any]  # from the base
    engine: EngineSpec
    trials: list[Trial] = field(default_factory=list)
    refusal_reason: str = ""  # why these settings cannot run here
    is_dropped: bool = False  # slower than half of the others after a round

    @property
    def label(self) -> str:
        """`token_budget=8192 num_workers=2`, or `base`."""
        return " ".join(f"{name}={value}" for name, value in self.changes.items()) or "base"

    @property
    def queue_depth(self) -> int:
        """Return how many batches may be ready in advance.

        Without loader processes, a thread of the worker makes them.
        """
        return self.engine.prefetch_factor * max(1, self.engine.num_workers)

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens/s of each trial."""
        return tuple(trial.tokens_per_s for trial in self.trials)

    @property
    def rate(self) -> float:
        """The median of the rates; 0 without a trial."""
        if not self.trials:
            return 0.0
        return median(self.rates)

    @property
    def spread(self) -> float:
        """(Largest − smallest) ÷ median of the rates; 0 for a single trial."""
        if not self.rate:
            return 0.0
        return (max(self.rates) - min(self.rates)) / self.rate

    @property
    def difference(self) -> float | None:
        """The largest difference of scores from the base in any trial."""
        return max((trial.score_difference for trial in self.trials), default=None)

    def add(self, outcome: Trial | str) -> None:
        """Keep the outcome of a measurement: a trial, or the reason why the settings cannot run.

        Raises:
            ConfigError: It is the base that cannot run.
        """
        if isinstance(outcome, Trial):
            self.trials.append(outcome)
        elif self.number == 0:
            raise ConfigError(f"the settings to compare with cannot run here: {outcome}")
        else:
            self.refusal_reason = outcome

    def verdict(self, tolerance: float) -> Verdict:
        """Return whether the settings may be recommended, or why not.

        Args:
            tolerance: How much scores may differ from those of the base settings.

        Returns:
            `usable` if they may. `base` is the verdict on the base settings themselves.
        """
        if self.refusal_reason or self.difference is None:
            return "cannot run"
        if self.number == 0:
            return "base"
        if any(trial.labels_changed for trial in self.trials):
            return "changes labels"
        if self.difference > tolerance:
            return "changes scores"
        return "usable"


def make_candidates(base: EngineSpec, swept: Mapping[str, Sequence[Any]]) -> tuple[Candidate, ...]:
    """Return the base, then every combination of the swept values that differs from it.

    >>> swept = {"num_workers": (0, 2), "prefetch_factor": (4,)}
    >>> [candidate.label for candidate in make_candidates(EngineSpec(), swept)]
    ['base', 'num_workers=2']

    Args:
        base: The settings to compare with.
        swept: The values to try, by name of the setting.

    Returns:
        The candidates. They are numbered from 0, which is the base.

    Raises:
        ConfigError: There are too many combinations.
    """
    engines = [base]
    for values in itertools.product(*swept.values()):
        changes = dict(zip(swept, values, strict=True))
        engines.append(EngineSpec.model_validate(base.model_dump() | changes))
    distinct_engines = list(dict.fromkeys(engines))  # in the same order
    if len(distinct_engines) > MAX_CANDIDATES:
        raise ConfigError(
            f"{len(distinct_engines)} combinations are too many (at most {MAX_CANDIDATES}); "
            "give shorter lists"
        )
    return tuple(
        Candidate(number, _changed_settings(base, engine, swept), engine)
        for number, engine in enumerate(distinct_engines)
    )


def _changed_settings(
    base: EngineSpec, engine: EngineSpec, swept: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """Return the swept settings that differ from the base, with their values."""
    changes = {}
    for name in swept:
        value = getattr(engine, name)
        if value != getattr(base, name):
            changes[name] = value
    return changes


def require_enough_reads(n_reads: int, profile: Profile) -> None:
    """Raise an error if a sweep has fewer reads than its profile asks for.

    On few reads, start-up and tails take most of the time, so no setting can be told from another.

    Args:
        n_reads: Number of staged reads.
        profile: The profile of the sweep.

    Raises:
        ConfigError: The reads are too few.
    """
    if n_reads < profile.min_reads:
        raise ConfigError(
            f"{n_reads:,} reads are too few to tune: profile {profile.name} asks for "
            f"{profile.min_reads:,} or more; give more reads, or name another profile"
        )


# --- Rounds ---------------------------------------------------------------------------------------


def schedule_trials(
    candidates: Sequence[Candidate], repeats: int, *, halving: bool
) -> Iterator[tuple[Candidate, int, str]]:
    """Yield what to measure next. The caller adds the outcome before it asks for the next.

    Each round measures every candidate once. So a machine that becomes slower as it warms up is
    slower for all of them. A candidate that cannot run here is left out of the next rounds.

    Args:
        candidates: The sets of settings, the base first.
        repeats: Number of rounds.
        halving: Drop the slower half after each round; never the base, and never so many that
            fewer than MIN_FINALISTS stay.

    Yields:
        The candidate, the round counted from 0, and a name for the measurement.
    """
    running = list(candidates)
    for repeat in range(repeats):
        for position, candidate in enumerate(running, start=1):
            name = f"round {repeat + 1}, {position} of {len(running)}: {candidate.label}"
            yield candidate, repeat, name
        running = [candidate for candidate in running if not candidate.refusal_reason]
        if halving:
            _drop_slower_half(running)
            running = [candidate for candidate in running if not candidate.is_dropped]


def _drop_slower_half(running: Sequence[Candidate]) -> None:
    """Mark the slower half of the candidates as dropped, but not the base, which is number 0.

    At least MIN_FINALISTS candidates stay.
    """
    fastest_first = sorted(running, key=lambda candidate: candidate.rate, reverse=True)
    n_kept = max(MIN_FINALISTS, (len(running) + 1) // 2)
    for candidate in fastest_first[n_kept:]:
        candidate.is_dropped = candidate.number != 0


# --- Recommendation -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The settings to use, and what speaks for them."""

    candidate: Candidate
    gain: float  # over the base's median, as a share; 0 if the base is recommended
    reason: str


def recommend(candidates: Sequence[Candidate], *, tolerance: float) -> Recommendation:
    """Recommend the fastest settings that may be used, or the base if none is clearly faster.

    Settings are clearly faster if their median rate is higher than the base's by more than the
    scatter. The scatter is estimated by measuring the base in every round: it is the range of the
    base's rates, or of the candidate's rates if that is larger. If the base was measured only once,
    the scatter is not known, and nothing else is recommended.

    Args:
        candidates: The measured sets of settings, the base first.
        tolerance: How much scores may differ from the base's.

    Raises:
        ConfigError: Nothing was measured of the base.
    """
    base = candidates[0]
    if not base.rate:
        raise ConfigError(
            "nothing was measured with the settings to compare with; give reads with open frames"
        )
    # Candidates that were dropped after a round have fewer trials than the others.
    n_trials = max(len(candidate.trials) for candidate in candidates)
    usable = [
        candidate
        for candidate in candidates
        if candidate.verdict(tolerance) == "usable" and len(candidate.trials) == n_trials
    ]
    best = max(usable, key=lambda candidate: candidate.rate, default=base)
    gain = best.rate / base.rate - 1
    if best is base or gain <= 0:
        reason = "the base stays: nothing else that may be used was as fast"
        return Recommendation(base, 0.0, reason)
    faster = f"{100 * gain:.1f} % faster"
    if n_trials < MIN_TRIALS:
        reason = (
            f"the base stays: {best.label} is {faster}, but each was measured once, so the scatter "
            f"is not known; --repeats {MIN_TRIALS} or more tells it"
        )
        return Recommendation(base, 0.0, reason)
    scatter = max(best.spread, base.spread)
    estimate = f"{100 * scatter:.1f} % (range of {n_trials} measurements each)"
    if gain <= scatter:
        reason = f"the base stays: {best.label} is {faster}, within the scatter of {estimate}"
        return Recommendation(base, 0.0, reason)
    return Recommendation(best, gain, f"{best.label}: {faster} than the base; scatter {estimate}")


# --- Trials ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _MeasuredScores:
    """A measurement, and the scores of the sequences that it embedded."""

    measurement: Measurement
    scores: Scores


@dataclass(frozen=True, slots=True)
class Sweep:
    """Where candidates are measured, and what with. `base` names every setting; none is `auto`."""

    out: Path
    bench: Bench
    base: EngineSpec
    profile: Profile
    repeats: int
    search: Literal["halving", "grid"]
    # A candidate is measured on the first shards with so many protein tokens. None: on all.
    tokens: int | None = None

    def trial(self, candidate: Candidate, repeat: int) -> Trial | str:
        """Measure a candidate once, or return an earlier trial of the same work.

        A trial is written to the folder `trials`, so that an interrupted sweep can go on. The
        first trial of the base also writes its scores, which all trials are compared with.

        Args:
            candidate: The settings to measure.
            repeat: The number of its measurement, counted from 0.

        Returns:
            The trial, or the reason why the settings cannot run here.

        Raises:
            DeviceError: Another run holds a device, which says nothing about the settings.
            ConfigError: The store or the models cannot be used.
            VirnucError: The run failed, but may succeed if it is repeated.
        """
        try:  # the check of the settings before anything is run
            resolve_engine(candidate.engine, resolve(self.bench.devices))
        except ConfigError as error:
            return str(error)
        trials_folder = self.out / "trials"
        base_scores_path = trials_folder / f"{self._digest(self.base)}.npy"
        run = RunDir(trials_folder / f"{self._digest(candidate.engine)}-{repeat}")
        trial_path = run.root / "trial.json"
        with run_lock(run.root):
            earlier = read_usable(trial_path, Trial)
            is_base = candidate.number == 0
            # All others are compared with the scores of the base. If they are lost, measure again.
            if is_base:
                _remove_damaged_scores(base_scores_path)
            needs_base_scores = is_base and not path_exists(base_scores_path)
            if earlier is not None and not needs_base_scores:
                return earlier.model_copy(update={"reused": True})
            outcome = self._measure(candidate, run)
            if isinstance(outcome, str):
                return outcome  # nothing is kept: what is refused today may run after an update
            if needs_base_scores:
                _save_scores(base_scores_path, outcome.scores)
            trial = _compare_with_base(outcome, _read_scores(base_scores_path))
            write(trial_path, trial)
        return trial

    def _digest(self, engine: EngineSpec) -> str:
        """Return a short digest of all that a trial with these settings depends on.

        That includes the settings of the base, which its scores are compared with, and how much
        of the reads is measured.
        """
        comparison = self.base.model_dump(mode="json")
        if self.tokens:
            comparison["tokens"] = self.tokens
        return self.bench.fingerprint(engine, comparison)[:DIGEST_LENGTH]

    def _measure(self, candidate: Candidate, run: RunDir) -> _MeasuredScores | str:
        """Run a candidate, and return its rate and scores; or the reason why it cannot run.

        Raises:
            DeviceError: Another run holds a device, which says nothing about the settings.
        """
        engine = candidate.engine.model_copy(update={"device_wait_s": DEVICE_WAIT_S})
        job = self.bench.job(run, engine)
        n_shards = None
        if self.tokens is not None:
            n_shards = -(-self.tokens // job.engine.shard_tokens)  # rounded up
        try:
            measurement = measure_job(job, shards=n_shards, sample_s=self.bench.sample_s)
            measured_shards = range(len(job.plan))[:n_shards]  # all, if `n_shards` is None
            scores, _ = shards.read_scores(run, measured_shards)
        except DeviceError as error:
            if is_held_by_another_run(job.devices):
                raise
            return str(error)
        except (ConfigError, ShardError, NotFiniteError) as error:
            return str(error)
        finally:
            discard(run.root, *SHARD_FILES)  # the embeddings of all trials would fill the disk
        if measurement.reduced:
            # These shards ran out of memory and were repeated with smaller batches.
            n_reduced = len(measurement.reduced)
            _, budget_divisor = measurement.reduced[0]
            return (
                f"the device cannot hold these budgets: {n_reduced} shards ran on "
                f"1/{budget_divisor} of them"
            )
        return _MeasuredScores(measurement, scores)


def is_held_by_another_run(devices: Iterable[Device]) -> bool:
    """Return whether another run computes on one of the devices.

    An idle worker of `virnuc serve` is no run: its server gives the device back when it is asked.
    """
    for device in devices:
        if device_holder(device.local) and not ask_for_device(device.local):
            return True
    return False


def _save_scores(path: Path, scores: Scores) -> None:
    """Write the scores of the base's first trial, which all trials are compared with."""
    with atomic_file(path) as temp_path:
        temp_path.write_bytes(array_bytes(scores))


def _read_scores(path: Path) -> Scores:
    """Read the scores of the base's first trial, if the file is as it was written.

    Raises:
        DamagedFileError: The file has another content.
        UnsafeFileError: It is no regular file, or it is too large.
        UnreadableError: The system cannot read it.
    """
    remedy = "remove it and start again, which measures the base anew"
    read_scores = partial(read_checked_array, path, max_bytes=MAX_SCORES_BYTES, remedy=remedy)
    return read_with_retries(path, read_scores)


def _remove_damaged_scores(path: Path) -> None:
    """Remove the scores of the base's first trial, with a warning, if the file is damaged.

    The base is then measured again. Trials of other candidates keep their differences, which were
    computed from the scores as they were.
    """
    if not path_exists(path):
        return
    try:
        _read_scores(path)
    except DamagedFileError as error:
        log.warning("%s; the base is measured again", error)
        remove_file(path)


def _compare_with_base(measured: _MeasuredScores, base_scores: Scores) -> Trial:
    """Return a trial: a measurement with the difference of its scores from the base's.

    Settings with another shard size may have embedded more or fewer sequences than the base. Only
    the sequences that both have embedded are compared.
    """
    n_shared = min(len(base_scores), len(measured.scores))
    change = compare_scores(base_scores[:n_shared], measured.scores[:n_shared])
    return Trial(
        **measured.measurement.model_dump(),
        score_difference=change.max_difference,
        labels_changed=change.n_labels_changed,
    )


@dataclass(frozen=True, slots=True)
class ScoreChange:
    """How much scores differ from those of the base."""

    max_difference: float  # of P(virus)
    n_labels_changed: int


def compare_scores(base_scores: Scores, scores: Scores) -> ScoreChange:
    """Compare scores with those of the base.

    A score that is missing (NaN) on one side counts as the largest possible difference.

    Args:
        base_scores: Scores of the base, [n, 2].
        scores: Scores of the same sequences, [n, 2].
    """
    base_virus = base_scores[:, 1].astype(np.float64)
    virus = scores[:, 1].astype(np.float64)
    is_on_one_side = np.isnan(base_virus) ^ np.isnan(virus)
    differences = np.nan_to_num(np.abs(base_virus - virus))
    differences[is_on_one_side] = 1.0
    # A comparison with NaN is false, so a missing score alone would not count as a changed label.
    changes_label = (base_virus >= DEFAULT_THRESHOLD) != (virus >= DEFAULT_THRESHOLD)
    return ScoreChange(
        max_difference=float(differences.max(initial=0.0)),
        n_labels_changed=int((is_on_one_side | changes_label).sum()),
    )
