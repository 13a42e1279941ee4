"""What the function of a flow returned or raised in this process, whatever a server says of the
run.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from prefect.client.schemas.objects import State, StateDetails
from prefect.context import FlowRunContext

from virnuc_core.errors import VirnucError

logger = logging.getLogger(__name__)


@dataclass
class OwnOutcome:
    """What a flow's function returned or raised in this process.

    The state that Prefect returns may be one that the server put in its place, with a result that
    the server chose. A run that is started from a terminal ends as its own function did.
    """

    has_begun: bool = False
    state: State[Any] | None = None
    error: BaseException | None = None

    def keep(self, state: State[Any]) -> None:
        """Store a copy of the state that the flow's function returned, with the id of its run.

        A copy is needed because Prefect and its server may change the state later.
        """
        flow_run_id = None
        context = FlowRunContext.get()
        if context is not None and context.flow_run is not None:
            flow_run_id = context.flow_run.id
        details = StateDetails(flow_run_id=flow_run_id)
        self.state = state.model_copy(update={"state_details": details})

    def final_state(self, recorded: State[Any]) -> State[Any]:
        """Return the function's own state.

        Args:
            recorded: What the server says of the run. Where it differs, a warning is logged.

        Raises:
            VirnucError: The server ended the run before the function was called.
            BaseException: What the function raised.
        """
        if self.error is not None:
            raise self.error
        server_says = f"the Prefect server says {recorded.name}"
        if recorded.message:
            server_says += f" ({recorded.message})"
        if self.state is None:
            raise VirnucError(
                f"the run was ended before it did anything: {server_says}; run it again"
            )
        if recorded.type != self.state.type:
            own_type = self.state.type.value.lower()
            logger.warning(
                "the run is %s, but %s; what its files say counts", own_type, server_says
            )
        return self.state


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
