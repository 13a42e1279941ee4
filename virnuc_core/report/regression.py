"""Is this run worse than the last one like it? A history of runs, one JSON line each.

Like is compared with like: same profile, devices, precision, reads and weights. Over 10 % worse in a metric's own
direction fails. When the newest run of the profile on these devices was made with other reads or weights, the earlier
figures are stale and say nothing.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from virnuc_core.errors import InputError
from virnuc_core.report.model import (
    HistoryPoint,
    Record,
    Regression,
    RegressionMetric,
    Report,
    Verdict,
)

SCHEMA_VERSION: Final = 1
WORSE: Final = 0.10
# name, unit, higher is better
METRICS: Final = (
    ("tokens_per_s", "tokens/s", True),
    ("gpu_utilisation", "%", True),
    ("packing_efficiency", "%", True),
    ("total_s", "s", False),
)


class HistoryEntry(Record):
    """One finished validation."""

    schema_version: int = SCHEMA_VERSION
    created: str
    commit: str
    profile: str
    devices: str  # "2x NVIDIA H200"
    precision: str
    reads: str  # fingerprint
    weights: str
    n_reads: int
    tokens_per_s: float | None
    gpu_utilisation: float | None
    packing_efficiency: float | None
    total_s: float | None
    criteria_met: int

    def place(self) -> tuple[str, str, str]:
        """What makes two runs of one series: profile, devices, precision."""
        return self.profile, self.devices, self.precision

    def like(self, other: HistoryEntry) -> bool:
        """Whether the two may be compared."""
        return (*self.place(), self.reads, self.weights) == (*other.place(), other.reads, other.weights)


def entry_of(report: Report) -> HistoryEntry | None:
    """The history line of a report; `None` when there was no run, or one that was resumed."""
    run = report.run
    if run is None or run.resumed or run.n_reads is None:
        return None
    prints = report.provenance.fingerprints
    weights = "+".join(prints.get(part, "unknown") for part in ("esm2", "dnabert_s", "head"))
    names = sorted(device.name for device in run.devices)
    telemetry = run.telemetry
    lowest = [d.esm2_percent for d in telemetry.devices] if telemetry else []
    known = [value for value in lowest if value is not None]
    packing = None if telemetry is None else telemetry.packing_efficiency
    return HistoryEntry(
        created=report.provenance.created,
        commit=report.provenance.git_commit or "unknown",
        profile=report.profile.name,
        devices=f"{len(names)}x {' + '.join(dict.fromkeys(names))}",
        precision=run.precision or "unknown",
        reads=prints.get("reads", "unknown"),
        weights=weights,
        n_reads=run.n_reads,
        tokens_per_s=telemetry.tokens_per_s if telemetry else None,
        gpu_utilisation=min(known) if known and len(known) == len(lowest) else None,
        packing_efficiency=None if packing is None else 100.0 * packing,
        total_s=run.total_s,
        criteria_met=report.met,
    )


def read_history(path: Path) -> tuple[HistoryEntry, ...]:
    """All entries, oldest first; none when there is no file. `InputError` names the line that cannot be read."""
    if not path.is_file():
        return ()
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append(HistoryEntry.model_validate_json(line))
        except ValidationError as error:
            what = error.errors()[0]["msg"]
            raise InputError(f"not a history entry ({what})", file=path, line=number, hint="remove it") from error
    return tuple(found)


def append_history(path: Path, entry: HistoryEntry) -> bool:
    """Add an entry under a file lock, unless one made at the same moment is there; says whether it was added."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if any(old.created == entry.created and old.like(entry) for old in read_history(path)):
            return False
        handle.write(json.dumps(entry.model_dump(mode="json"), sort_keys=True) + "\n")
        handle.flush()
    return True


class RegressionFile(Record):
    """`regression.json`: what was compared, so that the verdict can be computed again."""

    schema_version: int = SCHEMA_VERSION
    entry: HistoryEntry
    history: tuple[HistoryEntry, ...]


def check(history: Sequence[HistoryEntry], entry: HistoryEntry) -> Regression:
    """Compare `entry` with the newest earlier one that is like it."""
    series = [old for old in history if old.place() == entry.place() and old.created < entry.created]
    like = [old for old in series if old.like(entry)]
    stale = bool(series) and not max(series, key=lambda old: old.created).like(entry)
    if not like:
        reason = "no earlier run of this profile on these devices"
        if stale:
            reason = "stale baseline: earlier runs were made with other reads or weights"
        return Regression(
            verdict="not run", reason=reason, against_commit=None, against_created=None, stale=stale, metrics=()
        )
    before = max(like, key=lambda old: old.created)
    metrics = tuple(
        _metric(name, unit, higher, getattr(before, name), getattr(entry, name)) for name, unit, higher in METRICS
    )
    worse = [metric.name for metric in metrics if metric.verdict == "fail"]
    judged = [metric for metric in metrics if metric.verdict != "not run"]
    verdict: Verdict = "fail" if worse else "pass" if judged else "not run"
    reason = f"over {100 * WORSE:g} % worse in {', '.join(worse)}" if worse else ""
    return Regression(
        verdict=verdict,
        reason=reason or ("" if judged else "no metric was measured in both runs"),
        against_commit=before.commit,
        against_created=before.created,
        stale=stale,
        metrics=metrics,
    )


def _metric(name: str, unit: str, higher: bool, before: float | None, now: float | None) -> RegressionMetric:
    change = None
    verdict: Verdict = "not run"
    if before is not None and now is not None and before > 0:
        change = (now - before) / before
        worse = -change if higher else change
        verdict = "fail" if worse > WORSE else "pass"
    return RegressionMetric(
        name=name, unit=unit, higher_is_better=higher, before=before, now=now, change=change, verdict=verdict
    )


def points(history: Sequence[HistoryEntry], entry: HistoryEntry) -> tuple[HistoryPoint, ...]:
    """The trend that `entry` belongs to, itself included, oldest first."""
    like = [old for old in history if old.like(entry) and old.created < entry.created]
    return tuple(
        HistoryPoint(created=e.created, commit=e.commit, total_s=e.total_s, tokens_per_s=e.tokens_per_s)
        for e in sorted([*like, entry], key=lambda e: e.created)
    )
