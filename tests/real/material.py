"""What modules of this folder share: their arguments, and labelled reads with their embeddings."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from virnuc_core.config import TrainSpec
from virnuc_core.encoders.model_config import HeadShape, read_shape
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.training.features import Features, load_features
from virnuc_core.training.splits import choose_examples


def argument_parser() -> argparse.ArgumentParser:
    """Return a parser of the arguments that most modules of this folder take."""
    parser = argparse.ArgumentParser()
    parser.add_argument("wheels", type=Path, help="the folder that `make real-data` fills")
    parser.add_argument("data", type=Path, help="the folder with the genomes of other kinds")
    parser.add_argument("out", type=Path, help="the folder to write to")
    return parser


def spec_of(reads: Path, **options: Any) -> TrainSpec:
    """Return the settings of a training on some reads.

    Args:
        reads: The beginning of the names of the files with reads and tables.
        **options: Further settings.
    """
    return TrainSpec(
        truth=Path(f"{reads}.truth.tsv"),
        groups=Path(f"{reads}.groups.tsv"),
        genomes=Path(f"{reads}.genomes.fasta.gz"),
        **options,
    )


@dataclass(frozen=True, slots=True)
class Material:
    """All frames with their embeddings; the rows have the columns source and kind.

    Attributes:
        store: The staged reads.
        features: The frames. Their column source is the independent genome.
        shape: The shape of a classifier on them.
        spec: The settings of a training on them.
    """

    store: OrfStore
    features: Features
    shape: HeadShape
    spec: TrainSpec

    @property
    def genomes(self) -> pd.DataFrame:
        """Return label and kind of each independent genome."""
        columns = ["label", "kind"]
        genomes: pd.DataFrame = self.features.rows.groupby("source")[columns].first()
        return genomes

    def select(self, sources: Iterable[int]) -> Features:
        """Return the frames of some independent genomes."""
        is_wanted = self.features.rows["source"].isin(list(sources)).to_numpy()
        return self.features.select(np.flatnonzero(is_wanted))


def load_material(models: Path, run: RunDir, spec: TrainSpec) -> Material:
    """Load what is learnt from labelled reads that were embedded.

    Args:
        models: The models directory.
        run: The run with the embeddings, as `embed` has made it.
        spec: The settings of the training; see `spec_of`.
    """
    store = OrfStore.open(run.store)
    examples = choose_examples(store, spec)
    sources = examples.genomes["source"].to_numpy()[examples.rows["genome"]]
    features = load_features(run, store, examples.rows.assign(source=sources))
    old_shape = read_shape(models / "head" / "config.json", HeadShape)
    shape = old_shape.model_copy(update={"hidden": spec.hidden})
    return Material(store, features, shape, spec)
