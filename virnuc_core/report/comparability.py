"""Which parts of a validation may be held against each other: those made from the same reads, weights and length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from virnuc_core.report.criteria import BASELINE
from virnuc_core.report.files import RECORD, RawFolder, count, mapping, text
from virnuc_core.report.model import BaselineMetrics, Comparison, Criterion

PRINTS: Final = ("reads", "esm2", "dnabert_s", "head")
MODEL_LENGTH: Final = "model length"
SHOWN: Final = 8  # characters of a fingerprint


@dataclass(frozen=True, slots=True)
class Unlike:
    """Why pairs of parts may not be compared; a pair that may be is not in it."""

    reasons: Mapping[frozenset[str], str]

    def between(self, a: str | None, b: str | None) -> str | None:
        """The reason against comparing the parts `a` and `b`."""
        return None if a is None or b is None else self.reasons.get(frozenset((a, b)))

    def baseline(self, figure: BaselineMetrics | None, run: str | None) -> BaselineMetrics | None:
        """The baseline's figure, marked as not to be used where it is unlike the judged run."""
        reason = self.between(BASELINE, run)
        if figure is None or reason is None:
            return figure
        return figure.model_copy(update={"problem": reason})

    def comparisons(self, found: Iterable[Comparison]) -> tuple[Comparison, ...]:
        """The comparisons of like parts."""
        return tuple(one for one in found if self.between(one.a, one.b) is None)

    def criteria(self, judged: Iterable[Criterion], single: str | None, many: str | None) -> tuple[Criterion, ...]:
        """The verdicts, `not run` for those that would stand on unlike parts."""
        runs = self.between(single, many)
        truth = self.between(BASELINE, many) or self.between(BASELINE, single)
        speed = self.between(BASELINE, many or single)
        against = {"scaling": runs, "same_bytes": runs, "consensus": truth, "speedup": speed}
        return tuple(_not_run(one, against.get(one.id)) for one in judged)


def unlike_parts(raw: RawFolder, parts: Sequence[str]) -> Unlike:
    """Compare what each of `parts` says in its `run.json` with what each other says."""
    made = {part: _made_from(raw, part) for part in parts}
    reasons = {frozenset((a, b)): _reason(a, made[a], b, made[b]) for a, b in combinations(parts, 2)}
    return Unlike({pair: reason for pair, reason in reasons.items() if reason is not None})


def _made_from(raw: RawFolder, part: str) -> dict[str, str]:
    record = raw.json(part, RECORD)
    prints = mapping(record, "fingerprints")
    found = {name: text(prints, name) for name in PRINTS} | {MODEL_LENGTH: _length(count(record, "model_length"))}
    return {name: value for name, value in found.items() if value is not None}


def _length(bases: int | None) -> str | None:
    return None if bases is None else str(bases)


def _reason(a: str, left: Mapping[str, str], b: str, right: Mapping[str, str]) -> str | None:
    names = (*PRINTS, MODEL_LENGTH)
    differing = [name for name in names if name in left and name in right and left[name] != right[name]]
    if differing:
        said = ", ".join(f"{name} ({left[name][:SHOWN]} and {right[name][:SHOWN]})" for name in differing)
        return f"{a} and {b} differ in {said}"
    for part, known in ((a, left), (b, right)):
        absent = [name for name in names if name not in known]
        if absent:
            return f"{part}/{RECORD} does not tell {', '.join(absent)}"
    return None


def _not_run(criterion: Criterion, reason: str | None) -> Criterion:
    if reason is None or criterion.target is None:
        return criterion
    return criterion.model_copy(update={"verdict": "not run", "value": None, "samples": None, "reason": reason})
