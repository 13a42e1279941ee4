"""Outcomes of ours as states of Prefect, and back."""

from typing import TypeVar

from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from virnuc.tasks.outcome import Outcome

T = TypeVar("T")


def to_state(outcome: Outcome[T]) -> State[T]:
    """Return the state that shows an outcome in Prefect, with the same name and message.

    The result or error of the outcome becomes the data of the state.
    """
    if outcome.error is not None:
        return Failed(name=outcome.name, message=outcome.message, data=outcome.error)
    return Completed(name=outcome.name, message=outcome.message, data=outcome.value)


def from_state(state: State[T]) -> Outcome[T]:
    """Return the outcome that a state of this process shows.

    Args:
        state: A final state that a function of ours has returned, so its result is in memory.
            A state that a server has sent must not be given: its result could be code.
    """
    message = state.message or ""
    name = str(state.name)
    if state.is_completed():
        return Outcome(state.result(), message, name)
    error = state.result(raise_on_failure=False)
    assert isinstance(error, BaseException)  # `to_state` makes no other states
    return Outcome(None, message, name, error)
