"""What happens to words for a Prefect server that does not answer, and to tasks that have none."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
from prefect import context
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

from virnuc.flows.cli.forked_process import ForkedProcess
from virnuc.flows.cli.temporary_server import TemporaryServer, _use_server, require_usable_home
from virnuc.tasks import server_connection
from virnuc.tasks.device_slots import device_slots
from virnuc.tasks.outcome import Outcome
from virnuc.tasks.retries import first_attempt
from virnuc.tasks.server_connection import Connection, ServerLostError
from virnuc.tasks.server_use import without_server
from virnuc.tasks.task import retrying_task
from virnuc_core.errors import ConfigError, InputError, VirnucError, WorkerError
from virnuc_core.runfiles import Device

ARTIFACT = httpx.Request("POST", "http://server/api/artifacts/", json={})


def proposal(kind: str) -> httpx.Request:
    state = {
        "type": kind,
        "name": kind.title(),
        "message": "12 of 60 reads are viral",
        "state_details": {},
    }
    return httpx.Request(
        "POST", "http://server/api/flow_runs/1/set_state", json={"state": state, "force": False}
    )


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> tuple[Connection, httpx.MockTransport, list[str]]:
    """A connection whose server never answers, and the paths that it was asked for."""
    requests: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(request.url.path)
        raise httpx.ReadTimeout("in vain")

    monkeypatch.setattr(server_connection, "REQUEST_TIMEOUT_S", 0.0)
    return Connection(), httpx.MockTransport(handle), requests


def test_a_server_that_did_not_answer_is_not_asked_again_for_a_while(
    lost: tuple[Connection, httpx.MockTransport, list[str]],
) -> None:
    connection, transport, requests = lost
    for _ in range(3):
        with pytest.raises(ServerLostError):
            connection.send(ARTIFACT, transport.handle_request)
        with connection.reporting("table reads"):
            connection.send(ARTIFACT, transport.handle_request)
    assert requests == ["/api/artifacts/"]
    assert connection.unreported == ["table reads"] * 3


def test_no_log_line_about_a_server_has_its_password(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    url = "http://lab-user:swordfish@server.example/api/artifacts/"
    request = httpx.Request("POST", url)
    response = httpx.Response(401, request=request)

    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError(f"no answer from {url}")

    connection = Connection()
    with connection.reporting("table reads"):
        response.raise_for_status()
    with connection.reporting("table reads"):
        connection.send(request, refuse)
    assert "not reported" in caplog.text
    assert "server.example" in caplog.text
    assert "swordfish" not in caplog.text


def test_a_state_proposed_in_vain_is_taken_as_accepted_and_what_was_not_told_is_said_once(
    lost: tuple[Connection, httpx.MockTransport, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    connection, transport, requests = lost
    with connection.reporting("table reads"):
        connection.send(ARTIFACT, transport.handle_request)
    answer = connection.send(proposal("COMPLETED"), transport.handle_request).json()
    assert (answer["status"], answer["state"]["name"]) == ("ACCEPT", "Completed")
    assert len(requests) == 2  # an end is worth a try at all times
    assert [record.message for record in caplog.records] == [
        "not reported to the Prefect server: table reads, the state Completed"
    ]
    with pytest.raises(ServerLostError):  # nobody could ever end that pause
        connection.send(proposal("PAUSED"), transport.handle_request)


def test_a_server_that_is_back_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    connection, answers = Connection(), [httpx.Response(200), None, httpx.Response(201)]

    def handle(request: httpx.Request) -> httpx.Response:
        if (answer := answers.pop(0)) is None:
            raise httpx.ConnectError("restarting")
        return answer

    transport = httpx.MockTransport(handle)
    connection.send(ARTIFACT, transport.handle_request)
    assert connection.send(proposal("COMPLETED"), transport.handle_request).status_code == 201
    assert not connection.lost
    assert ["answers again" in record.message for record in caplog.records] == [False, True]


def test_devices_are_not_waited_for_at_a_server_that_is_gone() -> None:
    with (
        temporary_settings(updates={PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        device_slots([Device(id="GPU-unasked", kind="cuda", name="a GPU")]),
    ):
        assert any("gpu-unasked" in report for report in server_connection.connection.unreported)
    server_connection.connection.unreported.clear()


def test_an_embedded_server_which_nobody_else_sees_is_asked_for_no_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_connection.connection, "embedded", object())
    with (
        temporary_settings(updates={PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        device_slots([Device(id="GPU-unasked", kind="cuda", name="a GPU")]),
    ):
        assert server_connection.connection.unreported == []


@pytest.mark.parametrize(
    ("error", "attempts"), [(WorkerError("died"), 4), (InputError("truncated"), 1)]
)
def test_without_a_server_a_task_is_tried_again_where_that_can_help(
    monkeypatch: pytest.MonkeyPatch, error: VirnucError, attempts: int
) -> None:
    waits_s: list[float] = []
    firsts: list[bool] = []
    monkeypatch.setattr("virnuc.tasks.task.time.sleep", waits_s.append)

    @retrying_task("felled", "felled")
    def felled() -> Outcome[None]:
        firsts.append(first_attempt())
        raise error

    with pytest.raises(type(error)):
        without_server(felled).result()
    assert firsts == [True, *[False] * (attempts - 1)]
    assert waits_s == [10, 20, 40][: attempts - 1]


def not_a_folder(home: Path) -> None:
    home.write_text("")


def not_a_database(home: Path) -> None:
    home.mkdir()
    (home / "prefect.db").write_text(json.dumps("no tables"))


def on_a_full_disk(home: Path) -> None:
    home.mkdir()
    shutil.disk_usage = lambda _: SimpleNamespace(free=1 << 20)  # type: ignore[assignment]


@pytest.mark.parametrize("spoil", [not_a_folder, not_a_database, on_a_full_disk])
def test_a_home_that_no_server_can_use_is_named_with_the_way_out(
    tmp_path: Path, spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", shutil.disk_usage)  # put back in the end
    home = tmp_path / "home"
    with temporary_settings(updates={PREFECT_HOME: home}, restore_defaults={PREFECT_API_URL}):
        require_usable_home()
        spoil(home)
        with pytest.raises(ConfigError, match=rf"Prefect's .*{home}.*--no-prefect"):
            require_usable_home()


@pytest.mark.parametrize(("user_value", "expected"), [(None, None), ("60", 60)])
def test_a_run_on_a_temporary_server_sends_no_heartbeats_unless_the_user_wants_them(
    user_value: str | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"
    monkeypatch.delenv(name, raising=False)
    if user_value is not None:
        monkeypatch.setenv(name, user_value)
    monkeypatch.setattr(context, "GLOBAL_SETTINGS_CONTEXT", context.root_settings_context())
    process = cast(ForkedProcess, None)
    log = BytesIO()
    _use_server(TemporaryServer(process, "http://127.0.0.1:1/api", "secret", log, "no way out"))
    settings = context.GLOBAL_SETTINGS_CONTEXT.settings
    assert settings.api.url == "http://127.0.0.1:1/api"
    assert settings.flows.heartbeat_frequency == expected
