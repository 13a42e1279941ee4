"""Each frame gets its own embedding and the 4-mers of its own DNA."""

from __future__ import annotations

import numpy as np
import pytest

from virnuc_core.engine import shards
from virnuc_core.training.features import FOUR_MERS, load_features

from .conftest import TrainingRun


def test_rows_keep_their_embeddings_and_four_mers(training_run: TrainingRun) -> None:
    rows = training_run.choose_examples().rows
    features = load_features(training_run.run, training_run.store, rows)
    assert len(features.rows) == len(rows)

    plan = shards.read_plan(training_run.run)
    results = [shards.read_shard(training_run.run, plan, shard) for shard in range(len(plan))]
    embeddings = np.concatenate([result.embeddings for result in results])
    assert np.array_equal(features.embeddings.numpy(), embeddings[rows["unique"]])

    assert features.four_mers.sum(axis=1) == pytest.approx(1)
    uniques = rows["unique"].tolist()
    dna = [training_run.store.dna(unique, unique + 1)[0] for unique in uniques]
    has_aaaa = np.array([b"AAAA" in bases for bases in dna])
    column = features.four_mers[:, FOUR_MERS.index("AAAA")]
    assert np.array_equal(column > 0, has_aaaa)
