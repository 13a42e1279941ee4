"""The temporary server of a run by hand serves its own command alone, and no server chooses a result."""

from __future__ import annotations

import base64
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest
from prefect import flow
from prefect._internal.result_records import ResultRecord, ResultRecordMetadata
from prefect.client.schemas.objects import State
from prefect.serializers import PickleSerializer
from prefect.settings import PREFECT_API_URL

from tests.changing_folders import content_of, paths_below
from tests.process_lookup import command_line, family_of, has_ended, running_with
from virnuc.flows.flow_decorator import with_parameters
from virnuc.flows.flow_run import run_flow
from virnuc.flows.settings.predict import PredictSettings
from virnuc.tasks.outcome import Outcome, completed
from virnuc_core.errors import VirnucError

from .conftest import answers
from .flow_runs import running_flow_run
from .processes import (
    PATIENCE_S,
    PREFECT,
    VIRNUC,
    ask_server,
    background,
    committed,
    own_server,
    wait_for,
)
from .running_command import SERVER, SIZES, running

pytestmark = [pytest.mark.usefixtures("prefect_backend"), pytest.mark.slow]
OUTSIDER = Path(__file__).with_name("outsider.py")
TOKEN = "0nly-for-this-test-0123456789abcdefghijklmn"
SECRET = f"virnuc:{TOKEN}"
PAGES = ("/", "/docs", "/openapi.json", "/ui-settings", "/api/health", "/api/ready", "/api/docs")
TEAM = "team:words"  # of another server; the user has set it for good
# the command, with a secret that the test knows
KNOWN_SECRET = f"""
import secrets, sys
secrets.token_urlsafe = lambda _: {TOKEN!r}
from virnuc.flows.cli import main
sys.exit(main())
"""
# Prefect would start a server that answers anybody with this module. Our own server has it.
ONLY_OWN_SERVER = """
import os, sys
module = "prefect.server.api.server"
sys.modules[module] = None
os.register_at_fork(after_in_child=lambda: sys.modules.pop(module))
from virnuc.flows.cli import main
sys.exit(main())
"""
ORDINARY = "import sys; from virnuc.flows.cli import main; sys.exit(main())"
# the command as on a system where a copy of it would not be safe
WITHOUT_FORK = """
import sys
from virnuc.flows.cli import main, temporary_server
temporary_server.can_fork = lambda: False
sys.exit(main())
"""


@dataclass(frozen=True)
class Evidence:
    """What a run with a temporary server left, and what others were answered while it went on."""

    port: int
    outsider: dict[str, tuple[int, bool]]  # status and CORS headers by request
    with_secret: dict[str, httpx.Response]
    leaks: list[str]  # files and processes that show the secret
    code: int
    log: str
    home: Path


def server_routes() -> list[tuple[str, str]]:
    """Method and path of every HTTP route of Prefect's server, and of the pages beside its API."""
    from prefect.server.api.server import create_app

    schema = create_app(ephemeral=True).openapi()
    routes = []
    for path, methods in schema["paths"].items():
        full_path = f"/api{path}".replace("/api/api/", "/api/")
        concrete_path = full_path.replace("{", "").replace("}", "")
        for method in methods:
            routes.append((method.upper(), concrete_path))
    assert len(routes) > 150, "Prefect's routes were not found"
    for page in PAGES:
        routes.append(("GET", page))
    routes.append(("OPTIONS", "/api/flow_runs/filter"))
    return routes


