"""The history of validations, and whether a run is worse than the last run like it.

The history is a file with a line of JSON for each run. Only runs that are alike are compared: same
profile, host, devices, precision, reads and weights. A run fails if one metric is worse by more
than the profile allows (10 %). If the newest earlier run of the profile on these devices was made
from other reads or weights, the earlier figures are stale.

The history is the source of the verdict: `regression.json` beside a validation is a copy of the
lines that it was compared with. The answers of reviewers are lines, too.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError

from virnuc_core.allowed_paths import require_allowed
from virnuc_core.checked_files import Match, compare_text
from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.errors import InputError
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
from virnuc_core.runfiles import RunRecord
from virnuc_core.safe_files import open_to_write, read_file
from virnuc_core.system_errors import path_exists, read_with_retries
from virnuc_core.validation import ApprovalRecord

log = logging.getLogger(__name__)

REGRESSION: Final = "regression.json"
HISTORY: Final = "virnuc-history.jsonl"  # beside a validation's directory, unless told otherwise
MAX_HISTORY_BYTES: Final = 256 << 20  # a line has about 500 bytes
CHECKSUM: Final = "sha256"  # key of a line's checksum, beside the fields of the entry
# Key of the SHA-256 of the line before, so that a line cannot be removed or edited unnoticed. It is
# empty in the first line. Lines of older versions do not have it.
PREVIOUS: Final = "previous"
MAX_COMPARED_RUNS: Final = 100  # earlier runs that a validation keeps beside its own
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


class ApprovalLine(Record):
    """A line of the history with the answer of a reviewer."""

    kind: Literal["approval"] = "approval"
    created: str  # of the run that the answer is about, as in the line of the run
    profile: str
    host: str
    approval: ApprovalRecord


def approval_line(report: Report, approval: ApprovalRecord) -> ApprovalLine:
    """Return the line of the history with the answer of a reviewer on a report."""
    entry = entry_of(report)
    return ApprovalLine(
        created=report.provenance.created if entry is None else entry.created,
        profile=report.profile.name,
        host=report.provenance.host,
        approval=approval,
    )


def history_path(out: Path, record: RunRecord | None) -> Path:
    """Return the history file of a validation.

    Args:
        out: The validation's directory.
        record: Its record, which may name another file than the one beside the directory.

    Raises:
        ConfigError: The record names a file outside the folders of `VIRNUC_ROOTS`.
    """
    recorded_path = None if record is None else record.spec.get("history")
    if not recorded_path:
        return out.absolute().parent / HISTORY
    # The record may be a stranger's, so what it names is checked like an option.
    path = Path(str(recorded_path))
    require_allowed(path, "run.json: history")
    return path


def recorded_comparison(path: Path, entry: HistoryEntry) -> RegressionFile | None:
    """Return what a run was compared with, from the history.

    Args:
        path: The history file.
        entry: The run.

    Returns:
        The run and the earlier runs of its series that are listed before it, oldest first. `None`
        if the history is not there or does not list the run.
    """
    if not path_exists(path):
        return None
    history = read_history(path)
    for index, old in enumerate(history):
        if old.created == entry.created and old.same(entry, COMPARABLE_FIELDS):
            earlier = earlier_runs(history[:index], entry)
            return RegressionFile(entry=entry, history=tuple(earlier[-MAX_COMPARED_RUNS:]))
    return None


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
    """The lines of a history file.

    Attributes:
        valid: What each valid line says, by its text, in the order of the file.
        damaged: The texts of the other lines.
        edits: A sentence for each damaged line that no version of virnuc has written so.
        gaps: A sentence for each place where a line is gone, or another one stands in its place.
    """

    valid: dict[bytes, HistoryEntry | ApprovalLine] = field(default_factory=dict)
    damaged: list[bytes] = field(default_factory=list)
    edits: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)

    @property
    def entries(self) -> tuple[HistoryEntry, ...]:
        """Return the runs, in the order of the file."""
        return tuple(line for line in self.valid.values() if isinstance(line, HistoryEntry))


def read_history(path: Path) -> tuple[HistoryEntry, ...]:
    """Return all entries of a history, oldest first. Without a file there are none.

    Lines that are not entries are left out, with a warning.
    """
    return _read_lines(path, "passed over").entries


def read_approvals(path: Path) -> tuple[ApprovalLine, ...]:
    """Return all answers of reviewers in a history, oldest first. Without a file there are none."""
    lines = _read_lines(path, "passed over").valid.values()
    return tuple(line for line in lines if isinstance(line, ApprovalLine))


def history_gaps(path: Path) -> tuple[str, ...]:
    """Return a sentence for each place of a history where a line was removed or edited.

    A file of answers beside a report has the same form. Without a file there are none.
    """
    lines = _read_lines(path, "passed over")
    return (*lines.edits, *lines.gaps)


def require_whole_history(path: Path) -> None:
    """Raise an error if a line of a history was edited or removed, as far as its lines tell.

    A comparison with a run whose line was edited proves nothing.

    Raises:
        InputError: The message names the first such line, or how many lines are damaged.
    """
    lines = _read_lines(path, "passed over")
    hint = "take the copy of the history that the last good run left"
    if lines.gaps:
        raise InputError(lines.gaps[0], hint=hint)
    if lines.damaged:
        n_damaged = len(lines.damaged)
        raise InputError(f"{n_damaged} lines are damaged or were edited", file=path, hint=hint)


def _read_lines(path: Path, consequence: str) -> _HistoryLines:
    """Read the lines of a history, and warn about damaged ones.

    Args:
        path: The file. It need not exist.
        consequence: End of the warning: what happens to the damaged lines, such as "passed over".
    """
    lines = _HistoryLines()
    problems: list[str] = []
    content = b""
    if path_exists(path):
        content = read_with_retries(path, lambda: read_file(path, max_bytes=MAX_HISTORY_BYTES))
    line_before = b""
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        values: dict[str, Any] = {}
        try:
            values = _checked_values(line)
            previous = values.pop(PREVIOUS, None)
            lines.valid[line] = _parse_values(values)
            # A damaged line before this one has been named already.
            is_gap = previous is not None and previous != _digest_of(line_before)
            if is_gap and line_before not in lines.damaged:
                lines.gaps.append(f"{path}:{number}: the line before it was edited or removed")
        except ValueError as error:
            lines.damaged.append(line)
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            problems.append(f"{path}:{number}: not a history entry ({reason})")
            # A line with a right checksum that cannot be used here may be of a newer version.
            if not values:
                lines.edits.append(problems[-1])
        line_before = line
    for gap in lines.gaps:
        log.warning("%s", gap)
    if problems:
        n_more = len(problems) - 1
        more = f" and {n_more} more" if n_more else ""
        log.warning("%s%s; %s", problems[0], more, consequence)
    return lines


def _checked_values(line: bytes) -> dict[str, Any]:
    """Return the fields of a line, after a comparison with the line's checksum if it has one.

    Raises:
        ValueError: The line is no JSON object, or has another checksum.
    """
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    recorded = values.pop(CHECKSUM, None)  # lines of older versions have none
    if compare_text(_checked_text(values), recorded) is Match.CHANGED:
        raise ValueError("it was changed after it was written")
    return values


def _parse_values(values: Mapping[str, object]) -> HistoryEntry | ApprovalLine:
    """Return what the fields of a line say: a run, or the answer of a reviewer.

    Raises:
        ValueError: They are neither (a `ValidationError`).
    """
    if values.get("kind") == "approval":
        return ApprovalLine.model_validate(values)
    return HistoryEntry.model_validate(values)


def _line_of(content: HistoryEntry | ApprovalLine, line_before: bytes) -> bytes:
    """Return a line: its fields, the digest of the line before and a checksum, as JSON.

    Args:
        content: The run or the answer.
        line_before: The text of the last line of the file; empty if there is none.
    """
    values = content.model_dump(mode="json") | {PREVIOUS: _digest_of(line_before)}
    checksum = hashlib.sha256(_checked_text(values)).hexdigest()
    return json.dumps(values | {CHECKSUM: checksum}, sort_keys=True).encode()


def _digest_of(line: bytes) -> str:
    """Return the SHA-256 of a line of the history; an empty text for no line."""
    if not line:
        return ""
    return hashlib.sha256(line).hexdigest()


def _checked_text(values: Mapping[str, object]) -> bytes:
    """Return the text that the checksum of a line covers: its other fields."""
    return json.dumps(values, sort_keys=True).encode()


def append_history(path: Path, entry: HistoryEntry) -> bool:
    """Add a run to a history file. A lease protects the file against other processes.

    If the history already has a comparable run with the same start time, nothing is added. Damaged
    lines are moved to a file `….damaged`, with a warning.

    Returns:
        True if the run was added.
    """

    def is_listed(lines: _HistoryLines) -> bool:
        """Return whether the history already has the run."""
        for old in lines.entries:
            if old.created == entry.created and old.same(entry, COMPARABLE_FIELDS):
                return True
        return False

    return _append_line(path, entry, is_listed)


def append_approval(path: Path, line: ApprovalLine) -> bool:
    """Add the answer of a reviewer to a history file. No answer is ever overwritten.

    Returns:
        True if the answer was added, False if the history already has it.
    """

    def is_listed(lines: _HistoryLines) -> bool:
        """Return whether the history already has the answer."""
        return line in lines.valid.values()

    return _append_line(path, line, is_listed)


def _append_line(
    path: Path,
    content: HistoryEntry | ApprovalLine,
    is_listed: Callable[[_HistoryLines], bool],
) -> bool:
    """Add a line to a history file, unless it is listed. A lease keeps other processes out.

    Args:
        path: The file. It is made if it does not exist.
        content: What the line says.
        is_listed: Tells whether the file already has the line.

    Returns:
        True if the line was added.
    """
    path = path.resolve()
    damaged_path = path.with_name(f"{path.name}.damaged")
    lease_path = path.with_name(f".{path.name}.lease")
    with lease(lease_path, path, wait=True):
        lines = _read_lines(path, f"kept in {damaged_path.name}")
        if is_listed(lines):
            return False
        if lines.damaged:
            with (
                storage_errors(damaged_path),
                open_to_write(damaged_path, append=True) as damaged_file,
            ):
                damaged_file.write(b"".join(line + b"\n" for line in lines.damaged))
                os.fsync(damaged_file.fileno())
        # The keys of `valid` are the old lines as they were read, without their line ends.
        line_before = next(reversed(lines.valid), b"")
        all_lines = [*lines.valid, _line_of(content, line_before)]
        text = b"".join(line + b"\n" for line in all_lines)
        with atomic_file(path) as temp_path:
            temp_path.write_bytes(text)
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
