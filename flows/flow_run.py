"""A flow run in this process, started from a terminal: a tidy console, and errors raised to the
caller.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, cast

import httpx
from prefect.client.schemas.objects import State
from prefect.context import SyncClientContext
from prefect.exceptions import CancelledRun, PrefectException
from prefect.flows import Flow
from prefect.logging.handlers import PrefectConsoleHandler

from virnuc.flows.cancellation import CancelledError, cancellable
from virnuc.flows.outcome import NotMetError
from virnuc.flows.own_outcome import current_outcome, recorded_outcome
from virnuc.flows.server_refusal import server_refusal
from virnuc.tasks.server_connection import (
    REPORTING_ERRORS,
    route_through_connection,
    without_server,
)
from virnuc_core.errors import VirnucError, printable
from virnuc_core.runfiles import redact_credentials
from virnuc_core.telemetry import live

logger = logging.getLogger(__name__)
SERVER_ERRORS: Final = (VirnucError, *REPORTING_ERRORS)
# loggers of Prefect that count, at the end, what is still to be sent
QUEUE_LOGGERS: Final = ("APILogWorker", "EventsWorker")


class TerminalOptions(Protocol):
    """What the user wants to see on the terminal."""

    @property
    def quiet(self) -> bool:
        """Show only warnings and the outcome."""

    @property
    def no_progress(self) -> bool:
        """Show plain lines in place of live bars."""

    @property
    def debug(self) -> bool:
        """Show everything, also what Prefect logs."""


def run_flow(
    flow: Flow[..., Any],
    parameters: Mapping[str, Any],
    terminal: TerminalOptions,
    wait_for_server: Callable[[], object] | None,
    *,
    may_run_alone: bool = False,
) -> State[Any]:
    """Run a flow in this process.

    Args:
        flow: The flow.
        parameters: Its parameters by name.
        terminal: What is shown on the terminal.
        wait_for_server: Returns once the Prefect server answers. None runs the flow's function
            without a server.
        may_run_alone: Do the same if the server fails before the function has begun.

    Returns:
        The final state. It may be a failed one only if criteria were not met.

    Raises:
        CancelledError: Somebody cancelled the run in the UI.
        VirnucError: No server answers, or the flow failed.
        BaseException: What else the flow raised.
    """
    _set_up_console(terminal)
    state: State[Any]
    if wait_for_server is None:
        state = without_server(flow.fn, **parameters)
    else:
        with recorded_outcome() as outcome:
            try:
                wait_for_server()
                recorded = _run_on_server(flow, parameters)
            except SERVER_ERRORS as server_error:
                # A run that somebody cancelled must not go on, whether it has begun or not.
                is_cancelled = isinstance(server_error, CancelledError | CancelledRun)
                if is_cancelled or outcome.has_begun or not may_run_alone:
                    raise
                logger.warning(
                    "the run goes on without a Prefect server, and is not in the UI: %s",
                    server_error,
                )
                recorded = without_server(flow.fn, **parameters)
        state = outcome.final_state(recorded)
    if state.is_completed():
        return state
    error = state.result(raise_on_failure=False)
    if isinstance(error, BaseException) and not isinstance(error, NotMetError):
        raise error
    return state


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


def _set_up_console(terminal: TerminalOptions) -> None:
    """Let live bars, the core's log lines and Prefect's warnings share one console."""
    # If the server is lost, Prefect's log handler would print an error for each line.
    logging.raiseExceptions = terminal.debug
    console = live.shared_console()
    if terminal.quiet or terminal.no_progress:
        console.is_interactive = False
    level = logging.WARNING if terminal.quiet else logging.INFO

    def is_shown(record: logging.LogRecord) -> bool:
        """Return whether a line is shown: lines of the core, and warnings of other libraries."""
        if record.name.startswith("virnuc_core") and record.levelno >= level:
            return True
        return record.levelno == logging.WARNING and record.name not in QUEUE_LOGGERS

    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.console = console
            if not terminal.debug:
                handler.addFilter(is_shown)
                handler.setFormatter(_PrintableFormatter("%(asctime)s  %(message)s", "%H:%M:%S"))


class _PrintableFormatter(logging.Formatter):
    """Formats lines so that no name in them, as of a file, moves the cursor."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without control characters."""
        return printable(super().format(record))
