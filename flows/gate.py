"""The approval gate: the run pauses after its report until a reviewer has answered, or the time is over.

It never holds a device while it waits. The time-out answers `pending` by the same door a person would use, so that the
run ends as it would have with an answer, and a run nobody looked at is not a failed one.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from pathlib import Path
from typing import Final
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException
from prefect.flow_runs import pause_flow_run

from tasks.approval import Approval, record, time_out

GRACE_S: Final = 600  # the server keeps the pause open longer than we wait, so that our answer is still taken
POLL_S: Final = 5
logger = logging.getLogger(__name__)


def ask(report_dir: Path, form: type[Approval], *, timeout_s: int, poll_s: int = POLL_S) -> Approval:
    """Pause the current flow run until it is answered; the answer is kept in the report's directory.

    `form` is an `Approval` with the figures the answer is about.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("the approval gate works inside a flow run only")
    here = contextvars.copy_context()  # the server this run talks to
    timer = threading.Timer(timeout_s, here.run, (_answer_for_nobody, context.flow_run.id))
    timer.daemon = True
    timer.start()
    try:
        answer = pause_flow_run(wait_for_input=form, timeout=timeout_s + GRACE_S, poll_interval=poll_s)
    finally:
        timer.cancel()
    approval = Approval.model_validate(answer.model_dump())
    record(report_dir, approval, flow_run=str(context.flow_run.id))
    return approval


def _answer_for_nobody(flow_run_id: UUID) -> None:
    try:
        with get_client(sync_client=True) as client:
            client.resume_flow_run(flow_run_id, run_input=time_out())
    except (httpx.HTTPError, PrefectException, OSError) as error:
        logger.warning("the time-out of the approval could not be recorded: %s", error)
