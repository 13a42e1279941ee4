"""Who is let into a temporary server, and what is taken from a server's answers."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from prefect.server.api import server as prefect_server
from prefect.settings import (
    PREFECT_HOME,
    PREFECT_SERVER_DATABASE_CONNECTION_URL,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    temporary_settings,
)

import virnuc_core.first_use
from virnuc.flows.cli import temporary_server
from virnuc.flows.cli.server_guard import (
    ASKED_ROUTERS,
    Message,
    OwnerOnly,
    Receive,
    Send,
    order_routers,
)
from virnuc.flows.cli.temporary_server import FirstUse, Progress, TemporaryServer, progress_of
from virnuc.tasks import server_connection
from virnuc.tasks.result_references import without_result_references
from virnuc.tasks.server_connection import Connection, ServerLostError
from virnuc_core.errors import VirnucError

HOST = (b"host", b"127.0.0.1:4321")
SECRET = (b"authorization", b"Basic " + base64.b64encode(b"virnuc:secret"))
WRONG = (b"authorization", b"Basic " + base64.b64encode(b"virnuc:secrets"))
ORIGIN = (b"origin", b"http://127.0.0.1:4321")
REFERENCE = {"storage_key": "/tmp/theirs", "serializer": {"type": "pickle"}}
STATE = {"type": "COMPLETED", "name": "Completed", "state_details": {}, "data": REFERENCE}


def sent_to(kind: str, *headers: tuple[bytes, bytes]) -> list[Message]:
    """What a guarded application sends for one connection; the application itself sends `let in`."""
    messages: list[Message] = []

    async def app(_scope: Message, _receive: Receive, send: Send) -> None:
        await send({"type": "let in"})

    async def receive() -> Message:
        raise AssertionError("nothing is read of what is refused")

    async def send(message: Message) -> None:
        messages.append(message)

    guarded = OwnerOnly(app, "127.0.0.1:4321", "virnuc:secret")
    asyncio.run(guarded({"type": kind, "headers": list(headers)}, receive, send))
    return messages


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_who_knows_the_secret_is_let_in(kind: str) -> None:
    assert sent_to(kind, HOST, SECRET) == [{"type": "let in"}]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        ([HOST], 401),
        ([HOST, WRONG], 401),
        ([HOST, SECRET, WRONG], 401),
        ([HOST, (b"authorization", b"Bearer " + SECRET[1].split()[1])], 401),
        ([HOST, (b"authorization", "Basic ümlaut".encode())], 401),
        ([SECRET], 421),
        ([(b"host", b"evil.example:4321"), SECRET], 421),
        ([HOST, (b"host", b"evil.example"), SECRET], 421),
        ([HOST, SECRET, ORIGIN], 403),
        ([HOST, SECRET, (b"origin", b"null")], 403),
    ],
)
def test_all_others_are_refused(headers: list[tuple[bytes, bytes]], status: int) -> None:
    start, body = sent_to("http", *headers)
    assert (start["status"], body["body"]) == (status, b"")
    assert not any(name.startswith(b"access-control") for name, _ in start["headers"])
    assert sent_to("websocket", *headers) == [{"type": "websocket.close", "code": 1008}]


def test_the_server_itself_may_start_and_stop() -> None:
    assert sent_to("lifespan") == [{"type": "let in"}]


def answer_of(path: str, body: object, **headers: str) -> Any:
    """The parsed answer to a request for `path`, after the connection has seen it."""
    request = httpx.Request("POST", f"http://server/api{path}")
    content = json.dumps(body).encode()
    if headers:
        content = gzip.compress(content)
    response = httpx.Response(200, content=content, headers=headers)
    return without_result_references(request, response).json()


@pytest.mark.parametrize(
    ("path", "wrap"),
    [
        ("/flow_runs/1/set_state", lambda state: {"status": "REJECT", "state": state}),
        ("/flow_runs/1", lambda state: {"id": "1", "state": state, "parameters": {"data": [1]}}),
        ("/flow_runs/filter", lambda state: [{"state": state}, {"state": None}]),
        ("/task_runs/1/set_state", lambda state: {"state": state}),
        ("/flow_run_states/", lambda state: [state]),
        ("/deployments/1/create_flow_run", lambda state: {"state": state}),
    ],
)
def test_results_are_removed_from_every_state_that_a_server_sends(path: str, wrap: Any) -> None:
    bare = {name: value for name, value in STATE.items() if name != "data"}
    assert answer_of(path, wrap(STATE)) == wrap(bare)
    assert answer_of(path, wrap(STATE), **{"content-encoding": "gzip"}) == wrap(bare)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/artifacts/", {"type": "table", "data": "[]"}),
        ("/flow_runs/1", {"state": {"type": "RUNNING", "data": None}}),
        ("/flow_runs/filter", []),
    ],
)
def test_other_answers_are_left_as_they_are(path: str, body: object) -> None:
    assert answer_of(path, body) == body


# Listens on a socket that it got, works for some seconds without much computing, and then answers.
SLOW_SERVER = """
import http.server, os, socket, sys, time
listener = socket.socket(fileno=int(sys.argv[1]))
work, seconds = sys.argv[2], float(sys.argv[3])
file = os.open(sys.argv[4], os.O_RDWR | os.O_CREAT)
os.write(file, bytes(8192))
end = time.monotonic() + seconds
while time.monotonic() < end:
    time.sleep(0.1)
    if work == "writes":
        os.pwrite(file, bytes(8192), 0)
    elif work == "reads":
        os.pread(file, 8192, 0)
    elif work == "ticks":  # as a thread that waits for an event
        os.pwrite(file, bytes(8), 0)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
