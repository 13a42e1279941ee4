"""Look for known vulnerabilities in the pinned packages (`make audit`).

pip-audit asks a vulnerability service about every version in `deployments/requirements.txt`. The
command fails if a vulnerability is known. Without network, or if the service does not know the
packages, it prints "not run", which is never a pass.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[1] / "deployments" / "requirements.txt"
SERVICE_TIMEOUT_S = 15
MAX_ERROR_CHARS = 300


@dataclass(frozen=True)
class Audit:
    """Answers of the vulnerability service.

    Attributes:
        num_checked: Packages that the service answered for.
        unchecked: Names of the packages that it did not answer for.
        vulnerabilities: One line per known vulnerability: package, version, identifier, fixed versions.
    """

    num_checked: int
    unchecked: list[str]
    vulnerabilities: list[str]


class ServiceUnavailableError(Exception):
    """The vulnerability service gave no usable answer."""


def parse_audit(report: str) -> Audit:
    """Return the answers in pip-audit's JSON report."""
    num_checked = 0
    unchecked = []
    vulnerabilities = []
    for package in json.loads(report)["dependencies"]:
        name = package["name"]
        if "skip_reason" in package:
            unchecked.append(name)
            continue
        num_checked += 1
        for vulnerability in package["vulns"]:
            fixes = ", ".join(vulnerability["fix_versions"]) or "no version yet"
            identifier = vulnerability["id"]
            vulnerabilities.append(f"{name} {package['version']}: {identifier}, fixed in {fixes}")
    return Audit(num_checked, unchecked, vulnerabilities)


def run_audit(requirements: Path, service_url: str | None) -> Audit:
    """Ask the service about all pinned packages of a requirements file.

    Args:
        requirements: File that lists all packages with versions and hashes.
        service_url: Address of a service of the Open Source Vulnerabilities format. Without it,
            pip-audit asks that project's own service.

    Raises:
        ServiceUnavailableError: pip-audit printed no report, or the service answered for no package.
    """
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(requirements)]
    # The file already lists every package with its version, so nothing is resolved or installed.
    command += ["--disable-pip", "--require-hashes", "--no-deps"]
    command += ["--vulnerability-service", "osv"]
    if service_url is not None:
        command += ["--osv-url", service_url]
    command += [
        "--timeout",
        str(SERVICE_TIMEOUT_S),
        "--format",
        "json",
        "--progress-spinner",
        "off",
    ]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if not finished.stdout.strip():
        error_lines = finished.stderr.splitlines() or ["pip-audit printed nothing"]
        raise ServiceUnavailableError(error_lines[-1][:MAX_ERROR_CHARS])
    audit = parse_audit(finished.stdout)
    if audit.num_checked == 0:
        raise ServiceUnavailableError("the service answered for no package")
    return audit


def main() -> int:
    """Print the vulnerabilities that are known. Return 1 if there is one, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requirements", type=Path, nargs="?", default=REQUIREMENTS)
    parser.add_argument("--service-url")
    arguments = parser.parse_args()
    try:
        audit = run_audit(arguments.requirements, arguments.service_url)
    except ServiceUnavailableError as error:
        print(f"known vulnerabilities: not run. {error}")
        return 0
    for line in audit.vulnerabilities:
        print(line)
    if audit.unchecked:
        print(f"not checked: {', '.join(audit.unchecked)}")
    print(
        f"{audit.num_checked} packages checked, {len(audit.vulnerabilities)} known vulnerabilities"
    )
    return 1 if audit.vulnerabilities else 0


if __name__ == "__main__":
    sys.exit(main())
