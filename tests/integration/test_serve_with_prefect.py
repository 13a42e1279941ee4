"""Commands with a Prefect server that a child of `virnuc serve` runs: real processes, really killed."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client

from tests.process_lookup import family_of, running_with
from virnuc.flows.cli.server_guard import PROCESS_NAME

from .processes import PATIENCE_S, VIRNUC, background, committed, gone, own_server, wait_for
from .serving import (
    child_of_server,
    log_of,
    masked,
    n_handed_over,
    results,
    serve_environment,
    serving,
)

pytestmark = [pytest.mark.usefixtures("prefect_backend"), pytest.mark.slow]

# So many shards that a run can be struck in the middle.
SMALL_SHARDS = ("--shard-tokens", "1000")


@pytest.fixture
def environment(tmp_path: Path, database: Path) -> dict[str, str]:
    """The environment of a user whose commands start a temporary Prefect server."""
    return serve_environment(tmp_path, own_server(tmp_path / "prefect", database))


def command_of(reads: Path, models: Path, out: Path | str, *more: str) -> tuple[str, ...]:
    paths = ("predict", str(reads), "-o", str(out), "--models", str(models))
    return (*VIRNUC, *paths, "--devices", "cpu:1", *SMALL_SHARDS, *more)


def predict(
    command: tuple[str, ...], environment: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Make a prediction in a folder, to its end."""
    finished = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        capture_output=True,
        check=False,
        text=True,
        timeout=PATIENCE_S,
    )
    assert finished.returncode == 0, finished.stderr
    return finished


def flow_runs(home: Path) -> list[tuple[str, str]]:
    """Return the name of the flow and the last state of each run in a Prefect database."""
    query = (
        "SELECT flow.name, flow_run.state_type FROM flow_run "
        "JOIN flow ON flow.id = flow_run.flow_id ORDER BY flow_run.created"
    )
    with closing(sqlite3.connect(home / "prefect.db")) as opened:
        return [tuple(row) for row in opened.execute(query)]


def test_a_child_does_says_and_records_what_a_process_of_its_own_does(
    tmp_path: Path, environment: dict[str, str], some_reads: Path, models: Path
) -> None:
    runs = {}
    with serving(tmp_path, environment):
        n_before = n_handed_over(tmp_path)
        for name, serve in (("own", "auto"), ("alone", "off")):
            folder = tmp_path / name
            folder.mkdir()
            command = command_of(some_reads, models, "run", "--serve", serve)
            runs[name] = predict(command, environment, folder)
        assert n_handed_over(tmp_path) - n_before == 1
    assert results(tmp_path / "own" / "run") == results(tmp_path / "alone" / "run")
    assert masked(runs["own"].stdout) == masked(runs["alone"].stdout)
    assert masked(runs["own"].stderr) == masked(runs["alone"].stderr)
    assert flow_runs(tmp_path / "prefect") == [("predict", "COMPLETED")] * 2
    assert "Traceback" not in log_of(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_no_child_and_no_server_and_can_be_resumed(
    tmp_path: Path,
    environment: dict[str, str],
    some_reads: Path,
    models: Path,
    number: signal.Signals,
) -> None:
    out = tmp_path / "run"
    command = command_of(some_reads, models, out)
    with serving(tmp_path, environment) as server:
        with background(command, environment, tmp_path / "log", cwd=tmp_path) as run:
            wait_for(lambda: committed(out) >= 2, "two shards")
            child = child_of_server(server)
            prefect_servers = running_with(PROCESS_NAME, family_of(child.pid))
            assert len(prefect_servers) == 1
            run.send_signal(number)
            code = run.wait(PATIENCE_S)
            wait_for(lambda: gone([child, *prefect_servers]), "the child and its server to end")
        predict(command, environment, tmp_path)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    alone = tmp_path / "alone"
    predict(command_of(some_reads, models, alone, "--serve", "off"), environment, tmp_path)
    assert results(out) == results(alone)


def test_other_settings_of_prefect_let_a_command_run_by_itself(
    tmp_path: Path, environment: dict[str, str], some_reads: Path, models: Path
) -> None:
    with serving(tmp_path, environment):
        n_before = n_handed_over(tmp_path)
        other = {**environment, "PREFECT_LOGGING_LEVEL": "DEBUG"}
        predict(command_of(some_reads, models, tmp_path / "variable"), other, tmp_path)
        folder = tmp_path / "folder"
        folder.mkdir()
        (folder / "prefect.toml").write_text("[logging]\nlevel = 'DEBUG'\n")
        predict(command_of(some_reads, models, "run"), environment, folder)
        assert n_handed_over(tmp_path) == n_before
        predict(command_of(some_reads, models, tmp_path / "same"), environment, tmp_path)
        assert n_handed_over(tmp_path) == n_before + 1


def test_a_child_shows_its_run_on_the_server_that_the_user_has_named(
    tmp_path: Path, server: dict[str, str], some_reads: Path, models: Path
) -> None:
    environment = serve_environment(tmp_path, server)
    with serving(tmp_path, environment) as process, get_client(sync_client=True) as client:
        n_before = n_handed_over(tmp_path)
        out = tmp_path / "run"
        command = command_of(some_reads, models, out)
        with background(command, environment, tmp_path / "log", cwd=tmp_path) as run:
            wait_for(lambda: committed(out) >= 2, "two shards")
            family = family_of(child_of_server(process).pid)
            assert not running_with(PROCESS_NAME, family), "no temporary server is needed"
            assert run.wait(PATIENCE_S) == 0
        assert n_handed_over(tmp_path) == n_before + 1
        states = [run.state_name for run in client.read_flow_runs()]
        assert states == ["Completed"]
