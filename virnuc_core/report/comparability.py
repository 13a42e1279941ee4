"""Decide which parts of a validation may be compared: those with the same reads and weights."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.report.raw_files import RECORD, RawFolder
from virnuc_core.runfiles import MODEL_LENGTH, RunRecord, find_mismatches, identity

COMPARED_FINGERPRINTS: Final = ("reads", PROTEIN.name, DNA.name, "head", MODEL_LENGTH)
SHOWN_CHARACTERS: Final = 8  # of a fingerprint


@dataclass(frozen=True, slots=True)
class Comparability:
    """The pairs of runs and baseline that may not be compared, each with the reason."""

    reasons: Mapping[frozenset[str], str]

    def refusal(self, part: str, others: Iterable[str]) -> str:
        """Return why a part may not be compared with one of the others, or an empty string."""
        for other in others:
            reason = self.reasons.get(frozenset((part, other)))
            if reason:
                return reason
        return ""

    def allows(self, a: str, b: str) -> bool:
        """Return whether two parts may be compared."""
        return frozenset((a, b)) not in self.reasons

    @property
    def distinct_reasons(self) -> tuple[str, ...]:
        """Return every reason once."""
        return tuple(dict.fromkeys(self.reasons.values()))


def check_comparability(raw: RawFolder, parts: Sequence[str]) -> Comparability:
    """Find the pairs of parts that may not be compared. The `run.json` of each part decides.

    Args:
        raw: The validation's files.
        parts: Folders of runs, and of the baseline.
    """
    identities: dict[str, dict[str, str]] = {}
    for part in parts:
        record = raw.read(RunRecord, part, RECORD)
        identities[part] = {} if record is None else identity(record)
    reasons = {}
    for a, b in combinations(parts, 2):
        reason = _why_not_comparable(a, identities[a], b, identities[b])
        if reason:
            reasons[frozenset((a, b))] = reason
    return Comparability(reasons)


def _why_not_comparable(
    a: str, identity_a: Mapping[str, str], b: str, identity_b: Mapping[str, str]
) -> str:
    """Return why two parts may not be compared, or an empty string if they may.

    They may not if a fingerprint differs, or if one of them does not record a fingerprint.

    Args:
        a: The name of the first part.
        identity_a: Its fingerprints.
        b: The name of the second part.
        identity_b: Its fingerprints.
    """
    differences = []
    for name, (value_a, value_b) in find_mismatches(identity_a, identity_b).items():
        if name in COMPARED_FINGERPRINTS:
            shown_a = value_a[:SHOWN_CHARACTERS]
            shown_b = value_b[:SHOWN_CHARACTERS]
            differences.append(f"{name} ({shown_a} and {shown_b})")
    if differences:
        return f"{a} and {b} differ in {', '.join(differences)}"
    for part, fingerprints in ((a, identity_a), (b, identity_b)):
        missing = [name for name in COMPARED_FINGERPRINTS if name not in fingerprints]
        if missing:
            return f"{part}/{RECORD} does not tell {', '.join(missing)}"
    return ""
