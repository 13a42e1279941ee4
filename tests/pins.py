"""Does `constraints.txt` pin what an environment of the project needs, and nothing else? (`make sound`)

uv resolves the project with the extras that the make targets install. A pin that no package needs
is a leftover. A package without a pin could change its version from one installation to the next.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
# The extras `anndata` and `port` are left out: they need older packages, and no make target installs them.
EXTRAS = ("bam", "cluster", "dev", "docs", "ui")
# pip and setuptools belong to the environment. CUDA's packages come with the build of torch, which is a choice.
UNPINNED = re.compile(r"pip|setuptools|cuda-.*|nvidia-(?!ml-py).*")


def requirements_in(text: str) -> list[Requirement]:
    """Return the requirements of a file in pip's format."""
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return [Requirement(line) for line in lines if line]


def names_of(requirements: list[Requirement]) -> set[str]:
    """Return the names of packages, written in one way."""
    return {canonicalize_name(requirement.name) for requirement in requirements}


def resolve() -> list[Requirement]:
    """Return all packages of an environment with the extras, for any platform and Python.

    Raises:
        subprocess.CalledProcessError: The versions do not fit together, or there is no network.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--quiet"]
    command += ["--universal", "--python-version", "3.11.9", "--constraints", str(CONSTRAINTS)]
    command += ["--no-annotate", "--no-header"]
    for extra in EXTRAS:
        command += ["--extra", extra]
    finished = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return requirements_in(finished.stdout)


def unused_pins(needed: list[Requirement], pins: list[Requirement]) -> list[str]:
    """Return the pins that no package needs on any platform."""
    return sorted(names_of(pins) - names_of(needed))


def missing_pins(needed: list[Requirement], pins: list[Requirement]) -> list[str]:
    """Return the packages that are needed here and have no pin."""
    here = [package for package in needed if package.marker is None or package.marker.evaluate()]
    names = names_of(here) - names_of(pins)
    return sorted(name for name in names if not UNPINNED.fullmatch(name))


def main() -> int:
    """Print what is wrong with the pins. Return 1 if something is, otherwise 0."""
    pins = requirements_in(CONSTRAINTS.read_text(encoding="utf-8"))
    needed = resolve()
    unused = unused_pins(needed, pins)
    missing = missing_pins(needed, pins)
    if unused:
        print(f"constraints.txt: no package needs {', '.join(unused)}. Remove these lines.")
    if missing:
        print(f"constraints.txt: no version is given for {', '.join(missing)}. Add them.")
    if unused or missing:
        return 1
    print(f"constraints.txt: {len(pins)} packages are pinned, and each is needed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
