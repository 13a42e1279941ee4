"""The decorator of every step: it retries what a retry can help, with a Prefect server or without
one.
"""

import logging
import time
from collections.abc import Callable
from functools import cached_property, update_wrapper, wraps
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

from virnuc.tasks.core_logs import core_logs
from virnuc.tasks.outcome import Outcome, failed
from virnuc.tasks.retries import (
    BACKOFF_S,
    RETRIES,
    RETRYABLE_ERRORS,
    begin_attempt,
    is_retryable,
)
from virnuc.tasks.server_use import with_server
from virnuc_core.errors import VirnucError

if TYPE_CHECKING:
    from prefect import Task
    from prefect.client.schemas.objects import State

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)


def retrying_task(
    name: str, run_name: str
) -> Callable[[Callable[P, Outcome[T]]], "RetryingTask[P, T]"]:
    """Return a decorator that makes a function a step, which is tried again after passing errors.

    Args:
        name: The name of the step in the UI.
        run_name: The pattern for the name of one run of it, with the function's parameters in
            braces.
    """

    def decorate(function: Callable[P, Outcome[T]]) -> RetryingTask[P, T]:
        """Return the step that runs a function."""
        return RetryingTask(function, name, run_name)

    return decorate


class RetryingTask(Generic[P, T]):
    """A step of a flow. Under a Prefect server it is a task run, otherwise a plain function.

    Attributes:
        fn: The function without retries. Errors that no retry can help become its outcome.
        name: The name of the step in the UI.
        run_name: The pattern for the name of one run of it.
    """

    def __init__(self, function: Callable[P, Outcome[T]], name: str, run_name: str) -> None:
        @wraps(function)
        def fn(*args: P.args, **kwargs: P.kwargs) -> Outcome[T]:
            """Call the function, and show the core's log lines meanwhile."""
            try:
                with core_logs():
                    return function(*args, **kwargs)
            except VirnucError as error:
                if is_retryable(error):
                    raise
                # It becomes one sentence in the UI. Prefect would log a raised one's traceback.
                return failed(error)

        self.fn = fn
        self.name = name
        self.run_name = run_name
        update_wrapper(self, function)

    @cached_property
    def _prefect_task(self) -> "Task[P, State[T]]":
        """The step as a task of Prefect."""
        from virnuc.tasks.prefect_task import make_prefect_task

        return make_prefect_task(self.fn, self.name, self.run_name)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[T]:
        """Run the step. After an error that may pass, wait some time and try again.

        Raises:
            BaseException: The last attempt ended with this error, or no retry can help.
        """
        if with_server():
            from virnuc.tasks.prefect_task import run_as_task

            return run_as_task(self._prefect_task, *args, **kwargs)
        for attempt in range(1, RETRIES + 1):
            begin_attempt(attempt)
            try:
                return self.fn(*args, **kwargs)
            except RETRYABLE_ERRORS as error:
                if not is_retryable(error):
                    raise
                delay_s = BACKOFF_S * 2 ** (attempt - 1)
                logger.warning("%s: %s; tried again in %d s", self.name, error, delay_s)
                time.sleep(delay_s)
        begin_attempt(RETRIES + 1)
        return self.fn(*args, **kwargs)
