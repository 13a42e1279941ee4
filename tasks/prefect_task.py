"""A step as a task of Prefect, with Prefect's own retries.

Prefect's documentation shows a module whose functions are decorated by `@task`. Here the task is
made when a step first runs under a server, because the modules of the steps must also work where
Prefect cannot be imported.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from prefect import Task, runtime
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.tasks import exponential_backoff

from virnuc.tasks.outcome import Outcome
from virnuc.tasks.prefect_states import from_state, to_state
from virnuc.tasks.retries import BACKOFF_S, RETRIES, begin_attempt, is_retryable

P = ParamSpec("P")
T = TypeVar("T")


def make_prefect_task(step: Callable[P, Outcome[T]], name: str, run_name: str) -> Task[P, State[T]]:
    """Return a task of Prefect that runs a step and shows its outcome as its state.

    Args:
        step: The function of the step. An error that it raises is followed by another attempt, if
            that can help.
        name: The name of the task in the UI.
        run_name: The pattern of a task run's name, with the step's parameters in braces.
    """

    @wraps(step)
    def run(*args: P.args, **kwargs: P.kwargs) -> State[T]:
        """Run the step within a task run, and return its outcome as a state."""
        begin_attempt(runtime.task_run.run_count or 1)
        return to_state(step(*args, **kwargs))

    return Task(
        run,
        name=name,
        task_run_name=run_name,
        cache_policy=NO_CACHE,  # what can be used again is decided by the files of the run
        retries=RETRIES,
        retry_delay_seconds=exponential_backoff(backoff_factor=BACKOFF_S),
        retry_jitter_factor=0.2,  # tasks that failed together do not come back together
        retry_condition_fn=lambda _task, _run, state: is_retryable(
            state.result(raise_on_failure=False)
        ),
    )


def run_as_task(task: Task[P, State[T]], *args: P.args, **kwargs: P.kwargs) -> Outcome[T]:
    """Run a task of `make_prefect_task` as a task run of the server, and return its outcome.

    Raises:
        BaseException: The step raised this error in its last attempt.
    """
    # Called without `return_state`, Prefect returns what the function returned in this process.
    return from_state(task(*args, **kwargs))