def outsiders_answers(port: int) -> dict[str, tuple[int, bool]]:
    if os.getuid() != 0:
        pytest.skip(
            "only root can ask as another user; run this test as root, in a container for example"
        )
    process = subprocess.run(
        [sys.executable, "-I", str(OUTSIDER), str(port)],
        input=json.dumps(server_routes()),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    report = json.loads(process.stdout)
    assert report["uid"] == 65534
    return {name: (status, cors) for name, (status, cors) in report["answers"].items()}


def leaks_of_secret(*folders: Path) -> list[str]:
    """Return the files of the folders, and the processes, that show the secret.

    Of processes, the command lines and the environments are read.
    """
    paths = []
    for folder in folders:
        paths += paths_below(folder)
    for name in os.listdir("/proc"):  # noqa: PTH208 - names
        if name.isdigit():
            paths += [Path("/proc", name, kind) for kind in ("cmdline", "environ")]
    secret_forms = [TOKEN.encode(), base64.b64encode(SECRET.encode())]
    leaking = []
    for path in paths:
        try:
            content = content_of(path)
        except OSError:  # a process that is gone
            continue
        # the command under test has the token in its program, which makes it known to this test
        is_this_test = KNOWN_SECRET.encode() in content
        shows_secret = any(form in content for form in secret_forms)
        if shows_secret and not is_this_test:
            leaking.append(str(path))
    return leaking


@pytest.fixture(scope="module")
def evidence(
    tmp_path_factory: pytest.TempPathFactory, some_reads: Path, models: Path, database: Path
) -> Evidence:
    """One run: asked by an outsider while its worker is stopped, then brought to its end."""
    folder = tmp_path_factory.mktemp("temporary")
    home, out_dir, log, temporary = (folder / name for name in ("home", "run", "log", "tmp"))
    temporary.mkdir()
    environment = own_server(home, database) | {
        "TMPDIR": str(temporary),
        "http_proxy": "http://127.0.0.1:9",
        "PREFECT_API_KEY": "of-the-cloud",
        "PREFECT_API_AUTH_STRING": TEAM,
        "PREFECT_SERVER_API_AUTH_STRING": TEAM,
        "PREFECT_CLIENT_CUSTOM_HEADERS": json.dumps({"Authorization": "Bearer of-the-team"}),
        "PREFECT_LOGGING_LEVEL": "DEBUG",
        "PREFECT_LOGGING_ROOT_LEVEL": "DEBUG",
    }
    sizes = [
        word for name, size in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(size))
    ]
    words = (
        "predict",
        str(some_reads),
        "-o",
        str(out_dir),
        "--models",
        str(models),
        "--devices",
        "cpu:1",
    )
    command = (sys.executable, "-c", KNOWN_SECRET, *words, *sizes, "--debug")
    with background(command, environment, log) as process:
        wait_for(lambda: committed(out_dir) >= 2 or process.poll() is not None, "two shards")
        assert process.poll() is None, log.read_text()
        family = family_of(process.pid)
        server = running_with(SERVER, family)[0]
        worker = running_with("virnuc_core.engine.worker", family)[0]
        worker.suspend()
        port = next(
            door.laddr.port
            for door in server.net_connections()
            if door.status == psutil.CONN_LISTEN
        )
        outsider = outsiders_answers(port)
        leaks = leaks_of_secret(folder)
        url, auth = (
            f"http://127.0.0.1:{port}/api/flow_runs/filter",
            httpx.BasicAuth("virnuc", TOKEN),
        )
        headers: dict[str, dict[str, str]] = {
            "own": {},
            "foreign host": {"Host": "evil.example"},
            "foreign origin": {"Origin": "https://evil.example"},
        }
        with httpx.Client(auth=auth, trust_env=False, timeout=PATIENCE_S) as client:
            with_secret = {
                name: client.post(url, json={}, headers=request_headers)
                for name, request_headers in headers.items()
            }
        worker.resume()
        code = process.wait(PATIENCE_S)
    leaks += leaks_of_secret(folder)
    return Evidence(port, outsider, with_secret, leaks, code, log.read_text(), home)


def test_another_user_is_answered_nothing_on_any_route(evidence: Evidence) -> None:
    http = {
        name: answer
        for name, answer in evidence.outsider.items()
        if not name.startswith("websocket")
    }
    assert {status for status, _ in http.values()} == {401}
    assert not any(has_cors for _, has_cors in evidence.outsider.values())


def test_another_user_is_let_into_no_websocket(evidence: Evidence) -> None:
    statuses = [
        status for name, (status, _) in evidence.outsider.items() if name.startswith("websocket")
    ]
    assert statuses == [403] * 4


