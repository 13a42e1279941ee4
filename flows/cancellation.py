"""The cancel button of the UI, for a flow that was started from a terminal.

A worker or `serve` ends the process of a flow run that is cancelled. Nobody does that for a run
from a terminal, so this process asks the server itself.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext
from prefect.states import Cancelled

from virnuc.tasks.background import background_thread
from virnuc.tasks.server_connection import REPORTING_ERRORS, connection
from virnuc_core.errors import VirnucError

POLL_S: Final = 2.0
CANCELLED_STATES: Final = (StateType.CANCELLING, StateType.CANCELLED)


class CancelledError(VirnucError):
    """Somebody cancelled the flow run, in the UI or with `prefect flow-run cancel`."""

    exit_code = 130


@dataclass
class Cancellation:
    """Whether somebody cancelled the flow run that was started from a terminal.

    Attributes:
        flow_run_id: The run that was cancelled; None if none was.
    """

    flow_run_id: UUID | None = None


_cancellation: ContextVar[Cancellation | None] = ContextVar(
    "cancellation of the run from a terminal", default=None
)


@contextmanager
def cancellable() -> Iterator[None]:
    """Let the flow that the `with` block calls be cancelled at the server.

    A run that is cancelled is interrupted like one that gets a Ctrl-C. The server is then told that
    it has ended.

    Raises:
        CancelledError: The flow run was cancelled, and its processes have been ended.
        KeyboardInterrupt: Somebody pressed Ctrl-C.
    """
    cancellation = Cancellation()
    token = _cancellation.set(cancellation)
    try:
        yield
    except KeyboardInterrupt:
        if cancellation.flow_run_id is None:  # nobody cancelled the run: it was Ctrl-C
            raise
        _report_cancelled(cancellation.flow_run_id)
        raise CancelledError(
            "cancelled; what was committed stays, the same command goes on from there"
        ) from None
    finally:
        _cancellation.reset(token)


@contextmanager
def interrupted_when_cancelled() -> Iterator[None]:
    """Interrupt the `with` block, as Ctrl-C does, when its flow run is cancelled.

    A thread asks the server every few seconds. Nothing is watched if the run was not started from a
    terminal (no `cancellable` around it), or if there is no server.
    """
    cancellation = _cancellation.get()
    context = FlowRunContext.get()
    if cancellation is None or context is None or context.flow_run is None:
        yield
        return
    flow_run_id = context.flow_run.id

    def watch(stop: threading.Event) -> None:
        """Interrupt the main thread once the server says that this flow run is cancelled.

        Args:
            stop: Is set when the block has ended. It is not interrupted after that.
        """
        with get_client(sync_client=True) as client:
            while not stop.wait(POLL_S):
                if _is_cancelled(client, flow_run_id) and not stop.is_set():
                    cancellation.flow_run_id = flow_run_id
                    break
        # The client is closed by now, so no request is open when the interrupt comes.
        if cancellation.flow_run_id is not None:
            main_thread = threading.main_thread().ident
            assert main_thread is not None  # it has been started
            signal.pthread_kill(main_thread, signal.SIGINT)

    with background_thread(watch):
        yield


def _is_cancelled(client: SyncPrefectClient, flow_run_id: UUID) -> bool:
    """Ask the server whether a flow run is cancelled. No answer counts as no."""
    with suppress(*REPORTING_ERRORS):
        state = client.read_flow_run(flow_run_id).state
        return state is not None and state.type in CANCELLED_STATES
    return False


def _report_cancelled(flow_run_id: UUID) -> None:
    """Tell the server that a flow run it cancelled has ended."""
    with connection.reporting("that it was cancelled"), get_client(sync_client=True) as client:
        state: State[Any] = Cancelled(message="cancelled; children ended")
        client.set_flow_run_state(flow_run_id, state, force=True)
