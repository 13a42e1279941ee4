"""What an installation holds: every folder is listed in pyproject.toml, and a wrong file is noticed."""

from __future__ import annotations

import io
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

from tests.distributions import (
    MADE_BY_SETUPTOOLS,
    SOURCE_FILES,
    Distributions,
    check,
    installed_path,
    project_files,
)

ROOT = Path(__file__).resolve().parents[2]
HOPPER = "virnuc_core/encoders/cuda/hopper.so"


def write_distributions(
    folder: Path, wheel_files: Iterable[str], source_files: Iterable[str]
) -> Distributions:
    """Write a wheel and a source distribution with empty files."""
    source = folder / "virnuc-1.tar.gz"
    wheel = folder / "virnuc-1.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in [*wheel_files, "virnuc-1.dist-info/METADATA"]:
            archive.writestr(name, "")
    with tarfile.open(source, "w:gz") as archive:
        for name in [*source_files, "src/virnuc.egg-info/SOURCES.txt"]:
            archive.addfile(tarfile.TarInfo(f"virnuc-1/{name}"), io.BytesIO())
    return Distributions(source, wheel)


def test_every_folder_of_modules_or_data_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packaged = set(settings["tool"]["setuptools"]["packages"])
    installed = [path for path in map(installed_path, project_files()) if path is not None]
    folders = {".".join(Path(path).parent.parts) for path in installed}
    assert folders == packaged


def test_modules_are_installed_where_they_are_imported() -> None:
    assert installed_path("flows/cli/app.py") == "virnuc/flows/cli/app.py"
    assert installed_path("src/virnuc/__init__.py") == "virnuc/__init__.py"
    assert installed_path(HOPPER) == HOPPER
    assert installed_path("tests/conftest.py") is None
    assert installed_path("deployments/snakemake/virnuc/predict/wrapper.py") is None
    assert installed_path("src/virnuc/flows") is None  # the link; the folder has its own files


def test_a_missing_library_and_files_of_tests_are_noticed(tmp_path: Path) -> None:
    modules = {str(path) for path in map(installed_path, project_files()) if path is not None}
    sources = {f"src/{name}" for name in modules} | SOURCE_FILES | MADE_BY_SETUPTOOLS
    assert HOPPER in modules
    assert check(write_distributions(tmp_path, modules, sources)) == []

    wrong_modules = modules - {HOPPER} | {"tests/conftest.py"}
    wrong_sources = sources - {"LICENSE"} | {"src/virnuc/__pycache__/run.cpython-311.pyc"}
    assert check(write_distributions(tmp_path, wrong_modules, wrong_sources)) == [
        f"wheel: {HOPPER} is missing",
        "wheel: tests/conftest.py does not belong there",
        "sdist: LICENSE is missing",
        "sdist: src/virnuc/__pycache__/run.cpython-311.pyc does not belong there",
    ]
