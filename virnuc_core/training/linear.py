"""A logistic regression on the embeddings, carried in the file format of the head.

The format is that of a network with one hidden layer of rectified linear units. A linear function z
is the difference of two such units, relu(z) - relu(-z), so a hidden layer of two carries it. The
mean of the log-odds of two networks is one network with the hidden units of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler

from virnuc_core.encoders.classifier import Classifier
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.training.truth import VIRUS

Floats = NDArray[np.float64]

# Weight of half the squared coefficients, beside the mean loss of a row. On kept-aside real genomes
# 0.01 and 0.1 did about as well, and a choice by the validation genomes was worse.
PENALTY: Final = 0.1
MAX_ITERATIONS: Final = 300


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """Embeddings of frames, their labels and how much each counts."""

    embeddings: NDArray[Any]  # [rows, width]
    labels: NDArray[Any]  # 0 others, 1 virus, [rows]
    weights: Floats  # mean 1, [rows]


@dataclass(frozen=True, slots=True)
class LinearFunction:
    """Log-odds of a frame being viral, as a linear function of its embedding."""

    coefficients: Floats  # [width]
    offset: float

    def log_odds(self, embeddings: NDArray[Any]) -> Floats:
        """Return the log-odds of each row, [rows]."""
        values: Floats = embeddings.astype(np.float64) @ self.coefficients + self.offset
        return values


def fit_logistic_regression(rows: LabelledRows) -> LinearFunction:
    """Fit a logistic regression with an L2 penalty (`PENALTY`) on standardised columns."""
    scaler = StandardScaler()
    columns = scaler.fit_transform(rows.embeddings)
    inverse_penalty = 1 / (PENALTY * len(rows.labels))  # scikit-learn sums the losses of the rows
    model = LogisticRegression(C=inverse_penalty, max_iter=MAX_ITERATIONS)
    model.fit(columns, rows.labels, sample_weight=rows.weights)
    # w (x - mean) / scale + b  =  (w / scale) x + (b - (w / scale) mean)
    coefficients = model.coef_[0].astype(np.float64) / scaler.scale_
    offset = model.intercept_[0] - coefficients @ scaler.mean_
    return LinearFunction(coefficients, float(offset))


def validation_loss(log_odds: Floats, validation: LabelledRows) -> float:
    """Return the mean loss of log-odds on the validation rows."""
    odds = np.exp(-np.abs(log_odds))
    virus_scores = np.where(log_odds < 0, odds, 1.0) / (1 + odds)
    loss = log_loss(
        validation.labels, virus_scores, sample_weight=validation.weights, labels=[0, VIRUS]
    )
    return float(loss)


def as_network(function: LinearFunction, shape: HeadShape) -> Classifier:
    """Return a network in eval mode that computes a linear function.

    Args:
        function: The log-odds of a virus.
        shape: Sizes of the embeddings. The hidden layer has two units, whatever it says.
    """
    network = Classifier(shape.model_copy(update={"hidden": 2})).eval()
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
    coefficients = torch.from_numpy(function.coefficients)
    weights = network.state_dict()
    weights["hidden_layer.weight"] = signs[:, None] * coefficients
    weights["hidden_layer.bias"] = signs * function.offset
    # The batch norm of a new network divides by the root of 1 + eps.
    weights["bn1.weight"] = torch.full((2,), (1 + shape.norm_eps) ** 0.5)
    # The log-odds are the logit of "virus" less that of "others".
    weights["output_layer.weight"] = torch.tensor([[-0.5, 0.5], [0.5, -0.5]])
    weights["output_layer.bias"] = torch.zeros(2)
    network.load_state_dict(weights)
    return network


def mean_network(networks: Sequence[Classifier], shape: HeadShape) -> Classifier:
    """Return a network in eval mode whose log-odds are the mean of those of several networks.

    Args:
        networks: The networks, of the same embeddings.
        shape: Sizes of the embeddings. The hidden layer has the units of all networks.
    """
    parts = [network.state_dict() for network in networks]
    n_hidden = sum(len(part["hidden_layer.bias"]) for part in parts)
    network = Classifier(shape.model_copy(update={"hidden": n_hidden})).eval()
    weights = network.state_dict()
    for name in weights:
        tensors = [part[name] for part in parts]
        if name == "output_layer.weight":
            weights[name] = torch.cat(tensors, dim=1) / len(networks)
        elif name == "output_layer.bias":
            weights[name] = torch.stack(tensors).mean(dim=0)
        elif name != "bn1.num_batches_tracked":
            weights[name] = torch.cat(tensors)
    network.load_state_dict(weights)
    return network
