"""The history of validations, and whether a run is worse than the last run like it.

The history is a file with a line of JSON for each run. Only runs that are alike are compared: same
profile, host, devices, precision, reads and weights. A run fails if one metric is worse by more
than the profile allows (10 %). If the newest earlier run of the profile on these devices was made
from other reads or weights, the earlier figures are stale.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.lease import lease
from virnuc_core.report.model import (
    HistoryEntry,
    Record,
    Regression,
    RegressionMetric,
    Report,
    RunMetrics,
    Verdict,
)
from virnuc_core.report.sections import Row
from virnuc_core.report.views.history import trend_rows
from virnuc_core.rundir import atomic_file, storage_errors
from virnuc_core.safe_files import open_to_write, read_file
from virnuc_core.system_errors import path_exists, read_with_retries

log = logging.getLogger(__name__)

REGRESSION: Final = "regression.json"
HISTORY: Final = "virnuc-history.jsonl"  # beside a validation's directory, unless told otherwise
MAX_HISTORY_BYTES: Final = 256 << 20  # a line has about 500 bytes
CHECKSUM: Final = "sha256"  # key of a line's checksum, beside the fields of the entry
SERIES_FIELDS: Final = ("profile", "devices", "precision", "host")
COMPARABLE_FIELDS: Final = (*SERIES_FIELDS, "reads", "weights")
IS_MORE_BETTER: Final = {
    "tokens_per_s": True,
    "gpu_utilisation": True,
    "packing_efficiency": True,
    "total_s": False,
}
WEIGHTS: Final = (PROTEIN.name, DNA.name, "head")

Entries = Sequence[HistoryEntry]


class RegressionFile(Record):
    """`regression.json`: what was compared, so that the verdict can be computed again."""

    schema_version: int = 1
    entry: HistoryEntry
    history: tuple[HistoryEntry, ...]


def entry_of(report: Report) -> HistoryEntry | None:
    """Return the entry of a report in the history of validations.

    Returns:
        The entry, or `None` if the time of the run cannot be compared: there was no run, or it was
        resumed, stopped at its time limit, or had no rows.
    """
    run = report.run
    record = report.provenance
    if run is None or run.resumed or run.stopped_at_limit or run.n_reads is None or run.n_rows == 0:
        return None
    value_of_criterion = {criterion.id: criterion.value for criterion in report.criteria}
    weights = [record.fingerprints.get(part, "unknown") for part in WEIGHTS]
    # The entry is dated by the start of the run. So a run that is judged twice has one entry.
    created = run.attempts[0].started if run.attempts else record.created
    return HistoryEntry(
        created=created,
        commit=record.git_commit or "unknown",
        profile=report.profile.name,
        devices=_devices_text(run),
        precision=run.precision or "unknown",
        reads=record.fingerprints.get("reads", "unknown"),
        weights="+".join(weights),
        n_reads=run.n_reads,
        tokens_per_s=run.telemetry.tokens_per_s if run.telemetry else None,
        gpu_utilisation=value_of_criterion.get("gpu_utilisation"),
        packing_efficiency=value_of_criterion.get("packing"),
        total_s=run.total_s,
        criteria_met=report.num_met,
        regression_percent=report.profile.regression_percent,
        host=record.host,
    )


def _devices_text(run: RunMetrics) -> str:
    """Return the devices of a run as text for the history.

    For example `2x NVIDIA H200`, or `2x NVIDIA H200 (nodes: 2)` on a cluster.
    """
    names = sorted(device.name for device in run.devices)
    text = f"{len(names)}x {' + '.join(dict.fromkeys(names))}"
    nodes = {device.id.partition("@")[2] for device in run.devices} - {""}
    if nodes:
        text += f" (nodes: {len(nodes)})"
    return text


@dataclass(slots=True)
class _HistoryLines:
    """The lines of a history file."""

    entries: dict[bytes, HistoryEntry] = field(default_factory=dict)  # by the line's text
    damaged: list[bytes] = field(default_factory=list)


def read_history(path: Path) -> tuple[HistoryEntry, ...]:
    """Return all entries of a history, oldest first. Without a file there are none.

    Lines that are not entries are left out, with a warning.
    """
    lines = _read_lines(path, "passed over")
    return tuple(lines.entries.values())


def _read_lines(path: Path, consequence: str) -> _HistoryLines:
    """Read the lines of a history, and warn about damaged ones.

    Args:
        path: The file. It need not exist.
        consequence: End of the warning: what happens to the damaged lines, such as "passed over".
    """
    lines = _HistoryLines()
    first_problem = ""
    content = b""
    if path_exists(path):
        content = read_with_retries(path, lambda: read_file(path, max_bytes=MAX_HISTORY_BYTES))
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            lines.entries[line] = _parse_line(line)
        except ValueError as error:
            lines.damaged.append(line)
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            if not first_problem:
                first_problem = f"{path}:{number}: not a history entry ({reason})"
    if lines.damaged:
        n_more = len(lines.damaged) - 1
        more = f" and {n_more} more" if n_more else ""
        log.warning("%s%s; %s", first_problem, more, consequence)
    return lines


def _parse_line(line: bytes) -> HistoryEntry:
    """Return the entry of a line, after a comparison with the line's checksum if it has one.

    Raises:
        ValueError: The line is not an entry (a `ValidationError`), or has another checksum.
    """
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    recorded = values.pop(CHECKSUM, None)  # lines of older versions have none
    entry = HistoryEntry.model_validate(values)
    if recorded is not None and recorded != _checksum(values):
        raise ValueError("it was changed after it was written")
    return entry


def _line_of(entry: HistoryEntry) -> bytes:
    """Return the line of an entry: its fields and their checksum as JSON, in alphabetical order."""
    values = entry.model_dump(mode="json")
    return json.dumps(values | {CHECKSUM: _checksum(values)}, sort_keys=True).encode()


def _checksum(values: Mapping[str, object]) -> str:
    """Return the SHA-256 of the fields of a line."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def append_history(path: Path, entry: HistoryEntry) -> bool:
    """Add a run to a history file. A lease protects the file against other processes.

    If the history already has a comparable run with the same start time, nothing is added. Damaged
    lines are moved to a file `….damaged`, with a warning.

    Returns:
        True if the run was added.
    """
    path = path.resolve()
    damaged_path = path.with_name(f"{path.name}.damaged")
    lease_path = path.with_name(f".{path.name}.lease")
    with lease(lease_path, path, wait=True):
        lines = _read_lines(path, f"kept in {damaged_path.name}")
        for old in lines.entries.values():
            if old.created == entry.created and old.same(entry, COMPARABLE_FIELDS):
                return False
        if lines.damaged:
            with (
                storage_errors(damaged_path),
                open_to_write(damaged_path, append=True) as damaged_file,
            ):
                damaged_file.write(b"".join(line + b"\n" for line in lines.damaged))
                os.fsync(damaged_file.fileno())
        # The keys of `entries` are the old lines as they were read, without their line ends.
        all_lines = [*lines.entries, _line_of(entry)]
        content = b"".join(line + b"\n" for line in all_lines)
        with atomic_file(path) as temp_path:
            temp_path.write_bytes(content)
    return True


