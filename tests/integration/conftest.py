"""One temporary Prefect backend for all flow tests of a session."""

from __future__ import annotations

import gc
import os
import shutil
import sqlite3
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import patch
from urllib.parse import parse_qs

import httpx
import pytest
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW,
    PREFECT_SERVER_ANALYTICS_ENABLED,
    PREFECT_SERVER_DATABASE_CONNECTION_URL,
    temporary_settings,
)

from virnuc.flows.prefect_flows.predict import predict
from virnuc_core.encoders.convert import init_random
from virnuc_core.first_use import first_use
from virnuc_core.reads.simulate import SimulateSpec, simulate

from .processes import PATIENCE_S, PREFECT, background, own_server, reserved_port, wait_for
from .recording_proxy import Proxy
from .running_command import SIZES, results_digest

HARNESS_DATABASE = "prefect-test.db"  # as Prefect's test harness names it
STARTUP_S = 240  # of the server, which also makes its tables; a test may take 300 s


@pytest.fixture(scope="session")
def prefect_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Prefect API with an empty database; runs in it have no heartbeat thread, which costs a second a flow.

    Yields a copy of that database, made before anything was written to it: `database` is its name.
    Of several pytest workers only the first one makes the tables, which takes half of the start.
    """
    # Most workers run tests of flows never or late, and Prefect's server takes long to import.
    from prefect.testing.utilities import prefect_test_harness

    quiet = {
        PREFECT_SERVER_ANALYTICS_ENABLED: False,
        PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW: "ignore",
    }
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    template = shared / "prefect-template.db"
    with ExitStack() as stack:
        stack.enter_context(temporary_settings(updates=quiet))
        # Prefect looks for a free port, which another process could get before the server has it.
        server_port = stack.enter_context(reserved_port())
        port_search = "prefect.testing.utilities._find_available_port"
        stack.enter_context(patch(port_search, lambda: server_port))
        with first_use(shared, "the database of the tests", template.exists) as must_make:
            if must_make:
                stack.enter_context(prefect_test_harness(server_startup_timeout=STARTUP_S))
                _copy_database(template)
        if not must_make:
            folder = tmp_path_factory.mktemp("database")
            shutil.copy(template, folder / HARNESS_DATABASE)
            with patch("prefect.testing.utilities.mkdtemp", lambda: str(folder)):
                stack.enter_context(prefect_test_harness(server_startup_timeout=STARTUP_S))
        stack.enter_context(temporary_settings(updates={PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}))
        yield template


def _copy_database(template: Path) -> None:
    """Copy the database of the present server, so that the copy appears whole."""
    address = str(PREFECT_SERVER_DATABASE_CONNECTION_URL.value())
    path = Path(address.partition("///")[2])
    assert path.name == HARNESS_DATABASE
    part = template.with_suffix(".part")
    with (
        closing(sqlite3.connect(path)) as server_database,
        closing(sqlite3.connect(part)) as copy,
    ):
        server_database.backup(copy)
    part.rename(template)


@pytest.fixture(scope="session")
def database(prefect_backend: Path) -> Path:
    """A SQLite database with Prefect's tables and nothing in them, to be copied."""
    return prefect_backend


@pytest.fixture(scope="module", autouse=True)
def _prefects_own_sockets() -> Iterator[None]:
    """Prefect leaves sockets to the garbage collector; collect them here, where nobody is blamed for the warning."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Within these tests the collector may come by earlier, too."""
    folder = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(folder):
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))
            item.add_marker(
                pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
            )


@pytest.fixture(scope="session")
def child_environment(
    prefect_backend: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Environment of processes that shall talk to the same backend as the tests."""
    url = PREFECT_API_URL.value()
    assert url is not None
    home = str(tmp_path_factory.mktemp("prefect-home"))
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "VIRNUC_"))
    }
    return {
        **environment,
        "PREFECT_API_URL": url,
        "PREFECT_HOME": home,
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
    }


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which nobody listens, for a server that the test starts or does not start."""
    with reserved_port() as number:
        yield number


@pytest.fixture(scope="module")
def server_port() -> Iterator[int]:
    """The port of `server`."""
    with reserved_port() as number:
        yield number


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, database: Path, server_port: int
) -> Iterator[dict[str, str]]:
    """A server as a team has it, with its services; yields the environment of processes that talk to it."""
    folder = tmp_path_factory.mktemp("server")
    url = f"http://127.0.0.1:{server_port}/api"
    environment = {
        **own_server(folder, database),
        "PREFECT_API_URL": url,
        "PREFECT_WORKER_QUERY_SECONDS": "1",
    }
    own = {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    }
    start = (*PREFECT, "server", "start", "--port", str(server_port), "--no-ui")
    with background(start, environment | own, folder / "server.log") as process:
        wait_for(lambda: answers(f"{url}/health"), "the server")
        with temporary_settings(updates={PREFECT_API_URL: url}):
            yield environment
        process.terminate()
        process.wait(PATIENCE_S)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy for requests to other machines."""
    with Proxy() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def ncbi() -> Iterator[tuple[str, list[str]]]:
    """A server that plays NCBI; yields its address, and the mail addresses that it was given."""
    addresses: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            addresses.extend(form["email"])
            content = b">NC_000001.1 one\n" + b"ACGTTGCAAC" * 60 + b"\n"
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/efetch", addresses
        server.shutdown()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models directory of tiny random models."""
    folder = tmp_path_factory.mktemp("weights") / "models"
    init_random(folder, seed=1)
    return folder


@pytest.fixture(scope="session")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 simulated reads."""
    return simulate(
        SimulateSpec(reads=300, seed=3), tmp_path_factory.mktemp("reads") / "few.fastq.gz"
    ).reads_file


@pytest.fixture(scope="session")
def few_reads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 simulated reads, where it does not matter what they are."""
    return simulate(
        SimulateSpec(reads=60, seed=3), tmp_path_factory.mktemp("reads") / "few.fastq.gz"
    ).reads_file


@pytest.fixture(scope="session")
def some_reads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So many simulated reads that a run can be struck in the middle, and soon ends all the same."""
    return simulate(
        SimulateSpec(reads=2_500, seed=4), tmp_path_factory.mktemp("reads") / "some.fastq.gz"
    ).reads_file


@pytest.fixture(scope="session")
def many_reads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For runs that are not to end by themselves."""
    return simulate(
        SimulateSpec(reads=9_000, seed=4), tmp_path_factory.mktemp("reads") / "many.fastq.gz"
    ).reads_file


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, some_reads: Path, models: Path, prefect_backend: Path
) -> str:
    """Digest of the results of a run on two cores that nobody disturbed."""
    out_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    predict(reads=[str(some_reads)], out=out_dir, models=models, devices="cpu:2", **SIZES)
    return results_digest(out_dir)