def test_even_the_secret_is_of_no_use_to_a_web_page(evidence: Evidence) -> None:
    assert {name: answer.status_code for name, answer in evidence.with_secret.items()} == {
        "own": 200,
        "foreign host": 421,
        "foreign origin": 403,
    }
    assert not any(
        "access-control-allow-origin" in answer.headers for answer in evidence.with_secret.values()
    )


def test_the_secret_is_in_no_command_line_environment_file_or_log(evidence: Evidence) -> None:
    assert evidence.leaks == []
    assert "virnuc_core" in evidence.log or "reads" in evidence.log, "the log holds the run"


def test_events_logs_and_states_reach_the_temporary_server(evidence: Evidence) -> None:
    """Events go through a WebSocket, logs through threads of Prefect's own; both must know the secret."""
    assert evidence.code == 0, evidence.log
    with closing(sqlite3.connect(evidence.home / "prefect.db")) as records:
        events = {name for (name,) in records.execute("SELECT event FROM events")}
        messages = [message for (message,) in records.execute("SELECT message FROM log")]
        tasks = dict(records.execute("SELECT name, state_type FROM task_run"))
        runs = [state for (state,) in records.execute("SELECT state_type FROM flow_run")]
    assert "virnuc.prediction.done" in events
    assert any("shard" in message for message in messages), messages
    assert set(tasks.values()) == {"COMPLETED"}
    assert len(tasks) == 2  # stage and embed
    assert runs == ["COMPLETED"]
    assert "not reported" not in evidence.log


@dataclass(frozen=True)
class Payload:
    """A result as Prefect stores it, which creates a file when it is loaded."""

    metadata: dict[str, Any]
    proof: Path


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.proof), "w")


@pytest.fixture
def payload(tmp_path: Path) -> Payload:
    proof, stored_result = tmp_path / "loaded", tmp_path / "stored"
    metadata = ResultRecordMetadata(storage_key=str(stored_result), serializer=PickleSerializer())
    stored_result.write_bytes(ResultRecord(result=Malicious(proof), metadata=metadata).serialize())
    return Payload(metadata.model_dump(mode="json", serialize_as_any=True), proof)


def forged_state(payload: Payload) -> dict[str, Any]:
    return {
        "type": "COMPLETED",
        "name": "Completed",
        "message": "as the attacker says",
        "data": payload.metadata,
    }


def test_the_payload_is_one_that_prefect_would_load(payload: Payload) -> None:
    """Else the tests below would show nothing."""
    loaded_result: Any = State.model_validate(forged_state(payload)).result()
    loaded_result.close()
    assert payload.proof.exists()


def test_a_run_that_another_ended_with_a_pickle_ends_as_its_own_flow_did(
    tmp_path: Path,
    some_reads: Path,
    models: Path,
    child_environment: dict[str, str],
    payload: Payload,
) -> None:
    """The attack on a server that answers anybody: the state is set through its API while the run goes on."""
    reads = tmp_path / "attacked.fastq.gz"
    reads.symlink_to(some_reads)
    with running(tmp_path, reads, models, child_environment) as run:
        run.worker().suspend()
        flow_run = running_flow_run("attacked · cpu:1")
        url = f"{PREFECT_API_URL.value()}/flow_runs/{flow_run.id}/set_state"
        body = {"state": forged_state(payload), "force": True}
        assert ask_server("POST", url, json=body)["status"] == "ACCEPT"
        run.worker().resume()
        assert run.ends() == 0, run.log.read_text()
        log = run.log.read_text()
    assert not payload.proof.exists()
    assert "as the attacker says" not in log
    assert " of 2,500 reads are viral" in log
    assert "sent a result with a state; it is ignored" in log


