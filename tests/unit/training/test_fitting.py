"""A head learns columns of any size and mean alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from virnuc_core.config import TrainSpec
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.training.evaluation import Floats
from virnuc_core.training.features import Features
from virnuc_core.training.fitting import MAX_WEIGHT, balance_weights, fit_head


def fit_and_score(embeddings: Tensor, labels: pd.Series[int]) -> Tensor:
    """Fit a head on the first 300 rows, and return its scores of all, [rows, 2]."""
    shape = HeadShape(model_length=300, dna_width=4, protein_width=4, hidden=8)
    spec = TrainSpec(truth=Path(), epochs=20, patience=20)
    no_four_mers = np.zeros((len(embeddings), 0))
    rows = pd.DataFrame({"label": labels, "kind": labels.astype(str), "gc": 0.5})
    features = Features(rows, embeddings, no_four_mers)
    training = features.select(np.arange(300))
    validation = features.select(np.arange(300, len(embeddings)))
    torch.manual_seed(1)
    with threadpool_limits(1):
        network = fit_head(shape, training, validation, spec).network
    with torch.inference_mode():
        return network(embeddings).softmax(-1)


def test_columns_of_any_size_and_mean_are_learnt_alike() -> None:
    """Embeddings of real weights have means far from zero, and spreads that differ tenfold."""
    torch.manual_seed(0)
    labels = pd.Series(np.arange(400) % 2)
    plain = torch.randn(400, 8)
    plain[:, 0] += 2 * torch.tensor(labels.to_numpy())
    scaled_columns = plain * torch.logspace(-2, 1, 8) + torch.linspace(-5, 5, 8)
    plain_scores = fit_and_score(plain, labels)
    scaled_scores = fit_and_score(scaled_columns, labels)
    assert torch.allclose(plain_scores, scaled_scores, atol=0.01)
    is_called = (plain_scores[:, 1] > 0.5).numpy()
    assert (is_called == labels).mean() > 0.7


def rows_of_kinds() -> pd.DataFrame:
    """Return 60 viruses of three kinds, and 40 others of two; GC content depends on the kind."""
    counts = {"RNA virus": 35, "DNA virus": 15, "phage": 10, "plant": 30, "bacteria": 10}
    kinds = np.repeat(list(counts), list(counts.values()))
    rows = pd.DataFrame({"kind": kinds, "label": ~np.isin(kinds, ["plant", "bacteria"])})
    rows["label"] = rows["label"].astype(int)
    rows["gc"] = np.tile([0.35, 0.35, 0.45, 0.35, 0.55], 20)
    return rows


def totals(rows: pd.DataFrame, weights: Floats, label: int, column: str) -> list[float]:
    """Return the weight of each group of a class."""
    is_of_class = (rows["label"] == label).to_numpy()
    groups = rows.loc[is_of_class, column]
    return pd.Series(weights[is_of_class]).groupby(groups.to_numpy()).sum().tolist()


def test_each_kind_of_a_class_weighs_alike() -> None:
    rows = rows_of_kinds()
    weights = balance_weights(rows, "kind")
    assert totals(rows, weights, 1, "kind") == pytest.approx([20, 20, 20])
    assert totals(rows, weights, 0, "kind") == pytest.approx([20, 20])
    assert totals(rows, weights, 1, "label") == pytest.approx([60])


def test_each_range_of_gc_of_a_class_weighs_alike() -> None:
    rows = rows_of_kinds()
    weights = balance_weights(rows, "gc")
    assert totals(rows, weights, 1, "gc") == pytest.approx([20, 20, 20])
    assert totals(rows, weights, 0, "gc") == pytest.approx([40 / 3] * 3)


def test_kinds_and_gc_are_balanced_together() -> None:
    rows = rows_of_kinds()
    weights = balance_weights(rows, "kind-gc")
    for column in ("kind", "gc"):
        assert totals(rows, weights, 1, column) == pytest.approx([20, 20, 20], rel=0.01)


def test_no_row_of_a_rare_kind_counts_for_very_many() -> None:
    rows = pd.DataFrame({"kind": ["common"] * 999 + ["rare"], "label": 1, "gc": 0.5})
    weights = balance_weights(rows, "kind")
    assert weights.mean() == pytest.approx(1)
    assert weights.max() <= 1.01 * MAX_WEIGHT


@pytest.mark.parametrize("balance", ["none", "kind", "gc", "kind-gc"])
def test_one_kind_of_one_gc_content_is_left_as_it_is(balance: str) -> None:
    rows = pd.DataFrame({"kind": "virus", "label": [0, 1, 1], "gc": 0.5})
    assert balance_weights(rows, balance).tolist() == [1, 1, 1]


def test_a_rare_kind_is_learnt_if_kinds_weigh_alike() -> None:
    """Rare viruses look like the others in all columns but one, in which common ones differ not."""
    torch.manual_seed(0)
    n_rows = 1_200
    rng = np.random.default_rng(0)
    kind = rng.choice(["common", "rare", "host"], n_rows, p=[0.47, 0.03, 0.5])
    embeddings = torch.randn(n_rows, 8)
    embeddings[:, 0] += 3 * torch.tensor(kind == "common")
    embeddings[:, 1] += 1.5 * torch.tensor(kind == "rare")
    rows = pd.DataFrame({"kind": kind, "label": (kind != "host").astype(int), "gc": 0.5})
    features = Features(rows, embeddings, np.zeros((n_rows, 0)))
    shape = HeadShape(model_length=300, dna_width=4, protein_width=4, hidden=8)
    recalls = {}
    for balance in ("none", "kind"):
        spec = TrainSpec(truth=Path(), epochs=15, patience=15, balance=balance)
        torch.manual_seed(1)
        with threadpool_limits(1):
            training, validation = np.arange(900), np.arange(900, n_rows)
            head = fit_head(shape, features.select(training), features.select(validation), spec)
        with torch.inference_mode():
            scores = head.network(embeddings).softmax(-1)[:, 1].numpy()
        recalls[balance] = (scores[kind == "rare"] >= 0.5).mean()
    assert recalls["kind"] > recalls["none"] + 0.2
