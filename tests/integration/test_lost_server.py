"""A Prefect server that dies, hangs or is not wanted: runs end with their results, soon, and say what was not told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpcore
import psutil
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.context import SyncClientContext
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.process_lookup import family_of, kill_all, running_with
from virnuc.flows.approval import wait_for_approval
from virnuc.flows.cli import main
from virnuc.flows.prefect_flows.predict import predict
from virnuc.tasks.approval import Approval
from virnuc.tasks.server_connection import route_through_connection

from .conftest import answers
from .flow_runs import RESULTS
from .processes import (
    PATIENCE_S,
    PREFECT,
    VIRNUC,
    ask_server,
    background,
    committed,
    gone,
    own_server,
    wait_for,
)
from .running_command import SERVER, SIZES, results_digest, running

pytestmark = [pytest.mark.usefixtures("prefect_backend")]
TOLD = "the Prefect server does not answer"
RUNS_ALONE = "the run goes on without a Prefect server, and is not in the UI"


def not_a_folder(home: Path) -> None:
    home.write_text("a file")


def not_a_database(home: Path) -> None:
    home.mkdir()
    (home / "prefect.db").write_text("no tables")


@pytest.mark.slow
@pytest.mark.parametrize(
    "strike", [psutil.Process.kill, psutil.Process.suspend], ids=["killed", "stopped"]
)
def test_a_run_whose_server_is_lost_ends_with_its_results_and_says_so(
    tmp_path: Path,
    some_reads: Path,
    models: Path,
    database: Path,
    undisturbed: str,
    strike: Callable[[psutil.Process], None],
) -> None:
    with running(tmp_path, some_reads, models, own_server(tmp_path / "prefect", database)) as run:
        strike(run.server())
        assert run.ends() == 0, run.log.read_text()
        log = run.log.read_text()
    assert results_digest(run.out) == undisturbed
    assert log.count(TOLD) == 1, log
    assert "not reported" in log
    # How often a run says how far it is depends on how long it takes.
    other_lines = [line for line in log.splitlines() if "  Embedding: " not in line]
    assert len(other_lines) < 30, log


@pytest.mark.slow
@pytest.mark.parametrize(
    "strike", [psutil.Process.kill, psutil.Process.suspend], ids=["killed", "stopped"]
)
def test_a_prediction_goes_on_if_its_server_is_lost_while_it_starts(
    tmp_path: Path,
    few_reads: Path,
    models: Path,
    database: Path,
    strike: Callable[[psutil.Process], None],
) -> None:
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
    log = tmp_path / "log"
    environment = own_server(tmp_path / "prefect", database)
    # A server that shows no sign of life is given up after this time instead of 90 s.
    environment["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "5"
    with background((*VIRNUC, *words), environment, log) as process:
        servers = wait_for(lambda: running_with(SERVER, family_of(process.pid)), "a server")
        strike(servers[0])
        assert process.wait(PATIENCE_S) == 0
    output = log.read_text()
    assert output.count(f"{RUNS_ALONE}: Prefect's own server does not start") == 1
    assert output.splitlines()[-1].startswith("Time: ")
    assert (tmp_path / "run" / "reads.tsv").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [not_a_folder, not_a_database], ids=["file", "database"])
def test_a_prediction_goes_on_if_no_server_can_be_had(
    tmp_path: Path, few_reads: Path, models: Path, spoil: Callable[[Path], None]
) -> None:
    home = tmp_path / "prefect"
    spoil(home)
    environment = {name: value for name, value in os.environ.items() if "PREFECT" not in name}
    words = ("predict", few_reads, "-o", tmp_path / "run", "--models", models, "--devices", "cpu:1")
    process = subprocess.run(
        [*VIRNUC, *map(str, words)],
        env=environment | {"PREFECT_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert process.returncode == 0
    assert process.stderr.count(RUNS_ALONE) == 1
    assert str(home) in process.stderr
    assert (tmp_path / "run" / "reads.tsv").is_file()


@pytest.mark.slow
def test_first_runs_on_a_new_home_wait_for_each_other(
    tmp_path: Path, few_reads: Path, models: Path
) -> None:
    """Each would migrate the same database, and one of them would fail.

    More commands at once, with a home of an older version, start in `tests/faults/test_harness.py`.
    """
    environment = {name: value for name, value in os.environ.items() if "PREFECT" not in name}
    environment["PREFECT_HOME"] = str(tmp_path / "prefect")
    words = ("predict", few_reads, "--models", models, "--devices", "cpu:1", "-o")
    with ExitStack() as stack:
        processes = []
        for number in range(2):
            command = (*VIRNUC, *map(str, words), str(tmp_path / f"run-{number}"))
            log = tmp_path / f"log-{number}"
            processes.append(stack.enter_context(background(command, environment, log)))
        assert [process.wait(2 * PATIENCE_S) for process in processes] == [0] * len(processes)
    logs = [(tmp_path / f"log-{number}").read_text() for number in range(len(processes))]
    assert not any(RUNS_ALONE in log for log in logs), logs
    assert any("another process makes Prefect's database" in log for log in logs)


@pytest.mark.slow
def test_a_terminated_run_ends_in_ten_seconds_while_its_server_hangs(
    tmp_path: Path, many_reads: Path, models: Path, database: Path
) -> None:
    with running(tmp_path, many_reads, models, own_server(tmp_path / "prefect", database)) as run:
        run.server().suspend()
        began_s = time.monotonic()
        run.process.terminate()
        assert run.ends() == 130, run.log.read_text()
        assert time.monotonic() - began_s < 10, run.log.read_text()


@pytest.mark.slow
def test_a_workers_run_is_gone_in_ten_seconds_while_its_server_hangs(
    tmp_path: Path, many_reads: Path, models: Path, database: Path, port: int
) -> None:
    """The worker sends SIGTERM, and waits half a minute before it kills."""
    environment = own_server(tmp_path / "prefect", database)
    url = f"http://127.0.0.1:{port}/api"
    start = (*PREFECT, "server", "start", "--port", str(port), "--no-ui")
    arguments = {
        "reads": [str(many_reads)],
        "out": str(tmp_path / "run"),
        "models": str(models),
        "devices": "cpu:1",
        **SIZES,
    }
    with background(
        start, {**environment, "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}, tmp_path / "log"
    ) as server:
        wait_for(lambda: answers(f"{url}/health"), "the server")
        with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
            run = client.create_flow_run(predict, parameters=arguments)
        messages = {
            "PREFECT__FLOW_RUN_ID": str(run.id),
            "PREFECT__FLOW_ENTRYPOINT": "flows/prefect_flows/predict.py:predict",
        }
        engine = (sys.executable, "-m", "prefect.engine")
        with background(
            engine, {**environment, **messages, "PREFECT_API_URL": url}, tmp_path / "log"
        ) as process:
            wait_for(
                lambda: committed(tmp_path / "run") >= 2 or process.poll() is not None, "two shards"
            )
            family = family_of(process.pid)
            for member in family_of(server.pid):
                member.suspend()
            began_s = time.monotonic()
            process.terminate()
            assert process.wait(PATIENCE_S) != 0
            assert time.monotonic() - began_s < 10, (tmp_path / "log").read_text()
            wait_for(lambda: gone(family), "its children to end")


@pytest.mark.slow
def test_a_run_without_prefect_is_ended_in_order(
    tmp_path: Path, many_reads: Path, models: Path, database: Path
) -> None:
    environment = {**own_server(tmp_path / "prefect", database), "VIRNUC_NO_PREFECT": "1"}
    with running(tmp_path, many_reads, models, environment) as run:
        assert SERVER not in run.commands()
        run.process.terminate()
        assert run.ends() == 130, run.log.read_text()


@pytest.mark.slow
def test_a_run_goes_on_while_a_teams_server_is_started_again_and_tells_it_the_end(
    tmp_path: Path, many_reads: Path, models: Path, database: Path, port: int
) -> None:
    environment = own_server(tmp_path / "prefect", database)
    url = f"http://127.0.0.1:{port}/api"
    start = (*PREFECT, "server", "start", "--port", str(port), "--no-ui")
    server_environment = {
        **environment,
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    with background(start, server_environment, tmp_path / "server.log") as first_server:
        wait_for(lambda: answers(f"{url}/health"), "the server")
        with running(tmp_path, many_reads, models, server_environment) as run:
            kill_all(family_of(first_server.pid))
            first_server.wait(PATIENCE_S)
            wait_for(lambda: TOLD in run.log.read_text(), "the run to notice")
            run.worker().suspend()  # lest the run ends before the server is there
            with background(start, server_environment, tmp_path / "server.log"):
                wait_for(lambda: answers(f"{url}/health"), "the server again")
                run.worker().resume()
                run.process.terminate()
                assert run.ends() == 130, run.log.read_text()
                flow_runs = ask_server("POST", f"{url}/flow_runs/filter", json={})
    assert [flow_run["state_name"] for flow_run in flow_runs] == ["Crashed"]


@pytest.mark.slow
def test_nobody_is_asked_at_a_server_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("virnuc.tasks.server_connection.REQUEST_TIMEOUT_S", 0.5)

    @flow
    def gated() -> dict[str, Any]:
        context = SyncClientContext.get()
        assert context is not None
        route_through_connection(context.client)
        with monkeypatch.context() as patch:
            patch.setattr(httpcore.ConnectionPool, "handle_request", in_vain)
            return wait_for_approval(tmp_path, Approval, timeout_s=1, poll_s=1).model_dump()

    assert gated()["verdict"] == "pending"


def in_vain(_pool: httpcore.ConnectionPool, _request: httpcore.Request) -> httpcore.Response:
    raise httpcore.ReadTimeout("in vain")


@pytest.mark.slow
def test_without_prefect_the_same_files_come_and_nothing_is_recorded(
    tmp_path: Path,
    few_reads: Path,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("predict", str(few_reads), "--models", str(models), "--devices", "cpu:1", "-o")
    assert main([*words, str(tmp_path / "told")]) == 0
    monkeypatch.setattr("prefect.client.orchestration.SyncPrefectClient.request", None)
    assert main([*words, str(tmp_path / "untold"), "--no-prefect"]) == 0
    for name in RESULTS:
        assert (tmp_path / "told" / name).read_bytes() == (tmp_path / "untold" / name).read_bytes()
    # What each command says before its closing lines, which have paths and times
    told, untold, _ = re.split(
        r"Results: .*\nPage: .*\nTime: .*\n", capsys.readouterr().out, maxsplit=2
    )
    assert told == untold
    monkeypatch.setenv("VIRNUC_NO_PREFECT", "1")
    assert main([*words, str(tmp_path / "untold")]) == 0
    assert "nothing had to be computed" in capsys.readouterr().out
