"""The comparison of readers holds genomes back, inside and outside, and counts as told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from threadpoolctl import threadpool_limits

from virnuc_core.config import TrainSpec
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.training.features import Features

from ...real import heads
from ...real.readers import HEAD

KINDS = {"RNA virus": 1, "phage": 1, "bacteria": 0, "vertebrate": 0}
GENOMES_OF_KIND = 10
READS_OF_GENOME = 10


@pytest.fixture(scope="module")
def features() -> Features:
    """Frames of 40 genomes, two of a read, which differ by kind and by genome."""
    rng = np.random.default_rng(0)
    n_genomes = GENOMES_OF_KIND * len(KINDS)
    genome = np.repeat(np.arange(n_genomes), 2 * READS_OF_GENOME)
    kind = np.array(list(KINDS))[genome % len(KINDS)]
    read = np.arange(len(genome)) // 2
    rows = pd.DataFrame({"read": read, "chunk": read, "genome": genome, "cluster": genome})
    rows = rows.assign(source=genome, kind=kind, gc=rng.uniform(0.3, 0.7, len(rows)))
    rows["label"] = rows["kind"].map(KINDS)
    embeddings = rng.normal(size=(len(rows), 8)) + rng.normal(size=(n_genomes, 8))[genome]
    embeddings[:, 0] += 2 * rows["label"]
    four_mers = rng.dirichlet(np.ones(16), len(rows))
    return Features(rows, torch.tensor(embeddings, dtype=torch.float32), four_mers)


@pytest.mark.parametrize("n_folds", [3, 5])
def test_no_genome_is_in_two_folds_and_no_fold_lacks_a_kind(
    features: Features, n_folds: int
) -> None:
    rows = features.rows.assign(fold=heads.deal_folds(features.rows, n_folds, seed=1))
    assert (rows.groupby("cluster")["fold"].nunique() == 1).all()
    assert (rows.groupby("kind")["fold"].nunique() == n_folds).all()


def test_inner_folds_never_see_the_genomes_that_are_tested(
    features: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is tested is noise to the inner folds: they give the same scores without it."""
    shape = HeadShape(model_length=300, dna_width=1, protein_width=7, hidden=4)
    spec = TrainSpec(truth=Path(), epochs=1)
    monkeypatch.setattr(heads, "OUTER_FOLDS", 3)
    monkeypatch.setattr(heads, "INNER_FOLDS", 2)
    with threadpool_limits(1):
        fold = next(heads.score_folds(features, shape, spec, "main", seed=0))
        noise = features.embeddings.clone()
        noise[torch.tensor(fold.tested)] = 100.0
        noisy = Features(features.rows, noise, features.four_mers)
        noisy_fold = next(heads.score_folds(noisy, shape, spec, "main", seed=0))
    assert np.isnan(fold.inner[HEAD][fold.tested]).all()
    assert np.isfinite(fold.outer[HEAD][fold.tested]).all()
    for name, log_odds in fold.inner.items():
        np.testing.assert_array_equal(log_odds, noisy_fold.inner[name])
        assert np.isfinite(log_odds[~fold.tested]).all()


def test_the_threshold_finds_seven_tenths_of_the_drawn_viruses() -> None:
    scores = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.95])
    is_virus = np.array([True, True, True, True, True, False])
    once = np.ones(6)
    first_drawn_often = np.array([7.0, 1, 1, 1, 0, 1])
    thresholds = heads.thresholds_of_recall(scores, is_virus, np.stack([once, first_drawn_often]))
    assert thresholds[:, 0].tolist() == [0.6, 0.9]


@pytest.mark.parametrize(("unit", "of_each"), [("read", "cluster"), ("cluster", "kind")])
def test_a_share_is_taken_of_each_genome_or_of_each_kind(
    features: Features, unit: str, of_each: str
) -> None:
    rows = features.rows
    kept = rows[heads.keep_share(rows, unit, 0.5, seed=0)]
    n_all = rows.groupby(of_each)[unit].nunique()
    n_kept = kept.groupby(of_each)[unit].nunique()
    assert (n_kept == n_all / 2).all()
    whole = rows[rows[unit].isin(kept[unit])]
    assert len(whole) == len(kept), "a read is kept with all its frames"


def test_a_power_law_is_continued() -> None:
    shares = np.array(heads.SHARES)
    still_rising = 0.9 - 0.05 * shares**-0.5
    flat = np.full(4, 0.7)
    falling = 0.8 - 0.01 * shares
    values = np.stack([still_rising, flat, falling], axis=1)
    continued = heads.extrapolate(values, times=8)
    assert continued[0] == pytest.approx(0.9 - 0.05 * 8**-0.5)
    assert continued[1] == pytest.approx(0.7)
    assert continued[2] == pytest.approx(falling.mean()), "more never makes it worse"
