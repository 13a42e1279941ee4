"""What every task of ours is: tried again where that can help, heard in its run's log; and what Prefect shows of it.

Prefect renders table cells as Markdown, so that `>= 0.9` would appear as a quotation that reads "= 0.9"; one infinite
number empties a whole table; and the list of artifacts loads every body. Hence the rules of `cell` and the limits."""

import contextvars
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
    storage_error,
)

P = ParamSpec("P")
T = TypeVar("T")
PERMANENT_ERRORS: Final = (FileNotFoundError, PermissionError, IsADirectoryError, IncapableError)
RETRYABLE_ERRORS: Final = (WorkerError, ShardError, DeviceError, OSError, MemoryError)
RETRIES: Final = 3
BACKOFF_S: Final = 10  # 10 s, 20 s, 40 s
_attempt: contextvars.ContextVar[int] = contextvars.ContextVar(
    "attempt of a task without Prefect", default=1
)
logger = logging.getLogger(__name__)


def retrying_task(
    name: str, run_name: str
) -> Callable[[Callable[P, State[T]]], "RetryingTask[P, State[T]]"]:
    """Makes a function a task; an error of ours that no retry can help becomes the sentence of its failed state."""

    def decorate(function: Callable[P, State[T]]) -> "RetryingTask[P, State[T]]":
        @wraps(function)
        def body(*args: P.args, **kwargs: P.kwargs) -> State[T]:
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
            retry_jitter_factor=0.2,  # tasks felled together do not come back together
            retry_condition_fn=lambda _task, _run, state: is_retryable(
                state.result(raise_on_failure=False)
            ),
        )

    return decorate


class RetryingTask(Task[P, T]):
    """A task that does the same without Prefect where there is no server to tell."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:  # type: ignore[override]
        if with_server():
            return super().__call__(*args, **kwargs)
        for attempt in range(1, RETRIES + 1):
            _attempt.set(attempt)
            try:
                return self.fn(*args, **kwargs)
            except RETRYABLE_ERRORS as error:
                if not is_retryable(error):
                    raise
                delay_s = BACKOFF_S << (attempt - 1)
                logger.warning("%s: %s; tried again in %d s", self.name, error, delay_s)
                time.sleep(delay_s)
        return self.fn(*args, **kwargs)


def is_retryable(error: BaseException) -> bool:
    """Whether the same call may succeed later: a dead worker or a busy disk may, a wrong setting or bad input never."""
    return (
        isinstance(error, RETRYABLE_ERRORS)
        and not isinstance(error, PERMANENT_ERRORS)
        and storage_error(error) is None
    )


def first_attempt() -> bool:
    """Whether this is not a retry; a retry must go on from what the attempt before it committed."""
    return _attempt.get() <= 1 if not with_server() else (runtime.task_run.run_count or 1) <= 1


def completed(data: T, message: str, *, reused: bool = False) -> State[T]:
    """Completed, with a message; named `Reused` when no work had to be done."""
    return Completed(name="Reused" if reused else None, message=message, data=data)


@contextmanager
def core_logs() -> Iterator[None]:
    """Hear the core's records from INFO up while the body runs; those of a run are sent to its server, too."""
    core = logging.getLogger("virnuc_core")
    with ExitStack() as undone:
        undone.callback(core.setLevel, core.level)
        core.setLevel(min(core.getEffectiveLevel(), logging.INFO))
        if FlowRunContext.get() is None:
            yield
            return
        ids = {"flow_run_id": runtime.flow_run.id, "task_run_id": runtime.task_run.id}

        def named(
            record: logging.LogRecord,
        ) -> bool:  # threads of the core know no run, those of other tasks their own
            if (own := TaskRunContext.get()) is None or str(own.task_run.id) == ids["task_run_id"]:
                vars(record).update(ids)
            return True

        handler = next((one for one in core.handlers if isinstance(one, APILogHandler)), None)
        if handler is None:
            core.addHandler(handler := APILogHandler())
            undone.callback(core.removeHandler, handler)
        undone.callback(handler.removeFilter, named)
        handler.addFilter(named)
        yield
