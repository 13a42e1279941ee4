"""Is this run worse than the last one like it? A history of runs, one JSON line each.

Like is compared with like: same profile, devices, precision, reads and weights. Over 10 % worse in a metric's own
direction fails. When the newest run of the profile on these devices was made with other reads or weights, the earlier
figures are stale and say nothing.
"""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from virnuc_core.report.model import HistoryPoint, Record, Regression, RegressionMetric, Report, Verdict

log = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 1
WORSE: Final = 0.10
SERIES: Final = ("profile", "devices", "precision")
LIKE: Final = (*SERIES, "reads", "weights")  # only such runs may be compared
# whether more is better
METRICS: Final = {"tokens_per_s": True, "gpu_utilisation": True, "packing_efficiency": True, "total_s": False}


class HistoryEntry(HistoryPoint):
    """One finished validation."""

    schema_version: int = SCHEMA_VERSION
    profile: str
    devices: str  # "2x NVIDIA H200"
    precision: str
    reads: str  # fingerprint
    weights: str
    n_reads: int
    gpu_utilisation: float | None
    packing_efficiency: float | None
    criteria_met: int

    def same(self, other: HistoryEntry, fields: Sequence[str]) -> bool:
        """Whether two runs have these fields in common."""
        return all(getattr(self, field) == getattr(other, field) for field in fields)


class RegressionFile(Record):
    """`regression.json`: what was compared, so that the verdict can be computed again."""

    schema_version: int = SCHEMA_VERSION
    entry: HistoryEntry
    history: tuple[HistoryEntry, ...]


def entry_of(report: Report) -> HistoryEntry | None:
    """The history line of a report; `None` when there was no run, or one that was resumed."""
    run, made = report.run, report.provenance
    if run is None or run.resumed or run.n_reads is None:
        return None
    names, values = sorted(device.name for device in run.devices), {one.id: one.value for one in report.criteria}
    return HistoryEntry(
        created=made.created,
        commit=made.git_commit or "unknown",
        profile=report.profile.name,
        devices=f"{len(names)}x {' + '.join(dict.fromkeys(names))}",
        precision=run.precision or "unknown",
        reads=made.fingerprints.get("reads", "unknown"),
        weights="+".join(made.fingerprints.get(part, "unknown") for part in ("esm2", "dnabert_s", "head")),
        n_reads=run.n_reads,
        tokens_per_s=run.telemetry.tokens_per_s if run.telemetry else None,
        gpu_utilisation=values.get("gpu_utilisation"),
        packing_efficiency=values.get("packing"),
        total_s=run.total_s,
        criteria_met=report.met,
    )


def read_history(path: Path) -> tuple[HistoryEntry, ...]:
    """All entries, oldest first; none when there is no file. A line that cannot be read is named in a warning."""
    found, faults = _entries(path)
    if faults:
        more = f" (and {len(faults) - 1} more such lines)" if len(faults) > 1 else ""
        log.warning("%s:%s%s; it is passed over", path, faults[0], more)
    return found


def _entries(path: Path) -> tuple[tuple[HistoryEntry, ...], list[str]]:
    """The entries of a file, and a word on each line that is none."""
    found, faults = [], []
    if not path.is_file():
        return (), []
    for place, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append(HistoryEntry.model_validate_json(line))
        except ValidationError as error:
            faults.append(f"{place}: not a history entry ({error.errors()[0]['msg']})")
    return tuple(found), faults


def append_history(path: Path, entry: HistoryEntry) -> bool:
    """Add an entry under a file lock, unless one made at the same moment is there; says whether it was added."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if any(old.created == entry.created and old.same(entry, LIKE) for old in _entries(path)[0]):
            return False
        if path.read_bytes()[-1:] not in (b"", b"\n"):
            handle.write("\n")  # the last line was cut off
        handle.write(json.dumps(entry.model_dump(mode="json"), sort_keys=True) + "\n")
    return True


def earlier(history: Iterable[HistoryEntry], entry: HistoryEntry) -> list[HistoryEntry]:
    """The runs before `entry` of its profile, devices and precision, oldest first."""
    found = (old for old in history if old.same(entry, SERIES) and old.created < entry.created)
    return sorted(found, key=lambda old: old.created)


def check(history: Iterable[HistoryEntry], entry: HistoryEntry) -> Regression:
    """Compare `entry` with the newest earlier one that is like it."""
    series = earlier(history, entry)
    before = next((old for old in reversed(series) if old.same(entry, LIKE)), None)
    stale = bool(series) and not series[-1].same(entry, LIKE)
    if before is None:
        none = "stale baseline: earlier runs were made with other reads or weights"
        reason = none if stale else "no earlier run of this profile on these devices"
        return Regression(verdict="not run", reason=reason, stale=stale)
    metrics = []
    for name, higher in METRICS.items():
        was, now = getattr(before, name), getattr(entry, name)
        change = (now - was) / was if was is not None and now is not None and was > 0 else None
        verdict: Verdict = "not run"
        if change is not None:
            verdict = "fail" if (-change if higher else change) > WORSE else "pass"
        metrics.append(RegressionMetric(name=name, before=was, now=now, change=change, verdict=verdict))
    worse = [metric.name for metric in metrics if metric.verdict == "fail"]
    judged = any(metric.verdict != "not run" for metric in metrics)
    reason = f"over {100 * WORSE:g} % worse in {', '.join(worse)}" if worse else ""
    return Regression(
        verdict="fail" if worse else "pass" if judged else "not run",
        reason=reason if judged else "no metric was measured in both runs",
        against_commit=before.commit,
        against_created=before.created,
        stale=stale,
        metrics=tuple(metrics),
    )


def points(history: Iterable[HistoryEntry], entry: HistoryEntry) -> tuple[HistoryEntry, ...]:
    """The trend that `entry` belongs to, itself included, oldest first."""
    return (*(old for old in earlier(history, entry) if old.same(entry, LIKE)), entry)
