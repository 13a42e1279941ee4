"""Ways to tell viral frames from others by their embeddings, which `heads` compares.

A reader is fitted on the genomes of a fold. It returns the log-odds of a frame being viral.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from virnuc_core.config import TrainSpec
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.training.features import Features
from virnuc_core.training.fitting import balanced_sample, fit_head
from virnuc_core.training.truth import TRAIN_SIDE, VALIDATION_SIDE, VIRUS

Floats = NDArray[np.float64]
Reader = Callable[[Features], Floats]  # log-odds of each row
View = Callable[[Features], NDArray[Any]]  # what a linear reader sees of the rows, [rows, columns]

WEIGHT_DECAYS: Final = (0.03, 0.3)  # 0.01 was measured before, and changed nothing
SHRINKAGES: Final = (0.1, 0.3, 0.6)  # of the covariance towards a multiple of the identity
PENALTIES: Final = (0.01, 0.1, 1.0)  # of the logistic regression, for each row
MIDDLE_PENALTY: Final = 0.1
LANDMARKS: Final = 500  # rows that all rows are compared with, for the kernel
KERNEL_SCALE: Final = 0.25  # divided by the number of columns

HEAD: Final = "head"
DISCRIMINANT: Final = "discriminant"
TRAINING_ONLY: Final = " of the training genomes only"
FOUR_MERS_ONLY: Final = " of 4-mers alone"


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a reader may learn from: the rows of a fold's genomes."""

    features: Features
    sides: NDArray[np.int64]  # training or validation, by cluster, [rows]
    shape: HeadShape
    spec: TrainSpec
    seed: int

    @property
    def training(self) -> Features:
        """Return all rows of the training genomes."""
        return self.features.select(self.sides == TRAIN_SIDE)


# --- Networks -------------------------------------------------------------------------------------


def fit_network(lesson: Lesson, *, weight_decay: float = 0.0) -> tuple[Reader, int]:
    """Fit the head as `virnuc train` does, and return it with its best epoch."""
    rng = np.random.default_rng(lesson.seed)
    sampling = lesson.spec.sampling
    training = balanced_sample(lesson.features, lesson.sides == TRAIN_SIDE, sampling, rng)
    validation = balanced_sample(lesson.features, lesson.sides == VALIDATION_SIDE, sampling, rng)
    torch.manual_seed(lesson.seed)
    shape = shape_of(lesson.features, lesson.shape)
    fitted = fit_head(shape, training, validation, lesson.spec, weight_decay=weight_decay)
    return partial(log_odds_of_network, fitted.network), fitted.best_epoch


def fit_network_again(lesson: Lesson, epochs: int) -> Reader:
    """Fit the head on the validation genomes, too, for a given number of epochs."""
    rng = np.random.default_rng(lesson.seed)
    every_row = np.ones(len(lesson.sides), np.bool_)
    rows = balanced_sample(lesson.features, every_row, lesson.spec.sampling, rng)
    torch.manual_seed(lesson.seed)
    spec = lesson.spec.model_copy(update={"epochs": max(1, epochs), "patience": epochs + 1})
    fitted = fit_head(shape_of(rows, lesson.shape), rows, rows, spec)
    return partial(log_odds_of_network, fitted.network)


def shape_of(features: Features, shape: HeadShape) -> HeadShape:
    """Return the sizes of a head for rows of another width."""
    width = features.embeddings.shape[1]
    return shape.model_copy(update={"protein_width": width - shape.dna_width})


def log_odds_of_network(network: nn.Module, features: Features) -> Floats:
    """Return the log-odds of each row by a fitted network."""
    with torch.inference_mode():
        logits = network(features.embeddings).double().numpy()
    odds: Floats = logits[:, VIRUS] - logits[:, 1 - VIRUS]
    return odds


def with_four_mers(features: Features) -> Features:
    """Return rows whose embeddings are followed by the square roots of their shares of 4-mers."""
    four_mers = torch.from_numpy(np.sqrt(features.four_mers)).float()
    joined = torch.cat([features.embeddings, four_mers], dim=1)
    return Features(features.rows, joined, features.four_mers)


# --- Linear readers -------------------------------------------------------------------------------


def embeddings_of(features: Features) -> NDArray[Any]:
    """Return the embeddings."""
    return features.embeddings.numpy()


def embeddings_and_four_mers_of(features: Features) -> NDArray[Any]:
    """Return the embeddings with the square roots of the shares of 4-mers."""
    return with_four_mers(features).embeddings.numpy()


def four_mers_of(features: Features) -> NDArray[Any]:
    """Return the square roots of the shares of 4-mers."""
    return np.sqrt(features.four_mers)


def pooled_embeddings_of(features: Features) -> NDArray[Any]:
    """Return for each row the mean embedding of all frames of its read."""
    _, read_of_row, n_frames = np.unique(
        features.rows["read"], return_inverse=True, return_counts=True
    )
    sums = torch.zeros(len(n_frames), features.embeddings.shape[1])
    sums.index_add_(0, torch.from_numpy(read_of_row), features.embeddings)
    means = sums / torch.from_numpy(n_frames)[:, None]
    return means[torch.from_numpy(read_of_row)].numpy()


