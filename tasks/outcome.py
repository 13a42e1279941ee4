"""How a step or a flow ended: with a result or an error, and with one line for people.

Steps and flows return an `Outcome`, also where Prefect is not installed. `prefect_states` turns it
into the state that Prefect shows.
"""

from dataclasses import dataclass
from typing import Final, Generic, TypeVar, cast
from uuid import UUID

T = TypeVar("T")
# names of outcomes; the UI shows them as the names of states
COMPLETED: Final = "Completed"
REUSED: Final = "Reused"
FAILED: Final = "Failed"


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """How a step or a flow ended.

    Attributes:
        value: What it returned. None if it failed.
        message: One line for people.
        name: The kind of end in one or two words, as `Completed` or `Reused`.
        error: Why it failed. None if it did not.
        flow_run_id: The flow run at the Prefect server that shows the flow. None for a step, and
            for a flow that ran without a server.
    """

    value: T | None
    message: str
    name: str = COMPLETED
    error: BaseException | None = None
    flow_run_id: UUID | None = None

    def result(self) -> T:
        """Return what the step or flow returned.

        Raises:
            BaseException: It failed. This is its error.
        """
        if self.error is not None:
            raise self.error
        return cast(T, self.value)


def completed(value: T, message: str, *, reused: bool = False) -> Outcome[T]:
    """Return the outcome of a step or flow that did what it should.

    Args:
        value: Its result.
        message: One line for people.
        reused: Whether no work had to be done, because the results were there. The outcome is then
            named `Reused`.
    """
    return Outcome(value, message, REUSED if reused else COMPLETED)


def failed(error: BaseException, *, name: str = FAILED) -> Outcome[T]:
    """Return the outcome of a step or flow that ended with an error; its message is the error's."""
    return Outcome(None, str(error), name, error)
