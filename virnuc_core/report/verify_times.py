"""Verify that the times of a validation do not contradict each other.

A time can be forged in every file that holds it. It then still has to fit between the start of its
run and the start of the next one, and to be the sum of its parts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Final

from virnuc_core.report.model import BASELINE
from virnuc_core.report.raw_files import RECORD, SUMMARY, RawFolder, run_names
from virnuc_core.report.verification import Verification
from virnuc_core.runfiles import Attempt, RunRecord, RunSummary
from virnuc_core.validation import BaselineSummary

# Start stamps have whole seconds, and the clock of a machine is set right now and then.
CLOCK_TOLERANCE_S: Final = 5.0
# Stages are timed one by one. Between them passes a little time that belongs to none.
STAGE_TOLERANCE_S: Final = 0.1
STAGE_TOLERANCE_SHARE: Final = 0.01


@dataclass(frozen=True, slots=True)
class _Span:
    """When something was measured.

    Attributes:
        name: What it is, for messages.
        start: Seconds since 1970.
        seconds: How long it took.
    """

    name: str
    start: float
    seconds: float


def verify_times(verification: Verification, raw: RawFolder) -> None:
    """Check that stages add up to totals, and that no two measurements overlap.

    The baseline and the runs are made one after the other. So each must end before the next one
    begins.

    Args:
        verification: Collects the differences.
        raw: The validation's files.
    """
    spans = [*_baseline_spans(raw)]
    for run in run_names(raw.root):
        for name in (run, *run_names(raw.root, f"{run}.")):
            summary = raw.read(RunSummary, name, SUMMARY)
            if summary is None:
                continue
            _verify_stage_sum(verification, name, summary)
            for attempt in summary.attempts:
                spans += _attempt_spans(name, attempt)
                _verify_telemetry_start(verification, raw, name, attempt)
    spans.sort(key=lambda span: span.start)
    for first, second in pairwise(spans):
        verification.figures += 1
        overlap_s = first.start + first.seconds - second.start
        if overlap_s > CLOCK_TOLERANCE_S:
            verification.add_difference(
                f"{first.name} took {first.seconds:,.1f} s, but {second.name} began "
                f"{overlap_s:,.1f} s before its end"
            )


def _verify_stage_sum(verification: Verification, name: str, summary: RunSummary) -> None:
    """Check that the stages of a run add up to its total time.

    Args:
        verification: Collects the differences.
        name: The folder of the run.
        summary: Its summary. A run that was stopped has no stages, so nothing is compared.
    """
    seconds = [value for value in summary.stages.values() if value is not None]
    if not seconds or summary.total_s is None:
        return
    verification.figures += 1
    sum_s = sum(seconds)
    tolerance_s = STAGE_TOLERANCE_S + STAGE_TOLERANCE_SHARE * summary.total_s
    if abs(sum_s - summary.total_s) > tolerance_s:
        verification.add_difference(
            f"{name}/{SUMMARY}: total_s says {summary.total_s:,.3f}, "
            f"its stages add up to {sum_s:,.3f} s"
        )


def _verify_telemetry_start(
    verification: Verification, raw: RawFolder, name: str, attempt: Attempt
) -> None:
    """Check that the telemetry of an attempt began while the attempt lasted."""
    start = _seconds_of(attempt.started)
    if start is None or attempt.wall_s is None or attempt.telemetry is None:
        return
    telemetry = raw.telemetry(name, attempt.telemetry)
    began = None if telemetry is None else _seconds_of(telemetry.content.started)
    if telemetry is None or began is None:
        return
    verification.figures += 1
    # The clock of the telemetry begins before the run is prepared, and so before the attempt is
    # recorded. The first sample of the host was taken after that.
    measured = telemetry.content
    first_sample_s = measured.host.time_s.min()
    prepared_s = 0.0 if math.isnan(first_sample_s) else first_sample_s - measured.origin_s
    earliest = start - CLOCK_TOLERANCE_S
    latest = start + attempt.wall_s + CLOCK_TOLERANCE_S
    if began + prepared_s < earliest or began > latest:
        verification.add_difference(
            f"{telemetry.name}: began at {telemetry.content.started}, outside the attempt that "
            f"started at {attempt.started} and took {attempt.wall_s:,.1f} s"
        )


def _baseline_spans(raw: RawFolder) -> Iterator[_Span]:
    """Yield when the baseline was measured, if it was measured here."""
    record = raw.read(RunRecord, BASELINE, RECORD)
    summary = raw.read(BaselineSummary, BASELINE, SUMMARY)
    if record is None or summary is None or summary.measured_s is None:
        return
    start = _seconds_of(record.created)
    if start is not None:
        yield _Span(BASELINE, start, summary.measured_s)


def _attempt_spans(run: str, attempt: Attempt) -> Iterator[_Span]:
    """Yield when an attempt of a run was made, if its start and length are recorded."""
    start = _seconds_of(attempt.started)
    if start is not None and attempt.wall_s is not None:
        yield _Span(run, start, attempt.wall_s)


def _seconds_of(stamp: str) -> float | None:
    """Return an ISO 8601 time as seconds since 1970, or `None` if it is not one."""
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return None
