"""The Snakemake wrapper, run by Snakemake itself. `make test-slow` installs it in build/snakemake."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from virnuc_core.reads.simulate import SimulateSpec, simulate

from .processes import ROOT

SNAKEMAKE = ROOT / "build" / "snakemake" / "bin" / "snakemake"
WRAPPER = ROOT / "deployments" / "snakemake" / "virnuc" / "predict"
needs_snakemake = pytest.mark.skipif(not SNAKEMAKE.exists(), reason="Snakemake is not installed")
WRONG_OUTPUT = """
rule wrong:
    input: reads="reads/single.fastq", models="models"
    output: reads="results/wrong/reads.tsv", summary="results/wrong/numbers.json"
    wrapper: WRAPPER
"""


@pytest.fixture(scope="module")
def workflow(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """A copy of the wrapper whose example has reads, pairs and models beside it."""
    folder = tmp_path_factory.mktemp("snakemake") / "predict"
    shutil.copytree(WRAPPER, folder)
    example = folder / "test"
    shutil.copytree(models, example / "models")
    (example / "reads").mkdir()
    simulate(SimulateSpec(reads=12, seed=1), example / "reads" / "single.fastq")
    simulate(SimulateSpec(reads=12, seed=2, pairs=True), example / "reads" / "paired.fastq")
    return example


def run_snakemake(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the workflow of a folder with the virnuc of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [SNAKEMAKE, "--cores", "2", *words],
        cwd=folder,
        env={**os.environ, "PATH": path, "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def ids_in(table: Path) -> list[str]:
    """Return the first column of a table."""
    with table.open(encoding="utf-8", newline="") as lines:
        return [row[0] for row in list(csv.reader(lines, delimiter="\t"))[1:]]


def test_the_environment_names_this_version_and_the_description_all_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    environment = yaml.safe_load((WRAPPER / "environment.yaml").read_text(encoding="utf-8"))
    assert environment["dependencies"] == [f"virnuc ={project['version']}"]

    description = yaml.safe_load((WRAPPER / "meta.yaml").read_text(encoding="utf-8"))
    source = (WRAPPER / "wrapper.py").read_text(encoding="utf-8")
    described = [name for part in ("input", "output") for row in description[part] for name in row]
    assert len(described) == 10
    for name in described:
        assert f'"{name}"' in source or f"snakemake.input.{name}" in source


@pytest.mark.slow
@needs_snakemake
def test_snakemake_predicts_reads_and_pairs_once(workflow: Path) -> None:
    first = run_snakemake(workflow)
    logs = [path.read_text(encoding="utf-8") for path in (workflow / "logs").glob("*.log")]
    assert first.returncode == 0, first.stderr + "\n".join(logs)
    results = workflow / "results"
    assert len(ids_in(results / "single" / "reads.tsv")) == 12
    assert (results / "single" / "viral.fastq.gz").is_file()
    num_pairs = len(ids_in(results / "paired" / "pairs.tsv"))
    assert len(ids_in(results / "paired" / "reads.tsv")) == 2 * num_pairs > 0

    again = run_snakemake(workflow)
    assert again.returncode == 0
    assert "Nothing to be done" in again.stderr


@pytest.mark.slow
@needs_snakemake
def test_an_output_that_virnuc_does_not_write_is_refused(workflow: Path) -> None:
    with (workflow / "Snakefile").open("a") as snakefile:
        snakefile.write(WRONG_OUTPUT)
    finished = run_snakemake(workflow, "wrong")
    assert finished.returncode != 0
    assert "virnuc does not write the output `summary` as numbers.json." in finished.stderr
    assert not (workflow / "results" / "wrong" / "run.json").exists()
