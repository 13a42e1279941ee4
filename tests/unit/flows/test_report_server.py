"""`virnuc report --serve`: its pages are for the person who started it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import httpx
import pytest

from virnuc.flows.cli.report_server import ReportServer, report_server

PATIENCE_S = 60.0
PAGES = {"report.html": "<p>patient 7</p>", "report.json": '{"reads": 5}'}


@pytest.fixture
def server() -> Iterator[ReportServer]:
    """A running server of two pages."""
    with report_server(PAGES) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_the_address_shows_the_report(server: ReportServer) -> None:
    """The printed address is all that a browser needs."""
    answer = httpx.get(server.address_of("report.html"), timeout=PATIENCE_S)
    assert answer.text == PAGES["report.html"]
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert httpx.get(server.address_of("report.json"), timeout=PATIENCE_S).json() == {"reads": 5}
    head = httpx.head(server.address_of("report.html"), timeout=PATIENCE_S)
    assert head.headers["content-length"] == str(len(PAGES["report.html"]))


def test_two_servers_have_different_tokens() -> None:
    """A token cannot be known from an earlier one."""
    with report_server(PAGES) as first, report_server(PAGES) as second:
        assert first.token != second.token
        assert min(len(first.token), len(second.token)) >= 40


@pytest.mark.parametrize(
    "path",
    [
        "",
        "report.html",
        "wrong-token/report.html",
        "TOKEN/",
        "TOKEN/report.txt",
        "TOKEN/../report.html",
        "TOKEN/%2e%2e/report.html",
        "TOKEN//etc/passwd",
        "TOKEN/report.html/",
        "SHORTENED/report.html",
    ],
)
def test_no_other_path_is_answered(server: ReportServer, path: str) -> None:
    """Another user finds the port, but not the token, and there is no folder to list."""
    known_path = path.replace("TOKEN", server.token).replace("SHORTENED", server.token[:-1])
    answer = raw_request(server, f"GET /{known_path} HTTP/1.1", f"Host: {server.host}")
    assert answer.startswith("HTTP/1.0 404 "), answer
    assert "patient" not in answer


@pytest.mark.parametrize(
    "headers",
    [
        ("Host: attacker.example",),
        ("Host: localhost",),
        (),
        ("Host: HOST", "Host: attacker.example"),
    ],
)
def test_a_foreign_host_header_is_refused(server: ReportServer, headers: tuple[str, ...]) -> None:
    """A name that resolves to this machine lets no web page read the report (DNS rebinding)."""
    own_headers = [header.replace("HOST", server.host) for header in headers]
    answer = raw_request(server, f"GET /{server.token}/report.html HTTP/1.1", *own_headers)
    assert answer.startswith("HTTP/1.0 421 "), answer
    assert "patient" not in answer


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(server: ReportServer, method: str) -> None:
    """Only reading is possible."""
    answer = httpx.request(method, server.address_of("report.html"), timeout=PATIENCE_S)
    assert answer.status_code == 501


def test_a_page_can_load_nothing_and_run_no_script(server: ReportServer) -> None:
    """Markup that came into a report by a name could not send anything elsewhere."""
    policy = httpx.get(server.address_of("report.html"), timeout=PATIENCE_S).headers[
        "content-security-policy"
    ]
    assert "default-src 'none'" in policy
    assert "script-src" not in policy


def test_only_the_loopback_address_listens(server: ReportServer) -> None:
    """Other machines cannot connect."""
    assert server.server_address[0] == "127.0.0.1"


def raw_request(server: ReportServer, *lines: str) -> str:
    """Send a request as it is, without what an HTTP client would add or normalise."""
    with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
        connection.sendall("\r\n".join((*lines, "", "")).encode())
        received = b""
        while chunk := connection.recv(4096):
            received += chunk
    return received.decode()
