"""A logistic regression in the head's file format gives the scores of its linear function."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from virnuc_core.config import TrainSpec
from virnuc_core.encoders.checkpoint import WEIGHTS, open_folder
from virnuc_core.encoders.classifier import Classifier, Head
from virnuc_core.encoders.model_config import HeadShape, write_shape
from virnuc_core.encoders.model_files import write_tensors
from virnuc_core.training.features import Features
from virnuc_core.training.fitting import fit_classifier
from virnuc_core.training.linear import (
    LabelledRows,
    LinearFunction,
    as_network,
    fit_logistic_regression,
    mean_network,
)

SHAPE = HeadShape(model_length=300, dna_width=6, protein_width=10, hidden=32)
CPU = torch.device("cpu")


def random_network(seed: int) -> Classifier:
    """Return a network whose batch norm is not that of a new one."""
    torch.manual_seed(seed)
    network = Classifier(SHAPE).eval()
    network.bn1.running_mean = torch.randn(SHAPE.hidden)
    network.bn1.running_var = torch.rand(SHAPE.hidden) + 0.5
    return network


def log_odds(network: Classifier, embeddings: torch.Tensor) -> torch.Tensor:
    """Return the log-odds of a virus by a network."""
    with torch.inference_mode():
        logits = network(embeddings)
    return logits[:, 1] - logits[:, 0]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_a_head_file_scores_like_the_linear_function(scale: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    function = LinearFunction(rng.normal(size=16) / scale, offset=0.7)
    embeddings = scale * torch.randn(500, 16, generator=torch.Generator().manual_seed(0))
    network = as_network(function, SHAPE)
    shape = SHAPE.model_copy(update={"hidden": 2})
    tensors = network.state_dict()
    write_tensors(tmp_path / WEIGHTS, shape.tensors(), torch.float32, lambda name: tensors[name])
    write_shape(shape, tmp_path / "config.json")
    scores = Head(*open_folder(tmp_path, HeadShape), CPU).scores(embeddings)[:, 1]
    expected = expit(function.log_odds(embeddings.numpy()))
    np.testing.assert_allclose(scores.numpy(), expected, atol=2e-6)
    assert scores.min() < 0.1
    assert scores.max() > 0.9


def test_the_mean_of_networks_is_one_network() -> None:
    first, second = random_network(1), random_network(2)
    linear = as_network(LinearFunction(np.linspace(-1, 1, 16), offset=-0.2), SHAPE)
    embeddings = torch.randn(200, 16)
    networks = [first, second, linear]
    joined = mean_network(networks, SHAPE)
    expected = torch.stack([log_odds(network, embeddings) for network in networks]).mean(dim=0)
    torch.testing.assert_close(log_odds(joined, embeddings), expected, atol=1e-5, rtol=1e-5)
    assert joined.hidden_layer.out_features == 2 * SHAPE.hidden + 2


def labelled_rows(n_rows: int, seed: int) -> LabelledRows:
    """Return rows whose columns have means and spreads of very different size."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n_rows) % 2
    embeddings = rng.normal(size=(n_rows, 16))
    embeddings[:, 0] += labels
    embeddings = embeddings * np.logspace(-2, 1, 16) + np.linspace(-5, 5, 16)
    return LabelledRows(embeddings.astype(np.float32), labels, rng.uniform(0.5, 1.5, n_rows))


def test_the_regression_is_that_of_scikit_learn_on_standardised_columns() -> None:
    rows = labelled_rows(300, seed=0)
    columns = rows.embeddings.astype(np.float64)
    columns = (columns - columns.mean(axis=0)) / columns.std(axis=0)
    model = LogisticRegression(C=1 / (0.1 * 300)).fit(columns, rows.labels, rows.weights)
    function = fit_logistic_regression(rows)
    np.testing.assert_allclose(
        function.log_odds(rows.embeddings), model.decision_function(columns), atol=1e-3
    )


@pytest.fixture(scope="module")
def features() -> Features:
    """Rows of two kinds of others and two of viruses. The last column has many sizes."""
    rows = labelled_rows(600, seed=4)
    table = pd.DataFrame({"label": rows.labels, "gc": 0.5})
    table["kind"] = np.where(np.arange(600) % 10 < 8, "common", "rare")
    return Features(table, torch.from_numpy(rows.embeddings), np.zeros((600, 0)))


def test_each_method_fits_what_it_says(features: Features) -> None:
    training, validation = features.select(np.arange(400)), features.select(np.arange(400, 600))
    fitted = {}
    for method in ("network", "linear", "mean"):
        spec = TrainSpec(truth=Path(), epochs=5, hidden=32, method=method)
        torch.manual_seed(3)
        with threadpool_limits(1):
            fitted[method] = fit_classifier(SHAPE, training, validation, features, spec)
    widths = {method: head.network.hidden_layer.out_features for method, head in fitted.items()}
    assert widths == {"network": 32, "linear": 2, "mean": 34}
    odds = {name: log_odds(head.network, features.embeddings) for name, head in fitted.items()}
    mean = (odds["network"] + odds["linear"]) / 2
    torch.testing.assert_close(odds["mean"], mean, atol=1e-4, rtol=1e-4)
    assert fitted["network"].penalty is None
    assert fitted["linear"].penalty == fitted["mean"].penalty
    assert fitted["linear"].n_rows == 600, "it learns from the validation rows in the end"
    assert fitted["linear"].n_epochs == 0
    assert fitted["linear"].validation_loss < np.log(2), "it is better than a guess"
    assert len({head.validation_loss for head in fitted.values()}) == 3


def test_kinds_that_weigh_alike_change_the_regression(features: Features) -> None:
    networks = []
    for balance in ("none", "kind"):
        spec = TrainSpec(truth=Path(), method="linear", balance=balance)
        networks.append(fit_classifier(SHAPE, features, features, features, spec).network)
    plain, balanced = (log_odds(network, features.embeddings) for network in networks)
    assert not torch.allclose(plain, balanced, atol=1e-3)


def test_a_rare_class_has_the_same_weight(features: Features) -> None:
    """Log-odds do not depend on how many rows of a class there are."""
    is_kept = (features.rows["label"] == 0) | (np.arange(600) % 3 == 0)
    few_viruses = features.select(np.flatnonzero(is_kept))
    spec = TrainSpec(truth=Path(), method="linear")
    means = []
    for all_rows in (features, few_viruses):
        head = fit_classifier(SHAPE, features, features, all_rows, spec)
        means.append(float(log_odds(head.network, features.embeddings).mean()))
    assert means == pytest.approx([0, 0], abs=0.1)
