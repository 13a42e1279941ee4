"""Run a flow here and now: the flow that deployments run, with a tidy terminal and a cancel button that works."""

from __future__ import annotations

import contextvars
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, cast
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException
from prefect.flows import Flow
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.states import Cancelled

from flows.embedded_server import keep_server_ours
from tasks.step import NotMetError
from virnuc_core.errors import VirnucError

WATCH_S: Final = 2.0
IMPATIENCE_S: Final = 10.0  # in which children end; who presses Ctrl-C after that means it
logger = logging.getLogger(__name__)


class CancelledError(VirnucError):
    """Somebody cancelled the flow run, in the UI or with `prefect flow-run cancel`."""

    exit_code = 130


class _OwnLines(logging.Filter):
    """Keeps the console to what virnuc says, and to Prefect's warnings; errors are said once, by the command."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.startswith("virnuc_core"):
            return True
        return record.levelno == logging.WARNING


def tidy_console() -> None:
    """From now on show the core's lines, plainly, and Prefect's warnings; also while this process ends."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler) and not any(isinstance(f, _OwnLines) for f in handler.filters):
            handler.addFilter(_OwnLines())
            handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", datefmt="%H:%M:%S"))


class _ByHand:
    """What is known of the flow that `run_flow` runs."""

    cancelled: UUID | None = None  # the flow run that somebody cancelled


_by_hand: _ByHand | None = None  # one flow a process is run by hand


@contextmanager
def ended_when_cancelled() -> Iterator[None]:
    """For a flow's body: interrupt it when its run is cancelled.

    A worker or `serve` ends the process of a cancelled run; nobody does that for a run started by hand.
    """
    context = FlowRunContext.get()
    if _by_hand is None or context is None or context.flow_run is None:
        yield
        return
    stop, here = threading.Event(), contextvars.copy_context()  # with the server this run talks to
    arguments = (_watch, _by_hand, context.flow_run.id, stop)
    thread = threading.Thread(target=here.run, args=arguments, name="cancel watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=30)


def _watch(by_hand: _ByHand, flow_run_id: UUID, stop: threading.Event) -> None:
    with get_client(sync_client=True) as client:
        while not stop.wait(WATCH_S):
            try:
                state = client.read_flow_run(flow_run_id).state
            except (httpx.HTTPError, PrefectException, OSError) as error:
                logger.debug("state of the run not read: %s", error)
                continue
            if state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED):
                by_hand.cancelled = flow_run_id
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return


def run_flow(flow: Flow[..., Any], parameters: Mapping[str, Any], *, debug: bool = False) -> State[Any]:
    """Run `flow` in this process; returns its final state, which may be a failed one: criteria that were not met.

    Errors: what the flow raised; `CancelledError`; `KeyboardInterrupt`.
    """
    global _by_hand
    started = _by_hand = _ByHand()
    keep_server_ours()
    if not debug:
        tidy_console()
    try:
        with _terminate_politely():
            state = cast(State[Any], flow(**parameters, return_state=True))
    except KeyboardInterrupt:
        if started.cancelled is None:
            raise
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(started.cancelled, Cancelled(message="cancelled; children ended"), force=True)
        raise CancelledError("cancelled; what was committed stays, the same command goes on from there") from None
    finally:
        _by_hand = None
    found = None if state.is_completed() else state.result(raise_on_failure=False)
    if isinstance(found, BaseException) and not isinstance(found, NotMetError):
        raise found
    return state


@contextmanager
def _terminate_politely() -> Iterator[None]:
    """SIGTERM ends a run started by hand as Ctrl-C does; pressing again at once does not disturb the ending."""
    last_s = -math.inf

    def interrupt(_signum: int, _frame: object) -> None:
        nonlocal last_s
        now = time.monotonic()
        if now - last_s > IMPATIENCE_S:
            last_s = now
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
