"""Asking a reviewer: the flow run pauses after the report until somebody has answered, or until a
time-out.
"""

import logging
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput

from virnuc.flows.page_in_ui import page_in_ui
from virnuc.flows.settings.validate import ValidateSettings
from virnuc.tasks.approval import TIME_OUT_ANSWER, approval_form
from virnuc.tasks.artifacts import host_key, publish_markdown
from virnuc.tasks.background import background_thread
from virnuc.tasks.server_connection import REPORTING_ERRORS, connection
from virnuc_core.confidential import redact
from virnuc_core.report.approvals import (
    APPROVAL,
    contradictions,
    keep_answer,
    keep_earlier_answer,
    unanswered_questions,
)
from virnuc_core.report.build import rerender
from virnuc_core.report.model import Report
from virnuc_core.report.regression import approval_line
from virnuc_core.report.render import answer_markdown
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import write
from virnuc_core.safe_files import output_directory
from virnuc_core.validation import ApprovalRecord

# the server keeps the pause open longer than we wait, so that our own answer is still taken
GRACE_S: Final = 600
POLL_S: Final = 5
PAUSE_POLL_S: Final = 0.5  # time between two looks whether the server has paused the run
logger = logging.getLogger(__name__)


def ask_reviewer(settings: ValidateSettings, report: Report) -> ApprovalRecord:
    """Ask a reviewer about a report, and write all forms of the report again with the answer.

    The flow run is paused until somebody has answered, or until the time-out of the settings. The
    answer is added to those beside the report and to the history, in which no earlier answer is
    overwritten. It names where it contradicts the figures.

    Args:
        settings: The settings of the validation.
        report: The report to review.

    Returns:
        The answer, or `pending` if nobody answered in time.
    """
    folder = RunDir(settings.out).report
    keep_earlier_answer(settings.out, settings.history_file, report)
    answer = wait_for_approval(folder, approval_form(report), timeout_s=settings.approval_timeout_s)
    approval = answer.model_copy(update={"contradictions": contradictions(report, answer)})
    keep_answer(settings.out, settings.history_file, approval_line(report, approval))
    for sentence in approval.contradictions:
        logger.warning("the reviewer's answer contradicts the figures: %s", sentence)
    # The answer is in the directory now, so the report that is written again shows it.
    answered_report = rerender(settings.out)
    text = answer_markdown(answered_report)
    description = f"{approval.verdict} by {approval.reviewer}"
    publish_markdown(host_key(f"approval-{report.profile.name}"), text, description, folder)
    return approval


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A flow run that waits for its reviewer.

    Attributes:
        flow_run_id: The flow run at its server.
        report_dir: The directory of the report that the reviewer reads.
        timeout_s: How long an answer is waited for.
    """

    flow_run_id: UUID
    report_dir: Path
    timeout_s: int

    def announce_and_end(self, stop: threading.Event) -> None:
        """Say how to answer once the run is paused, and answer `pending` after the time-out.

        If the server is lost, this only notes what could not be sent.

        Args:
            stop: Is set when the answer of a person has come. Then nothing more is done.
        """
        deadline_s = time.monotonic() + self.timeout_s
        reporting = connection.reporting("the time-out of the approval")
        with reporting, get_client(sync_client=True) as client:
            self._announce(client, stop)
        if stop.wait(max(0.0, deadline_s - time.monotonic())):
            return
        reporting = connection.reporting("the time-out of the approval")
        with reporting, get_client(sync_client=True) as client:
            client.resume_flow_run(self.flow_run_id, run_input=TIME_OUT_ANSWER)

    def _announce(self, client: SyncPrefectClient, stop: threading.Event) -> None:
        """Write to the log what is waited for and the two ways to answer, once the run is paused.

        An answer before the pause would be refused. Without a pause within the time-out nothing is
        written.

        Args:
            client: Asks the server about the flow run.
            stop: Is set when nothing is waited for any more.
        """
        give_up_s = time.monotonic() + self.timeout_s
        flow_run = client.read_flow_run(self.flow_run_id)
        while flow_run.state is None or not flow_run.state.is_paused():
            if stop.wait(PAUSE_POLL_S) or time.monotonic() >= give_up_s:
                return
            flow_run = client.read_flow_run(self.flow_run_id)
        end = datetime.now(UTC) + timedelta(seconds=self.timeout_s)
        # Warnings are shown with --quiet, too: nothing goes on until somebody answers.
        logger.warning(
            "flow run '%s' waits for a reviewer to approve or reject %s, until %s",
            flow_run.name,
            self.report_dir / "report.html",
            end.strftime("%Y-%m-%d %H:%M UTC"),
        )
        logger.warning("answer in the UI: %s, button Resume", page_in_ui(self.flow_run_id))
        logger.warning(
            "or answer by command: virnuc approve %s --yes (--no, --later); "
            "virnuc approve --help lists the questions",
            self.flow_run_id,
        )


def wait_for_approval(
    report_dir: Path, form: type[RunInput], *, timeout_s: int, poll_s: int = POLL_S
) -> ApprovalRecord:
    """Pause the current flow run until a reviewer has answered, and keep the answer.

    While the run waits, the log says for what, and the two ways to answer. After the time-out this
    process itself answers `pending`, in the way a person would. A run that nobody looked at must
    not become a failed one, which is what Prefect's own time-out makes of it.

    Args:
        report_dir: The directory of the report; `approval.json` is written to it.
        form: What the reviewer is asked.
        timeout_s: How long to wait for an answer.
        poll_s: Time between two questions to the server.

    Returns:
        The answer. It is `pending` after the time-out, and also if the server is lost.
    """
    flow_run_id = UUID(runtime.flow_run.id)
    waiting = _Waiting(flow_run_id, report_dir, timeout_s)
    # a person needs hours, in which the server may be restarted
    connection.patient_until_s = time.monotonic() + timeout_s
    try:
        with background_thread(waiting.announce_and_end):
            answer = pause_flow_run(
                wait_for_input=form, timeout=timeout_s + GRACE_S, poll_interval=poll_s
            )
    except REPORTING_ERRORS as error:
        logger.warning("nobody could be asked: the Prefect server is lost (%s)", redact(str(error)))
        answer = form.model_validate(TIME_OUT_ANSWER)
    finally:
        connection.patient_until_s = 0.0

    answered_at = datetime.now(UTC).isoformat(timespec="seconds")
    fields = answer.model_dump(mode="json")
    record = _without_hasty_approval(
        ApprovalRecord(when=answered_at, flow_run=str(flow_run_id), **fields)
    )
    # In this block, no symbolic link within the output directory is followed.
    with output_directory(report_dir.parent):
        write(report_dir / APPROVAL, record)
    return record


def _without_hasty_approval(record: ApprovalRecord) -> ApprovalRecord:
    """Return a reviewer's answer, as `pending` if it approves without an answer to each question.

    The server refuses such an answer by the schema of the form. This is for a server that does not.
    """
    missing = unanswered_questions(record)
    if record.verdict != "approved" or not missing:
        return record
    note = f"approved, but not answered: {', '.join(missing)}. {record.note}".strip()
    return record.model_copy(update={"verdict": "pending", "note": note})