def earlier_runs(
    history: Entries, entry: HistoryEntry, fields: Sequence[str] = SERIES_FIELDS
) -> list[HistoryEntry]:
    """Return the runs before `entry` for which these fields are equal, oldest first."""
    runs = [old for old in history if old.same(entry, fields) and old.created < entry.created]
    return sorted(runs, key=lambda old: old.created)


def regression(history: Entries, entry: HistoryEntry) -> Regression:
    """Compare a run with the newest comparable earlier run.

    Args:
        history: Earlier runs.
        entry: The run.

    Returns:
        The verdict, with each metric. `not run` if there is no comparable run.
    """
    # All runs of this profile on these devices. Those that are comparable had the same reads and
    # weights, too. The figures are stale if the newest run of the series had others.
    series = earlier_runs(history, entry)
    comparable = earlier_runs(history, entry, COMPARABLE_FIELDS)
    is_stale = bool(series) and not series[-1].same(entry, COMPARABLE_FIELDS)
    if not comparable:
        reason = "no earlier run of this profile on these devices"
        if is_stale:
            reason = "stale baseline: earlier runs were made with other reads or weights"
        return Regression(verdict="not run", reason=reason, stale=is_stale)

    previous = comparable[-1]
    metrics = [_compare_metric(name, previous, entry) for name in IS_MORE_BETTER]
    verdicts = {metric.name: metric.verdict for metric in metrics}
    worse = [name for name, verdict in verdicts.items() if verdict == "fail"]
    verdict: Verdict = "pass"
    reason = ""
    if worse:
        verdict = "fail"
        reason = f"over {entry.regression_percent:g} % worse in {', '.join(worse)}"
    elif set(verdicts.values()) == {"not run"}:
        verdict = "not run"
        reason = "no metric was measured in both runs"
    return Regression(
        verdict=verdict,
        reason=reason,
        against_commit=previous.commit,
        against_created=previous.created,
        stale=is_stale,
        metrics=tuple(metrics),
    )


def _compare_metric(name: str, previous: HistoryEntry, entry: HistoryEntry) -> RegressionMetric:
    """Compare one metric of two runs. It fails if it is worse by more than the profile allows."""
    old_value = getattr(previous, name)
    new_value = getattr(entry, name)
    change = None
    verdict: Verdict = "not run"
    if old_value is not None and new_value is not None and old_value > 0:
        change = (new_value - old_value) / old_value
        loss = -change if IS_MORE_BETTER[name] else change
        verdict = "fail" if 100 * loss > entry.regression_percent else "pass"
    return RegressionMetric(
        name=name, before=old_value, now=new_value, change=change, verdict=verdict
    )


def trend(history: Entries) -> list[Row]:
    """Return a table row for each run, compared with the newest comparable run before it."""
    runs = [(entry, regression(history, entry)) for entry in history]
    return trend_rows(runs)
