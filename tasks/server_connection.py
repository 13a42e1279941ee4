"""The line to the Prefect server, which shows what a run does: no run waits for it long or fails because of it.

A request is given a few seconds; after one that was not answered others are not sent for a while; a state which a run
proposes in vain is taken as accepted. What could not be reported is said in the log. Runs wait for one another's
devices there; the lock of the operating system, taken by the worker process itself, is what makes sharing impossible.
"""

import contextvars
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NoReturn, TypeVar
from uuid import uuid4

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import PrefectException
from prefect.utilities import callables

from virnuc.tasks.result_references import without_result_references

T = TypeVar("T")
Ask = Callable[[httpx.Request], httpx.Response]
REQUEST_TIMEOUT_S: Final = 15.0  # for one request; a busy server has needed some seconds
SILENT_S: Final = 30.0  # after a request that was not answered
REPORTING_ERRORS: Final = (httpx.HTTPError, PrefectException, OSError, RuntimeError)
logger = logging.getLogger(__name__)


class _NoOthers(callables.ParameterSchema):
    """A flow's parameters, as a server holds new runs against them: names that are none of these are refused."""

    additionalProperties: bool  # noqa: N815 - a word of JSON Schema

    def __init__(
        self, **schema: Any
    ) -> None:  # what is not given is left out where a flow is deployed
        super().__init__(**schema, additionalProperties=False)


# there is no setting for it, and Prefect makes the schema anew wherever it deploys a flow
callables.ParameterSchema = _NoOthers  # type: ignore[misc]


class ServerLostError(httpx.TransportError):
    """The server did not answer in time, or is gone. Prefect's own client does not try again after it."""


class Connection:
    """What this process knows of its server."""

    def __init__(self) -> None:
        self.answered = self.lost = False
        self.unreported: list[str] = []
        self.embedded: subprocess.Popen[Any] | None = None  # the server that this process started
        self._silent_until_s = 0.0
        self.patient_until_s = (
            0.0  # while a person is waited for, a server that is away may be, too
        )

    def send(self, request: httpx.Request, ask: Ask) -> httpx.Response:
        """What the server answers to `ask`; on a state ours, when it answers nothing. Errors: `ServerLostError`."""
        proposed = request.method == "POST" and request.url.path.endswith("/set_state")
        state: Mapping[str, Any] | None = json.loads(request.content)["state"] if proposed else None
        until_s = max(
            self.patient_until_s, time.monotonic() + (REQUEST_TIMEOUT_S if state else 0.0)
        )
        while True:
            try:
                answer = self._try(
                    request, ask, at_once=state is not None or time.monotonic() < until_s
                )
            except ServerLostError:
                gone = self.embedded is not None and self.embedded.poll() is not None
                if not gone and time.monotonic() < until_s:
                    time.sleep(1.0)
                    continue
                if state is None or state["type"] == "PAUSED":  # nobody could ever end that pause
                    raise
                self.unreported.append(f"the state {state['name']}")
                told = {
                    name: state.get(name) for name in ("type", "name", "message", "state_details")
                }
                told |= {"id": str(uuid4()), "timestamp": datetime.now(UTC).isoformat()}
                body = {"state": told, "status": "ACCEPT", "details": {"type": "accept_details"}}
                answer = httpx.Response(200, json=body, request=request)
            break
        if state is not None and state["type"] not in ("PENDING", "RUNNING", "PAUSED"):
            if self.unreported:
                logger.warning(
                    "not reported to the Prefect server: %s",
                    ", ".join(dict.fromkeys(self.unreported)),
                )
                self.unreported.clear()
            if (
                self.lost and os.environ.get("PREFECT__FLOW_RUN_ID", "none") in request.url.path
            ):  # a worker's child
                self._end_soon(int(state["type"] != "COMPLETED"))
        return answer

    def _try(self, request: httpx.Request, ask: Ask, *, at_once: bool) -> httpx.Response:
        if time.monotonic() < self._silent_until_s and not at_once:
            raise ServerLostError("the Prefect server did not answer before")
        request.extensions["timeout"] = httpx.Timeout(REQUEST_TIMEOUT_S).as_dict()
        try:
            if self.embedded is not None and self.embedded.poll() is not None:
                # whoever has its port now is not asked
                raise httpx.ConnectError("its process has ended")
            response = without_result_references(request, ask(request))
        except httpx.TransportError as error:
            self._silent_until_s = time.monotonic() + SILENT_S
            if self.answered and not self.lost:
                reason = type(error).__name__
                logger.warning(
                    "the Prefect server does not answer (%s); the run goes on without it", reason
                )
            self.lost = True
            raise ServerLostError(str(error)) from error
        if self.lost:
            logger.warning("the Prefect server answers again")
        self.answered, self.lost, self._silent_until_s = True, False, 0.0
        return response

    @contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Around a report to the server: one that cannot be given is remembered, and the run goes on."""
        try:
            yield
        except REPORTING_ERRORS as error:
            logger.debug("%s: not reported: %s", what, error)
            self.unreported.append(what)

    def leave(self, code: int) -> None:
        """See to it that this process ends now, or soon: threads of Prefect would wait for a lost server for ever."""
        if self.lost:
            self._end(code)
        self._end_soon(code)

    def _end_soon(self, code: int) -> None:
        timer = threading.Timer(REQUEST_TIMEOUT_S, self._end, (code,))
        timer.daemon = True
        timer.start()

    def _end(self, code: int) -> NoReturn:
        if self.embedded is not None:
            self.embedded.kill()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


connection: Final = Connection()


def route_through_connection(client: SyncPrefectClient) -> None:
    """Let this client, which a flow run and all within it share, ask through `connection`."""
    own = (
        client._client
    )  # Prefect knows settings for all of its clients only, made before ours are read
    for way in filter(None, (own._transport, *own._mounts.values())):
        if not isinstance(way.handle_request, partial):
            way.handle_request = partial(connection.send, ask=way.handle_request)  # type: ignore[method-assign]


_alone: contextvars.ContextVar[bool] = contextvars.ContextVar("runs without Prefect", default=False)


def with_server() -> bool:
    """Whether there is a Prefect server to tell."""
    return not _alone.get()


def without_server(called: Callable[..., T], **given: Any) -> T:
    """What `called` returns when it and the tasks in it are plain functions: nothing is recorded, nobody is asked."""
    context = contextvars.copy_context()
    context.run(_alone.set, True)
    return context.run(called, **given)
