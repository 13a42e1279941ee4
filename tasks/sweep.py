"""A sweep over engine settings: what is tried, what is measured, and which settings may be recommended. Pure.

Only measured rates count, a difference within the spread of the measurements counts as none, and settings that change
the scores by more than the tolerance are not recommended unless that was asked for.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from virnuc_core.config import EngineSpec
from virnuc_core.errors import ConfigError

MAX_CANDIDATES: Final = 200
FINALISTS: Final = 3  # stay in the running to the end, whatever the first rounds say

Verdict = Literal["base", "usable", "changes results", "cannot run"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One set of settings. Number 0 is the base: the profile's settings with what was set for the whole sweep."""

    number: int
    changes: tuple[tuple[str, Any], ...]  # against the base
    engine: EngineSpec

    @property
    def label(self) -> str:
        """`token_budget=8192 num_workers=2`, or `base`."""
        return " ".join(f"{name}={value}" for name, value in self.changes) or "base"


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement of one candidate on all reads."""

    tokens_per_s: float  # both encoders' real tokens over the time from the first launch to the last finish
    window_s: float
    wall_s: float  # with loading of the weights
    packing: float | None  # 0 to 1
    starved: float | None  # share of batches waited for longer than 50 ms
    utilisation: float | None  # percent, of the device with the lowest
    peak_bytes: float | None  # of the device with the highest
    score_difference: float | None  # largest, against the base; None where nothing could be compared
    labels_changed: int
    refused: str = ""  # why these settings cannot run here; then no figure above means anything
    reused: bool = False  # measured by an earlier run over the same directory


@dataclass(slots=True)
class Entry:
    """A candidate and what was measured of it so far."""

    candidate: Candidate
    trials: list[Trial] = field(default_factory=list)
    dropped: bool = False  # slower than half of the others after a round

    @property
    def refused(self) -> str:
        """Why it cannot run; empty when it can."""
        return next((trial.refused for trial in self.trials if trial.refused), "")

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens a second of each measurement."""
        return tuple(trial.tokens_per_s for trial in self.trials if not trial.refused)

    @property
    def median(self) -> float:
        """Median rate; 0 without any."""
        return statistics.median(self.rates) if self.rates else 0.0

    @property
    def spread(self) -> float:
        """(Fastest − slowest) ÷ median; 0 for one measurement."""
        return (max(self.rates) - min(self.rates)) / self.median if self.median else 0.0

    @property
    def difference(self) -> float | None:
        """Largest score difference against the base in any trial."""
        known = [trial.score_difference for trial in self.trials if trial.score_difference is not None]
        return max(known, default=None)

    def verdict(self, tolerance: float) -> Verdict:
        """Whether it may be recommended."""
        if self.refused or not self.rates:
            return "cannot run"
        if self.candidate.number == 0:
            return "base"
        return "usable" if self.difference is not None and self.difference <= tolerance else "changes results"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The settings to use, and what speaks for them."""

    entry: Entry
    gain: float  # over the base's median; 0 when the base is recommended
    reason: str


def candidates(base: EngineSpec, swept: Mapping[str, Sequence[Any]]) -> tuple[Candidate, ...]:
    """The base, then every combination of the swept values that differs from it; `ConfigError` when they are too many.

    >>> [c.label for c in candidates(EngineSpec(), {"num_workers": (0, 2), "prefetch_factor": (4,)})]
    ['base', 'num_workers=2']
    """
    found = [Candidate(0, (), base)]
    seen = {base}
    for values in itertools.product(*swept.values()):
        engine = EngineSpec.model_validate(base.model_dump() | dict(zip(swept, values, strict=True)))
        if engine not in seen:
            seen.add(engine)
            changes = tuple((name, getattr(engine, name)) for name in swept if _differs(engine, base, name))
            found.append(Candidate(len(found), changes, engine))
    if len(found) > MAX_CANDIDATES:
        raise ConfigError(f"{len(found)} combinations are too many (at most {MAX_CANDIDATES}); give shorter lists")
    return tuple(found)


def _differs(engine: EngineSpec, base: EngineSpec, name: str) -> bool:
    return bool(getattr(engine, name) != getattr(base, name))


def in_the_running(entries: Sequence[Entry]) -> list[Entry]:
    """Those to measure in the next round."""
    return [entry for entry in entries if not entry.dropped and not entry.refused]


def drop_slower_half(entries: Sequence[Entry]) -> None:
    """After a round of halving: the slower half leaves, never the base and never below `FINALISTS`."""
    running = sorted(in_the_running(entries), key=lambda entry: entry.median, reverse=True)
    keep = max(FINALISTS, (len(running) + 1) // 2)
    for entry in running[keep:]:
        entry.dropped = entry.candidate.number != 0


def recommend(entries: Sequence[Entry], *, tolerance: float, allow_changed: bool) -> Recommendation:
    """The fastest settings that may be used, if they beat the base by more than the measurements scatter.

    A rate counts as better when its median lies above the base's by more than half of either spread. Errors:
    `ConfigError` when the base itself could not run.
    """
    base = entries[0]
    if not base.rates:
        raise ConfigError(f"the settings to compare with cannot run here: {base.refused or 'nothing was measured'}")
    wanted = ("usable", "changes results") if allow_changed else ("usable",)
    measured = max(len(entry.rates) for entry in entries)
    usable = [entry for entry in entries if entry.verdict(tolerance) in wanted and len(entry.rates) == measured]
    best = max(usable, key=lambda entry: entry.median, default=base)
    gain = best.median / base.median - 1
    scatter = max(best.spread, base.spread) / 2
    if best is base or gain <= scatter:
        near = "nothing else that may be used was as fast" if best is base or gain <= 0 else ""
        near = (
            near or f"{best.candidate.label} is {100 * gain:.1f} % faster, within the scatter of {100 * scatter:.1f} %"
        )
        return Recommendation(base, 0.0, f"the base stays: {near}")
    changed = "" if best.verdict(tolerance) == "usable" else "; it CHANGES RESULTS beyond the tolerance, as was allowed"
    text = f"{best.candidate.label}: {100 * gain:.1f} % faster than the base (scatter {100 * scatter:.1f} %){changed}"
    return Recommendation(best, gain, text)
