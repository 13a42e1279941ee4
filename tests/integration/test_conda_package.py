"""The conda package, built by rattler-build from our recipe.

No conda channel is asked. A channel on this disk has the three packages that the build needs: the
Python, pip and setuptools of this environment. What the package needs to run is not installed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest
import rattler_build

from tests.distributions import describe_difference, installed_path, project_files

from .processes import ROOT

pytestmark = pytest.mark.slow
PLATFORM = "linux-64"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
SITE_PACKAGES = f"lib/{PYTHON}/site-packages"


def stage_python(folder: Path) -> None:
    """Write an environment in the form of `python -m venv`, so that packages are installed into it."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(Path(sys.base_prefix) / "bin" / PYTHON)
    home = Path(sys.base_prefix) / "bin"
    (folder / "pyvenv.cfg").write_text(
        f"home = {home}\ninclude-system-site-packages = false\n", encoding="utf-8"
    )


def stage_installed(folder: Path, name: str) -> None:
    """Copy a package that is installed in this environment."""
    files = metadata.files(name)
    assert files
    for file in files:
        is_module = ".." not in file.parts and "__pycache__" not in file.parts
        if is_module:
            target = folder / SITE_PACKAGES / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(str(file.locate())), target)


def add_package(channel: Path, folder: Path, name: str, version: str) -> None:
    """Make a conda package of a folder, and list it in the channel."""
    assembled = rattler_build.assemble_package(
        name=name,
        version=version,
        target_platform=PLATFORM,
        build_string="0",
        output_dir=channel / PLATFORM,
        files_dir=folder,
    )
    path = channel / PLATFORM / Path(assembled.path).name
    if path != Path(assembled.path):
        shutil.move(assembled.path, path)
    index = channel / PLATFORM / "repodata.json"
    listed = json.loads(index.read_text(encoding="utf-8"))
    listed["packages.conda"][path.name] = {
        "name": name,
        "version": version,
        "build": "0",
        "build_number": 0,
        "depends": [],
        "subdir": PLATFORM,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "size": path.stat().st_size,
    }
    index.write_text(json.dumps(listed), encoding="utf-8")


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A channel with what a build of a Python package needs."""
    channel = tmp_path_factory.mktemp("channel")
    for platform in (PLATFORM, "noarch"):
        (channel / platform).mkdir()
        index = {"info": {"subdir": platform}, "packages": {}, "packages.conda": {}}
        (channel / platform / "repodata.json").write_text(json.dumps(index), encoding="utf-8")
    staged = tmp_path_factory.mktemp("staged")
    stage_python(staged / "python")
    add_package(channel, staged / "python", "python", ".".join(map(str, sys.version_info[:3])))
    for name in ("pip", "setuptools"):
        stage_installed(staged / name, name)
        add_package(channel, staged / name, name, metadata.version(name))
    return channel


def test_the_package_has_our_modules_and_needs_what_the_project_needs(
    channel: Path, tmp_path: Path
) -> None:
    recipe = rattler_build.Stage0Recipe.from_file(ROOT / "deployments" / "conda" / "recipe.yaml")
    untested = rattler_build.ToolConfiguration(test_strategy="skip")  # its packages are not here
    (result,) = recipe.run_build(
        tool_config=untested, output_dir=tmp_path, channels=[channel.as_uri()]
    )
    (path,) = result.packages
    package = rattler_build.Package.from_file(path)
    assert (package.name, package.version) == ("virnuc", metadata.version("virnuc"))
    assert package.noarch == "python"
    assert "__linux" in package.depends
    assert len(package.depends) > 20

    prefix = "site-packages/"
    files = {str(file).removeprefix(prefix) for file in package.files}
    modules = {file for file in files if ".dist-info/" not in file}
    expected = {str(name) for name in map(installed_path, project_files()) if name is not None}
    assert describe_difference("conda", modules, expected) == []
