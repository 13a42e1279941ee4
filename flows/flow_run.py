"""A flow run in this process, started from a terminal, that a Prefect server shows."""

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, cast

import httpx
from prefect.client.schemas.objects import State
from prefect.context import SyncClientContext
from prefect.exceptions import CancelledRun, PrefectException
from prefect.flows import Flow

from virnuc.flows.cancellation import CancelledError, cancellable
from virnuc.flows.own_outcome import current_outcome, recorded_outcome
from virnuc.flows.running_alone import warn_of_running_alone
from virnuc.flows.server_refusal import server_refusal
from virnuc.tasks.outcome import Outcome
from virnuc.tasks.server_connection import route_through_connection
from virnuc_core.runfiles import redact_credentials

# What Prefect and we import when a flow or task runs for the first time
RUN_MODULES: Final = (
    "prefect.flow_engine",
    "prefect.task_engine",
    "prefect.artifacts",
    "virnuc.tasks.prefect_task",
    "virnuc.tasks.server_logs",
)


def load_run_modules() -> None:
    """Load what a flow run needs at its first steps, while its server starts.

    A damaged package may raise errors of any type here. The run raises them again where it needs
    the package.
    """
    for name in RUN_MODULES:
        with suppress(Exception):
            importlib.import_module(name)


def run_flow(
    flow: Flow[..., Any],
    parameters: Mapping[str, Any],
    wait_for_server: Callable[[], object],
    run_alone: Callable[[], Outcome[Any]] | None = None,
) -> Outcome[Any]:
    """Run a flow in this process as a flow run of the server.

    Args:
        flow: The flow.
        parameters: Its parameters by name.
        wait_for_server: Returns once the Prefect server answers.
        run_alone: Does what the flow does without a server. It is called, after a warning, if the
            server fails before the flow's function has begun. None makes that an error.

    Returns:
        The outcome of the flow's function in this process.

    Raises:
        CancelledError: Somebody cancelled the run in the UI.
        VirnucError: No server answers.
        BaseException: What the function raised.
    """
    with recorded_outcome() as own:
        try:
            wait_for_server()
            recorded = _run_on_server(flow, parameters)
        except Exception as error:
            # Before the function has begun, any error is one of Prefect, its settings or server.
            # A run that somebody cancelled must not go on, whether it has begun or not.
            is_cancelled = isinstance(error, CancelledError | CancelledRun)
            if is_cancelled or own.has_begun or run_alone is None:
                raise
            warn_of_running_alone(error)
            return run_alone()
    return own.checked_against(recorded)


def _run_on_server(flow: Flow[..., Any], parameters: Mapping[str, Any]) -> State[Any]:
    """Run a flow as a flow run of the server; return the state that the server has of it.

    Raises:
        VirnucError: The server does not answer, or does not accept the run.
        BaseException: What the flow raised.
    """
    with cancellable():
        context = SyncClientContext()
        # From here on, a lost server delays or stops no work: see `server_connection`.
        route_through_connection(context.client)
        try:
            with context:
                return cast(State[Any], flow(**parameters, return_state=True))
        except (httpx.HTTPError, RuntimeError, ValueError, PrefectException) as error:
            # Prefect's client raises a RuntimeError if it cannot ask for the server's version.
            # After the function has begun, an error is the flow's own.
            if current_outcome().has_begun:
                raise
            shown_url = redact_credentials(str(context.client.api_url))
            refusal = server_refusal(error, shown_url)
            if refusal is None:
                raise
            raise refusal from error
