"""How a flow ends whose figures are judged by a profile, or by a reviewer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from virnuc.flows.settings.measured import MeasureSettings
from virnuc.tasks.task import completed
from virnuc_core.errors import VirnucError
from virnuc_core.report.model import Report
from virnuc_core.rundir import RunDir

# names of the states of runs that ended well, but not as was asked
NOT_MET: Final = "Criteria not met"
REJECTED: Final = "Rejected"


class NotMetError(VirnucError):
    """A run that ended well, but missed a criterion or was rejected by a reviewer."""

    exit_code = 5


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """What a flow's state keeps of a report. The whole report is in its directory.

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


def final_state(
    settings: MeasureSettings, report: Report, message: str, verdict: str | None = None
) -> State[ValidationResult]:
    """Return the state in which a judged flow ends.

    Args:
        settings: The settings of the flow. `fail_on_criteria` decides whether a missed criterion
            fails the flow run or only names its state.
        report: The judged report.
        message: The message of the state.
        verdict: The reviewer's verdict, or None if nobody was asked.
    """
    folder = RunDir(settings.out).report
    result = ValidationResult(folder, report.num_met, report.failures, report.outcome, verdict)
    if verdict == "rejected":
        name = REJECTED
    elif report.outcome == "failed":
        name = NOT_MET
    else:
        return completed(result, message)
    if settings.fail_on_criteria:
        return Failed(name=name, message=message, data=NotMetError(message))
    return Completed(name=name, message=message, data=result)
