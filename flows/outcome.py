"""How a flow ends whose figures are judged by a profile, or by a reviewer."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from virnuc.tasks.outcome import Outcome, completed, failed
from virnuc_core.errors import VirnucError
from virnuc_core.rundir import RunDir

if TYPE_CHECKING:
    from virnuc.flows.settings.measured import MeasureSettings
    from virnuc_core.report.model import Report, ReportOutcome

# names of the outcomes of runs that ended well, but not as was asked
NOT_MET: Final = "Criteria not met"
REJECTED: Final = "Rejected"


class NotMetError(VirnucError):
    """A run that ended well, but missed a criterion or was rejected by a reviewer."""

    exit_code = 5


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """What a flow returns of a report. The whole report is in its directory.

    Attributes:
        folder: The directory of the report.
        met: Number of criteria that are met.
        failed: The criteria that were missed, by title.
        outcome: `passed`, `failed` or `not judged`.
        approval: The reviewer's verdict, or None if nobody was asked.
    """

    folder: Path
    met: int
    failed: tuple[str, ...]
    outcome: str
    approval: str | None = None


def judged_outcome(
    settings: "MeasureSettings",
    report: "Report",
    message: str,
    verdict: str | None = None,
    *,
    outcome: "ReportOutcome | None" = None,
) -> Outcome[ValidationResult]:
    """Return the outcome of a flow whose figures were judged.

    Args:
        settings: The settings of the flow. `fail_on_criteria` decides whether a missed criterion
            fails the flow run or only names its outcome.
        report: The judged report.
        message: The message of the outcome: one line for people.
        verdict: The reviewer's verdict, or None if nobody was asked.
        outcome: Whether the run passed. None takes the report's own outcome, which is that of a
            validation.
    """
    if outcome is None:
        outcome = report.outcome
    folder = RunDir(settings.out).report
    result = ValidationResult(folder, report.num_met, report.failures, outcome, verdict)
    if verdict == "rejected":
        name = REJECTED
    elif outcome == "failed":
        name = NOT_MET
    else:
        return completed(result, message)
    if settings.fail_on_criteria:
        return failed(NotMetError(message), name=name)
    return Outcome(result, message, name)