@pytest.fixture
def forging(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, Any]], None]:
    """Makes the server answer a proposed state of this type with another one."""

    def forge(proposed_type: str, state: dict[str, Any]) -> None:
        ask = httpx.HTTPTransport.handle_request

        def handle(transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("/set_state"):
                proposed = json.loads(request.content)["state"]["type"]
                if proposed == proposed_type:
                    body = {
                        "status": "REJECT",
                        "details": {"type": "reject_details", "reason": "no"},
                    }
                    return httpx.Response(200, json=body | {"state": {"id": str(uuid4()), **state}})
            return ask(transport, request)

        monkeypatch.setattr(httpx.HTTPTransport, "handle_request", handle)

    return forge


@pytest.fixture
def probe(tmp_path: Path) -> Callable[[], Outcome[Any]]:
    """Runs a flow that does nothing on the tests' server, as the command does."""
    reads = tmp_path / "reads.fa"
    reads.write_text(">r1\nACGT\n")

    @flow
    @with_parameters(PredictSettings)
    def harmless(settings: PredictSettings) -> Outcome[str]:
        """Does nothing."""
        return completed("own result", "own message")

    parameters = {
        "reads": (str(reads),),
        "out": tmp_path / "out",
        "models": tmp_path,
        "devices": "cpu:1",
    }
    return lambda: run_flow(harmless, parameters, lambda: None)


@pytest.mark.parametrize("kind", ["COMPLETED", "FAILED", "CRASHED"])
def test_a_state_that_a_server_puts_in_place_of_ours_does_not_count(
    forging: Callable[[str, dict[str, Any]], None],
    payload: Payload,
    probe: Callable[[], Outcome[Any]],
    kind: str,
) -> None:
    forging("COMPLETED", forged_state(payload) | {"type": kind})
    outcome = probe()
    assert (outcome.name, outcome.message, outcome.result()) == (
        "Completed",
        "own message",
        "own result",
    )
    assert not payload.proof.exists()


def test_a_run_that_a_server_ends_before_it_begins_is_an_error(
    forging: Callable[[str, dict[str, Any]], None],
    payload: Payload,
    probe: Callable[[], Outcome[Any]],
) -> None:
    forging("RUNNING", forged_state(payload))
    with pytest.raises(
        VirnucError, match=r"ended before it did anything: .* Completed \(as the attacker says\)"
    ):
        probe()
    assert not payload.proof.exists()


def test_no_module_that_a_server_names_is_imported(
    tmp_path: Path,
    forging: Callable[[str, dict[str, Any]], None],
    probe: Callable[[], Outcome[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prefect imports the pickle library of a serializer when it parses a state, before any result is asked for."""
    proof = tmp_path / "imported"
    (tmp_path / "chosen_by_server.py").write_text(f"open({str(proof)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    serializer = {"type": "pickle", "picklelib": "chosen_by_server"}
    data = {"storage_key": "anything", "serializer": serializer, "prefect_version": "3.8.8"}
    forging("COMPLETED", {"type": "COMPLETED", "name": "Completed", "data": data})
    assert probe().result() == "own result"
    assert not proof.exists()


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_copy_of_the_command_serves_as_a_new_process_does(
    tmp_path: Path, few_reads: Path, models: Path, database: Path, is_copy: bool
) -> None:
    program = ORDINARY if is_copy else WITHOUT_FORK
    home = tmp_path / "prefect"
    words = ("predict", str(few_reads), "-o", str(tmp_path / "run"), "--models", str(models))
    command = (sys.executable, "-c", program, *words, "--devices", "cpu:1")
    with background(command, own_server(home, database), tmp_path / "log") as process:
        servers = wait_for(lambda: running_with(SERVER, family_of(process.pid)), "a server")
        has_own_program = "serve_new" in " ".join(command_line(servers[0]))
        assert has_own_program != is_copy
        assert process.wait(PATIENCE_S) == 0
        assert all(map(has_ended, servers))
    log = (tmp_path / "log").read_text()
    assert "without a Prefect server" not in log
    assert "Traceback" not in log
    with closing(sqlite3.connect(home / "prefect.db")) as recorded:
        flow_states = recorded.execute("SELECT state_type FROM flow_run").fetchall()
        task_states = recorded.execute("SELECT state_type FROM task_run").fetchall()
        artifacts = recorded.execute("SELECT key FROM artifact WHERE key IS NOT NULL").fetchall()
        n_log_lines = recorded.execute("SELECT count(*) FROM log").fetchone()[0]
    assert flow_states == [("COMPLETED",)]
    assert task_states == [("COMPLETED",)] * 2  # staging and embedding
    kinds = {key.split("-")[0] for (key,) in artifacts}
    assert kinds == {"progress", "stages", "summary", "reads"}
    assert n_log_lines > 0


def test_a_server_that_the_user_named_is_used_with_his_own_settings(
    tmp_path: Path, few_reads: Path, models: Path, database: Path, port: int
) -> None:
    url = f"http://127.0.0.1:{port}/api"
    environment = own_server(tmp_path / "prefect", database) | {
        "PREFECT_API_URL": url,
        "PREFECT_API_AUTH_STRING": TEAM,
        "PREFECT_SERVER_API_AUTH_STRING": TEAM,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    start = (*PREFECT, "server", "start", "--port", str(port), "--no-ui")
    words = (
        "predict",
        str(few_reads),
        "-o",
        str(tmp_path / "run"),
        "--models",
        str(models),
        "--devices",
        "cpu:1",
    )
    with background(start, environment, tmp_path / "server.log"):
        wait_for(lambda: answers(f"{url}/health"), "the server")
        with background((*VIRNUC, *words), environment, tmp_path / "log") as process:
            assert process.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()
        assert "its server answers" not in (tmp_path / "log").read_text()
        auth = ("team", "words")
        runs = ask_server("POST", f"{url}/flow_runs/filter", json={}, auth=auth)
    assert [run["state_name"] for run in runs] == ["Completed"]


def test_an_answer_to_a_validation_starts_no_server_without_a_secret(
    tmp_path: Path, database: Path
) -> None:
    """`virnuc approve` without a named server looks into the database that temporary servers share."""
    process = subprocess.run(
        [sys.executable, "-c", ONLY_OWN_SERVER, "approve", "nobody", "--yes"],
        env=own_server(tmp_path / "prefect", database),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (process.returncode, process.stderr) == (
        2,
        "virnuc: no flow run has the name 'nobody'\n",
    )


def test_an_answer_that_cannot_have_a_server_is_told_how_to_name_one(tmp_path: Path) -> None:
    home = tmp_path / "prefect"
    home.write_text("a file")
    environment = {name: value for name, value in os.environ.items() if "PREFECT" not in name}
    process = subprocess.run(
        [*VIRNUC, "approve", "nobody", "--yes"],
        env=environment | {"PREFECT_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert line.startswith(f"virnuc: Prefect's home {home}: ")
    assert line.endswith(
        "; set another PREFECT_HOME, or name the server of the run with PREFECT_API_URL"
    )


def test_the_time_of_a_command_has_the_end_of_its_server_and_is_in_the_summary(
    tmp_path: Path, few_reads: Path, models: Path, database: Path
) -> None:
    out_dir = tmp_path / "run"
    words = ("predict", str(few_reads), "-o", str(out_dir), "--models", str(models))
    start_s = time.monotonic()
    with subprocess.Popen(
        (*VIRNUC, *words, "--devices", "cpu:1"),
        env=own_server(tmp_path / "prefect", database),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        servers = wait_for(lambda: running_with(SERVER, family_of(process.pid)), "a server")
        time_line = next(line for line in process.stdout if line.startswith("Time: "))
        outer_s = time.monotonic() - start_s
        # The line came before the end of the command, but after that of its server.
        assert all(map(has_ended, servers))
        printed_s = float(time_line.split()[1])
        assert process.wait(PATIENCE_S) == 0
    waited_s = json.loads((out_dir / "summary.json").read_text())["waited_s"]
    assert printed_s == pytest.approx(waited_s, abs=0.05)
    # A loaded machine starts the process, and hands the line over, a moment later.
    assert outer_s - max(1.0, 0.1 * outer_s) < waited_s < outer_s + 0.05
