"""How good scores are: metrics of frames, chunks and reads with intervals over genomes, curves and thresholds.

All metrics take weights, so that resampled genomes and another share of viruses are the same sums."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.calibration import calibration_curve
from sklearn.metrics import precision_recall_curve, roc_curve

from virnuc_core.config import THRESHOLD
from virnuc_core.encoders.model_config import Estimate
from virnuc_core.runfiles import RunFile

Floats = NDArray[np.float64]
Scored = tuple[pd.DataFrame, Floats]  # rows, and the score of each
Points = tuple[tuple[float, ...], tuple[float, ...]]  # x and y
METRICS: Final = ("auroc", "auprc", "precision", "recall", "f1", "brier", "ece")
LEVELS: Final = ("frame", "chunk", "read")
SAMPLES: Final = 200  # of the bootstrap
BINS: Final = 10  # of the score, for the calibration error
AT_ONCE: Final = 1 << 21  # weights held at a time
POINTS: Final = 100  # of a curve


class Figures(RunFile):
    """One line of the table: who scored what, and how well."""

    method: str  # head, or a baseline
    asked: str  # cross-validation, test, or the bases of cut fragments
    level: str
    prevalence: float  # share of viral ones that the metrics hold for
    natural: bool  # that of the rows themselves
    rows: int
    clusters: int  # of genomes
    metrics: dict[str, Estimate | None]  # None where one is not defined


def by_level(rows: pd.DataFrame, score: Floats) -> dict[str, pd.DataFrame]:
    """`score`, `label` and `cluster` of each frame, chunk and read, as a prediction judges them. A chunk's score is the
    mean of the largest and the least of its frames', a read's the mean of its chunks'."""
    frames = rows[["read", "chunk", "label", "cluster"]].assign(score=score)
    same = {"label": ("label", "first"), "cluster": ("cluster", "first")}
    chunks = frames.groupby(["read", "chunk"]).agg(high=("score", "max"), low=("score", "min"), **same)
    chunks["score"] = (chunks["high"] + chunks["low"]) / 2
    reads = chunks.groupby("read").agg(score=("score", "mean"), **same)
    return dict(zip(LEVELS, (frames, chunks, reads), strict=True))


def measure(table: pd.DataFrame, weights: Floats) -> dict[str, Floats]:
    """Each of METRICS for every row of `weights` [samples, rows of the table]; NaN where one is not defined."""
    order = np.argsort(-table["score"].to_numpy(np.float64), kind="stable")
    score, virus = table["score"].to_numpy(np.float64)[order], table["label"].to_numpy()[order] == 1
    weights = weights[:, order]
    last = np.append(np.flatnonzero(np.diff(score)), len(score) - 1)  # of equal scores
    hit, false = (np.cumsum(weights * kind, axis=1)[:, last] for kind in (virus, ~virus))
    missed, called = score - virus, weights * (score >= THRESHOLD)
    bins = np.eye(BINS)[np.minimum((score * BINS).astype(int), BINS - 1)]
    with np.errstate(invalid="ignore", divide="ignore"):
        recall, wrong = hit / hit[:, -1:], false / false[:, -1:]
        steps = np.diff(recall, axis=1, prepend=0)
        return {
            "auroc": (np.diff(wrong, axis=1, prepend=0) * (recall - steps / 2)).sum(axis=1),
            "auprc": np.nansum(steps * hit / (hit + false), axis=1),
            "precision": called @ virus / called.sum(axis=1),
            "recall": called @ virus / (weights @ virus),
            "f1": 2 * (called @ virus) / (called.sum(axis=1) + weights @ virus),
            "brier": weights @ missed**2 / weights.sum(axis=1),
            "ece": np.abs((weights * missed) @ bins).sum(axis=1) / weights.sum(axis=1),
        }