server.socket = listener
server.serve_forever()
"""


@pytest.fixture
def slow_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, float], TemporaryServer]]:
    """Starts a server that answers late, under a limit of one second."""
    monkeypatch.setattr(temporary_server, "POLL_S", 0.2)
    monkeypatch.setattr(server_connection.connection, "embedded", None)  # `wait` sets it
    limit = {PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: 1}
    with ExitStack() as stack:
        stack.enter_context(temporary_settings(updates=limit))
        log = stack.enter_context(tempfile.TemporaryFile())

        def start(work: str, seconds: float) -> TemporaryServer:
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                listener.listen(128)
                number = listener.fileno()
                arguments = [str(number), work, str(seconds), str(tmp_path / "database")]
                process = subprocess.Popen(
                    [sys.executable, "-c", SLOW_SERVER, *arguments],
                    pass_fds=[number],
                    stderr=subprocess.DEVNULL,
                )
                url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
            stack.callback(process.wait)
            stack.callback(process.kill)
            return TemporaryServer(process, url, "secret", log, "do without")

        yield start


@pytest.mark.parametrize("work", ["writes", "reads"])
def test_a_server_that_waits_for_a_slow_disk_is_waited_for(
    work: str, slow_server: Callable[[str, float], TemporaryServer]
) -> None:
    server = slow_server(work, 6.0)
    server.wait()
    assert server.process.poll() is None


@pytest.mark.parametrize("work", ["nothing", "ticks"])
def test_a_server_that_is_stuck_is_given_up(
    work: str, slow_server: Callable[[str, float], TemporaryServer]
) -> None:
    server = slow_server(work, 60.0)
    with pytest.raises(VirnucError, match=r"does not start: .*; mend it, or do without"):
        server.wait()


def test_a_process_that_has_ended_shows_no_work() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    progress = progress_of(process.pid)
    assert progress == Progress(0.0, 0)
    assert not progress.shows_work_since(Progress(0.0, 0))


def test_nobody_is_asked_at_the_port_of_a_temporary_server_that_has_ended() -> None:
    """Another user may have taken it."""
    requests: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200)

    connection = Connection()
    connection.embedded = cast("subprocess.Popen[Any]", SimpleNamespace(poll=lambda: -9))
    with pytest.raises(ServerLostError, match="its process has ended"):
        connection.send(httpx.Request("GET", "http://server/api/flow_runs/1"), handle)
    assert requests == []


def migrate(home: Path, revision: str) -> None:
    """Leave in a database what Prefect's migrations leave: the name of the last one (Alembic)."""
    with closing(sqlite3.connect(home / "prefect.db")) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS alembic_version (version_num VARCHAR(32))")
        database.execute("DELETE FROM alembic_version")
        database.execute("INSERT INTO alembic_version VALUES (?)", (revision,))


def finished_first_use(home: Path) -> None:
    """Set up a home as a command does whose server has answered."""
    first_use = FirstUse(home)
    migrate(home, "a3b9c7d2e5f1")
    first_use.finish()
    first_use.release()


