"""Decide which parts of a validation may be compared.

Results may be compared if they are of the same reads and weights. Times may be compared if, beside
that, they were measured on the same machine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.report.raw_files import RECORD, SUMMARY, RawFolder
from virnuc_core.runfiles import (
    MODEL_LENGTH,
    Device,
    RunRecord,
    RunSummary,
    find_mismatches,
    identity,
)

COMPARED_FINGERPRINTS: Final = ("reads", PROTEIN.name, DNA.name, "head", MODEL_LENGTH)
SHOWN_CHARACTERS: Final = 8  # of a fingerprint
# Versions of software that change how fast the same devices are.
COMPARED_VERSIONS: Final = ("driver", "torch")
UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True)
class Comparability:
    """The pairs of runs and baseline that may not be compared, each with the reason.

    Attributes:
        reasons: Why the results of a pair may not be compared, by the two folder names.
        timing_reasons: Why the times of a pair may not be compared. Pairs in `reasons` are not
            repeated here.
    """

    reasons: Mapping[frozenset[str], str]
    timing_reasons: Mapping[frozenset[str], str] = field(default_factory=dict)

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

    def timing_refusal(self, part: str, others: Iterable[str]) -> str:
        """Return why the times of a part and of one of the others may not be compared.

        Returns:
            The reason: another job, or another machine. An empty string if they may be compared.
        """
        for other in others:
            pair = frozenset((part, other))
            reason = self.reasons.get(pair) or self.timing_reasons.get(pair)
            if reason:
                return reason
        return ""

    @property
    def distinct_reasons(self) -> tuple[str, ...]:
        """Return every reason once."""
        reasons = (*self.reasons.values(), *self.timing_reasons.values())
        return tuple(dict.fromkeys(reasons))


def check_comparability(raw: RawFolder, parts: Sequence[str]) -> Comparability:
    """Find the pairs of parts that may not be compared. The `run.json` of each part decides.

    Results may be compared if reads and weights have the same fingerprints. Times may be compared
    if the machine is the same, too.

    Args:
        raw: The validation's files.
        parts: Folders of runs, and of the baseline.
    """
    identities: dict[str, dict[str, str]] = {}
    machines: dict[str, dict[str, str]] = {}
    for part in parts:
        record = raw.read(RunRecord, part, RECORD)
        identities[part] = {} if record is None else identity(record)
        machines[part] = {}
        if record is not None:
            # The summary of a run and that of a baseline both have the devices.
            summary = raw.read(RunSummary, part, SUMMARY)
            used_devices = () if summary is None else summary.devices
            machines[part] = machine_identity(record, used_devices)
    reasons = {}
    timing_reasons = {}
    for a, b in combinations(parts, 2):
        pair = frozenset((a, b))
        reason = _why_not_comparable(a, identities[a], b, identities[b])
        if reason:
            reasons[pair] = reason
            continue
        timing_reason = why_other_machine(a, machines[a], b, machines[b])
        if timing_reason:
            timing_reasons[pair] = timing_reason
    return Comparability(reasons, timing_reasons)


def machine_identity(record: RunRecord, used_devices: Sequence[Device] = ()) -> dict[str, str]:
    """Return what decides how fast a run is, beside its work: names and versions by their kind.

    The models of the devices are named without their number, because runs on one device and on
    several are compared. The kind of a device counts too: a CPU may have the name of a GPU.

    Args:
        record: The `run.json` of the run or baseline.
        used_devices: The devices in its `summary.json`. Without any, those of the record count.
    """
    devices = used_devices or record.devices
    models = {f"{device.name} ({device.kind})" for device in devices}
    machine = {"host": record.host, "devices": " + ".join(sorted(models))}
    for package in COMPARED_VERSIONS:
        if package in record.versions:
            machine[package] = record.versions[package]
    return machine


def why_other_machine(
    a: str, machine_a: Mapping[str, str], b: str, machine_b: Mapping[str, str]
) -> str:
    """Return why the times of two parts may not be compared, or an empty string if they may.

    Args:
        a: The name of the first part.
        machine_a: Its host, devices and versions; see `machine_identity`.
        b: The name of the second part.
        machine_b: Its host, devices and versions.
    """
    differences = []
    # strict=True: a value that only one machine has is a difference.
    for name, (value_a, value_b) in find_mismatches(machine_a, machine_b, strict=True).items():
        differences.append(f"{name} ({value_a or UNKNOWN} and {value_b or UNKNOWN})")
    if differences:
        return f"the times of {a} and {b} are of different machines: {', '.join(differences)}"
    # Both are the same, but nothing shows that it is the same machine if its name was not recorded.
    for name in ("host", "devices"):
        if not machine_a.get(name):
            return f"{a}/{RECORD} and {b}/{RECORD} do not tell their {name}"
    return ""


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
