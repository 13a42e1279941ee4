"""Measure how good the scores of a classifier are: metrics with intervals, curves, thresholds.

All metrics take weights of rows. Resampling genomes, and assuming another share of viral reads, are
then the same sums with other weights. Intervals come from a bootstrap over clusters of genomes,
because reads of one genome are not independent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import Field
from sklearn.calibration import calibration_curve
from sklearn.metrics import precision_recall_curve, roc_curve

from virnuc_core import consensus
from virnuc_core.config import DEFAULT_THRESHOLD
from virnuc_core.encoders.model_config import Estimate
from virnuc_core.proportions import wilson_interval
from virnuc_core.reads.simulate import LABELS
from virnuc_core.runfiles import RunFile
from virnuc_core.training.truth import VIRUS

Floats = NDArray[np.float64]
Points = tuple[tuple[float, ...], tuple[float, ...]]  # x and y
Counts = tuple[tuple[int, ...], tuple[int, ...]]  # of others and of viruses, by bin

BOOTSTRAP_SAMPLES: Final = 200
CALIBRATION_BINS: Final = 10  # of the score
HISTOGRAM_BINS: Final = 20
MAX_WEIGHTS: Final = 1 << 21  # that are held at a time
MAX_POINTS: Final = 100  # of a curve
INTERVAL: Final = (0.025, 0.975)  # quantiles


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Frames with their scores."""

    rows: pd.DataFrame  # with the columns read, chunk, label and cluster
    scores: Floats  # P(virus), [rows]


class Figures(RunFile):
    """A line of the table of figures: which method scored which test set, and how well."""

    method: str  # head, or a baseline
    # The test set: cross-validation, test, or the length of fragments of the test genomes.
    test_set: Annotated[str, Field(alias="asked")]
    level: str  # what has a score: frame, chunk or read
    prevalence: float  # share of viral frames, chunks or reads that the metrics hold for
    # Whether this is their share in the test set itself. If not, they were weighted.
    is_natural: Annotated[bool, Field(alias="natural")]
    rows: int
    clusters: int  # of genomes
    metrics: dict[str, Estimate | None]  # None where one is not defined


def by_level(rows: pd.DataFrame, score: Floats) -> dict[str, pd.DataFrame]:
    """Return the scores that a prediction would give the frames, their chunks and their reads.

    A chunk is a piece of a read. It is translated in up to six frames, and the classifier scores
    each frame. The scores of its frames give the score of a chunk, and those of its chunks the
    score of a read.

    Args:
        rows: Frames with their read, chunk, label and cluster.
        score: P(virus) of each frame, [rows].

    Returns:
        For "frame", "chunk" and "read" a table with the columns score, label and cluster.
    """
    frames = rows[["read", "chunk", "label", "cluster"]].assign(score=score)
    # All frames of a read have its label and cluster, so the first frame tells them.
    first_label_and_cluster = {"label": ("label", "first"), "cluster": ("cluster", "first")}
    frames_of_chunk = frames.groupby(["read", "chunk"])
    chunks = frames_of_chunk.agg(**first_label_and_cluster)
    chunk_of_frame = np.asarray(frames_of_chunk.ngroup(), np.int64)
    chunks["score"] = consensus.chunk_scores(np.asarray(score), chunk_of_frame)
    reads = chunks.groupby("read").agg(**first_label_and_cluster)
    read_numbers = chunks.index.get_level_values("read")
    _, read_of_chunk = np.unique(read_numbers, return_inverse=True)  # the row in `reads`
    # `mean_margins` averages the numbers of each read. A prediction averages the margins of its
    # chunks and makes a score of the result: 0.5 + margin ÷ 2. To average their scores is the same.
    reads["score"] = consensus.mean_margins(chunks["score"].to_numpy(), read_of_chunk, len(reads))
    return {"frame": frames, "chunk": chunks, "read": reads}