def judge(asked: str, method: str, scored: Sequence[Scored], prevalence: float, seed: int = 0) -> list[Figures]:
    """Lines of the table for each level and both prevalences; over several scorings of the same rows their means."""
    lines, levels = [], [by_level(*one) for one in scored]
    for level in LEVELS:
        tables, rng = [one[level] for one in levels], np.random.default_rng(seed)
        own, of = float(tables[0]["label"].mean()), tables[0].groupby("cluster")["label"].mean()
        of = of.where(of.isin((0, 1)), 0.5)  # clusters of both classes, which --groups may make, are their own kind
        times = np.ones((1 + SAMPLES, int(of.index.max()) + 1))  # that each cluster is drawn, within its kind
        for value in of.unique():
            members = of.index[of == value]
            times[1:, members] = rng.multinomial(len(members), [1 / len(members)] * len(members), SAMPLES)
        for share in (None, prevalence):
            parts = np.array_split(times, 1 + len(times) * len(tables[0]) // AT_ONCE)
            found = [[measure(table, _weights(table, part, share)) for part in parts] for table in tables]
            means = {
                name: np.mean([np.concatenate([one[name] for one in pieces]) for pieces in found], axis=0)
                for name in METRICS
            }
            metrics = {name: _interval(mean, of) for name, mean in means.items()}
            told = {"rows": len(tables[0]), "clusters": len(of), "natural": share is None, "metrics": metrics}
            lines.append(Figures(method=method, asked=asked, level=level, prevalence=share or own, **told))
    return lines


def _weights(table: pd.DataFrame, times: Floats, share: float | None) -> Floats:
    """Of each row, as often as its cluster was drawn; with a share of viral rows that each sample is brought to."""
    weights, virus = times[:, table["cluster"]], table["label"].to_numpy() == 1
    if share is not None:
        own = (weights @ virus / weights.sum(axis=1))[:, None]
        weights *= np.where(virus, share / own, (1 - share) / (1 - own))
    return weights


def _interval(found: Floats, of: "pd.Series[float]") -> Estimate | None:
    """The first of them, and between what 95 % of all lie; anything where a class has one cluster alone."""
    known = np.clip(found[np.isfinite(found)], 0, 1)
    told = len(known) > 0 and min((of < 1).sum(), (of > 0).sum()) > 1
    low, high = np.quantile(known, (0.025, 0.975)).tolist() if told else (0, 1)
    return Estimate(value=known[0], low=low, high=high) if np.isfinite(found[0]) else None


def thresholds(table: pd.DataFrame, shares: Sequence[float], prevalence: float) -> dict[float, float]:
    """The least score from which no more than each share of what is called viral is not, where there is one. One more
    false read than there are is counted, above all others: of few reads nobody can tell a small share."""
    label, score, own = np.append(table["label"], 0), np.append(table["score"], 2.0), table["label"].mean()
    weights = np.where(label == 1, prevalence / own, (1 - prevalence) / (1 - own))
    precision, _, at = precision_recall_curve(label, score, sample_weight=weights)
    held = {share: at[precision[:-1] >= 1 - share] for share in shares}
    return {share: float(scores[0]) for share, scores in held.items() if len(scores)}


def false_share(table: pd.DataFrame, threshold: float, prevalence: float) -> float | None:
    """The share that is not viral of what a threshold calls viral; None where it calls nothing so."""
    weights = _weights(table, np.ones((1, int(table["cluster"].max()) + 1)), prevalence)[0]
    called, virus = table["score"] >= threshold, table["label"] == 1
    return float(weights[called & ~virus].sum() / weights[called].sum()) if called.any() else None


def curves(table: pd.DataFrame) -> dict[str, Points]:
    """ROC, precision and recall, and reliability at the prevalence of the table itself."""
    label, score = table["label"], table["score"]
    wrong, hits, _ = roc_curve(label, score)
    precision, recall, _ = precision_recall_curve(label, score)
    real, said = calibration_curve(label, score, n_bins=BINS)
    found = {"ROC": (wrong, hits), "precision and recall": (recall, precision), "reliability": (said, real)}
    thin = {name: np.unique(np.linspace(0, len(x) - 1, POINTS).astype(int)) for name, (x, _) in found.items()}
    return {name: (tuple(x[thin[name]].tolist()), tuple(y[thin[name]].tolist())) for name, (x, y) in found.items()}


def histogram(table: pd.DataFrame) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Reads of both classes, others first, by score, in equal bins from 0 to 1."""
    of = (table.loc[table["label"] == label, "score"] for label in (0, 1))
    others, virus = (tuple(np.histogram(scores, 2 * BINS, (0, 1))[0].tolist()) for scores in of)
    return others, virus
