"""Fit a classifier (head), and the baselines that it is compared with.

The head is a network with early stopping, a logistic regression, or the mean of both.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from virnuc_core.config import TrainSpec
from virnuc_core.encoders.classifier import Classifier, probabilities
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.reads.simulate import LABELS
from virnuc_core.training.evaluation import Floats, ScoredRows
from virnuc_core.training.features import GC_BOUNDS, Features
from virnuc_core.training.linear import (
    PENALTY,
    LabelledRows,
    as_network,
    fit_logistic_regression,
    mean_network,
    validation_loss,
)
from virnuc_core.training.splits import assign_folds, assign_training_sides, subsample
from virnuc_core.training.truth import KIND, TEST_SIDE, TRAIN_SIDE, VALIDATION_SIDE, VIRUS

HEAD_METHOD: Final = "head"
BATCH_ROWS: Final = 128
STEP_EPOCHS: Final = 10  # after so many epochs the learning rate is multiplied by STEP_DECAY
STEP_DECAY: Final = 0.85
MIN_SPREAD: Final = 1e-3  # a column that varies less is not scaled up further
BASELINE_ROWS: Final = 2_500  # of a class that a baseline learns from
MAX_WEIGHT: Final = 5.0  # of a row, if its kind or GC content is rare; the mean is 1
BALANCE_ROUNDS: Final = 20
REPEAT_SEEDS: Final = 1_000  # distance of the seeds of two cross-validations

Scorer = Callable[[Features], Floats]  # P(virus) of each row


@dataclass(frozen=True, slots=True)
class FittedHead:
    """A trained network and the record of its training."""

    network: Classifier  # in eval mode
    n_rows: int  # that it was trained on; both classes have the same weight
    n_epochs: int  # 0 for a logistic regression, which has none
    best_epoch: int
    validation_loss: float  # when the validation rows were not learnt from: of the best epoch
    penalty: float | None = None  # of the logistic regression, if there is one


@dataclass(frozen=True, slots=True)
class FittedMethods:
    """The head and the baselines, trained on the same rows."""

    head: FittedHead
    scorers: dict[str, Scorer]  # by name of the method; the head first


@dataclass(frozen=True, slots=True)
class _LabelledVectors:
    """Standardised embeddings, their labels and how much each counts."""

    embeddings: Tensor  # [rows, width]
    labels: Tensor  # [rows]
    weights: Tensor  # [rows]


# --- Baselines ------------------------------------------------------------------------------------


def _embeddings_of(features: Features) -> NDArray[Any]:
    """Return the embeddings, [rows, width]."""
    return features.embeddings.numpy()


def _four_mers_of(features: Features) -> NDArray[Any]:
    """Return the shares of 4-mers, [rows, 256]."""
    return features.four_mers


# What each baseline sees of the rows.
BASELINES: Final[dict[str, Callable[[Features], NDArray[Any]]]] = {
    "logistic regression on the vectors": _embeddings_of,
    "logistic regression on 4-mers": _four_mers_of,
}
METHODS: Final = (HEAD_METHOD, *BASELINES)


def _fit_baseline(
    features: Features, view: Callable[[Features], NDArray[Any]], balance: str
) -> Scorer:
    """Fit a logistic regression, and return the function that scores rows with it.

    Args:
        features: The rows to learn from.
        view: Returns what the baseline may see of some rows: their embeddings or their 4-mers.
        balance: What weighs alike within a class, see `balance_weights`.
    """
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1_000))
    weights = balance_weights(features.rows, balance)
    model.fit(view(features), features.rows["label"], logisticregression__sample_weight=weights)
    return partial(_score_by_baseline, model, view)


def _score_by_baseline(
    model: Pipeline, view: Callable[[Features], NDArray[Any]], features: Features
) -> Floats:
    """Return P(virus) of each row by a fitted logistic regression, [rows].

    Args:
        model: The fitted regression.
        view: Returns what the regression was fitted on: embeddings or 4-mers.
        features: The rows to score.
    """
    class_scores: Floats = model.predict_proba(view(features))  # [rows, classes]
    return class_scores[:, VIRUS]


# --- Head and baselines ---------------------------------------------------------------------------


def cross_validate(
    features: Features, shape: HeadShape, spec: TrainSpec
) -> dict[str, list[ScoredRows]]:
    """Score each row by methods that were trained on other clusters of genomes.

    The methods are the head, which is the classifier, and the baselines. The rows are split into
    folds of whole clusters, and each fold is scored by methods that learnt from the other folds.
    All this is repeated with other folds.

    Args:
        features: All rows.
        shape: Sizes of the head.
        spec: The number of folds and repeats, and the training settings.

    Returns:
        By method, the scores of all rows for each repeat; empty without repeats.
    """
    scorings: dict[str, list[ScoredRows]] = {}
    for repeat in range(spec.repeats):
        # The folds of a repeat use the seeds that follow, so repeats are far apart.
        seed = spec.seed + REPEAT_SEEDS * (repeat + 1)
        scores_of_method = _cross_validate_once(features, shape, spec, seed)
        for method, scores in scores_of_method.items():
            scorings.setdefault(method, []).append(ScoredRows(features.rows, scores))
    return scorings


def _cross_validate_once(
    features: Features, shape: HeadShape, spec: TrainSpec, seed: int
) -> dict[str, Floats]:
    """Return the scores of each method for all rows, [rows].

    The rows of each fold are scored by methods that were trained on the other folds.

    Args:
        features: All rows.
        shape: Sizes of the head.
        spec: The number of folds, and the training settings.
        seed: Seed of the folds. Each fold trains with a seed of its own.
    """
    n_rows = len(features.rows)
    folds = assign_folds(features.rows, 1 / spec.folds, seed)
    scores_of_method = {method: np.empty(n_rows) for method in METHODS}
    for fold in range(folds.max() + 1):
        fold_seed = seed + fold
        test_rows = np.flatnonzero(folds == fold)
        other_rows = np.flatnonzero(folds != fold)
        sides = np.full(n_rows, TEST_SIDE)
        sides[other_rows] = assign_training_sides(
            features.rows.iloc[other_rows], spec.validation_share, fold_seed
        )
        fitted = fit_methods(features, sides, shape, spec, fold_seed)
        for method, scorer in fitted.scorers.items():
            scores_of_method[method][test_rows] = scorer(features.select(test_rows))
    return scores_of_method


def fit_methods(
    features: Features, sides: NDArray[np.int64], shape: HeadShape, spec: TrainSpec, seed: int
) -> FittedMethods:
    """Fit the head, which is the classifier, and each baseline on the training set.

    The head learns from as many rows of either class. A baseline learns from the first of these
    rows, at most `BASELINE_ROWS` for each class.

    Args:
        features: All rows.
        sides: The set of each row (index into SIDES: training, validation or test), [rows]. The
            training of the head stops when it no longer improves on the validation set. The test
            set is not used.
        shape: Sizes of the head.
        spec: Training settings.
        seed: Seed of the sample of rows, the first weights, the order of rows and the dropout.
    """
    rng = np.random.default_rng(seed)
    training = balanced_sample(features, sides == TRAIN_SIDE, spec.sampling, rng)
    validation = balanced_sample(features, sides == VALIDATION_SIDE, spec.sampling, rng)
    torch.manual_seed(seed)
    all_rows = features.select(np.flatnonzero(sides != TEST_SIDE))
    head = fit_classifier(shape, training, validation, all_rows, spec)
    scorers: dict[str, Scorer] = {HEAD_METHOD: partial(_score_by_head, head.network)}
    n_baseline_rows = min(len(training.rows), len(LABELS) * BASELINE_ROWS)
    baseline_rows = training.select(np.arange(n_baseline_rows))  # the rows are in random order
    for name, view in BASELINES.items():
        scorers[name] = _fit_baseline(baseline_rows, view, spec.balance)
    return FittedMethods(head, scorers)


def balanced_sample(
    features: Features, is_wanted: NDArray[np.bool_], sampling: str, rng: np.random.Generator
) -> Features:
    """Return equally many rows of both classes, in random order: as many as the rarer class has.

    Args:
        features: All rows.
        is_wanted: Marks the rows that may be chosen, [rows].
        sampling: "natural": all rows are equally likely. "even": a row of each genome in turn.
        rng: The random number generator.
    """
    numbered_rows = features.rows.reset_index(drop=True)
    candidates = numbered_rows[is_wanted].assign(rows=1)  # each entry stands for one row
    n_rows_of_rarer_class = int(candidates["label"].value_counts().min())
    chosen_rows = subsample(candidates, n_rows_of_rarer_class, sampling, rng)
    return features.select(rng.permutation(chosen_rows.to_numpy()))


def balance_weights(rows: pd.DataFrame, balance: str) -> Floats:
    """Return how much each row counts in the training, so that rare kinds of reads count enough.

    Both classes keep their total weight. Within a class, the weights are fitted in turn to equal
    totals of each kind and of each range of GC content (iterative proportional fitting; Deming and
    Stephan 1940, Annals of Mathematical Statistics 11:427). No row counts more than about
    `MAX_WEIGHT` rows, because few rows would otherwise be learnt by heart.

    Args:
        rows: Rows with the columns label, kind and gc.
        balance: "kind", "gc", or "kind-gc" for both. "none": each row counts once.

    Returns:
        The weights, [rows]; their mean is 1 in each class.
    """
    groupings = []
    if "kind" in balance:
        groupings.append(rows[KIND].to_numpy(object))
    if "gc" in balance:
        groupings.append(np.digitize(rows["gc"].to_numpy(), GC_BOUNDS))
    weights = np.ones(len(rows))
    for label in range(len(LABELS)):
        is_of_class = rows["label"].to_numpy() == label
        if is_of_class.any():
            groupings_of_class = [grouping[is_of_class] for grouping in groupings]
            weights[is_of_class] = _equal_group_weights(groupings_of_class, int(is_of_class.sum()))
    return weights


def _equal_group_weights(groupings: list[NDArray[Any]], n_rows: int) -> Floats:
    """Return weights with the mean 1, with which the groups of each grouping have equal totals.

    Args:
        groupings: For each grouping, the group of each row, [rows].
        n_rows: Number of rows.
    """
    weights = np.ones(n_rows)
    numbered_groupings = [pd.factorize(grouping)[0] for grouping in groupings]
    for _ in range(BALANCE_ROUNDS):
        for group_of_row in numbered_groupings:
            totals = np.bincount(group_of_row, weights)
            weights *= n_rows / len(totals) / totals[group_of_row]
    # What the heaviest rows lose goes to all others, of which some may then be too heavy.
    for _ in range(BALANCE_ROUNDS):
        weights = np.minimum(weights, MAX_WEIGHT)
        weights *= n_rows / weights.sum()
    return weights


def _score_by_head(network: nn.Module, features: Features) -> Floats:
    """Return P(virus) of each row by a trained head, [rows]."""
    with torch.inference_mode():
        virus_scores = probabilities(network(features.embeddings))[:, VIRUS]
    scores: Floats = virus_scores.double().numpy()
    return scores


# --- Head -----------------------------------------------------------------------------------------


def fit_classifier(
    shape: HeadShape,
    training: Features,
    validation: Features,
    all_rows: Features,
    spec: TrainSpec,
) -> FittedHead:
    """Fit a head by the method of the settings.

    "network" is a network with one hidden layer. "linear" is a logistic regression. "mean" has the
    mean of the log-odds of both. All have the file format of a network.

    Args:
        shape: Sizes of the network. The logistic regression adds two hidden units.
        training: Rows that the network is trained on, as many of either class.
        validation: Rows of other genomes, which decide when the network stops.
        all_rows: All rows of the genomes of both. The logistic regression learns from them.
        spec: Settings of the training.
    """
    if spec.method == "network":
        return fit_head(shape, training, validation, spec)
    if spec.method == "linear":
        return _fit_linear_head(shape, training, validation, all_rows, spec).head
    # The network comes first, so that it has the random numbers that it has alone.
    network_head = fit_head(shape, training, validation, spec)
    linear = _fit_linear_head(shape, training, validation, all_rows, spec)
    with torch.inference_mode():
        logits = network_head.network(validation.embeddings).double().numpy()
    network_log_odds = logits[:, VIRUS] - logits[:, 1 - VIRUS]
    mean_log_odds = (network_log_odds + linear.validation_log_odds) / 2
    return replace(
        network_head,
        network=mean_network([network_head.network, linear.head.network], shape),
        n_rows=linear.head.n_rows,
        validation_loss=validation_loss(mean_log_odds, _labelled_rows(validation, spec.balance)),
        penalty=linear.head.penalty,
    )


@dataclass(frozen=True, slots=True)
class _LinearHead:
    """A logistic regression as a head."""

    head: FittedHead
    validation_log_odds: Floats  # before it learnt from the validation rows


def _fit_linear_head(
    shape: HeadShape,
    training: Features,
    validation: Features,
    all_rows: Features,
    spec: TrainSpec,
) -> _LinearHead:
    """Fit a logistic regression, first on the training rows for its loss, then on all rows.

    A network cannot learn from the validation rows: it needs rows of other genomes to stop by.
    """
    validation_rows = _labelled_rows(validation, spec.balance)
    first_function = fit_logistic_regression(_labelled_rows(training, spec.balance))
    log_odds = first_function.log_odds(validation_rows.embeddings)
    final_function = fit_logistic_regression(_labelled_rows(all_rows, spec.balance))
    head = FittedHead(
        network=as_network(final_function, shape),
        n_rows=len(all_rows.rows),
        n_epochs=0,
        best_epoch=0,
        validation_loss=validation_loss(log_odds, validation_rows),
        penalty=PENALTY,
    )
    return _LinearHead(head, log_odds)


def _labelled_rows(features: Features, balance: str) -> LabelledRows:
    """Return embeddings, labels and weights for the logistic regression.

    Both classes have the same total weight, as in the training of the network.
    """
    labels = features.rows["label"].to_numpy(np.int64)
    rows_of_class = np.bincount(labels, minlength=len(LABELS))
    class_weights = len(labels) / (len(LABELS) * rows_of_class)
    weights = balance_weights(features.rows, balance) * class_weights[labels]
    return LabelledRows(features.embeddings.numpy(), labels, weights)


def fit_head(
    shape: HeadShape,
    training: Features,
    validation: Features,
    spec: TrainSpec,
    *,
    weight_decay: float = 0.0,
) -> FittedHead:
    """Train a network until it no longer improves on the validation rows.

    The result has the weights of the epoch with the lowest validation loss. Training stops when
    `spec.patience` epochs have not lowered it, or after `spec.epochs`.

    Inputs are standardised, because a single learning rate suits columns of equal spread. The
    scaling is folded into the first layer afterwards, so that the head takes embeddings as they
    are. Random numbers come from torch's global generator.

    Args:
        shape: Sizes of the head.
        training: Rows to train on.
        validation: Rows whose loss decides when to stop, and which epoch is best.
        spec: Epochs, patience, learning rate, and what weighs alike within a class.
        weight_decay: Strength of the L2 penalty on all weights.
    """
    network = _new_network(shape)
    means = training.embeddings.mean(0)  # [width]
    spreads = training.embeddings.std(0, correction=0).clamp_min(MIN_SPREAD)  # [width]
    training_vectors = _standardise(training, means, spreads, spec.balance)
    validation_vectors = _standardise(validation, means, spreads, spec.balance)
    optimiser = torch.optim.SGD(
        network.parameters(), lr=spec.learning_rate, momentum=0.9, weight_decay=weight_decay
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, STEP_EPOCHS, STEP_DECAY)
    epoch = 0
    best_epoch = 0
    best_loss = float("inf")
    best_weights = copy.deepcopy(network.state_dict())
    for epoch in range(1, spec.epochs + 1):
        _train_epoch(network, optimiser, training_vectors)
        schedule.step()
        loss = _validation_loss(network, validation_vectors)
        if loss < best_loss:
            best_loss = loss
            best_epoch = epoch
            best_weights = copy.deepcopy(network.state_dict())
        elif epoch - best_epoch >= spec.patience:
            break
    # Fold the scaling into the first layer:
    # W (x - mean) / spread + b  =  (W / spread) x + (b - (W / spread) mean)
    best_weights["hidden_layer.weight"] /= spreads
    best_weights["hidden_layer.bias"] -= best_weights["hidden_layer.weight"] @ means
    network.load_state_dict(best_weights)
    return FittedHead(
        network=network.eval(),
        n_rows=len(training.rows),
        n_epochs=epoch,
        best_epoch=best_epoch,
        validation_loss=best_loss,
    )


def _new_network(shape: HeadShape) -> Classifier:
    """Return an untrained head: random weights (Glorot and Bengio 2010), biases of 0."""
    network = Classifier(shape)
    for layer in (network.hidden_layer, network.output_layer):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    return network


def _standardise(
    features: Features, means: Tensor, spreads: Tensor, balance: str
) -> _LabelledVectors:
    """Return embeddings with mean 0 and spread 1 in each column, their labels and weights."""
    labels = torch.tensor(features.rows["label"].to_numpy(np.int64))
    weights = torch.tensor(balance_weights(features.rows, balance), dtype=torch.float32)
    return _LabelledVectors((features.embeddings - means) / spreads, labels, weights)


def _train_epoch(
    network: nn.Module, optimiser: torch.optim.Optimizer, training: _LabelledVectors
) -> None:
    """Train the network once on all rows, in random order."""
    network.train()
    order = torch.randperm(len(training.labels))
    for batch in order.split(BATCH_ROWS):
        if len(batch) == 1:
            continue  # batch norm cannot learn from one row
        optimiser.zero_grad()
        outputs = network(training.embeddings[batch])
        losses = nn.functional.cross_entropy(outputs, training.labels[batch], reduction="none")
        (losses * training.weights[batch]).mean().backward()
        optimiser.step()


def _validation_loss(network: nn.Module, validation: _LabelledVectors) -> float:
    """Return the mean loss of the network on the validation rows, without dropout.

    The network stays in eval mode.
    """
    network.eval()
    with torch.inference_mode():
        outputs = network(validation.embeddings)
        losses = nn.functional.cross_entropy(outputs, validation.labels, reduction="none")
        return float((losses * validation.weights).mean())
