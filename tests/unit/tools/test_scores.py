"""Metrics, held against scikit-learn's, and what a lab reads off them."""

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

from virnuc_core.training.evaluation import (
    _weights,
    by_level,
    curves,
    false_share,
    histogram,
    judge,
    measure,
    thresholds,
)


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
    table = pd.DataFrame({"score": score, "label": label.astype(int)})
    if len(set(label)) < 2:
        return
    found = {name: of[0] for name, of in measure(table, weight[None].astype(float)).items()}
    assert list(found) == ["auroc", "auprc", "precision", "recall", "f1", "brier", "ece"]
    called, given_weight = score >= 0.5, {"sample_weight": weight}
    assert found["auroc"] == pytest.approx(roc_auc_score(label, score, **given_weight))
    assert found["auprc"] == pytest.approx(average_precision_score(label, score, **given_weight))
    assert found["brier"] == pytest.approx(brier_score_loss(label, score, **given_weight))
    assert found["recall"] == pytest.approx(recall_score(label, called, **given_weight))
    assert found["f1"] == pytest.approx(f1_score(label, called, **given_weight))
    if called.any():
        assert found["precision"] == pytest.approx(precision_score(label, called, **given_weight))
    else:
        assert np.isnan(found["precision"])


def sample(n: int, seed: int = 0, signal: float = 1.0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    label = np.arange(n) % 2
    score = 1 / (1 + np.exp(-(rng.normal(size=n) + signal * (2 * label - 1))))
    return pd.DataFrame(
        {
            "read": np.arange(n),
            "chunk": 0,
            "label": label,
            "cluster": np.arange(n) % 20,
            "score": score,
        }
    )


def test_what_is_said_with_its_chance_is_calibrated() -> None:
    rng = np.random.default_rng(1)
    score = rng.random(20_000)
    table = pd.DataFrame({"score": score, "label": (rng.random(20_000) < score).astype(int)})
    even = np.ones((1, len(table)))
    assert measure(table, even)["ece"][0] < 0.02
    assert measure(table.assign(score=score**3), even)["ece"][0] > 0.15


def test_another_prevalence_is_what_another_mixture_would_give() -> None:
    table = sample(2_000)
    rare = pd.concat([table[table["label"] == 0], table[table["label"] == 1].iloc[:100]])
    share = float(rare["label"].mean())
    stated = {
        f.level: f
        for f in judge("x", "head", [(table, table["score"].to_numpy())], share)
        if not f.natural
    }
    as_is = {
        f.level: f
        for f in judge("x", "head", [(rare, rare["score"].to_numpy())], share)
        if f.natural
    }
    for name, one in stated["read"].metrics.items():
        other = as_is["read"].metrics[name]
        assert one is not None
        assert other is not None
        assert one.value == pytest.approx(
            other.value, abs=0.06
        )  # a hundred viral ones are a sample
        assert one.low <= one.value <= one.high


def test_an_interval_at_a_stated_prevalence_is_of_samples_that_have_it() -> None:
    """Clusters of a class differ in size, so that a sample of them has another share of viral reads of its own."""
    table, times = sample(1_000), np.ones((5, 20))
    times[1:] = np.random.default_rng(0).multinomial(20, [1 / 20] * 20, 4)
    table = table[(table["cluster"] > 2) | (np.arange(1_000) < 100)]
    weights = _weights(table, times, 0.01)
    assert (weights @ (table["label"] == 1) / weights.sum(axis=1)) == pytest.approx([0.01] * 5)


def test_an_interval_is_wider_over_genomes_than_over_reads() -> None:
    """Reads of one genome fall together: what counts is how many genomes there are."""
    table = sample(2_000)
    shift = np.random.default_rng(2).normal(size=20)[table["cluster"]]
    score = 1 / (1 + np.exp(-(np.log(table["score"] / (1 - table["score"])) + 2 * shift)))
    widths = []
    for cluster in (table["cluster"], table["read"]):
        lines = judge("x", "head", [(table.assign(cluster=cluster), score.to_numpy())], 0.01)
        auroc = lines[0].metrics["auroc"]
        assert auroc is not None
        widths.append(auroc.high - auroc.low)
    assert widths[0] > 2 * widths[1]


def test_chunks_and_reads_are_judged_as_a_prediction_judges_them() -> None:
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


def test_a_threshold_holds_the_share_of_false_ones_at_the_stated_prevalence() -> None:
    table = sample(4_000, signal=2.0)
    found = thresholds(table, (0.01, 0.05, 0.5), 0.1)
    for share in (0.05, 0.5):
        called = table[table["score"] >= found[share]]
        true = 0.1 * (called["label"] == 1).sum() / 2_000
        false = 0.9 * (called["label"] == 0).sum() / 2_000
        assert false / (true + false) <= share + 1e-9
        assert false_share(table, found[share], 0.1) == pytest.approx(false / (true + false))
    assert found[0.05] > found[0.5]
    assert false_share(table, 1.1, 0.1) is None
    assert thresholds(table.assign(score=0.5), (0.01,), 0.1) == {}, "no threshold holds it"
    perfect = pd.DataFrame({"label": [0, 1] * 50, "score": [0.1, 0.9] * 50})
    assert set(thresholds(perfect, (0.001, 0.05), 0.5)) == {0.05}, (
        "fifty reads cannot tell of one in a thousand"
    )


def test_what_is_not_defined_is_none() -> None:
    table = sample(100)
    lines = judge("x", "head", [(table, table["score"].to_numpy() / 10)], 0.01)
    assert lines[0].metrics["precision"] is None, "nothing is called viral"
    assert lines[0].metrics["recall"] is not None


def test_one_cluster_of_a_class_tells_nothing() -> None:
    table = sample(100)
    lines = judge(
        "x", "head", [(table.assign(cluster=table["label"]), table["score"].to_numpy())], 0.01
    )
    auroc = lines[0].metrics["auroc"]
    assert auroc is not None
    assert (auroc.low, auroc.high) == (0, 1)


@pytest.mark.parametrize("mixed", [2, 20])
def test_clusters_of_both_classes_are_drawn_too(mixed: int) -> None:
    table = sample(400)
    cluster = table["cluster"].where(table["cluster"] >= mixed, 0)
    lines = judge("x", "head", [(table.assign(cluster=cluster), table["score"].to_numpy())], 0.01)
    auroc = lines[0].metrics["auroc"]
    assert auroc is not None
    assert auroc.low <= auroc.value <= auroc.high


def test_curves_and_histograms_tell_of_all_rows() -> None:
    table = sample(1_000)
    made = curves(table)
    assert set(made) == {"ROC", "precision and recall", "reliability"}
    assert all(0 <= value <= 1 for points in made.values() for axis in points for value in axis)
    assert made["ROC"][0][0] == made["ROC"][1][0] == 0
    assert made["ROC"][0][-1] == made["ROC"][1][-1] == 1
    others, virus = histogram(table)
    assert sum(others) == sum(virus) == 500
