"""Sends log lines of the core to the Prefect server, which shows them with the run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prefect import runtime
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler


@contextmanager
def logs_sent_to_server(core_logger: logging.Logger) -> Iterator[None]:
    """Send the core's log lines to the server, under the current flow run and task run.

    Prefect's own way (`PREFECT_LOGGING_EXTRA_LOGGERS`) finds the run of a line by the context of
    its thread. Threads of the core have no such context, so the ids are added to their lines here.
    Outside a flow run nothing is sent.

    Args:
        core_logger: The logger of the core. It gets a handler that sends, if it has none.
    """
    if FlowRunContext.get() is None:
        yield
        return
    run_ids = {"flow_run_id": runtime.flow_run.id, "task_run_id": runtime.task_run.id}

    def add_run_ids(record: logging.LogRecord) -> bool:
        """Add the ids of this task run to a line, unless it comes from another task run.

        Returns:
            True, because the line is sent in any case.
        """
        # A line from a thread of the core, which has no context, belongs to this task run.
        context = TaskRunContext.get()
        if context is None or str(context.task_run.id) == run_ids["task_run_id"]:
            vars(record).update(run_ids)
        return True

    # A task inside a flow, and tasks of several samples at a time, share one handler. So each line
    # is sent once.
    handlers = [item for item in core_logger.handlers if isinstance(item, APILogHandler)]
    is_new = not handlers
    handler = APILogHandler() if is_new else handlers[0]
    if is_new:
        core_logger.addHandler(handler)
    handler.addFilter(add_run_ids)
    try:
        yield
    finally:
        handler.removeFilter(add_run_ids)
        if is_new:
            core_logger.removeHandler(handler)
