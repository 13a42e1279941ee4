"""Which engine settings are fastest here: candidates measured in rounds, and the one that may be recommended.

Only measured rates count, a difference within the spread of the measurements counts as none. Settings that turn a label
or change the scores by more than the tolerance are never recommended."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnuc_core.config import DEFAULT_THRESHOLD, EngineSpec
from virnuc_core.engine import shards
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.errors import ConfigError, DeviceError, NotFiniteError, ShardError
from virnuc_core.profiles import Profile
from virnuc_core.rundir import SHARD_FILES, RunDir, atomic_file, device_holder, discard, run_lock
from virnuc_core.runfiles import write
from virnuc_core.tools.bench import Bench, Measurement, measure
from virnuc_core.validation import read_usable

MAX_CANDIDATES: Final = 200
FINALISTS: Final = 3  # stay in the running to the end, whatever the first rounds say
DEVICE_WAIT_S: Final = (
    60.0  # a device that another run is just leaving is waited for, not held against a candidate
)

Verdict = Literal["base", "usable", "changes scores", "changes labels", "cannot run"]


class Trial(Measurement):
    """One measurement of one candidate on all reads; kept as `trial.json`."""

    score_difference: float  # largest, against the base
    labels_changed: int
    reused: bool = False  # measured by an earlier run over the same directory


@dataclass(slots=True)
class Candidate:
    """One set of settings and what was measured of it so far. Number 0 is the base: what all are held against."""

    number: int
    changes: dict[str, Any]  # against the base
    engine: EngineSpec
    trials: list[Trial] = field(default_factory=list)
    refused: str = ""  # why these settings cannot run here
    dropped: bool = False  # slower than half of the others after a round

    @property
    def label(self) -> str:
        """`token_budget=8192 num_workers=2`, or `base`."""
        return " ".join(f"{name}={value}" for name, value in self.changes.items()) or "base"

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens a second of each trial."""
        return tuple(trial.tokens_per_s for trial in self.trials)

    @property
    def rate(self) -> float:
        """The median of the rates; 0 of nothing."""
        return median(self.rates) if self.rates else 0.0

    @property
    def spread(self) -> float:
        """(Largest − least) ÷ median of the rates; 0 of one."""
        return (max(self.rates) - min(self.rates)) / self.rate if self.rate else 0.0

    @property
    def difference(self) -> float | None:
        """Largest score difference against the base in any trial."""
        return max((trial.score_difference for trial in self.trials), default=None)

    def add(self, outcome: Trial | str) -> None:
        """Keep a trial, or the reason why there is none; `ConfigError` when it is the base that cannot run."""
        if isinstance(outcome, Trial):
            self.trials.append(outcome)
        elif self.number == 0:
            raise ConfigError(f"the settings to compare with cannot run here: {outcome}")
        else:
            self.refused = outcome

    def verdict(self, tolerance: float) -> Verdict:
        """Whether it may be recommended."""
        if self.refused or self.difference is None:
            return "cannot run"
        if self.number == 0:
            return "base"
        if any(trial.labels_changed for trial in self.trials):
            return "changes labels"
        return "usable" if self.difference <= tolerance else "changes scores"


class Recommendation(NamedTuple):
    """The settings to use, and what speaks for them."""

    candidate: Candidate
    gain: float  # over the base's median; 0 when the base is recommended
    reason: str


def candidates(base: EngineSpec, swept: Mapping[str, Sequence[Any]]) -> tuple[Candidate, ...]:
    """The base, then every combination of the swept values that differs from it; `ConfigError` when they are too many.

    >>> [c.label for c in candidates(EngineSpec(), {"num_workers": (0, 2), "prefetch_factor": (4,)})]
    ['base', 'num_workers=2']
    """
    combined = (
        base.model_dump() | dict(zip(swept, one, strict=True))
        for one in itertools.product(*swept.values())
    )
    found = []
    for number, engine in enumerate(
        dict.fromkeys([base, *map(EngineSpec.model_validate, combined)])
    ):
        changes = {
            name: getattr(engine, name)
            for name in swept
            if getattr(engine, name) != getattr(base, name)
        }
        found.append(Candidate(number, changes, engine))
    if len(found) > MAX_CANDIDATES:
        raise ConfigError(
            f"{len(found)} combinations are too many (at most {MAX_CANDIDATES}); give shorter lists"
        )
    return tuple(found)


