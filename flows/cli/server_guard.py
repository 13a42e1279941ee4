"""Guards the temporary Prefect server: it answers the command that started it, and nobody else.

This module runs in the server's process. Prefect's own authentication leaves some routes open (`/`,
`/docs`, `/api/health`), answers any `Host` and sends CORS headers to any `Origin`. `OwnerOnly`
stands before all of it.
"""

import base64
import hmac
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

UNAUTHORIZED: Final = 401
FORBIDDEN: Final = 403
MISDIRECTED: Final = 421
POLICY_VIOLATION: Final = 1008  # a WebSocket's close code


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


def create_app() -> App:
    """Return Prefect's server application, so that it answers only those who know a secret.

    The secret (`user:password`) is read from standard input, which is a pipe. So it is in no
    command line and in no environment that `/proc` shows. Prefect reads it from an environment
    variable when it is imported, so this process sets the variable before the import.

    Raises:
        RuntimeError: There is no secret on standard input.
    """
    secret = sys.stdin.readline().strip()
    if not secret:
        raise RuntimeError("no authentication string on standard input")
    os.environ["PREFECT_SERVER_API_AUTH_STRING"] = secret
    from prefect.server.api import server

    # The `Host` header of a request has no user name and no password.
    host = urlsplit(os.environ["PREFECT_API_URL"]).netloc.rpartition("@")[2]
    return OwnerOnly(server.create_app(), host, secret)
