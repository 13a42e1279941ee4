"""The container images, as far as their description tells: building them needs Docker and a network."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# https://specs.opencontainers.org/image-spec/annotations/
OCI_LABELS = ("title", "description", "authors", "licenses", "version", "revision", "created")
OCI_LABELS += ("source", "base.name")
DIGEST = "sha256:" + "0123456789abcdef" * 4


@dataclass(frozen=True)
class Stage:
    """A stage of a Dockerfile: its name, what it is built from, and its instructions."""

    name: str
    parent: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def words(self, instruction: str) -> list[str]:
        """Return the words of the last such instruction in JSON form."""
        values = [text for name, text in self.instructions if name == instruction]
        words: list[str] = json.loads(values[-1])
        return words


def read_stages() -> tuple[dict[str, Stage], dict[str, str]]:
    """Return the stages of our Dockerfile by name, and the defaults of its build arguments."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    stages: dict[str, Stage] = {}
    arguments: dict[str, str] = {}
    current: Stage | None = None
    for line in joined.splitlines():
        if not line.strip():
            continue
        instruction, _, value = line.partition(" ")
        if instruction == "ARG" and "=" in value:
            name, _, default = value.partition("=")
            arguments[name] = default
        elif instruction == "FROM":
            parent, _, name = value.partition(" AS ")
            current = stages[name] = Stage(name, parent)
        elif current is not None:
            current.instructions.append((instruction, value.strip()))
    return stages, arguments


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    """The stages of our Dockerfile."""
    return read_stages()[0]


@contextmanager
def worker_that_answers(status: int) -> Iterator[int]:
    """Answer every question at a port of this machine with a status."""

    class Worker(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Worker)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run_health_check(stage: Stage, port: int) -> subprocess.CompletedProcess[str]:
    """Run the health check of a stage as Docker does, with the Python of this environment."""
    (check,) = [text for name, text in stage.instructions if name == "HEALTHCHECK"]
    words = json.loads(check.partition(" CMD ")[2])
    assert words[0] == "python"
    environment = {**os.environ, "PREFECT_WORKER_WEBSERVER_PORT": str(port)}
    environment["http_proxy"] = "http://127.0.0.1:9"  # must not be asked
    command = [sys.executable, *words[1:]]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_last_stage_runs_the_command_and_another_a_worker(stages: dict[str, Stage]) -> None:
    assert list(stages) == ["common", "worker", "command"]  # without --target, the last is built
    assert stages["command"].words("ENTRYPOINT") == ["tini", "--", "virnuc"]
    assert stages["worker"].words("ENTRYPOINT")[:5] == ["tini", "--", "prefect", "worker", "start"]
    assert stages["worker"].parent == stages["command"].parent == "common"


def test_labels_are_those_of_the_specification_and_name_this_version(
    stages: dict[str, Stage],
) -> None:
    (text,) = [value for name, value in stages["common"].instructions if name == "LABEL"]
    labels = dict(word.split("=", 1) for word in shlex.split(text))
    assert set(labels) == {f"org.opencontainers.image.{name}" for name in OCI_LABELS}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert labels["org.opencontainers.image.licenses"] == project["license"]
    assert read_stages()[1]["VERSION"] == project["version"]


def test_both_images_are_built_from_the_digest_that_the_registry_names(
    stages: dict[str, Stage], tmp_path: Path
) -> None:
    """A program in the place of Docker writes down what `make image` asks for."""
    calls = tmp_path / "calls"
    docker = tmp_path / "docker"
    docker.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\ntest "$1" = buildx && echo {DIGEST} || true\n'
    )
    docker.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["make", "image"], cwd=ROOT, env=environment, capture_output=True, check=True)

    base = read_stages()[1]["BASE_IMAGE"]
    lookup, *builds = calls.read_text().splitlines()
    assert lookup == f"buildx imagetools inspect {base} --format {{{{.Manifest.Digest}}}}"
    targets = [re.search(r"--tag (\S+) --target (\S+)", build) for build in builds]
    assert [match and match.groups() for match in targets] == [
        ("virnuc", "command"),
        ("virnuc-worker", "worker"),
    ]
    assert all(f"--build-arg BASE_IMAGE={base}@{DIGEST} " in build for build in builds)
    assert stages["common"].parent == "${BASE_IMAGE}"


def test_no_process_is_root_and_kubernetes_can_tell(stages: dict[str, Stage]) -> None:
    users = [value for name, value in stages["common"].instructions if name == "USER"]
    template = json.loads((ROOT / "deployments" / "kubernetes-job.json").read_text())
    manifest = template["job_configuration"]["job_manifest"]
    security = manifest["spec"]["template"]["spec"]["securityContext"]
    assert users == [str(security["runAsUser"])]


def test_what_is_copied_exists_and_is_sent_to_docker(stages: dict[str, Stage]) -> None:
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [value.split()[:-1] for name, value in stages["common"].instructions if name == "COPY"]
    sources = [source for words in copied for source in words]
    assert len(sources) > 5
    for source in sources:
        assert f"!{source}" in sent
        assert list(ROOT.glob(source))


def test_a_worker_that_asks_its_server_is_healthy(stages: dict[str, Stage]) -> None:
    with worker_that_answers(200) as port:
        finished = run_health_check(stages["worker"], port)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")


def test_a_worker_that_lost_its_server_or_ended_is_not_healthy(stages: dict[str, Stage]) -> None:
    with worker_that_answers(503) as port:
        finished = run_health_check(stages["worker"], port)
    assert finished.returncode == 1
    ended = run_health_check(stages["worker"], port)
    assert ended.returncode == 1
    assert ended.stdout == f"no healthy worker answers at 127.0.0.1:{port}\n"
