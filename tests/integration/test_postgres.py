"""A team's set-up: PostgreSQL behind a server, a worker, a flow, and a server that is restarted in the middle of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.process_lookup import family_of, kill_all

from .processes import PATIENCE_S, PREFECT, ROOT, ask_server, reserved_port, wait_for

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
pytestmark = [
    pytest.mark.postgres,
    pytest.mark.timeout(900),  # the sum of all waits on a busy machine
    pytest.mark.skipif(
        not PROGRAMS, reason="PostgreSQL's server programs are not in /usr/lib/postgresql"
    ),
]


def succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def background(command: list[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as handle:
        process = subprocess.Popen(command, stdout=handle, stderr=handle, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_all(family_of(process.pid))
        process.wait(PATIENCE_S)


@pytest.fixture
def database_port() -> Iterator[int]:
    """The port of PostgreSQL; that of Prefect's server is `port`."""
    with reserved_port() as number:
        yield number


@pytest.fixture
def database(database_port: int) -> Iterator[str]:
    """Address of an empty database on loopback."""
    programs = PROGRAMS[-1].parent
    # PostgreSQL refuses to run as root, and its user must be able to reach the folder
    folder = Path("/tmp") / f"virnuc-postgres-{os.getpid()}"
    folder.mkdir(mode=0o755)
    options: dict[str, Any] = {}
    if os.getuid() == 0:
        shutil.chown(folder, "postgres", "postgres")
        options = {"user": "postgres", "group": "postgres", "extra_groups": [], "cwd": folder}
    try:
        subprocess.run(
            [str(programs / "initdb"), "-D", str(folder / "data"), "-U", "virnuc", "-A", "trust"],
            check=True,
            capture_output=True,
            **options,
        )
        command = [
            str(programs / "postgres"),
            "-D",
            str(folder / "data"),
            "-p",
            str(database_port),
            "-k",
            str(folder),
        ]
        with background(
            [*command, "-h", "127.0.0.1"],
            Path(f"/tmp/virnuc-postgres-{os.getpid()}.log"),
            **options,
        ):
            ready = [str(programs / "pg_isready"), "-h", "127.0.0.1", "-p", str(database_port)]
            wait_for(lambda: succeeds(*ready), "PostgreSQL")
            commands = [
                str(programs / "createdb"),
                "-h",
                "127.0.0.1",
                "-p",
                str(database_port),
                "-U",
                "virnuc",
                "prefect",
            ]
            subprocess.run(commands, check=True, capture_output=True)
            yield f"postgresql+asyncpg://virnuc@127.0.0.1:{database_port}/prefect"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        Path(f"/tmp/virnuc-postgres-{os.getpid()}.log").unlink(missing_ok=True)


def test_a_flow_survives_a_restart_of_the_server(
    database: str, tmp_path: Path, many_reads: Path, models: Path, port: int
) -> None:
    api = f"http://127.0.0.1:{port}/api"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")
    } | {
        "PREFECT_HOME": str(tmp_path / "home"),
        "PREFECT_API_URL": api,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database,
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    }

    def healthy() -> bool:
        try:
            return httpx.get(f"{api}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def ask(path: str, **body: Any) -> Any:
        return ask_server("POST", f"{api}/{path}", json=body)

    def run_state(run: str) -> dict[str, Any]:
        return dict(ask_server("GET", f"{api}/flow_runs/{run}")["state"])

    log, out_dir = tmp_path / "log", tmp_path / "run"
    server = [*PREFECT, "server", "start", "--port", str(port)]
    worker = [*PREFECT, "worker", "start", "-p", "gpu", "--limit", "1"]
    with background(server, log, env=environment) as first_server:
        wait_for(healthy, "the server")
        subprocess.run(
            ["make", "deploy"], env=environment, cwd=ROOT, check=True, capture_output=True
        )
        flow_runs = [
            d["id"]
            for d in ask("deployments/filter")
            if d["entrypoint"] == "virnuc.flows.prefect_flows.predict.predict"
        ]
        with background(worker, log, env=environment, cwd=ROOT):
            arguments = {
                "reads": [str(many_reads)],
                "out": str(out_dir),
                "models": str(models),
                "devices": "cpu:1",
            }
            run = ask(
                f"deployments/{flow_runs[0]}/create_flow_run",
                parameters=arguments | {"shard_tokens": 8192},
            )["id"]
            wait_for(lambda: len(list((out_dir / "shards").glob("*.h5"))) >= 3, "three shards")
            first_server.terminate()
            first_server.wait(PATIENCE_S)
            assert not healthy()
            time.sleep(3)
            with background(server, log, env=environment):
                wait_for(healthy, "the server, again")
                wait_for(
                    lambda: run_state(run)["name"] in ("Completed", "Failed", "Crashed"),
                    "the flow to end",
                )
                state = run_state(run)
    assert state["name"] == "Completed", log.read_text()[-4000:]
    assert "reads are viral" in state["message"]
    assert (out_dir / "prediction_results.txt").is_file()
