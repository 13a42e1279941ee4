"""Metrics agree with scikit-learn's, and intervals and thresholds hold what they promise."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    average_precision_score,
    brier_score_loss,
    f1_score,
    precision_score,
    recall_score,
    roc_auc_score,
)

from virnuc_core.encoders.model_config import Estimate
from virnuc_core.training.evaluation import (
    Figures,
    ScoredRows,
    bootstrap_metrics,
    by_level,
    curves,
    false_discovery_rate,
    fdr_thresholds,
    histogram,
    row_weights,
    weighted_metrics,
)

N_CLUSTERS = 20


def random_table(n_rows: int, signal: float = 1.0) -> pd.DataFrame:
    """Return scored rows: normal log odds whose mean is ± `signal`, in 20 clusters.

    Each row is a read of one chunk.
    """
    rng = np.random.default_rng(0)
    label = np.arange(n_rows) % 2
    log_odds = rng.normal(size=n_rows) + signal * (2 * label - 1)
    return pd.DataFrame(
        {
            "read": np.arange(n_rows),
            "chunk": 0,
            "label": label,
            "cluster": np.arange(n_rows) % N_CLUSTERS,
            "score": 1 / (1 + np.exp(-log_odds)),
        }
    )


def figures_of(table: pd.DataFrame, prevalence: float = 0.01) -> list[Figures]:
    """Measure a table."""
    scored_rows = ScoredRows(table, table["score"].to_numpy())
    return bootstrap_metrics("test", "head", [scored_rows], prevalence)


def select(figures: list[Figures], level: str, *, natural: bool) -> Figures:
    """Return the line of a level, at the natural or the stated prevalence."""
    [line] = [line for line in figures if line.level == level and line.is_natural == natural]
    return line


def frame_auroc(table: pd.DataFrame) -> Estimate:
    """Return the AUROC of frames with its interval, at the natural prevalence."""
    auroc = select(figures_of(table), "frame", natural=True).metrics["auroc"]
    assert auroc is not None
    return auroc


@given(
    st.lists(
        st.tuples(st.integers(0, 20).map(lambda n: n / 20), st.booleans(), st.integers(1, 5)),
        min_size=4,
        max_size=40,
    )
)
@settings(max_examples=40)
def test_metrics_are_those_of_scikit_learn(rows: list[tuple[float, bool, int]]) -> None:
    score, label, weight = (np.array(column) for column in zip(*rows, strict=True))
    if len(set(label)) < 2:
        return
    table = pd.DataFrame({"score": score, "label": label.astype(int)})
    metrics = weighted_metrics(table, weight[None].astype(float)).iloc[0]
    is_called = score >= 0.5
    assert list(metrics.index) == [
        "auroc",
        "auprc",
        "precision",
        "recall",
        "f1",
        "brier",
        "ece",
    ]
    expected = {
        "auroc": roc_auc_score(label, score, sample_weight=weight),
        "auprc": average_precision_score(label, score, sample_weight=weight),
        "brier": brier_score_loss(label, score, sample_weight=weight),
        "recall": recall_score(label, is_called, sample_weight=weight),
        "f1": f1_score(label, is_called, sample_weight=weight),
    }
    if is_called.any():
        expected["precision"] = precision_score(label, is_called, sample_weight=weight)
    else:
        assert np.isnan(metrics["precision"])
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value), name


def test_scores_that_are_true_chances_are_calibrated() -> None:
    rng = np.random.default_rng(1)
    score = rng.random(20_000)
    label = (rng.random(20_000) < score).astype(int)
    table = pd.DataFrame({"score": score, "label": label})
    equal_weights = np.ones((1, len(table)))
    assert weighted_metrics(table, equal_weights)["ece"][0] < 0.02
    too_low = table.assign(score=score**3)
    assert weighted_metrics(too_low, equal_weights)["ece"][0] > 0.15


def test_metrics_at_another_prevalence_are_those_of_a_mixture_with_it() -> None:
    table = random_table(2_000)
    is_virus = table["label"] == 1
    mixture = pd.concat([table[~is_virus], table[is_virus].iloc[:100]])
    prevalence = float(mixture["label"].mean())
    figures = select(figures_of(table, prevalence), "read", natural=False)
    natural = select(figures_of(mixture, prevalence), "read", natural=True)
    for name, estimate in figures.metrics.items():
        of_mixture = natural.metrics[name]
        assert estimate is not None
        assert of_mixture is not None
        # The mixture has only a hundred viral reads.
        assert estimate.value == pytest.approx(of_mixture.value, abs=0.06)
        assert estimate.low <= estimate.value <= estimate.high


def test_each_bootstrap_sample_is_brought_to_the_stated_prevalence() -> None:
    """Clusters differ in size, so that samples of them have other shares of viral reads."""
    table = random_table(1_000)
    draws = np.ones((5, N_CLUSTERS))
    chances = [1 / N_CLUSTERS] * N_CLUSTERS
    draws[1:] = np.random.default_rng(0).multinomial(N_CLUSTERS, chances, 4)
    table = table[(table["cluster"] > 2) | (np.arange(1_000) < 100)]
    weights = row_weights(table, draws, 0.01)
    virus_weights = weights @ (table["label"] == 1)
    assert virus_weights / weights.sum(axis=1) == pytest.approx([0.01] * 5)


def test_an_interval_is_wider_over_genomes_than_over_reads() -> None:
    """Reads of one genome have similar scores: what counts is the number of genomes."""
    table = random_table(2_000)
    shift = np.random.default_rng(2).normal(size=N_CLUSTERS)[table["cluster"]]
    log_odds = np.log(table["score"] / (1 - table["score"])) + 2 * shift
    table["score"] = 1 / (1 + np.exp(-log_odds))
    over_genomes = frame_auroc(table)
    over_reads = frame_auroc(table.assign(cluster=table["read"]))
    assert over_genomes.high - over_genomes.low > 2 * (over_reads.high - over_reads.low)


def test_chunks_and_reads_are_scored_as_a_prediction_scores_them() -> None:
    rows = pd.DataFrame(
        {
            "read": [0, 0, 0, 1],
            "chunk": [0, 0, 1, 0],
            "label": [1, 1, 1, 0],
            "cluster": [0, 0, 0, 1],
        }
    )
    levels = by_level(rows, np.array([0.9, 0.2, 0.7, 0.4]))
    assert levels["chunk"]["score"].tolist() == pytest.approx([0.55, 0.7, 0.4])
    assert levels["read"]["score"].tolist() == pytest.approx([0.625, 0.4])
    assert levels["read"]["label"].tolist() == [1, 0]


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_a_threshold_holds_its_false_discovery_rate_at_the_stated_prevalence(rate: float) -> None:
    table = random_table(4_000, signal=2.0)  # 2,000 of each class
    threshold = fdr_thresholds(table, (rate,), 0.1)[rate]
    called_rows = table[table["score"] >= threshold]
    true = 0.1 * (called_rows["label"] == 1).sum() / 2_000
    false = 0.9 * (called_rows["label"] == 0).sum() / 2_000
    assert false / (true + false) <= rate + 1e-9
    realised_rate = false_discovery_rate(table, threshold, 0.1)
    assert realised_rate == pytest.approx(false / (true + false))


def test_a_lower_false_discovery_rate_needs_a_higher_threshold() -> None:
    thresholds = fdr_thresholds(random_table(4_000, signal=2.0), (0.05, 0.5), 0.1)
    assert thresholds[0.05] > thresholds[0.5]


def test_a_threshold_that_calls_nothing_viral_has_no_false_discovery_rate() -> None:
    assert false_discovery_rate(random_table(100), 1.1, 0.1) is None


def test_a_rate_that_no_score_reaches_has_no_threshold() -> None:
    equal_scores = random_table(4_000).assign(score=0.5)
    assert fdr_thresholds(equal_scores, (0.01,), 0.1) == {}


def test_few_reads_cannot_show_a_small_rate_even_if_all_are_right() -> None:
    perfect = pd.DataFrame({"label": [0, 1] * 50, "score": [0.1, 0.9] * 50})
    assert set(fdr_thresholds(perfect, (0.001, 0.05), 0.5)) == {0.05}


def test_a_metric_that_is_not_defined_is_none() -> None:
    table = random_table(100)
    nothing_called = table.assign(score=table["score"] / 10)
    metrics = select(figures_of(nothing_called), "frame", natural=True).metrics
    assert metrics["precision"] is None
    assert metrics["recall"] is not None


def test_the_interval_of_a_class_with_one_cluster_is_everything() -> None:
    table = random_table(100)
    auroc = frame_auroc(table.assign(cluster=table["label"]))
    assert (auroc.low, auroc.high) == (0, 1)


@pytest.mark.parametrize("n_mixed", [2, 20])
def test_clusters_of_both_classes_are_drawn_too(n_mixed: int) -> None:
    table = random_table(400)
    cluster = table["cluster"].where(table["cluster"] >= n_mixed, 0)
    auroc = frame_auroc(table.assign(cluster=cluster))
    assert auroc.low <= auroc.value <= auroc.high


def test_curves_lie_between_0_and_1_and_the_roc_curve_joins_the_corners() -> None:
    points_of = curves(random_table(1_000))
    assert set(points_of) == {"ROC", "precision and recall", "reliability"}
    for x, y in points_of.values():
        assert all(0 <= value <= 1 for value in (*x, *y))
    x, y = points_of["ROC"]
    assert (x[0], y[0]) == (0, 0)
    assert (x[-1], y[-1]) == (1, 1)


def test_histograms_count_all_rows() -> None:
    other_counts, virus = histogram(random_table(1_000))
    assert sum(other_counts) == sum(virus) == 500
