"""Guards the temporary Prefect server: it answers the command that started it, and nobody else.

This module runs in the server's process. Prefect's own authentication leaves some routes open (`/`,
`/docs`, `/api/health`), answers any `Host` and sends CORS headers to any `Origin`. `OwnerOnly`
stands before all of it.
"""

import base64
import hmac
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

from virnuc_core.rundir import name_process

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

UNAUTHORIZED: Final = 401
FORBIDDEN: Final = 403
MISDIRECTED: Final = 421
POLICY_VIOLATION: Final = 1008  # a WebSocket's close code
PROCESS_NAME: Final = "virnuc-server"  # as `ps` and `top` show it
# The routers that a run asks, those with few routes first.
ASKED_ROUTERS: Final = (
    "/admin",
    "/csrf-token",
    "/logs",
    "/events",
    "/artifacts",
    "/flows",
    "/flow_runs",
)


class OwnerOnly:
    """Pass on requests and WebSockets that know the secret and come from no web page.

    Args:
        app: The ASGI application to protect.
        host: The only accepted `Host` header, as `127.0.0.1:PORT`. A foreign name that resolves to
            this machine (DNS rebinding) is refused.
        secret: The authentication string, as `user:password`.
    """

    def __init__(self, app: App, host: str, secret: str) -> None:
        self._app = app
        self._host = host.encode()
        self._authorization = b"Basic " + base64.b64encode(secret.encode())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one connection: pass it on to the application, or refuse it.

        The parameters are those of the ASGI standard, with which a web server calls an application.

        Args:
            scope: What is known of the connection: its type, and the headers of the request.
            receive: Waits for the next message of the client.
            send: Sends a message to the client.
        """
        status = None
        # "lifespan" is no request, but the start and the end of the web server itself.
        if scope["type"] != "lifespan":
            status = self._refusal(scope["headers"])
        if status is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        else:
            headers = [(b"content-length", b"0"), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b""})

    def _refusal(self, headers: list[tuple[bytes, bytes]]) -> int | None:
        """Return the status that refuses a request with these headers, or None to accept it.

        A header that occurs twice is refused as well, because programs may differ in which one of
        the two they take.
        """
        authorizations = [value for name, value in headers if name == b"authorization"]
        hosts = [value for name, value in headers if name == b"host"]
        has_origin = any(name == b"origin" for name, _ in headers)
        if len(authorizations) != 1:
            return UNAUTHORIZED
        # This comparison takes equally long wherever the first difference is.
        if not hmac.compare_digest(authorizations[0], self._authorization):
            return UNAUTHORIZED
        if hosts != [self._host]:
            return MISDIRECTED
        if has_origin:  # browsers send it, our client does not
            return FORBIDDEN
        return None


def serve_new(listening_socket: int) -> None:
    """Run the server in a process of its own, until the process is asked to end.

    The secret (`user:password`) is read from standard input, which is a pipe. So it is in no
    command line and in no environment that `/proc` shows.

    Args:
        listening_socket: The number of the socket at which the server is asked.

    Raises:
        RuntimeError: There is no secret on standard input.
    """
    secret = sys.stdin.readline().strip()
    if not secret:
        raise RuntimeError("no authentication string on standard input")
    _serve(listening_socket, secret)


def serve_copied(listening_socket: int, secret: str, environment: Mapping[str, str]) -> None:
    """Run the server in a copy of the command's process, until the copy is asked to end.

    Args:
        listening_socket: The number of the socket at which the server is asked.
        secret: The authentication string, as `user:password`.
        environment: The environment of the server. A new process would be started with it.
    """
    os.environ.clear()
    os.environ.update(environment)
    _serve(listening_socket, secret)


def _serve(listening_socket: int, secret: str) -> None:
    """Run the guarded server until this process is asked to end.

    Args:
        listening_socket: The number of the socket at which the server is asked.
        secret: The authentication string, as `user:password`.
    """
    name_process(PROCESS_NAME)
    import uvicorn

    app = partial(guarded_app, secret)
    uvicorn.run(app, factory=True, fd=listening_socket, log_level="error")


def guarded_app(secret: str) -> App:
    """Return Prefect's server application, so that it answers only those who know a secret.

    Args:
        secret: The authentication string, as `user:password`. Prefect reads it from an environment
            variable, which this function sets.
    """
    os.environ["PREFECT_SERVER_API_AUTH_STRING"] = secret
    from prefect.context import refresh_global_settings_context

    # In a copy of the command's process, Prefect has read the settings of the command.
    refresh_global_settings_context()
    from prefect.server.api import server

    order_routers(server)
    # The `Host` header of a request has no user name and no password.
    host = urlsplit(os.environ["PREFECT_API_URL"]).netloc.rpartition("@")[2]
    return OwnerOnly(server.create_app(), host, secret)


def order_routers(server: Any) -> None:
    """Let the server look first among the routes that a run asks.

    FastAPI compares the path of a request with one router after the other, and builds the routes of
    a router when it first comes there. In Prefect's order, the first request of a run (for the
    version) would build all 180 routes, which takes 0.3 s of processor time. Prefect has no setting
    for it. No path is in two routers, so the order decides nothing else.

    Args:
        server: Prefect's module of the server.
    """

    def place(router: Any) -> int:
        """Return the place of a router in the order. `sorted` keeps the order of the others."""
        if router.prefix in ASKED_ROUTERS:
            return ASKED_ROUTERS.index(router.prefix)
        return len(ASKED_ROUTERS)

    server.API_ROUTERS = tuple(sorted(server.API_ROUTERS, key=place))
