"""A small staged store and random models, made once."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from virnuc_core.encoders.convert import init_random
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore


def _write_reads(path: Path, count: int, seed: int) -> None:
    """Random reads of 90 to 620 bases; some empty, some twice, some with an N."""
    rng = random.Random(seed)
    with path.open("w") as handle:
        for i in range(count):
            bases = "".join(rng.choices("ACGT", k=rng.randint(90, 620)))
            if i % 11 == 5:
                bases = bases[:40] + "N" + bases[41:]
            if i % 17 == 3:
                bases = ""
            handle.write(f">r{i}\n{bases}\n" * (1 + (i % 13 == 7)))


@pytest.fixture(scope="session")
def write_reads() -> Callable[[Path, int, int], None]:
    """Writes a FASTA file of so many reads, made from a seed."""
    return _write_reads


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    init_random(folder, esm2="tiny", dnabert_s="tiny", model_length=500, seed=3)
    return folder


@pytest.fixture(scope="session")
def store(
    tmp_path_factory: pytest.TempPathFactory, write_reads: Callable[[Path, int, int], None]
) -> OrfStore:
    folder = tmp_path_factory.mktemp("store")
    write_reads(folder / "reads.fa", 160, 5)
    stage(StageSpec(reads=(str(folder / "reads.fa"),)), folder / "orfs.h5")
    return OrfStore.open(folder / "orfs.h5")
