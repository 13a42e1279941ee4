"""The Nextflow module, as far as it can be tried without Nextflow, which is in no package registry.

Its script and its stub are run by bash with the values that Nextflow would fill in. The files that
they leave are held against the outputs that the module and its description name.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from virnuc_core.reads.simulate import SimulateSpec, simulate

from .processes import ROOT

MODULE = ROOT / "deployments" / "nextflow" / "virnuc" / "predict"
SOURCE = (MODULE / "main.nf").read_text(encoding="utf-8")
OUTPUT = re.compile(
    r'path\("(?P<pattern>[^"]+)"\)\s*, emit: (?P<name>\w+)(?P<optional>, optional)?'
)
VARIABLE = re.compile(r"\$\{?([a-z.]+)\}?")
PREFIX = "sample"


@dataclass(frozen=True)
class Output:
    """A channel of the module: which files it takes from the task's folder."""

    pattern: str
    is_optional: bool


def outputs() -> dict[str, Output]:
    """Return the channels of files by name."""
    found = OUTPUT.finditer(SOURCE)
    return {
        match["name"]: Output(match["pattern"], match["optional"] is not None) for match in found
    }


def bash_script(section: str, values: dict[str, str]) -> str:
    """Return the text of `script` or `stub` as Nextflow writes it, with the given values."""
    body = SOURCE.partition(f"    {section}:\n")[2].split('"""')[1]
    unescaped = body.replace("\\\\\n", "\\\n")
    return VARIABLE.sub(lambda match: values[match[1]], unescaped)


def run_task(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a Nextflow task does, with the virnuc of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["/bin/bash", "-ueo", "pipefail", "-c", script],
        cwd=folder,
        # as in our image, which allows its own folder alone
        env={**os.environ, "PATH": path, "VIRNUC_ROOTS": "/srv/virnuc"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def channels_with_files(folder: Path) -> set[str]:
    """Return the channels for which a task left files in its folder."""
    found = set()
    for name, output in outputs().items():
        pattern = output.pattern.replace("${prefix}", PREFIX)
        if list(folder.glob(pattern)):
            found.add(name)
    return found


def test_the_description_names_every_input_and_output() -> None:
    description = yaml.safe_load((MODULE / "meta.yml").read_text(encoding="utf-8"))
    described = dict(description["output"])
    version = described.pop("versions_virnuc")
    patterns = {name: next(iter(channel[0][1])) for name, channel in described.items()}
    assert patterns == {name: output.pattern for name, output in outputs().items()}
    assert len(patterns) == 6

    command = next(iter(version[0][2]))
    assert f'eval("{command}")' in SOURCE
    assert description["topics"]["versions"] == version
    first, second = description["input"]
    names = [*(next(iter(part)) for part in first), next(iter(second))]
    assert names == ["meta", "reads", "models"]


def test_the_environment_names_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    environment = yaml.safe_load((MODULE / "environment.yml").read_text(encoding="utf-8"))
    assert environment["dependencies"] == [f"bioconda::virnuc={project['version']}"]


@pytest.mark.parametrize("pairs", ["", f"{PREFIX}/pairs.tsv"], ids=["reads", "pairs"])
def test_the_stub_leaves_every_output(tmp_path: Path, pairs: str) -> None:
    values = {"args": "--threshold 0.9", "prefix": PREFIX, "pairs": pairs}
    finished = run_task(tmp_path, bash_script("stub", values))
    assert finished.returncode == 0, finished.stderr
    expected = {name for name, output in outputs().items() if not output.is_optional}
    assert channels_with_files(tmp_path) == expected | ({"pairs"} if pairs else set())


@pytest.mark.slow
def test_the_script_predicts_pairs_and_leaves_every_output(tmp_path: Path, models: Path) -> None:
    simulate(SimulateSpec(reads=12, seed=2, pairs=True), tmp_path / "reads.fastq")
    values = {
        "args": "--devices cpu:1 --write-viral --threshold 0",
        "input": "--mates-1 reads_R1.fastq --mates-2 reads_R2.fastq",
        "prefix": PREFIX,
        "models": str(models),
        "task.cpus": "1",
    }
    version = yaml.safe_load((MODULE / "meta.yml").read_text())["output"]["versions_virnuc"]
    script = bash_script("script", values) + "\n" + next(iter(version[0][2]))
    finished = run_task(tmp_path, script)
    assert finished.returncode == 0, finished.stderr
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert finished.stdout.splitlines()[-1] == project["version"]
    assert channels_with_files(tmp_path) == set(outputs())
