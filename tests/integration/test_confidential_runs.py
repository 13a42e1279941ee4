"""Real runs with a mail address and with a password: neither is in any file or on any terminal."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from .processes import PATIENCE_S, ROOT, VIRNUC, files_with, own_server

MAILBOX = "ada.distinctive"  # the part that no program writes in another form
MAIL = f"{MAILBOX}@lab.example"
PASSWORD = "Zx9-swordfish"
CREDENTIALS = f"lab-user:{PASSWORD}"
# A command whose downloads come from the address that is its first word.
PROGRAM = """
import sys
from virnuc_core.reads import remote
remote.NCBI_ADDRESS = sys.argv.pop(1)
from virnuc.flows.cli import main
sys.exit(main())
"""


def run(words: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        words,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("two words", marks=pytest.mark.slow),
        pytest.param("one word", marks=pytest.mark.slow),
        pytest.param("environment", marks=pytest.mark.slow),
        "no Prefect",
    ],
)
def test_the_mail_address_of_a_run_is_in_no_file(
    tmp_path: Path, database: Path, models: Path, ncbi: tuple[str, list[str]], way: str
) -> None:
    ncbi_address, received_addresses = ncbi
    environment = own_server(tmp_path / "home", database) | {"VIRNUC_PRIVATE_ADDRESSES": "allow"}
    out = tmp_path / "run"
    words = [sys.executable, "-c", PROGRAM, ncbi_address, "predict", "ncbi:NC_000001.1"]
    words += ["-o", str(out), "--models", str(models), "--devices", "cpu:1", "--debug"]
    if way == "environment":
        environment["VIRNUC_EMAIL"] = MAIL
    elif way == "one word":
        words.append(f"--email={MAIL}")
    else:
        words += ["--email", MAIL]
    if way == "no Prefect":
        words.append("--no-prefect")
    process = run(words, environment)
    assert process.returncode == 0, process.stderr
    assert received_addresses == [MAIL], "NCBI gets it"
    assert files_with(MAILBOX, tmp_path) == []
    assert MAILBOX not in process.stdout + process.stderr


def test_a_flow_has_no_parameter_for_the_mail_address() -> None:
    """A server keeps the parameters of a run, and those of a deployment."""
    from virnuc.flows.prefect_flows.inbox import predict_inbox
    from virnuc.flows.prefect_flows.predict import predict
    from virnuc.flows.prefect_flows.train import train
    from virnuc.flows.prefect_flows.validate import validate

    for flow in (predict, predict_inbox, train, validate):
        assert "reads" in flow.parameters.properties or flow is predict_inbox
        assert "email" not in flow.parameters.properties


@pytest.fixture
def refusing_server() -> Iterator[str]:
    """A server that wants another password; yields its host and port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET  # noqa: N815 - the name is given

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


# With --debug a command says more than without. `make test` has that for the quick commands; the
# doctor also tries out the machine.
QUICK_REFUSALS = (("predict", "401", True), ("approve", "401", True))
REFUSALS = tuple(
    pytest.param(*refusal, marks=() if refusal in QUICK_REFUSALS else pytest.mark.slow)
    for refusal in itertools.product(
        ("predict", "doctor", "approve"), ("closed port", "401"), (False, True)
    )
)


@pytest.mark.parametrize(("command", "kind", "debug"), REFUSALS)
def test_a_password_is_in_no_message_about_a_server(
    tmp_path: Path,
    database: Path,
    models: Path,
    few_reads: Path,
    refusing_server: str,
    command: str,
    kind: str,
    debug: bool,
    port: int,
) -> None:
    host = refusing_server
    if kind == "closed port":
        host = f"127.0.0.1:{port}"
    environment = own_server(tmp_path / "home", database) | {
        "PREFECT_API_URL": f"http://{CREDENTIALS}@{host}/api",
        "PREFECT_API_AUTH_STRING": CREDENTIALS,
    }
    words = [*VIRNUC, command]
    if command == "predict":
        words += [str(few_reads), "-o", str(tmp_path / "run"), "--models", str(models)]
        words += ["--devices", "cpu:1"]
    elif command == "approve":
        words += ["a-run", "--yes"]
    if debug:
        words.append("--debug")
        environment["PREFECT_LOGGING_LEVEL"] = "DEBUG"
    process = run(words, environment)
    assert process.returncode != 0
    assert host in process.stdout + process.stderr, "the message names the server"
    assert PASSWORD not in process.stdout + process.stderr
    assert files_with(PASSWORD, tmp_path) == []


@pytest.mark.slow
def test_a_password_is_in_no_output_of_a_run_on_a_named_server(
    tmp_path: Path, server: dict[str, str], models: Path, few_reads: Path
) -> None:
    url = server["PREFECT_API_URL"].replace("://", f"://{CREDENTIALS}@")
    home = tmp_path / "home"
    environment = server | {"PREFECT_API_URL": url, "PREFECT_HOME": str(home)}
    out = tmp_path / "run"
    words = [*VIRNUC, "predict", str(few_reads), "-o", str(out), "--models", str(models)]
    process = run([*words, "--devices", "cpu:1", "--debug"], environment)
    assert process.returncode == 0, process.stderr
    assert PASSWORD not in process.stdout + process.stderr
    assert files_with(PASSWORD, tmp_path, Path(server["PREFECT_HOME"])) == []
