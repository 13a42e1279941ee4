"""What every task of ours is: tried again where that can help, heard in its run's log, and brief about wrong input."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from prefect import Task, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler
from prefect.states import Completed, Failed
from prefect.tasks import exponential_backoff

from virnuc_core.errors import (
    ConfigError,
    DeviceError,
    InputError,
    ShardError,
    VirnucError,
    WeightsError,
    WorkerError,
)

P = ParamSpec("P")
T = TypeVar("T")
CORE: Final = "virnuc_core"
REUSED: Final = "Reused"
NOT_MET: Final = "Criteria not met"
REJECTED: Final = "Rejected"
HOPELESS: Final = (InputError, ConfigError, WeightsError, FileNotFoundError, PermissionError, IsADirectoryError)
WORTH_A_RETRY: Final = (WorkerError, ShardError, DeviceError, OSError, MemoryError)


class NotMetError(VirnucError):
    """A run that ended well, but not as was asked: a criterion was missed, or a reviewer said no."""

    exit_code = 5


def step(name: str, run_name: str) -> Callable[[Callable[P, State[T]]], Task[P, State[T]]]:
    """A decorator that makes a function a task. An error of ours that no retry can help becomes its failed state.

    Such a state holds the error and says it in a sentence; `.result()` of what the task returns raises it.
    """

    def decorate(function: Callable[P, State[T]]) -> Task[P, State[T]]:
        @wraps(function)
        def body(*args: P.args, **kwargs: P.kwargs) -> State[T]:
            try:
                with core_logs():
                    return function(*args, **kwargs)
            except VirnucError as error:
                if can_help(error):
                    raise
                return Failed(message=str(error), data=error)

        # 10 s, 20 s, 40 s; each stretched by up to a fifth, so that tasks felled together do not come back together
        made: Task[P, State[T]] = task(
            name=name,
            task_run_name=run_name,
            cache_policy=NO_CACHE,
            retries=3,
            retry_delay_seconds=exponential_backoff(backoff_factor=10),
            retry_jitter_factor=0.2,
            retry_condition_fn=_retry_condition,
        )(body)
        return made

    return decorate


def can_help(error: BaseException) -> bool:
    """Whether the same call may succeed later: a dead worker or a busy disk may, a wrong setting or bad input never."""
    return isinstance(error, WORTH_A_RETRY) and not isinstance(error, HOPELESS)


def _retry_condition(_task: Any, _task_run: TaskRun, state: State[Any]) -> bool:
    """Prefect's question after a failed attempt."""
    try:
        state.result()
    except Exception as error:  # noqa: BLE001 - whatever the task raised is what has to be judged
        return can_help(error)
    return False


def first_attempt() -> bool:
    """Whether this is not a retry; a retry must go on from what the attempt before it committed."""
    return (runtime.task_run.run_count or 1) <= 1


def done(data: T, message: str, *, reused: bool = False) -> State[T]:
    """Completed, with a message; named `Reused` when no work had to be done."""
    return Completed(name=REUSED if reused else None, message=message, data=data)


def not_met(data: T, message: str, *, fails: bool, name: str = NOT_MET) -> State[T]:
    """Criteria that were not met, or a reviewer's no: a failed run, or a completed one whose name says so."""
    if fails:
        return Failed(name=name, message=message, data=NotMetError(message))
    return Completed(name=name, message=message, data=data)


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
    task_context = TaskRunContext.get()
    if task_context is not None and task_context.task_run.flow_run_id is not None:
        return _RunOf(str(task_context.task_run.flow_run_id), str(task_context.task_run.id))
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
