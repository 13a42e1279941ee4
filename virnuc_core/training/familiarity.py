"""Measure the composition of the training reads, from which later samples are judged.

Nothing is asked about genomes that were learnt from: the limits come from clusters of genomes that
were held out, each in turn, so that the rate of false alarms is known.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.covariance import ledoit_wolf

from virnuc_core.encoders.composition import (
    COMPOSITION,
    N_CODONS,
    Floats,
    KindComposition,
    TrainingComposition,
    codon_features,
    composition_rows,
    count_codons,
    distances_by_group,
    nearest_distances,
    write_composition,
)
from virnuc_core.reads.store import OrfStore
from virnuc_core.sample_familiarity import MIN_READS

FOLDS: Final = 5
MAX_FRAMES: Final = 400  # of one cluster of genomes, so that a large one does not count for many
MIN_FRAMES: Final = 2 * N_CODONS  # of a kind; with fewer it has no mean of its own
MIN_GENOME_READS: Final = 20  # of a held-out cluster, to measure its share and mean
USUAL: Final = 0.95  # share of the reads of a kind, and of the genomes, that are within the limits
MIN_CODONS_RATIO: Final = 1.2  # of longest to shortest frames, to measure the effect of length

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Fit:
    """The means of the kinds, and what they have in common."""

    kinds: tuple[str, ...]
    means: Floats  # [kinds, 64]
    whitening: Floats  # [64, 64]


def fit_composition(store: OrfStore, rows: pd.DataFrame, seed: int) -> TrainingComposition | None:
    """Measure which codons the training reads use, and how far held-out genomes are from that.

    Args:
        store: The training reads.
        rows: Their frames, with the columns read, chunk, unique, kind and cluster.
        seed: Seed of the choice of frames and of the folds.

    Returns:
        The composition; None if no kind has two clusters of genomes with enough reads, so that
        nothing can be held out.
    """
    rng = np.random.default_rng(seed)
    rows = _limit_frames(rows, rng)
    n_frames = rows["kind"].value_counts()
    rows = rows[rows["kind"].isin(n_frames.index[n_frames >= MIN_FRAMES])]
    rows = rows.sort_values(["read", "chunk"], kind="stable")
    if rows.empty:
        return None
    codons = _count_codons_of_rows(store, rows)
    features = codon_features(codons)
    fold_of_row = _deal_clusters(rows, rng)
    distances = _held_out_distances(rows, features, fold_of_row)
    is_held_out = np.isfinite(distances)
    if not is_held_out.any():
        return None

    n_codons = codons.sum(axis=1)
    base, per_codon = _expected_distance(distances[is_held_out], n_codons[is_held_out])
    distances = distances / (base + per_codon / np.maximum(1, n_codons))
    reads = _reads_of_rows(rows, distances)
    if len(reads) < MIN_READS:
        return None
    # The nearest frame of a chunk decides, so a read is nearer than a frame. With this scale the
    # mean distance of held-out reads is 1.
    scale = float(reads["distance"].mean())
    reads["distance"] /= scale
    far_from = float(reads.groupby("kind")["distance"].quantile(USUAL).max())
    reads["is_far"] = reads["distance"] >= far_from
    genomes = reads.groupby("cluster").agg(
        reads=("is_far", "size"), share=("is_far", "mean"), distance=("distance", "mean")
    )
    genomes = genomes[genomes["reads"] >= MIN_GENOME_READS]
    if genomes.empty:
        return None
    fit = _fit(rows["kind"].to_numpy(), features)
    false_alarms = reads.groupby("kind")["is_far"].mean()
    kinds = {}
    for kind, mean in zip(fit.kinds, composition_rows(fit.means), strict=True):
        rows_of_kind = rows[rows["kind"] == kind]
        false_alarm = None
        if kind in false_alarms:
            false_alarm = round(float(false_alarms[kind]), 4)
        kinds[kind] = KindComposition(
            genomes=rows_of_kind["cluster"].nunique(),
            reads=rows_of_kind["read"].nunique(),
            false_alarms=false_alarm,
            mean=mean,
        )
    return TrainingComposition(
        kinds=kinds,
        whitening=composition_rows(fit.whitening),
        expected_distance=(scale * base, scale * per_codon),
        codons=(int(n_codons.min()), int(n_codons.max())),
        far_from=far_from,
        usual_share=float(np.quantile(genomes["share"], USUAL, method="higher")),
        largest_share=float(genomes["share"].max()),
        usual_distance=float(np.quantile(genomes["distance"], USUAL, method="higher")),
        largest_distance=float(genomes["distance"].max()),
        genomes_held_out=len(genomes),
    )


def replace_composition(composition: TrainingComposition | None, head: Path) -> None:
    """Write the composition to a classifier's folder, or remove that of an earlier training.

    Args:
        composition: The composition; None if it could not be measured.
        head: Folder of the classifier, before its `config.json` is written.
    """
    if composition is not None:
        write_composition(composition, head)
        return
    log.warning(
        "no kind has two unrelated genomes with %d reads or more: runs of this head cannot tell "
        "whether their reads are like those of the training",
        MIN_GENOME_READS,
    )
    (head / COMPOSITION).unlink(missing_ok=True)


def _limit_frames(rows: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    """Return about `MAX_FRAMES` frames of each cluster at most, all frames of a read or none."""
    reads = rows.groupby("read").agg(cluster=("cluster", "first"), frames=("cluster", "size"))
    reads = reads.iloc[rng.permutation(len(reads))]
    n_so_far = reads.groupby("cluster")["frames"].cumsum()
    return rows[rows["read"].isin(reads.index[n_so_far <= MAX_FRAMES])]


def _count_codons_of_rows(store: OrfStore, rows: pd.DataFrame) -> Floats:
    """Return how often each row has each codon, [rows, 64]."""
    uniques, row_of_unique = np.unique(rows["unique"], return_inverse=True)
    counts = np.empty((len(uniques), N_CODONS))
    for number, unique in enumerate(uniques.tolist()):
        counts[number] = count_codons(store, unique, unique + 1)[0]
    return counts[row_of_unique]


def _deal_clusters(rows: pd.DataFrame, rng: np.random.Generator) -> NDArray[np.int64]:
    """Deal the clusters of each kind to folds in turn, and return the fold of each row, [rows].

    Rows of a kind with a single cluster are in no fold: -1.
    """
    fold_of_cluster = {}
    for _, clusters in rows.groupby("kind", sort=True)["cluster"]:
        names = rng.permutation(clusters.unique())
        for number, name in enumerate(names.tolist()):
            is_only_one = len(names) == 1
            fold_of_cluster[name] = -1 if is_only_one else number % FOLDS
    return rows["cluster"].map(fold_of_cluster).to_numpy(np.int64)


def _held_out_distances(
    rows: pd.DataFrame, features: Floats, fold_of_row: NDArray[np.int64]
) -> Floats:
    """Return the distance of each row to the kinds of the other folds; NaN without a fold."""
    kinds = rows["kind"].to_numpy()
    distances = np.full(len(rows), np.nan)
    for fold in range(FOLDS):
        is_held_out = fold_of_row == fold
        if is_held_out.any():
            fit = _fit(kinds[~is_held_out], features[~is_held_out])
            distances[is_held_out] = nearest_distances(
                features[is_held_out], fit.means, fit.whitening
            )
    return distances


def _fit(kinds: NDArray[np.object_], features: Floats) -> _Fit:
    """Measure the mean of each kind, and the covariance within kinds, each kind counting the same.

    The covariance is shrunk (Ledoit and Wolf 2004, J Multivariate Analysis 88:365), so that it has
    an inverse.
    """
    names = tuple(sorted(set(kinds.tolist())))
    means = []
    covariances = []
    for name in names:
        features_of_kind = features[kinds == name]
        covariance, _ = ledoit_wolf(features_of_kind)
        means.append(features_of_kind.mean(axis=0))
        covariances.append(covariance)
    mean_covariance = np.mean(covariances, axis=0)
    whitening: Floats = np.linalg.cholesky(np.linalg.inv(mean_covariance)).astype(np.float64)
    return _Fit(names, np.array(means), whitening)


def _expected_distance(distances: Floats, n_codons: Floats) -> tuple[float, float]:
    """Return how the mean distance depends on the number of codons n: first + second ÷ n.

    If all frames have about the same length, the second number is 0.
    """
    mean_distance = float(distances.mean())
    shortest, longest = np.quantile(n_codons, (0.05, 0.95))
    if longest < MIN_CODONS_RATIO * shortest:
        return mean_distance, 0.0
    constant = np.ones(len(n_codons))
    inverse_length = 1 / np.maximum(1, n_codons)
    columns = np.stack((constant, inverse_length), axis=1)
    coefficients, *_ = np.linalg.lstsq(columns, distances)
    base, per_codon = coefficients.tolist()
    if base <= 0 or per_codon <= 0:
        return mean_distance, 0.0
    return base, per_codon


def _reads_of_rows(rows: pd.DataFrame, distances: Floats) -> pd.DataFrame:
    """Return held-out reads with the columns kind, cluster and distance.

    Args:
        rows: Frames, sorted by read and chunk.
        distances: The distance of each frame; NaN where it was not held out.
    """
    chunks = rows["chunk"].to_numpy(np.int64)
    read_distances = distances_by_group(distances, chunks, rows["read"].to_numpy(np.int64))
    reads = rows.drop_duplicates("read")[["kind", "cluster"]].assign(distance=read_distances)
    return reads.dropna()
