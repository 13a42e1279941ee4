"""Shows the pages of a report to a browser on this machine, and to nobody else.

Other users of the machine can connect to the same port. So the address contains a random token,
without which no page is sent. The pages are served from memory: no file is opened for a request.
"""

import hmac
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import urlsplit

LOOPBACK: Final = "127.0.0.1"
TOKEN_BYTES: Final = 32  # 256 random bits cannot be guessed
CONTENT_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".json": "application/json",
    ".md": "text/plain; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
}
SAFETY_HEADERS: Final = {
    # The page has inline styles and images. Nothing may be loaded, and no script may run.
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; "
        "form-action 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address contains the token
    "Cache-Control": "no-store",
}


class ReportServer(ThreadingHTTPServer):
    """An HTTP server for the pages of one report.

    Attributes:
        pages: The content of each page, by its file name.
        token: The random first part of all paths.
    """

    daemon_threads = True

    def __init__(self, pages: Mapping[str, str]) -> None:
        """Bind a free port of the loopback address.

        Args:
            pages: The content of each page, by its file name.
        """
        self.pages = pages
        self.token = secrets.token_urlsafe(TOKEN_BYTES)
        super().__init__((LOOPBACK, 0), _PageHandler)

    @property
    def host(self) -> str:
        """Return the only value of the `Host` header that is answered."""
        return f"{LOOPBACK}:{self.server_port}"

    def address_of(self, page: str) -> str:
        """Return the address of a page, which contains the token."""
        return f"http://{self.host}/{self.token}/{page}"


class _PageHandler(BaseHTTPRequestHandler):
    """Answers one request: with a page of the report, or with an error without content."""

    server: ReportServer
    server_version = "virnuc"
    sys_version = ""

    def do_GET(self) -> None:
        """Send the requested page."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Send the headers of the requested page."""
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        """Send the page, or refuse the request.

        A foreign `Host` header is refused because a name in the internet can resolve to this
        machine (DNS rebinding). The browser would then let a web page read the report.
        """
        if self.headers.get_all("Host") != [self.server.host]:
            self._send(HTTPStatus.MISDIRECTED_REQUEST)
            return
        # A path is "/TOKEN/PAGE".
        _, _, token_and_page = urlsplit(self.path).path.partition("/")
        token, _, page = token_and_page.partition("/")
        # This comparison takes equally long wherever the first difference is.
        has_token = hmac.compare_digest(token.encode(), self.server.token.encode())
        if not has_token or page not in self.server.pages:
            self._send(HTTPStatus.NOT_FOUND)
            return
        content = self.server.pages[page].encode()
        content_type = CONTENT_TYPES[PurePosixPath(page).suffix]
        self._send(HTTPStatus.OK, content, content_type, with_body=with_body)

    def _send(
        self,
        status: HTTPStatus,
        content: bytes = b"",
        content_type: str = "text/plain",
        *,
        with_body: bool = True,
    ) -> None:
        """Send a whole answer.

        Args:
            status: The status.
            content: The body.
            content_type: The type of the body.
            with_body: Send the body; false for HEAD requests.
        """
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        for name, value in SAFETY_HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: a line for each request would disturb the terminal."""


@contextmanager
def report_server(pages: Mapping[str, str]) -> Iterator[ReportServer]:
    """Yield a server that is bound but does not serve yet; its port is freed afterwards.

    Args:
        pages: The content of each page, by its file name.
    """
    with ReportServer(pages) as server:
        yield server
