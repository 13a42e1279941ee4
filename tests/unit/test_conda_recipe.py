"""The conda recipe, rendered by rattler-build: versions and dependencies are those of pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import rattler_build
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
# Packages that conda-forge has under another name than PyPI.
CONDA_NAMES = {"isal": "python-isal", "matplotlib": "matplotlib-base", "torch": "pytorch"}
OPTIONAL_EXTRAS = ("anndata", "bam", "cluster")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """The metadata of the project."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    metadata: dict[str, Any] = settings["project"]
    return metadata


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    """The recipe as rattler-build builds it."""
    parsed = rattler_build.Stage0Recipe.from_file(ROOT / "deployments" / "conda" / "recipe.yaml")
    (variant,) = parsed.render()
    rendered: dict[str, Any] = variant.recipe.to_dict()
    return rendered


def as_conda(requirements: list[str]) -> dict[str, SpecifierSet]:
    """Return the range of versions of each package, under its name on conda-forge."""
    parsed = [Requirement(text) for text in requirements]
    return {CONDA_NAMES.get(package.name, package.name): package.specifier for package in parsed}


def ranges(specs: list[str]) -> dict[str, SpecifierSet]:
    """Return the range of versions of each package of a recipe. `__linux` is no package."""
    parsed = [Requirement(text) for text in specs if not text.startswith("__")]
    return {package.name: package.specifier for package in parsed}


def test_version_licence_and_command_are_those_of_the_project(
    recipe: dict[str, Any], project: dict[str, Any]
) -> None:
    assert recipe["package"] == {"name": project["name"], "version": project["version"]}
    assert recipe["about"]["license"] == project["license"]
    commands = [f"{name} = {entry}" for name, entry in project["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == commands


def test_the_prebuilt_library_keeps_its_bytes(recipe: dict[str, Any]) -> None:
    # A library of another digest is not loaded, so its search paths must not be edited.
    assert recipe["build"]["dynamic_linking"]["binary_relocation"] is False


def test_dependencies_are_those_of_the_project(
    recipe: dict[str, Any], project: dict[str, Any]
) -> None:
    expected = as_conda(project["dependencies"])
    expected["python"] = SpecifierSet(project["requires-python"])
    assert ranges(recipe["requirements"]["run"]) == expected


def test_optional_packages_have_the_ranges_of_the_extras(
    recipe: dict[str, Any], project: dict[str, Any]
) -> None:
    extras = project["optional-dependencies"]
    optional = [text for extra in OPTIONAL_EXTRAS for text in extras[extra]]
    assert ranges(recipe["requirements"]["run_constraints"]) == as_conda(optional)
