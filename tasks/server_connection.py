"""The connection to the Prefect server, which shows what a run does. No run waits for it long or
fails with it.

A request is given a few seconds. After one that was not answered, others are not sent for a while.
If the server does not accept the state that a run proposes, because it is away, the run goes on as
if it had. What could not be reported is said in the log.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NoReturn, Protocol
from uuid import uuid4

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import PrefectException

from virnuc.tasks.result_references import without_result_references
from virnuc.tasks.server_use import REQUEST_TIMEOUT_S
from virnuc_core.confidential import redact

Ask = Callable[[httpx.Request], httpx.Response]
SILENT_S: Final = 30.0  # how long nothing is sent after a request that was not answered
REPEAT_S: Final = 1.0  # time between two tries of one request
REPORTING_ERRORS: Final = (httpx.HTTPError, PrefectException, OSError, RuntimeError)
UNFINISHED_STATES: Final = ("PENDING", "RUNNING", "PAUSED")
COPIED_FIELDS: Final = ("type", "name", "message", "state_details")  # of a state
logger = logging.getLogger(__name__)


class ServerLostError(httpx.TransportError):
    """The server did not answer in time, or is gone. Prefect's own client does not try again after
    it.
    """


@dataclass(frozen=True, slots=True)
class ProposedState:
    """The state of a flow run or task run that a request proposes to the server."""

    fields: dict[str, Any]

    @property
    def type(self) -> str:
        """The type of the state, as `COMPLETED`."""
        return str(self.fields["type"])

    @property
    def is_end(self) -> bool:
        """Tell whether the run has ended with this state."""
        return self.type not in UNFINISHED_STATES

    def accepted(self, request: httpx.Request) -> httpx.Response:
        """Return the answer that a server gives if it accepts the state.

        Prefect's client goes on by it as if the server had answered. The state has a new id and the
        present time, as a server would give it.

        Args:
            request: The request that proposed the state.
        """
        state = {name: self.fields.get(name) for name in COPIED_FIELDS}
        state["id"] = str(uuid4())
        state["timestamp"] = datetime.now(UTC).isoformat()
        body = {"state": state, "status": "ACCEPT", "details": {"type": "accept_details"}}
        return httpx.Response(200, json=body, request=request)


class ServerProcess(Protocol):
    """The process of a server that this process has started."""

    def poll(self) -> int | None:
        """Return the exit status of the process, or None if it has not ended."""

    def kill(self) -> None:
        """End the process by force."""


class Connection:
    """What this process knows of its server.

    Attributes:
        answered: Whether the server has ever answered.
        lost: Whether the last request was not answered.
        unreported: What could not be reported since the last state.
        embedded: The process of the server, if this process started it.
        patient_until_s: Until this moment (`time.monotonic`) the server may be away, because a
            person is waited for.
    """

    def __init__(self) -> None:
        self.answered = False
        self.lost = False
        self.unreported: list[str] = []
        self.embedded: ServerProcess | None = None
        self.patient_until_s = 0.0
        self._silent_until_s = 0.0

    def send(self, request: httpx.Request, ask: Ask) -> httpx.Response:
        """Send a request to the server.

        A request that proposes a state is tried again for a while. If the server does not answer,
        the state is taken as accepted. If the run has ended with this state, the log says what
        could not be reported.

        Args:
            request: The request.
            ask: Sends it and returns the answer.

        Returns:
            The answer, or one of ours.

        Raises:
            ServerLostError: There is no answer, and the request proposes no state, or a pause:
                nobody could ever end that.
        """
        state = proposed_state(request)
        try:
            answer = self._send_patiently(request, ask, is_state=state is not None)
        except ServerLostError:
            if state is None or state.type == "PAUSED":
                raise
            self.unreported.append(f"the state {state.fields['name']}")
            answer = state.accepted(request)
        if state is not None and state.is_end:
            self._end_run(request, state)
        return answer

    def _send_patiently(
        self, request: httpx.Request, ask: Ask, *, is_state: bool
    ) -> httpx.Response:
        """Send a request, and repeat it until it is answered or the time is over.

        Requests that propose a state are repeated for `REQUEST_TIMEOUT_S`. All requests are
        repeated until `patient_until_s`. If our own server has ended, nothing is repeated.

        Raises:
            ServerLostError: The last attempt was not answered.
        """
        patience_s = REQUEST_TIMEOUT_S if is_state else 0.0
        until_s = max(self.patient_until_s, time.monotonic() + patience_s)
        while True:
            # Others may be left out for some seconds after a request that was not answered.
            is_urgent = is_state or time.monotonic() < until_s
            try:
                return self._try(request, ask, is_urgent=is_urgent)
            except ServerLostError:
                if self._has_ended() or time.monotonic() >= until_s:
                    raise
            time.sleep(REPEAT_S)

    def _try(self, request: httpx.Request, ask: Ask, *, is_urgent: bool) -> httpx.Response:
        """Send a request once, and note whether the server answers.

        Args:
            request: The request.
            ask: Sends it and returns the answer.
            is_urgent: Send it even if another request was not answered a moment ago.

        Raises:
            ServerLostError: There is no answer, or the request was not sent.
        """
        if time.monotonic() < self._silent_until_s and not is_urgent:
            raise ServerLostError("the Prefect server did not answer before")
        request.extensions["timeout"] = httpx.Timeout(REQUEST_TIMEOUT_S).as_dict()
        try:
            if self._has_ended():
                # Another program may use its port now, and must not receive our requests.
                raise httpx.ConnectError("its process has ended")
            response = without_result_references(request, ask(request))
        except httpx.TransportError as error:
            self._note_loss(error)
            raise ServerLostError(redact(str(error))) from error
        if self.lost:
            logger.warning("the Prefect server answers again")
        self.answered = True
        self.lost = False
        self._silent_until_s = 0.0
        return response

    def _has_ended(self) -> bool:
        """Tell if the server was started by this process and has ended."""
        return self.embedded is not None and self.embedded.poll() is not None

    def _note_loss(self, error: httpx.TransportError) -> None:
        """Record that a request was not answered. The first time, a warning is logged.

        For the next `SILENT_S` seconds, no requests are sent that can be left out.
        """
        self._silent_until_s = time.monotonic() + SILENT_S
        if self.answered and not self.lost:
            logger.warning(
                "the Prefect server does not answer (%s); the run goes on without it",
                type(error).__name__,
            )
        self.lost = True

    def _end_run(self, request: httpx.Request, state: ProposedState) -> None:
        """Say what could not be reported of a run that has ended.

        If the server is lost and this process is the child of a Prefect worker, it is ended soon:
        threads of Prefect would wait for the server. A command ends itself, see `leave`.

        Args:
            request: The request that proposed the last state of a flow run or task run.
            state: This state.
        """
        if self.unreported:
            items = ", ".join(dict.fromkeys(self.unreported))
            logger.warning("not reported to the Prefect server: %s", items)
            self.unreported.clear()
        # A worker names the flow run to its child. The path of a request contains the run's id.
        run_of_workers_child = os.environ.get("PREFECT__FLOW_RUN_ID", "no such run")
        if self.lost and run_of_workers_child in request.url.path:
            exit_code = 0 if state.type == "COMPLETED" else 1
            self._exit_soon(exit_code)

    @contextmanager
    def reporting(self, subject: str) -> Iterator[None]:
        """Swallow the error of a report to the server that the `with` block makes, and go on.

        The subject is kept, so that the end of the run says what was not reported.

        Args:
            subject: What is reported, as "table reads".
        """
        try:
            yield
        except REPORTING_ERRORS as error:
            # Errors of HTTP clients name the address, which may contain a password.
            logger.debug("%s: not reported: %s", subject, redact(str(error)))
            self.unreported.append(subject)

    def send_rest(self) -> None:
        """Send the log lines and events that Prefect's threads still hold. They are ended then.

        They would do so when the process ends. Nothing is sent to a lost server, and the threads
        get the time of one request.
        """
        if self.lost or self._has_ended():
            return
        from prefect.logging.handlers import APILogWorker

        # This drains all services of Prefect that send something, as Prefect's own `flush` does.
        APILogWorker.drain_all(timeout=REQUEST_TIMEOUT_S, at_exit=False)

    def leave(self, code: int) -> None:
        """End this process at the end of a command, before threads of Prefect can hold it up.

        They would wait for a lost server for ever, so the process then ends now. Otherwise it has
        the time of one request to end by itself.

        Args:
            code: The exit code.
        """
        if self.lost:
            self._exit(code)
        self._exit_soon(code)

    def _exit_soon(self, code: int) -> None:
        """End this process after the time for one request, unless it ends by itself."""
        timer = threading.Timer(REQUEST_TIMEOUT_S, self._exit, (code,))
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # no further thread can be started, so nothing can wait
            self._exit(code)

    def _exit(self, code: int) -> NoReturn:
        """End this process, and the server that it started, without waiting for threads."""
        if self.embedded is not None:
            self.embedded.kill()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


connection: Final = Connection()


def proposed_state(request: httpx.Request) -> ProposedState | None:
    """Return the state that a request proposes for a run; None for any other request."""
    if request.method != "POST" or not request.url.path.endswith("/set_state"):
        return None
    body = json.loads(request.content)
    return ProposedState(body["state"])


def route_through_connection(client: SyncPrefectClient) -> None:
    """Let the client that a flow run and all within it share send its requests by `connection`.

    Prefect has settings for all of its clients only, and makes them before ours are read. So the
    transports of the client, which send its requests, are changed. A second call changes nothing.
    """
    http_client = client._client
    transports = (http_client._transport, *http_client._mounts.values())
    for transport in transports:
        if transport is None:  # for addresses that use no proxy; the first transport serves them
            continue
        is_changed = isinstance(transport.handle_request, partial)
        if is_changed:
            continue
        routed = partial(connection.send, ask=transport.handle_request)
        transport.handle_request = routed  # type: ignore[method-assign]