def weighted_metrics(table: pd.DataFrame, weights: Floats) -> pd.DataFrame:
    """Compute the metrics of scores for several sets of weights, all at once.

    Args:
        table: Scored frames, chunks or reads with the columns score (P(virus)) and label.
        weights: Weight of each row, [samples, rows]. A sample is one set of weights.

    Returns:
        A row for each sample and a column for each metric; NaN where a metric is not defined.
    """
    all_scores = table["score"].to_numpy(np.float64)
    order = np.argsort(-all_scores, kind="stable")
    scores = all_scores[order]  # [rows], largest first
    is_virus = table["label"].to_numpy()[order] == VIRUS  # [rows]
    weights = weights[:, order]  # [samples, rows]
    total = weights.sum(axis=1)  # [samples]

    # The curves have a point for each threshold. Rows with equal scores are called together, so a
    # threshold lies behind the last of them.
    last_of_score = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)  # [thresholds]
    true_positives = np.cumsum(weights * is_virus, axis=1)[:, last_of_score]
    false_positives = np.cumsum(weights * ~is_virus, axis=1)[:, last_of_score]

    # Precision, recall and F1 hold for the default threshold.
    called_weights = weights * consensus.is_viral(scores, DEFAULT_THRESHOLD)
    called_right = called_weights @ is_virus
    n_called = called_weights.sum(axis=1)
    n_virus = weights @ is_virus

    errors = scores - is_virus
    # A score of exactly 1 belongs to the last bin.
    bin_of_row = np.minimum((scores * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    is_in_bin = np.eye(CALIBRATION_BINS)[bin_of_row]  # [rows, bins]
    with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0 is NaN: not defined
        recall = true_positives / true_positives[:, -1:]
        fallout = false_positives / false_positives[:, -1:]  # the false positive rate
        recall_steps = np.diff(recall, axis=1, prepend=0)
        fallout_steps = np.diff(fallout, axis=1, prepend=0)
        # The areas between two neighbouring points, below a straight line (ROC) and below a step
        # (precision and recall, as in scikit-learn's average precision).
        trapezoids = fallout_steps * (recall - recall_steps / 2)
        precision_steps = recall_steps * true_positives / (true_positives + false_positives)
        # The Brier score is the mean squared error. The expected calibration error (ece) compares,
        # bin by bin, the mean score with the share of viral rows.
        metrics = {
            "auroc": trapezoids.sum(axis=1),
            "auprc": np.nansum(precision_steps, axis=1),
            "precision": called_right / n_called,
            "recall": called_right / n_virus,
            "f1": 2 * called_right / (n_called + n_virus),
            "brier": weights @ errors**2 / total,
            "ece": np.abs((weights * errors) @ is_in_bin).sum(axis=1) / total,
        }
    return pd.DataFrame(metrics)


def bootstrap_metrics(
    test_set: str,
    method: str,
    scorings: Sequence[ScoredRows],
    prevalence: float,
    seed: int = 0,
) -> list[Figures]:
    """Measure the scores of a method on a test set, with bootstrap intervals.

    Args:
        test_set: Name of the test set.
        method: Name of the method.
        scorings: Scores of the same frames, once for each repeat of the cross-validation. The
            metrics are averaged over the repeats.
        prevalence: A share of viral frames, chunks or reads, 0 to 1. The metrics are computed
            twice: for this share, and for the natural one, which is the share in the test set.
        seed: Seed of the bootstrap.

    Returns:
        For each level (frame, chunk, read) the figures at the natural prevalence, then at the
        given one.
    """
    tables_of_repeats = [by_level(scoring.rows, scoring.scores) for scoring in scorings]
    figures = []
    for level in tables_of_repeats[0]:
        tables = [tables_by_level[level] for tables_by_level in tables_of_repeats]
        labels = tables[0]["label"]  # the same in each repeat, like the clusters
        cluster_labels = _cluster_labels(tables[0])
        n_clusters_of_rarer_class = _count_of_rarer_class(cluster_labels)
        draws = bootstrap_draws(cluster_labels, np.random.default_rng(seed))
        natural_prevalence = float(labels.mean())
        for target in (None, prevalence):  # None: do not change the natural prevalence
            samples = _mean_metrics(tables, draws, target)
            metrics = {
                name: _estimate(values.to_numpy(), n_clusters_of_rarer_class)
                for name, values in samples.items()
            }
            figures.append(
                Figures(
                    method=method,
                    test_set=test_set,
                    level=level,
                    prevalence=natural_prevalence if target is None else target,
                    is_natural=target is None,
                    rows=len(labels),
                    clusters=len(cluster_labels),
                    metrics=metrics,
                )
            )
    return figures


def _cluster_labels(table: pd.DataFrame) -> "pd.Series[float]":
    """Return the label of each cluster of genomes: 0, 1, or 0.5 for a cluster with both classes.

    The option `--groups` can put genomes of both classes into one cluster.
    """
    mean_labels = table.groupby("cluster")["label"].mean()
    # `where` keeps the means that are 0 or 1, and replaces all others.
    return mean_labels.where(mean_labels.isin((0, 1)), 0.5)


def bootstrap_draws(cluster_labels: "pd.Series[float]", rng: np.random.Generator) -> Floats:
    """Draw the clusters of genomes for the bootstrap: with replacement, separately for each label.

    So each bootstrap sample has as many clusters of each label as the data themselves.

    Args:
        cluster_labels: Label of each cluster, by its number.
        rng: The random number generator.

    Returns:
        How often each cluster was drawn, [1 + samples, clusters]. Row 0 has each cluster once.
    """
    n_clusters = int(cluster_labels.index.max()) + 1
    draws = np.ones((1 + BOOTSTRAP_SAMPLES, n_clusters))  # row 0 stays as it is
    for label in cluster_labels.unique():
        members = cluster_labels.index[cluster_labels == label]
        n_members = len(members)
        chances = [1 / n_members] * n_members  # all are equally likely
        draws[1:, members] = rng.multinomial(n_members, chances, BOOTSTRAP_SAMPLES)
    return draws


def _mean_metrics(
    tables: Sequence[pd.DataFrame], draws: Floats, prevalence: float | None
) -> pd.DataFrame:
    """Return the metrics of each bootstrap sample, averaged over the tables: [samples, metrics].

    Args:
        tables: The same rows with their scores, a table for each repeat of the scoring.
        draws: How often each cluster was drawn, [samples, clusters].
        prevalence: Share of viral rows that the metrics hold for. None: as it is in the sample.
    """
    n_parts = 1 + len(draws) * len(tables[0]) // MAX_WEIGHTS  # limits the memory for weights
    metrics_of_tables = []
    for table in tables:
        parts = []
        for part in np.array_split(draws, n_parts):
            weights = row_weights(table, part, prevalence)  # [samples of the part, rows]
            parts.append(weighted_metrics(table, weights))
        metrics_of_tables.append(pd.concat(parts))
    # `sum` starts with the first table, because it would otherwise start with the number 0.
    total = sum(metrics_of_tables[1:], metrics_of_tables[0])
    return total / len(tables)


def row_weights(table: pd.DataFrame, draws: Floats, prevalence: float | None) -> Floats:
    """Return the weight of each row in each bootstrap sample.

    A row weighs as much as its cluster was drawn. If a prevalence is given, the weights of each
    class are multiplied by a factor, so that viral rows have this share of the total.

    Args:
        table: Rows with the columns label and cluster.
        draws: How often each cluster was drawn, [samples, clusters].
        prevalence: Share of the weight that viral rows get in each sample. None: as drawn.

    Returns:
        Weights, [samples, rows].
    """
    weights = draws[:, table["cluster"]]  # a copy
    is_virus = table["label"].to_numpy() == VIRUS
    if prevalence is not None:
        sample_prevalence = (weights @ is_virus / weights.sum(axis=1))[:, None]
        virus_factor = prevalence / sample_prevalence
        others_factor = (1 - prevalence) / (1 - sample_prevalence)
        weights *= np.where(is_virus, virus_factor, others_factor)
    return weights


def _count_of_rarer_class(cluster_labels: "pd.Series[float]") -> int:
    """Return the number of clusters of the class that has fewer.

    A cluster with both classes has the label 0.5, and counts for both.
    """
    n_others = int((cluster_labels < 1).sum())
    n_virus = int((cluster_labels > 0).sum())
    return min(n_others, n_virus)


def _estimate(samples: Floats, n_clusters: int) -> Estimate | None:
    """Return a metric with its 95 % interval; None if it is not defined.

    Args:
        samples: The metric of all rows, then of each bootstrap sample. It is NaN where it is not
            defined; such samples are left out.
        n_clusters: Number of clusters, of the class that has fewer. If it is 1, the interval is 0
            to 1, because one cluster says nothing of others.
    """
    if not np.isfinite(samples[0]):
        return None
    known_samples = np.clip(samples[np.isfinite(samples)], 0, 1)  # against rounding errors
    low, high = 0.0, 1.0
    if n_clusters > 1:
        low, high = np.quantile(known_samples, INTERVAL).tolist()
    return Estimate(value=known_samples[0], low=low, high=high)


def cluster_share(called: Floats, weights: Floats, clusters: Any, seed: int) -> Estimate | None:
    """Return the share of some reads that was called viral, with its interval.

    The interval comes from the bootstrap over clusters. If all clusters agree, for instance because
    no read was called, the bootstrap has no width. So the interval is at least as wide as
    Wilson's for as many independent reads.

    Args:
        called: How often each read was called viral, 0 to 1, [reads].
        weights: How many reads each stands for, [reads].
        clusters: The cluster of each read, [reads].
        seed: Seed of the bootstrap.

    Returns:
        The share; None if there are no reads.
    """
    if not len(called):
        return None
    cluster_of_read, _ = pd.factorize(clusters)
    weight_of_cluster = np.bincount(cluster_of_read, weights)
    called_of_cluster = np.bincount(cluster_of_read, weights * called)
    n_clusters = len(weight_of_cluster)
    one_label = pd.Series(0.0, index=range(n_clusters))
    draws = bootstrap_draws(one_label, np.random.default_rng(seed))
    samples = (draws @ called_of_cluster) / (draws @ weight_of_cluster)
    estimate = _estimate(samples, n_clusters)
    if estimate is None:
        return None
    narrowest = wilson_interval(estimate.value, len(called))
    return Estimate(
        value=estimate.value,
        low=min(estimate.low, narrowest.low),
        high=max(estimate.high, narrowest.high),
    )


def cluster_precision(table: pd.DataFrame, prevalence: float, seed: int) -> Estimate | None:
    """Return the share of viral reads among the reads that are called viral, with its interval.

    Args:
        table: Reads with the columns label, cluster, called (how often a read was called viral,
            0 to 1) and weight (how many reads it stands for).
        prevalence: Share of viral reads that the precision holds for.
        seed: Seed of the bootstrap over clusters.

    Returns:
        The precision; None if a class has no reads or no read is called viral.
    """
    cluster_of_read, _ = pd.factorize(table["cluster"])
    cluster_labels = _cluster_labels(table.assign(cluster=cluster_of_read))
    draws = bootstrap_draws(cluster_labels, np.random.default_rng(seed))
    shares_called = []  # of others and of viruses, [samples] each
    for label in range(len(LABELS)):
        weights = table["weight"].to_numpy() * (table["label"] == label).to_numpy()
        weight_of_cluster = np.bincount(cluster_of_read, weights)
        called_of_cluster = np.bincount(cluster_of_read, weights * table["called"].to_numpy())
        with np.errstate(invalid="ignore"):  # a class without reads has no share
            shares_called.append((draws @ called_of_cluster) / (draws @ weight_of_cluster))
    fallout, recall = shares_called
    right = prevalence * recall
    wrong = (1 - prevalence) * fallout
    with np.errstate(invalid="ignore"):  # nothing is called viral
        samples = right / (right + wrong)
    return _estimate(samples, _count_of_rarer_class(cluster_labels))


def fdr_thresholds(
    table: pd.DataFrame, rates: Sequence[float], prevalence: float
) -> dict[float, float]:
    """Return for each false discovery rate the lowest threshold that keeps it.

    The false discovery rate is the share of wrong reads among the reads that are called viral.

    A fictitious false positive with a score above all others is added. Without it, a test with few
    reads would claim that very small rates hold.

    Args:
        table: Scored reads with the columns score and label.
        rates: The false discovery rates that may not be exceeded.
        prevalence: Share of viral reads that the rates hold for. The reads are weighted for it.

    Returns:
        The threshold of each rate; rates that no threshold reaches are absent.
    """
    labels = np.append(table["label"], LABELS.index("others"))
    scores = np.append(table["score"], 2.0)  # real scores are at most 1
    table_prevalence = table["label"].mean()
    virus_weight = prevalence / table_prevalence
    others_weight = (1 - prevalence) / (1 - table_prevalence)
    weights = np.where(labels == VIRUS, virus_weight, others_weight)
    # The candidates ascend. The last value of `precision` belongs to none of them.
    precision, _, candidates = precision_recall_curve(labels, scores, sample_weight=weights)
    thresholds = {}
    for rate in rates:
        sufficient_thresholds = candidates[precision[:-1] >= 1 - rate]
        if len(sufficient_thresholds):
            thresholds[rate] = float(sufficient_thresholds[0])
    return thresholds


def false_discovery_rate(table: pd.DataFrame, threshold: float, prevalence: float) -> float | None:
    """Return the share of non-viral reads among the reads that are called viral.

    It is None if no read is called viral.

    Args:
        table: Scored reads with the columns score, label and cluster.
        threshold: Score from which a read is called viral.
        prevalence: Share of viral reads that the rate is given for.
    """
    is_called = consensus.is_viral(table["score"].to_numpy(), threshold)
    if not is_called.any():
        return None
    n_clusters = int(table["cluster"].max()) + 1
    draws = np.ones((1, n_clusters))  # a single sample, in which each cluster counts once
    weights = row_weights(table, draws, prevalence)[0]  # [reads]
    is_virus = table["label"] == VIRUS
    false_weight = weights[is_called & ~is_virus].sum()
    return float(false_weight / weights[is_called].sum())


def curves(table: pd.DataFrame) -> dict[str, Points]:
    """Return the points of the ROC, precision-recall and reliability curves, by name.

    They hold for the share of viral reads that the table itself has.

    Args:
        table: Scored reads with the columns score and label.
    """
    labels, scores = table["label"], table["score"]
    # The fallout is the false positive rate.
    fallout, recall_of_roc, _ = roc_curve(labels, scores)
    precision, recall, _ = precision_recall_curve(labels, scores)
    share_of_virus, mean_score = calibration_curve(labels, scores, n_bins=CALIBRATION_BINS)
    return {
        "ROC": _thin_out(fallout, recall_of_roc),
        "precision and recall": _thin_out(recall, precision),
        "reliability": _thin_out(mean_score, share_of_virus),
    }


def _thin_out(x: Floats, y: Floats) -> Points:
    """Return at most MAX_POINTS points of a curve, evenly chosen."""
    indices = np.unique(np.linspace(0, len(x) - 1, MAX_POINTS).astype(int))
    return tuple(x[indices].tolist()), tuple(y[indices].tolist())


def histogram(table: pd.DataFrame) -> Counts:
    """Count reads of others and of viruses by score, in equal bins from 0 to 1.

    Args:
        table: Scored reads with the columns score and label.

    Returns:
        The counts of the others by bin, then those of the viruses.
    """
    counts_of_label = []
    for label in range(len(LABELS)):
        scores = table.loc[table["label"] == label, "score"]
        counts, _ = np.histogram(scores, HISTOGRAM_BINS, (0, 1))
        counts_of_label.append(tuple(counts.tolist()))
    others_counts, virus_counts = counts_of_label
    return others_counts, virus_counts
