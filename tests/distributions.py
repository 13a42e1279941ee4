"""Build the source distribution and the wheel from a clean folder, and check what is in them (`make dist`)."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
# Folders of the repository, and where their modules are in the wheel.
PACKAGES = {
    "src/virnuc": "virnuc",
    "flows": "virnuc/flows",
    "tasks": "virnuc/tasks",
    "deployments": "virnuc/deployments",
    "virnuc_core": "virnuc_core",
}
# What only a checkout has: people copy these files into a CI system or a pipeline, or give them to pip.
CHECKOUT_ONLY = {"deployments/ci-github.yml", "deployments/ci-validate.sh"}
CHECKOUT_ONLY |= {"deployments/requirements.txt"}
CHECKOUT_FOLDERS = ("deployments/conda", "deployments/nextflow", "deployments/snakemake")
# Files of the source distribution that are not modules.
SOURCE_FILES = {"LICENSE", "README.md", "pyproject.toml", "MANIFEST.in", "constraints.txt"}
SOURCE_FILES |= {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md"}
MADE_BY_SETUPTOOLS = {"PKG-INFO", "setup.cfg"}


@dataclass(frozen=True)
class Distributions:
    """A source distribution and the wheel that was built from it."""

    source: Path
    wheel: Path


def project_files() -> list[str]:
    """Return the files that git knows or would add, with their paths in the repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in listed.split("\0") if name and (ROOT / name).exists())


def copy_project(folder: Path) -> None:
    """Copy the files of the project, and nothing that a build or a test left beside them."""
    for name in project_files():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)


def build(folder: Path) -> Distributions:
    """Build both distributions from a clean copy of the project.

    The wheel is built from the source distribution, which therefore must be complete. The build
    uses the setuptools of this environment, so it needs no network.

    Args:
        folder: Where the copy and the distributions are written.

    Raises:
        RuntimeError: The build failed, or setuptools says that a package is not listed.
    """
    copy = folder / "clean"
    copy_project(copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(copy)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    output = finished.stdout + finished.stderr
    if finished.returncode != 0 or "Package would be ignored" in output:
        raise RuntimeError(f"the build failed:\n{output}")
    (source,) = folder.glob("virnuc-*.tar.gz")
    (wheel,) = folder.glob("virnuc-*.whl")
    return Distributions(source, wheel)


def installed_path(name: str) -> str | None:
    """Return where a file of the repository is in the wheel; None if it is not installed."""
    path = PurePosixPath(name)
    if name in CHECKOUT_ONLY or any(path.is_relative_to(folder) for folder in CHECKOUT_FOLDERS):
        return None
    for folder, package in PACKAGES.items():
        is_link = (ROOT / name).is_symlink()  # src/virnuc/flows leads to flows
        if path.is_relative_to(folder) and not is_link:
            return str(package / path.relative_to(folder))
    return None


def files_in_wheel(wheel: Path) -> set[str]:
    """Return the files of a wheel, less those that describe it."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    return {name for name in names if ".dist-info/" not in name}


def files_in_source(source: Path) -> set[str]:
    """Return the files of a source distribution, with their paths below its folder."""
    with tarfile.open(source) as archive:
        names = [member.name for member in archive if member.isfile()]
    return {name.partition("/")[2] for name in names}


def describe_difference(title: str, actual: Iterable[str], expected: Iterable[str]) -> list[str]:
    """Return one line for each file that is missing or does not belong there."""
    missing = sorted(set(expected) - set(actual))
    unexpected = sorted(set(actual) - set(expected))
    lines = [f"{title}: {name} is missing" for name in missing]
    lines += [f"{title}: {name} does not belong there" for name in unexpected]
    return lines


def check(distributions: Distributions) -> list[str]:
    """Return what is wrong with the files in both distributions, one line for each file."""
    installed = {installed_path(name) for name in project_files()} - {None}
    modules = {str(name) for name in installed}
    problems = describe_difference("wheel", files_in_wheel(distributions.wheel), modules)

    expected = SOURCE_FILES | MADE_BY_SETUPTOOLS | {f"src/{name}" for name in modules}
    in_source = files_in_source(distributions.source)
    own_record = {name for name in in_source if ".egg-info/" in name}
    return problems + describe_difference("sdist", in_source - own_record, expected)


def main() -> int:
    """Write both distributions to a folder. Return 1 if their files are not as they should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        distributions = build(Path(folder))
        problems = check(distributions)
        if problems:
            print("\n".join(problems))
            return 1
        out.mkdir(parents=True, exist_ok=True)
        for path in (distributions.source, distributions.wheel):
            shutil.copy2(path, out)
            print(out / path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
