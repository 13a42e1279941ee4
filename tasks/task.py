"""The decorator of every task: it retries what a retry can help, and shows the core's log lines in
the run.
"""

import contextvars
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from prefect import Task, runtime
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler
from prefect.states import Completed, Failed
from prefect.tasks import exponential_backoff

from virnuc.tasks.server_connection import with_server
from virnuc_core.errors import (
    DeviceError,
    IncapableError,
    ShardError,
    VirnucError,
    WorkerError,
)
from virnuc_core.system_errors import storage_error

P = ParamSpec("P")
T = TypeVar("T")
RETRYABLE_ERRORS: Final = (WorkerError, ShardError, DeviceError, OSError, MemoryError)
PERMANENT_ERRORS: Final = (FileNotFoundError, PermissionError, IsADirectoryError, IncapableError)
RETRIES: Final = 3
BACKOFF_S: Final = 10  # retries come after 10 s, 20 s and 40 s
_attempt: contextvars.ContextVar[int] = contextvars.ContextVar(
    "attempt of a task without Prefect", default=1
)
logger = logging.getLogger(__name__)


def retrying_task(
    name: str, run_name: str
) -> Callable[[Callable[P, State[T]]], "RetryingTask[P, State[T]]"]:
    """Make a function a task that is tried again after errors that may pass.

    An error of ours that no retry can help becomes a failed state with one sentence, without a
    traceback.

    Args:
        name: The name of the task in the UI.
        run_name: The pattern of a task run's name, with the function's parameters in braces.
    """

    def decorate(function: Callable[P, State[T]]) -> "RetryingTask[P, State[T]]":
        """Return the task for a function."""

        @wraps(function)
        def body(*args: P.args, **kwargs: P.kwargs) -> State[T]:
            """Call the function. Errors that a retry cannot help become a failed state."""
            try:
                with core_logs():
                    return function(*args, **kwargs)
            except VirnucError as error:
                if is_retryable(error):
                    raise
                return Failed(message=str(error), data=error)

        return RetryingTask(
            body,
            name=name,
            task_run_name=run_name,
            cache_policy=NO_CACHE,
            retries=RETRIES,
            retry_delay_seconds=exponential_backoff(backoff_factor=BACKOFF_S),
            retry_jitter_factor=0.2,  # tasks that failed together do not come back together
            retry_condition_fn=lambda _task, _run, state: is_retryable(
                state.result(raise_on_failure=False)
            ),
        )

    return decorate


class RetryingTask(Task[P, T]):
    """A task that runs, with the same retries, also where there is no Prefect server."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:  # type: ignore[override]
        """Run the task."""
        if with_server():
            return super().__call__(*args, **kwargs)
        for attempt in range(1, RETRIES + 1):
            _attempt.set(attempt)
            try:
                return self.fn(*args, **kwargs)
            except RETRYABLE_ERRORS as error:
                if not is_retryable(error):
                    raise
                delay_s = BACKOFF_S * 2 ** (attempt - 1)
                logger.warning("%s: %s; tried again in %d s", self.name, error, delay_s)
                time.sleep(delay_s)
        return self.fn(*args, **kwargs)


def is_retryable(error: BaseException) -> bool:
    """Tell whether the same call may succeed later.

    A worker that died or a busy disk may recover. A wrong setting, bad input or a full disk does
    not.
    """
    if isinstance(error, PERMANENT_ERRORS) or storage_error(error) is not None:
        return False
    return isinstance(error, RETRYABLE_ERRORS)


def first_attempt() -> bool:
    """Tell whether the current task run is not a retry.

    A retry goes on from what the attempt before it committed, so it must not discard anything.
    """
    if not with_server():
        return _attempt.get() <= 1
    return (runtime.task_run.run_count or 1) <= 1


def completed(result: T, message: str, *, reused: bool = False) -> State[T]:
    """Return a completed state.

    Args:
        result: The result of the flow or task.
        message: What the UI shows.
        reused: Whether no work had to be done. The state is then named `Reused`.
    """
    name = "Reused" if reused else None
    return Completed(name=name, message=message, data=result)


@contextmanager
def core_logs() -> Iterator[None]:
    """Let the core log from INFO up while the body runs. In a flow run the server gets the lines,
    too.
    """
    core_logger = logging.getLogger("virnuc_core")
    previous_level = core_logger.level
    core_logger.setLevel(min(core_logger.getEffectiveLevel(), logging.INFO))
    try:
        if FlowRunContext.get() is None:
            yield
        else:
            with _logs_sent_to_server(core_logger):
                yield
    finally:
        core_logger.setLevel(previous_level)


@contextmanager
def _logs_sent_to_server(core_logger: logging.Logger) -> Iterator[None]:
    """Send the core's log lines to the server, under the current flow run and task run."""
    run_ids = {"flow_run_id": runtime.flow_run.id, "task_run_id": runtime.task_run.id}

    def add_run_ids(record: logging.LogRecord) -> bool:
        """Add the ids of this task run to a record, unless it comes from another task run."""
        # Threads of the core have no Prefect context: their lines belong to this task run.
        context = TaskRunContext.get()
        if context is None or str(context.task_run.id) == run_ids["task_run_id"]:
            vars(record).update(run_ids)
        return True

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
