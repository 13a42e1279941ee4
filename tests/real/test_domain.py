"""A run says in its last line that its reads are of kinds which its classifier has never seen."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from virnuc_core.runfiles import RunSummary, read

from .conftest import KEPT_ASIDE, WINDOWS, Training
from .genomes import Genome, cut, hosts, viruses
from .kinds import all_genomes
from .training import LENGTH, VIRNUC

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
READS: Final = 400
VERTEBRATE_READS: Final = 1_200  # of which few have an open frame
LAST_LINE: Final = "UNFAMILIAR SAMPLE"


@pytest.fixture(scope="module")
def models(training: Training, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the models of the training with the head that it made."""
    folder = tmp_path_factory.mktemp("domain") / "models"
    shutil.copytree(training.models, folder)
    shutil.rmtree(folder / "head")
    shutil.copytree(training.out / "head", folder / "head")
    return folder


def write_sample(genomes: Sequence[tuple[Sequence[Genome], int]], path: Path) -> Path:
    """Write so many reads of each list of genomes, without saying where they are from."""
    reads = [
        read.letters for members, count in genomes for read in cut(list(members), LENGTH, count)
    ]
    path.write_bytes(b"".join(b">%d\n%b\n" % (number, bases) for number, bases in enumerate(reads)))
    return path


def predict(sample: Path, models: Path, out: Path, *options: str) -> subprocess.CompletedProcess:
    """Run `virnuc predict` as a user does."""
    command = [VIRNUC, "predict", sample, "--models", models, "-o", out, "--devices", "cpu:1"]
    command += ["--no-prefect", "--no-progress", *options]
    return subprocess.run(command, check=False, text=True, capture_output=True)


@pytest.mark.parametrize("kind", ["bacteria", "phage"])
def test_the_last_line_of_a_run_tells_a_kind_that_the_training_did_not_have(
    kind: str, models: Path, wheels: Path, real_data: Path, tmp_path: Path
) -> None:
    genomes = [genome for genome in all_genomes(wheels, real_data) if genome.kind == kind]
    sample = write_sample([(genomes, READS)], tmp_path / "sample.fasta")
    run = predict(sample, models, tmp_path / "out")
    assert run.returncode == 0, run.stderr
    assert LAST_LINE in run.stdout.splitlines()[-1]
    summary = read(tmp_path / "out" / "summary.json", RunSummary)
    assert summary.familiarity is not None
    assert summary.familiarity.is_outside
    assert summary.answer.message.endswith(summary.answer.domain_warning)
    assert any("unlike all that the classifier was trained on" in w for w in summary.warnings)

    refused = predict(sample, models, tmp_path / "refused", "--abstain")
    assert refused.returncode == 2
    assert "--fdr-outside-domain" in refused.stderr


def test_families_and_windows_that_were_kept_aside_are_not_told(
    models: Path, wheels: Path, tmp_path: Path
) -> None:
    aside = [genome for genome in viruses(wheels, of_family=1) if genome.group in KEPT_ASIDE]
    assert len(aside) == len(KEPT_ASIDE)
    known_windows = {genome.name for genome in hosts(wheels, WINDOWS)}
    windows = [genome for genome in hosts(wheels) if genome.name not in known_windows][::10]
    sample = write_sample([(aside, READS), (windows, VERTEBRATE_READS)], tmp_path / "sample.fasta")
    run = predict(sample, models, tmp_path / "out")
    assert run.returncode == 0, run.stderr
    assert "UNFAMILIAR" not in run.stdout
    summary = read(tmp_path / "out" / "summary.json", RunSummary)
    assert summary.familiarity is not None
    assert summary.familiarity.verdict == "familiar"
    assert summary.answer.domain_warning == ""