def test_a_second_first_use_waits_for_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first_use = FirstUse(tmp_path)
    waiting = threading.Thread(target=finished_first_use, args=(tmp_path,))
    waiting.start()
    while "another process makes Prefect's database" not in caplog.text:
        assert waiting.is_alive()
        time.sleep(0.01)
    first_use.release()
    waiting.join(timeout=120.0)
    assert not waiting.is_alive()
    assert caplog.text.count("another process makes Prefect's database") == 1


def test_a_home_that_is_ready_needs_no_lock_until_its_database_is_removed(tmp_path: Path) -> None:
    finished_first_use(tmp_path)
    with_lock = FirstUse(tmp_path)
    assert not with_lock._lock.is_held
    (tmp_path / "prefect.db").unlink()
    first_use = FirstUse(tmp_path)
    assert first_use._lock.is_held
    # Its server makes the file long before all tables are in it.
    (tmp_path / "prefect.db").write_text("")
    assert not first_use._is_ready()
    first_use.release()


def test_a_database_whose_migrations_were_taken_back_is_migrated_again(tmp_path: Path) -> None:
    finished_first_use(tmp_path)
    migrate(tmp_path, "an older one")
    first_use = FirstUse(tmp_path)
    assert first_use._lock.is_held
    assert not first_use.is_set_up
    first_use.release()


def test_migrations_are_left_out_only_for_the_database_that_was_set_up(tmp_path: Path) -> None:
    finished_first_use(tmp_path)
    first_use = FirstUse(tmp_path)
    with temporary_settings(updates={PREFECT_HOME: tmp_path}):
        own_url = f"sqlite+aiosqlite:///{tmp_path}/prefect.db"
        with temporary_settings(updates={PREFECT_SERVER_DATABASE_CONNECTION_URL: own_url}):
            assert first_use.is_set_up
        # A profile of Prefect may name another database, which this home knows nothing of.
        other_url = f"sqlite+aiosqlite:///{tmp_path}/other.db"
        with temporary_settings(updates={PREFECT_SERVER_DATABASE_CONNECTION_URL: other_url}):
            assert not first_use.is_set_up


def test_no_request_could_be_answered_by_two_routers() -> None:
    """So the order in which a temporary server looks through them decides no answer."""
    routers = prefect_server.API_ROUTERS
    routes = [(index, route) for index, router in enumerate(routers) for route in router.routes]
    clashes = []
    for index, route in routes:
        path = re.sub(r"\{[^}]+\}", "0b3e5a1c-7d4f-4b6a-9c2e-1f8d7a6b5c4d", route.path)
        for other_index, other in routes:
            if other_index == index or not other.path_regex.match(path):
                continue
            if methods_of(route) & methods_of(other):
                clashes.append((route.path, other.path))
    assert clashes == []


def methods_of(route: Any) -> set[str]:
    """Return the HTTP methods of a route, or one word for a WebSocket."""
    return getattr(route, "methods", None) or {"WebSocket"}


def test_the_routers_that_a_run_asks_come_first_and_none_is_lost() -> None:
    server = SimpleNamespace(API_ROUTERS=prefect_server.API_ROUTERS)
    order_routers(server)
    prefixes = [router.prefix for router in server.API_ROUTERS]
    assert prefixes[: len(ASKED_ROUTERS)] == list(ASKED_ROUTERS)
    assert Counter(prefixes) == Counter(router.prefix for router in prefect_server.API_ROUTERS)


def test_a_suspended_holder_does_not_stop_others_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virnuc_core.first_use, "MAX_WAIT_S", 0.3)
    first_use = FirstUse(tmp_path)
    FirstUse(tmp_path).release()
    first_use.release()


def test_no_link_is_followed_for_the_lock(tmp_path: Path) -> None:
    (tmp_path / ".virnuc-first-use").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        FirstUse(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_another_that_has_taken_the_port_of_a_dead_server_is_sent_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_connection.connection, "embedded", None)  # `wait` sets it
    process = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)
    process.wait()
    with process, socket.socket() as other, tempfile.TemporaryFile() as log:
        other.bind(("127.0.0.1", 0))
        other.listen()
        other.setblocking(False)
        url = f"http://127.0.0.1:{other.getsockname()[1]}/api"
        server = TemporaryServer(process, url, "secret", log, "do without")
        with pytest.raises(VirnucError, match="its process has ended"):
            server.wait()
        with pytest.raises(BlockingIOError):  # nobody has connected
            other.accept()
