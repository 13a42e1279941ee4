"""What the function of a flow returned or raised in this process, whatever a server says of the
run.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from virnuc.tasks.outcome import Outcome
from virnuc_core.errors import VirnucError

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

logger = logging.getLogger(__name__)


@dataclass
class OwnOutcome:
    """What a flow's function returned or raised in this process.

    The state that Prefect returns may be one that the server put in its place, with a result that
    the server chose. A run that is started from a terminal ends as its own function did.

    Attributes:
        has_begun: Whether the function was called.
        returned: What it returned. None if it did not return.
        error: What it raised. None if it raised nothing.
    """

    has_begun: bool = False
    returned: Outcome[Any] | None = None
    error: BaseException | None = None

    def checked_against(self, recorded: "State[Any]") -> Outcome[Any]:
        """Return the outcome of the function itself.

        If the server says something else of the run, a warning is logged.

        Args:
            recorded: The state that the server has of the run. Its result is not looked at.

        Raises:
            VirnucError: The server ended the run before the function was called.
            BaseException: What the function raised.
        """
        if self.error is not None:
            raise self.error
        server_says = f"the Prefect server says {recorded.name}"
        if recorded.message:
            server_says += f" ({recorded.message})"
        if self.returned is None:
            raise VirnucError(
                f"the run was ended before it did anything: {server_says}; run it again"
            )
        own_type = "completed" if self.returned.error is None else "failed"
        servers_type = recorded.type.value.lower()  # "completed", "failed", "crashed", "running", …
        if servers_type != own_type:
            logger.warning(
                "the run is %s, but %s; what its files say counts", own_type, server_says
            )
        return self.returned


_outcome: ContextVar[OwnOutcome | None] = ContextVar(
    "outcome of the run from a terminal", default=None
)


@contextmanager
def recorded_outcome() -> Iterator[OwnOutcome]:
    """Yield the outcome that the flow called in the body fills in."""
    outcome = OwnOutcome()
    token = _outcome.set(outcome)
    try:
        yield outcome
    finally:
        _outcome.reset(token)


def current_outcome() -> OwnOutcome:
    """Return the outcome of the run from a terminal, or a new one that nobody reads.

    Prefect pickles the wrapper of a served flow with all variables that it refers to, and a
    `ContextVar` cannot be pickled. So the wrapper calls this function instead.
    """
    outcome = _outcome.get()
    if outcome is None:
        return OwnOutcome()
    return outcome