def rounds(
    entries: Sequence[Candidate], repeats: int, *, halving: bool
) -> Iterator[tuple[Candidate, int, str]]:
    """What to measure next, its round and a name for it; the caller adds the outcome before it asks for the next. Round
    by round a machine that warms up does so for all. With `halving` the slower half leaves after each, never the base
    and never below `FINALISTS`."""
    running = list(entries)
    for repeat in range(repeats):
        for place, candidate in enumerate(running, start=1):
            yield (
                candidate,
                repeat,
                f"round {repeat + 1}, {place} of {len(running)}: {candidate.label}",
            )
        running = [candidate for candidate in running if not candidate.refused]
        if halving:
            running.sort(key=lambda candidate: -candidate.rate)
            for candidate in running[max(FINALISTS, (len(running) + 1) // 2) :]:
                candidate.dropped = candidate.number != 0
            running = sorted(
                (one for one in running if not one.dropped), key=lambda one: one.number
            )


def recommend(entries: Sequence[Candidate], *, tolerance: float) -> Recommendation:
    """The fastest settings that may be used, if their median lies above the base's by more than half of either spread.
    Errors: `ConfigError` when nothing was measured of the base."""
    base = entries[0]
    if not base.rate:
        raise ConfigError(
            "nothing was measured with the settings to compare with; give reads with open frames"
        )
    most = max(len(candidate.trials) for candidate in entries)
    usable = [
        one for one in entries if one.verdict(tolerance) == "usable" and len(one.trials) == most
    ]
    best = max(usable, key=lambda candidate: candidate.rate, default=base)
    gain = best.rate / base.rate - 1
    scatter = max(best.spread, base.spread) / 2
    if best is base or gain <= 0:
        return Recommendation(
            base, 0.0, "the base stays: nothing else that may be used was as fast"
        )
    said = f"{100 * gain:.1f} % faster"
    if gain <= scatter:
        near = f"{best.label} is {said}, within the scatter of {100 * scatter:.1f} %"
        return Recommendation(base, 0.0, f"the base stays: {near}")
    known = (
        f"scatter {100 * scatter:.1f} %" if most > 1 else "measured once: the scatter is not known"
    )
    return Recommendation(best, gain, f"{best.label}: {said} than the base ({known})")


class Sweep(NamedTuple):
    """Where candidates are measured, and what with. `base` names every setting; none is `auto`."""

    out: Path
    bench: Bench
    base: EngineSpec
    profile: Profile
    repeats: int
    search: Literal["halving", "grid"]
    tokens: int | None = (
        None  # a candidate is measured on the first shards of so many ESM-2 tokens; None: on all
    )

    def trial(self, candidate: Candidate, repeat: int) -> Trial | str:
        """The engine's rate over the whole store with these settings, new or of an earlier run over the same all; or
        why they cannot run here. Errors: what a retry can help; `ConfigError` of a store or models that do not fit."""
        try:
            resolve_engine(candidate.engine, resolve(self.bench.devices)[0].kind)
        except ConfigError as error:
            return str(error)
        # what a trial depends on: all that a measurement does, and the settings it is held against
        against = self.base.model_dump(mode="json") | (
            {"tokens": self.tokens} if self.tokens else {}
        )
        own, base = (
            self.bench.fingerprint(engine, against)[:16] for engine in (candidate.engine, self.base)
        )
        run, reference = (
            RunDir(self.out / "trials" / f"{own}-{repeat}"),
            self.out / "trials" / f"{base}.npy",
        )
        kept = run.root / "trial.json"
        with run_lock(run.root):
            before = read_usable(kept, Trial)
            if before is not None and (candidate.number or reference.exists()):
                return before.model_copy(update={"reused": True})
            job = self.bench.job(
                run, candidate.engine.model_copy(update={"device_wait_s": DEVICE_WAIT_S})
            )
            try:
                first = None if self.tokens is None else -(-self.tokens // job.engine.shard_tokens)
                measured = measure(job, shards=first, sample_s=self.bench.sample_s)
                scores = shards.read_scores(run, range(len(job.plan))[:first])[0]
            except (ConfigError, DeviceError, ShardError, NotFiniteError) as error:
                if isinstance(error, DeviceError) and any(
                    device_holder(device.id) for device in job.devices
                ):
                    raise  # another run has it: nothing has been said about these settings
                return str(error)  # and nothing kept: what is refused today may run after an update
            finally:
                discard(run.root, *SHARD_FILES)  # the embeddings of every trial would fill the disk
            if measured.reduced:
                count, divisor = len(measured.reduced), measured.reduced[0][1]
                return f"the device cannot hold these budgets: {count} shards ran on 1/{divisor} of them"
            if candidate.number == 0 and not reference.exists():  # those of its first trial stay
                with atomic_file(reference) as aside, aside.open("wb") as handle:
                    np.save(handle, scores)
            known = np.load(
                reference
            )  # the base's scores; those of shards of another size may end elsewhere
            shared = min(len(known), len(scores))
            difference, changed = compare_scores(known[:shared], scores[:shared])
            trial = Trial(
                **measured.model_dump(), score_difference=difference, labels_changed=changed
            )
            write(kept, trial)
        return trial


def compare_scores(
    reference: NDArray[np.float32], scores: NDArray[np.float32]
) -> tuple[float, int]:
    """Largest difference of P(virus) and the number of labels that turned; both [n, 2]. A score that is missing on one
    side only counts as the largest difference there can be."""
    a, b = reference[:, 1].astype(np.float64), scores[:, 1].astype(np.float64)
    alone = np.isnan(a) ^ np.isnan(b)
    apart = np.where(alone, 1.0, np.nan_to_num(np.abs(a - b))).max(initial=0.0)
    return float(apart), int((alone | ((a >= DEFAULT_THRESHOLD) != (b >= DEFAULT_THRESHOLD))).sum())
