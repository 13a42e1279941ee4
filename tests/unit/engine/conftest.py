"""A tiny models directory and a small staged store, made once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.forked_workers import Forker, workers_of
from virnuc_core.encoders.convert import init_random
from virnuc_core.reads.stage import StageSpec, StageSummary, stage

from .runs import ONE_CORE, classify_store


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    init_random(folder, "tiny", "tiny", model_length=300, seed=3)
    return folder


@pytest.fixture(scope="session")
def reads_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 600 reads of 60 to 700 bases, one in nine a copy of an earlier one."""
    rng = random.Random(5)
    path = tmp_path_factory.mktemp("reads") / "small.fasta"
    lines: list[str] = []
    sequences: list[str] = []
    for i in range(600):
        sequence = "".join(rng.choices("ACGT", k=rng.randint(60, 700)))
        if i % 9 == 8:
            sequence = rng.choice(sequences)
        sequences.append(sequence)
        lines += [f">read{i}", sequence]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="session")
def staged(tmp_path_factory: pytest.TempPathFactory, reads_file: Path) -> tuple[Path, StageSummary]:
    store = tmp_path_factory.mktemp("store") / "orfs.h5"
    return store, stage(StageSpec(reads=(str(reads_file),), model_length=300), store)


@pytest.fixture(scope="session")
def reference(
    tmp_path_factory: pytest.TempPathFactory,
    staged: tuple[Path, StageSummary],
    tiny_models: Path,
    forker: Forker,
) -> Path:
    """Make a finished run on one core."""
    root = tmp_path_factory.mktemp("reference") / "run"
    with workers_of(forker):
        classify_store(root, staged, tiny_models, ONE_CORE)
    return root
