"""Genomes of sense codons: each kind has its own use of codons, and each genome varies it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore

STOPS = {"TAA", "TAG", "TGA"}
CODONS = [codon for codon in map("".join, product("ACGT", repeat=3)) if codon not in STOPS]
KIND_SPREAD = 0.8  # of the logarithms of codon weights, between kinds
GENOME_SPREAD = 0.1  # between the genomes of a kind


def reads_of_kind(kind: int, genome: int, count: int, n_codons: int = 50) -> list[str]:
    """Return reads of one genome. Each kind and genome is a number, from which it is made."""
    kind_rng = np.random.default_rng(kind)
    genome_rng = np.random.default_rng((kind, genome))
    logs = KIND_SPREAD * kind_rng.normal(size=len(CODONS))
    logs += GENOME_SPREAD * genome_rng.normal(size=len(CODONS))
    weights = np.exp(logs) / np.exp(logs).sum()
    codons = genome_rng.choice(CODONS, size=(count, n_codons), p=weights)
    return ["".join(read) for read in codons]


def stage_reads(reads: list[str], folder: Path, model_length: int = 300) -> OrfStore:
    """Stage reads named by their place in the list."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f">{number}\n{bases}\n" for number, bases in enumerate(reads)]
    path = folder / "reads.fasta"
    path.write_text("".join(lines))
    stage(StageSpec(reads=(str(path),), model_length=model_length), folder / "orfs.h5")
    return OrfStore.open(folder / "orfs.h5")


def rows_of_genomes(store: OrfStore, genomes: list[tuple[str, int]]) -> pd.DataFrame:
    """Return the frames of a store as a training has them.

    Args:
        store: The staged reads.
        genomes: Kind and cluster of each read.
    """
    rows = pd.DataFrame(
        {"read": store.row_read[:], "chunk": store.row_chunk[:], "unique": store.row_unique[:]}
    )
    rows["kind"] = [genomes[read][0] for read in rows["read"]]
    rows["cluster"] = [genomes[read][1] for read in rows["read"]]
    return rows
