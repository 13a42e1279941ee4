"""Asking a reviewer: the flow run pauses after the report until somebody has answered, or until a
time-out.
"""

import logging
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput

from virnuc.flows.settings.validate import ValidateSettings
from virnuc.tasks.approval import TIME_OUT_ANSWER, approval_form
from virnuc.tasks.artifacts import host_key, publish_markdown
from virnuc.tasks.background import background_thread
from virnuc.tasks.server_connection import REPORTING_ERRORS, connection
from virnuc_core.confidential import redact
from virnuc_core.report.build import APPROVAL, rerender
from virnuc_core.report.model import Report
from virnuc_core.report.regression import append_approval, approval_line
from virnuc_core.report.render import answer_markdown
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import write
from virnuc_core.safe_files import output_directory
from virnuc_core.validation import ApprovalRecord

# the server keeps the pause open longer than we wait, so that our own answer is still taken
GRACE_S: Final = 600
POLL_S: Final = 5
logger = logging.getLogger(__name__)


def ask_reviewer(settings: ValidateSettings, report: Report) -> ApprovalRecord:
    """Ask a reviewer about a report, and write all forms of the report again with the answer.

    The flow run is paused until somebody has answered, or until the time-out of the settings. The
    answer is also added to the history, in which no earlier answer is overwritten.

    Args:
        settings: The settings of the validation.
        report: The report to review.

    Returns:
        The answer, or `pending` if nobody answered in time.
    """
    folder = RunDir(settings.out).report
    form = approval_form(report)
    approval = wait_for_approval(folder, form, timeout_s=settings.approval_timeout_s)
    append_approval(settings.history_file, approval_line(report, approval))
    # The answer is in the directory now, so the report that is written again shows it.
    answered_report = rerender(settings.out)
    text = answer_markdown(answered_report)
    description = f"{approval.verdict} by {approval.reviewer}"
    publish_markdown(host_key(f"approval-{report.profile.name}"), text, description, folder)
    return approval


def wait_for_approval(
    report_dir: Path, form: type[RunInput], *, timeout_s: int, poll_s: int = POLL_S
) -> ApprovalRecord:
    """Pause the current flow run until a reviewer has answered, and keep the answer.

    After the time-out this process itself answers `pending`, in the way a person would. A run that
    nobody looked at must not become a failed one, which is what Prefect's own time-out makes of it.

    Args:
        report_dir: The directory of the report; `approval.json` is written to it.
        form: What the reviewer is asked.
        timeout_s: How long to wait for an answer.
        poll_s: Time between two questions to the server.

    Returns:
        The answer. It is `pending` after the time-out, and also if the server is lost.
    """
    flow_run_id = UUID(runtime.flow_run.id)

    def answer_for_nobody(stop: threading.Event) -> None:
        """Answer `pending` if nobody has answered within the time-out.

        Args:
            stop: Is set when the answer of a person has come.
        """
        if stop.wait(timeout_s):
            return
        # If the server is lost, this only notes that the answer could not be sent.
        reporting = connection.reporting("the time-out of the approval")
        with reporting, get_client(sync_client=True) as client:
            client.resume_flow_run(flow_run_id, run_input=TIME_OUT_ANSWER)

    # a person needs hours, in which the server may be restarted
    connection.patient_until_s = time.monotonic() + timeout_s
    try:
        with background_thread(answer_for_nobody):
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
    record = ApprovalRecord(when=answered_at, flow_run=str(flow_run_id), **fields)
    # In this block, no symbolic link within the output directory is followed.
    with output_directory(report_dir.parent):
        write(report_dir / APPROVAL, record)
    return record
