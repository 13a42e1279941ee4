"""The core's log lines, inside the log of the run that caused them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler

CORE: Final = "virnuc_core"


class _RunOf(logging.Filter):
    """Writes the run's ids on each record, since threads of the core know of no run."""

    def __init__(self, flow_run_id: str, task_run_id: str | None) -> None:
        super().__init__()
        self.flow_run_id, self.task_run_id = flow_run_id, task_run_id

    def filter(self, record: logging.LogRecord) -> bool:
        record.flow_run_id = self.flow_run_id
        if self.task_run_id is not None:
            record.task_run_id = self.task_run_id
        return True


def _current_run() -> _RunOf | None:
    task = TaskRunContext.get()
    if task is not None and task.task_run.flow_run_id is not None:
        return _RunOf(str(task.task_run.flow_run_id), str(task.task_run.id))
    flow = FlowRunContext.get()
    if flow is not None and flow.flow_run is not None:
        return _RunOf(str(flow.flow_run.id), None)
    return None


@contextmanager
def core_logs() -> Iterator[None]:
    """Send the core's records from INFO up to the current run while the body runs; outside a run do nothing."""
    run = _current_run()
    if run is None:
        yield
        return
    logger = logging.getLogger(CORE)
    handler = next((h for h in logger.handlers if isinstance(h, APILogHandler)), None)
    own = handler is None
    if handler is None:
        handler = APILogHandler()
        logger.addHandler(handler)
    level = logger.level
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
    handler.addFilter(run)
    try:
        yield
    finally:
        handler.removeFilter(run)
        logger.setLevel(level)
        if own:
            logger.removeHandler(handler)
