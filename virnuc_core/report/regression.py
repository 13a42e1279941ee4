"""Is this run worse than the last one like it? A history of runs, one JSON line each.

Like is compared with like: same profile, host, devices, precision, reads and weights. Worse in a metric's own direction
by more than the profile allows (10 %) fails. When the newest run of the profile on these devices was made with other
reads or weights, the earlier figures are stale and say nothing."""

import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from virnuc_core.lease import lease
from virnuc_core.report.model import HistoryEntry, Record, Regression, RegressionMetric, Report, Verdict
from virnuc_core.report.render import told_rows
from virnuc_core.rundir import storing, whole_file

log = logging.getLogger(__name__)

HISTORY: Final = "virnuc-history.jsonl"  # beside a validation's directory, unless told otherwise
SERIES: Final = ("profile", "devices", "precision", "host")
LIKE: Final = (*SERIES, "reads", "weights")  # only such runs may be compared
# whether more is better
METRICS: Final = {"tokens_per_s": True, "gpu_utilisation": True, "packing_efficiency": True, "total_s": False}


class RegressionFile(Record):
    """`regression.json`: what was compared, so that the verdict can be computed again."""

    schema_version: int = 1
    entry: HistoryEntry
    history: tuple[HistoryEntry, ...]


def entry_of(report: Report) -> HistoryEntry | None:
    """The history line of a report; `None` when there was no run, or one that was resumed or cut off."""
    run, made = report.run, report.provenance
    if run is None or run.resumed or run.stopped_at_limit or run.n_reads is None:
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
        regression_percent=report.profile.regression_percent,
        host=made.host,
    )


def read_history(path: Path) -> tuple[HistoryEntry, ...]:
    """All entries, oldest first; none when there is no file. A line that cannot be read is named in a warning."""
    return tuple(_lines(path, "passed over")[0].values())


def _lines(path: Path, fate: str) -> tuple[dict[bytes, HistoryEntry], list[bytes]]:
    """The lines of a file that are entries, and those that are none: a warning names the first, and their `fate`."""
    found, broken, said = dict[bytes, HistoryEntry](), list[bytes](), ""
    for place, line in enumerate(path.read_bytes().splitlines() if path.is_file() else [], start=1):
        try:
            found |= {line: HistoryEntry.model_validate_json(line)} if line.strip() else {}
        except ValidationError as error:
            broken.append(line)
            said = said or f"{path}:{place}: not a history entry ({error.errors()[0]['msg']})"
    if broken:
        log.warning("%s%s; %s", said, f" and {len(broken) - 1} more" * (len(broken) > 1), fate)
    return found, broken


def append_history(path: Path, entry: HistoryEntry) -> bool:
    """Whether an entry was added, under a lease: one made at the same moment is not added again. Lines that are no
    entries go to `….damaged` first, with a warning."""
    path, aside = path.resolve(), path.with_name(f"{path.name}.damaged")
    with lease(path.with_name(f".{path.name}.lease"), path, wait=True):
        found, broken = _lines(path, f"kept in {aside.name}")
        if any(old.created == entry.created and old.same(entry, LIKE) for old in found.values()):
            return False
        line = json.dumps(entry.model_dump(mode="json"), sort_keys=True).encode() + b"\n"
        if broken:
            with storing(aside), aside.open("ab") as kept:
                kept.writelines(bad + b"\n" for bad in broken)
                os.fsync(kept.fileno())
        with whole_file(path) as anew:
            anew.write_bytes(b"\n".join([*found, line]))
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
            verdict = "fail" if 100 * (-change if higher else change) > entry.regression_percent else "pass"
        metrics.append(RegressionMetric(name=name, before=was, now=now, change=change, verdict=verdict))
    worse = [metric.name for metric in metrics if metric.verdict == "fail"]
    judged = any(metric.verdict != "not run" for metric in metrics)
    reason = f"over {entry.regression_percent:g} % worse in {', '.join(worse)}" if worse else ""
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


def trend(history: Sequence[HistoryEntry]) -> list[dict[str, object]]:
    """A row for each run, as given: oldest first, each against the one before that is like it."""
    return told_rows("trend.view.j2", runs=[(entry, check(history, entry)) for entry in history])