def fit_linear(model: Any, view: View, features: Features) -> Reader:
    """Fit a classifier of scikit-learn on standardised columns of all rows."""
    pipeline = make_pipeline(StandardScaler(), model)
    pipeline.fit(view(features), features.rows["label"])
    return lambda rows: pipeline.decision_function(view(rows))


def discriminant(shrinkage: float | str = "auto") -> LinearDiscriminantAnalysis:
    """Return a linear discriminant with shrunken covariance.

    Both classes have the same prior, as in the training of the head.

    Args:
        shrinkage: Share of the identity in the covariance; "auto": of Ledoit and Wolf (2004).
    """
    return LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage, priors=[0.5, 0.5])


def logistic_regression(penalty: float, n_rows: int) -> LogisticRegression:
    """Return a logistic regression in which both classes weigh alike.

    Args:
        penalty: Weight of the squared coefficients (L2), beside the mean loss of a row.
        n_rows: Rows that it will learn from.
    """
    inverse_penalty = 1 / (penalty * n_rows)  # scikit-learn sums the losses
    return LogisticRegression(C=inverse_penalty, class_weight="balanced", max_iter=300)


def fit_kernel_discriminant(features: Features, seed: int) -> Reader:
    """Fit a discriminant on similarities to some of the rows: a nonlinear reader."""
    width = features.embeddings.shape[1]
    landmarks = Nystroem(gamma=KERNEL_SCALE / width, n_components=LANDMARKS, random_state=seed)
    pipeline = make_pipeline(StandardScaler(), landmarks, StandardScaler(), discriminant())
    pipeline.fit(embeddings_of(features), features.rows["label"])
    return lambda rows: pipeline.decision_function(embeddings_of(rows))


# --- All of them ----------------------------------------------------------------------------------

Scope = Literal["main", "linear", "all"]


def fit_readers(lesson: Lesson, scope: Scope) -> dict[str, Reader]:
    """Fit readers on the genomes of a fold.

    Args:
        lesson: The rows, and how the head is trained.
        scope: "main": the head and a discriminant. "linear": further linear readers, which are
            fitted in seconds. "all": also further networks and readers of 4-mers.

    Returns:
        The readers, by their names in the table.
    """
    head, best_epoch = fit_network(lesson)
    readers = {HEAD: head}
    readers[DISCRIMINANT] = fit_linear(discriminant(), embeddings_of, lesson.features)
    if scope != "main":
        readers |= _fit_linear_readers(lesson)
    if scope == "all":
        readers |= _fit_further_readers(lesson, best_epoch)
    return readers


def _fit_linear_readers(lesson: Lesson) -> dict[str, Reader]:
    """Fit linear readers of embeddings, with penalties of several strengths."""
    features = lesson.features
    readers = {}
    for shrinkage in SHRINKAGES:
        model = discriminant(shrinkage)
        readers[f"discriminant, shrinkage {shrinkage}"] = fit_linear(model, embeddings_of, features)
    for penalty in PENALTIES:
        name = f"logistic regression, penalty {penalty}"
        regression = logistic_regression(penalty, len(features.rows))
        readers[name] = fit_linear(regression, embeddings_of, features)
    # The head learns from the training genomes only; the other readers also from those of the
    # validation. This reader shows what that brings.
    training = lesson.training
    regression = logistic_regression(MIDDLE_PENALTY, len(training.rows))
    readers[f"logistic regression{TRAINING_ONLY}"] = fit_linear(regression, embeddings_of, training)
    regression = logistic_regression(MIDDLE_PENALTY, len(features.rows))
    readers["logistic regression, frames of a read pooled"] = fit_linear(
        regression, pooled_embeddings_of, features
    )
    return readers


def _fit_further_readers(lesson: Lesson, best_epoch: int) -> dict[str, Reader]:
    """Fit networks of other settings, and readers that see 4-mers or are not linear.

    Args:
        lesson: The rows, and how the head is trained.
        best_epoch: Of the head.
    """
    features = lesson.features
    readers = {
        "head that learns from the validation genomes, too": fit_network_again(lesson, best_epoch)
    }
    for weight_decay in WEIGHT_DECAYS:
        readers[f"head, weight decay {weight_decay}"], _ = fit_network(
            lesson, weight_decay=weight_decay
        )
    joined_lesson = dataclasses.replace(lesson, features=with_four_mers(features))
    joined_head, _ = fit_network(joined_lesson)
    readers["head, with 4-mers"] = lambda rows: joined_head(with_four_mers(rows))
    for name, view in {
        "logistic regression, with 4-mers": embeddings_and_four_mers_of,
        f"logistic regression{FOUR_MERS_ONLY}": four_mers_of,
    }.items():
        regression = logistic_regression(MIDDLE_PENALTY, len(features.rows))
        readers[name] = fit_linear(regression, view, features)
    readers["kernel discriminant"] = fit_kernel_discriminant(features, lesson.seed)
    return readers
