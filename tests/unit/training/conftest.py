"""Simulated reads of known origin, and a run whose embeddings hold the class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from virnuc_core.config import TrainSpec
from virnuc_core.encoders.checkpoint import check_models
from virnuc_core.encoders.convert import init_random
from virnuc_core.encoders.model_config import DNABERT_SIZES, ESM2_SIZES
from virnuc_core.engine import shards
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.training.splits import Examples, choose_examples
from virnuc_core.training.train_file import TrainFile
from virnuc_core.training.training import link_models, train_head

from .origins import LabelledReads, read_labels

WIDTH = ESM2_SIZES["tiny"].width + DNABERT_SIZES["tiny"].width
SHARD_ROWS = 97
SIGNAL_COLUMNS = 8  # of the embeddings that depend on the class
QUICK: dict[str, Any] = {"hidden": 32, "epochs": 30, "repeats": 0}


def write_embeddings(
    run: RunDir, reads: Path, is_virus: Callable[[str], bool], signal: float
) -> OrfStore:
    """Stage reads, and write shards whose embeddings hold the class in a few columns.

    Args:
        run: The run directory to write.
        reads: The file of reads.
        is_virus: Says of a read id whether the read is viral.
        signal: Distance of the classes in each of these columns; the noise has a spread of 1.
    """
    stage(StageSpec(reads=(str(reads),)), run.store)
    store = OrfStore.open(run.store)
    read_ids = store.read_ids(0, store.n_reads)
    read_of_unique = store.row_read[store.unique_row[:]].tolist()
    label_of_unique = np.array([is_virus(read_ids[read_index]) for read_index in read_of_unique])
    noise = np.random.default_rng(0).normal(size=(store.n_uniques, WIDTH))
    embeddings = noise.astype(np.float32)
    offsets = signal * (label_of_unique[:, None] - 0.5)
    embeddings[:, :SIGNAL_COLUMNS] += offsets.astype(np.float32)
    bounds = (*range(0, store.n_uniques, SHARD_ROWS), store.n_uniques)
    plan = shards.ShardPlan(bounds=bounds, fingerprint="made")
    shards.write_plan(run, plan)
    for shard in range(len(plan)):
        start, end = plan.range(shard)
        undecided_scores = np.full((end - start, 2), 0.5, dtype=np.float32)
        shards.commit(run, plan, shard, shards.ShardResult(embeddings[start:end], undecided_scores))
    return store


class TrainingRun:
    """Simulated reads with their table of origins, and a training directory with embeddings."""

    def __init__(self, folder: Path, models: Path, signal: float) -> None:
        spec = SimulateSpec(
            reads=900, viral_genomes=6, other_genomes=7, genome_length=4_000, seed=4
        )
        self.simulated = simulate(spec, folder / "reads.fasta")
        self.truth = self.simulated.truth_file
        self.run = RunDir(folder / "run")
        self.head = self.run.root / "head"
        self.embed(signal)
        link_models(models, self.run.root, check_models(models))

    def embed(self, signal: float) -> None:
        """Stage the reads as they are now, and write their embeddings."""
        labels = read_labels(self.truth)
        self.store = write_embeddings(
            self.run, self.simulated.reads_file, lambda read: labels[read] == "virus", signal
        )

    def spec(self, **settings: Any) -> TrainSpec:
        """Return settings of a quick training, some of them changed."""
        return TrainSpec(truth=self.truth, **QUICK | settings)

    def choose_examples(self) -> Examples:
        """Split the reads."""
        return choose_examples(self.store, self.spec())

    def train(self, *fragments: RunDir, **settings: Any) -> TrainFile:
        """Train a head; `fragments` may be the run over fragments of the test genomes."""
        spec = self.spec(**settings)
        examples = choose_examples(self.store, spec)
        return train_head(self.run, self.store, examples, spec, *fragments)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny random models."""
    folder = tmp_path_factory.mktemp("models")
    init_random(folder, esm2="tiny", dnabert_s="tiny", model_length=500, seed=1)
    return folder


@pytest.fixture(scope="module")
def training_run(tmp_path_factory: pytest.TempPathFactory, models: Path) -> TrainingRun:
    """A training directory whose embeddings tell the classes apart."""
    return TrainingRun(tmp_path_factory.mktemp("training"), models, signal=1.5)


@pytest.fixture
def labelled_reads(tmp_path: Path) -> LabelledReads:
    """Reads of five viruses and five other genomes."""
    return LabelledReads.simulate(tmp_path)
