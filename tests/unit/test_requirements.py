"""The packages of a production machine: versions, hashes and known vulnerabilities."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.pins import missing_pins, requirements_in, unused_pins

ROOT = Path(__file__).resolve().parents[2]
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)
EXTRAS = ("bam", "cluster")


def pinned_versions(path: Path) -> dict[str, str]:
    """Return the version of each package that a requirements file pins."""
    return {canonicalize_name(name): version for name, version in PINNED.findall(path.read_text())}


def installed_dependencies(requirements: list[str], extras: tuple[str, ...]) -> set[str]:
    """Return the packages that the given requirements need here, with all that those need."""
    needed: set[str] = set()
    waiting = [(Requirement(line), extras) for line in requirements]
    while waiting:
        requirement, parent_extras = waiting.pop()
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in ("", *parent_extras)):
            continue
        name = canonicalize_name(requirement.name)
        if name in needed:
            continue
        needed.add(name)
        further = metadata.requires(name) or []
        waiting += [(Requirement(line), tuple(requirement.extras)) for line in further]
    return needed


@pytest.fixture(scope="module")
def locked() -> dict[str, str]:
    """Versions in the file of a production machine."""
    return pinned_versions(ROOT / "deployments" / "requirements.txt")


def test_production_gets_the_tested_versions(locked: dict[str, str]) -> None:
    """A package that the tests pin has the same version on a production machine."""
    tested = pinned_versions(ROOT / "constraints.txt")
    both = locked.keys() & tested.keys()
    assert len(both) > 100
    assert {name: locked[name] for name in both} == {name: tested[name] for name in both}


def test_prefects_range_holds_the_tested_version_and_ci_looks_beyond_it(
    locked: dict[str, str],
) -> None:
    """CI tells of a Prefect that the range leaves out, and not of one that it already admits."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    dependencies = [Requirement(text) for text in settings["project"]["dependencies"]]
    (prefect,) = [package for package in dependencies if package.name == "prefect"]
    assert prefect.specifier.contains(locked["prefect"])
    bounds = [bound.version for bound in prefect.specifier if bound.operator == "<"]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"'prefect>=([^']+)'", ci) == bounds


def test_every_package_has_a_hash(locked: dict[str, str]) -> None:
    """pip refuses the whole file if one package has no hash."""
    text = (ROOT / "deployments" / "requirements.txt").read_text()
    entries = re.split(r"\n(?=[A-Za-z])", text[text.index("\naiosqlite") + 1 :])
    assert len(entries) == len(locked)
    for entry in entries:
        assert "--hash=sha256:" in entry, entry.splitlines()[0]


def test_nothing_that_the_product_needs_is_missing(locked: dict[str, str]) -> None:
    """With --require-hashes pip refuses to install a dependency that is not in the file."""
    requirements = metadata.requires("virnuc")
    assert requirements
    needed = installed_dependencies(requirements, EXTRAS)
    # pip's option covers only what pip installs: these two are part of the environment itself.
    needed -= {"pip", "setuptools"}
    assert len(needed) > 100
    assert needed - locked.keys() == set()


def test_a_pin_that_nothing_needs_is_found() -> None:
    """A package for another platform is needed too, however its name is written."""
    needed = requirements_in("Ruamel.YAML==1\npywin32==2 ; sys_platform == 'win32'\n")
    pins = requirements_in("# a comment\nruamel-yaml==1\npywin32==2\nleft-over==3\n")
    assert unused_pins(needed, pins) == ["left-over"]


def test_a_package_without_a_pin_is_found() -> None:
    """What is only for Windows, or comes with one build of torch, needs no pin."""
    needed = requirements_in(
        "torch==1\nunpinned==2\npywin32==3 ; sys_platform == 'win32'\n"
        "nvidia-cublas==4 ; sys_platform == 'linux'\nnvidia-ml-py==5\nsetuptools==6\n"
    )
    pins = requirements_in("torch==1\n")
    assert missing_pins(needed, pins) == ["nvidia-ml-py", "unpinned"]


VULNERABILITY = {
    "id": "PYSEC-2099-1",
    "summary": "reads any file",
    "modified": "2099-01-01T00:00:00Z",
    "affected": [
        {
            "package": {"name": "leaky", "ecosystem": "PyPI"},
            "ranges": [
                {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "1.1"}]},
            ],
            "versions": ["1.0"],
        }
    ],
}


@pytest.fixture
def service() -> Iterator[str]:
    """A vulnerability service that knows one vulnerability, of the package `leaky`."""

    class Service(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            package = json.loads(body)["package"]["name"]
            if package == "unanswered":
                self.send_error(500)
                return
            answer = {"vulns": [VULNERABILITY]} if package == "leaky" else {}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def audit(folder: Path, packages: list[str], service_url: str) -> subprocess.CompletedProcess[str]:
    """Run `make audit`'s program on a file that pins the given packages to version 1.0."""
    requirements = folder / "requirements.txt"
    digest = "0" * 64
    lines = [f"{package}==1.0 --hash=sha256:{digest}\n" for package in packages]
    requirements.write_text("".join(lines))
    command = [sys.executable, "tests/audit.py", str(requirements), "--service-url", service_url]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_known_vulnerability_fails_the_audit(tmp_path: Path, service: str) -> None:
    """The vulnerable package, its version and the version that is mended are named."""
    finished = audit(tmp_path, ["leaky", "sound"], service)
    assert "leaky 1.0: PYSEC-2099-1, fixed in 1.1" in finished.stdout
    assert "2 packages checked, 1 known vulnerabilities" in finished.stdout
    assert finished.returncode == 1


def test_sound_packages_pass_the_audit(tmp_path: Path, service: str) -> None:
    """Without a known vulnerability the audit passes."""
    finished = audit(tmp_path, ["sound"], service)
    assert finished.stdout == "1 packages checked, 0 known vulnerabilities\n"
    assert finished.returncode == 0


@pytest.mark.parametrize("reason", ["a failing service", "no service"])
def test_an_audit_that_cannot_be_made_is_not_run(tmp_path: Path, service: str, reason: str) -> None:
    """Without an answer the audit says "not run", and never that nothing was found."""
    # Port 9 (discard) has no service on a test machine, so the connection is refused.
    service_url = "http://127.0.0.1:9/v1/query" if reason == "no service" else service
    finished = audit(tmp_path, ["unanswered"], service_url)
    assert finished.stdout.startswith("known vulnerabilities: not run. ")
    assert "checked" not in finished.stdout
    assert finished.returncode == 0
