"""What a named server answers instead of starting a run becomes one line that says what to do."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.integration.processes import VIRNUC
from virnuc.flows.server_refusal import server_refusal
from virnuc.tasks.server_connection import ServerLostError
from virnuc_core.encoders.convert import init_random

URL = "http://server.example:4200/api"
WAY_OUT = "--no-prefect"


def status_error(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", f"{URL}/admin/version")
    response = httpx.Response(code, request=request)
    return httpx.HTTPStatusError(str(code), request=request, response=response)


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (401, "PREFECT_API_AUTH_STRING"),
        (403, "PREFECT_API_AUTH_STRING"),
        (404, "which ends with /api"),
        (405, "which ends with /api"),
        (407, "no_proxy"),
        (422, "a server of the same version"),
        (500, "the server's log"),
        (503, "the server's log"),
        (599, "the server's log"),
    ],
)
def test_each_answer_has_its_advice(code: int, advice: str) -> None:
    # Prefect's client wraps some of these errors.
    wrapper = RuntimeError("Failed to reach API")
    wrapper.__cause__ = status_error(code)
    for error in (status_error(code), wrapper):
        refusal = server_refusal(error, URL)
        assert refusal is not None
        message = str(refusal)
        assert f"at {URL} answers {code}" in message
        assert advice in message
        assert WAY_OUT in message
        assert "\n" not in message


def test_a_server_that_does_not_answer_and_other_errors() -> None:
    assert "no Prefect server answers at" in str(server_refusal(ServerLostError("gone"), URL))
    assert server_refusal(ValueError("a fault of ours"), URL) is None


@contextmanager
def impostor(code: int, content: bytes) -> Iterator[str]:
    """Serve one answer at every address, and yield the address of its "API"."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET  # noqa: N815 - the name is given

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/api"
        finally:
            server.shutdown()


@contextmanager
def encrypted_server(folder: Path) -> Iterator[int]:
    """Serve with a certificate that nobody trusts; yield the port."""
    key = folder / "key.pem"
    certificate = folder / "certificate.pem"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    files = ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"]
    subprocess.run([*request, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *_: None  # type: ignore[method-assign] # clients hang up
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
@pytest.mark.parametrize(
    ("is_encrypted", "words"),
    [
        (True, ("not trusted here (self", "PREFECT_API_SSL_CERT_FILE")),
        (False, ("makes no encrypted connection", "begins with http://")),
    ],
)
def test_a_failed_encryption_is_reported_in_one_line(
    tmp_path: Path, is_encrypted: bool, words: tuple[str, ...]
) -> None:
    models = tmp_path / "models"
    init_random(models, model_length=300, seed=5)
    reads = tmp_path / "reads.fasta"
    reads.write_text(">read\n" + "ACGT" * 60 + "\n")
    predict = ["predict", str(reads), "-o", str(tmp_path / "out"), "--models", str(models)]
    with ExitStack() as servers:
        if is_encrypted:
            port = servers.enter_context(encrypted_server(tmp_path))
        else:
            plain_url = servers.enter_context(impostor(200, b""))
            port = httpx.URL(plain_url).port or 0
        url = f"https://127.0.0.1:{port}/api"
        environment = os.environ | {"PREFECT_API_URL": url, "PREFECT_CLIENT_MAX_RETRIES": "0"}
        for command in ([*predict, "--devices", "cpu:1", "--quiet"], ["doctor"]):
            process = subprocess.run(
                [*VIRNUC, *command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert process.returncode != 0
            lines = (process.stdout + process.stderr).splitlines()
            (line,) = [line for line in lines if url in line]
            for text in words:
                assert text in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "content", "advice"),
    [
        (401, b'{"detail": "Unauthorized"}', "PREFECT_API_AUTH_STRING"),
        (200, b"<html>a home page</html>", "is no Prefect server"),
    ],
)
def test_a_prediction_is_refused_in_one_line(
    tmp_path: Path, code: int, content: bytes, advice: str
) -> None:
    models = tmp_path / "models"
    init_random(models, model_length=300, seed=5)
    reads = tmp_path / "reads.fasta"
    reads.write_text(">read\n" + "ACGT" * 60 + "\n")
    words = ["predict", str(reads), "-o", str(tmp_path / "out"), "--models", str(models)]
    with impostor(code, content) as url:
        process = subprocess.run(
            [*VIRNUC, *words, "--devices", "cpu:1", "--quiet"],
            env=os.environ | {"PREFECT_API_URL": url, "PREFECT_CLIENT_MAX_RETRIES": "0"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert process.returncode == 1
    (line,) = process.stderr.splitlines()
    assert line.startswith("virnuc: ")
    assert advice in line
    assert not (tmp_path / "out" / "reads.tsv").exists()
