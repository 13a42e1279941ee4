"""A head learns columns of any size and mean alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from virnuc_core.config import TrainSpec
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.training.features import Features
from virnuc_core.training.fitting import fit_head


def fit_and_score(embeddings: Tensor, labels: pd.Series[int]) -> Tensor:
    """Fit a head on the first 300 rows, and return its scores of all, [rows, 2]."""
    shape = HeadShape(model_length=300, dna_width=4, protein_width=4, hidden=8)
    spec = TrainSpec(truth=Path(), epochs=20, patience=20)
    no_four_mers = np.zeros((len(embeddings), 0))
    features = Features(pd.DataFrame({"label": labels}), embeddings, no_four_mers)
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
