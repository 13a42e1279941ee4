"""Compare ways to read embeddings of real ESM-2 8M by nested folds of genomes.

`python -m tests.real.heads WHEELS DATA OUT` writes the tables to OUT/heads.md. The arguments are
those of `kinds`. It takes some minutes on a free core, of which the embedding is a part. With
`--times 8 --readers linear` it takes eight times as many reads, and fewer readers.

The outer folds judge: each read is scored by readers that never met its genome. The inner folds
divide the genomes that are left, and choose among the readers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from virnuc_core import consensus
from virnuc_core.config import DEFAULT_THRESHOLD, TrainSpec
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.training.evaluation import by_level, weighted_metrics
from virnuc_core.training.features import Features
from virnuc_core.training.splits import assign_training_sides
from virnuc_core.training.truth import VIRUS

from .kinds import GC_RICH, weights_of_drawn_genomes, write_reads_of_kinds
from .material import argument_parser, load_material, spec_of
from .readers import (
    FOUR_MERS_ONLY,
    HEAD,
    MIDDLE_PENALTY,
    TRAINING_ONLY,
    Floats,
    Lesson,
    Scope,
    fit_readers,
)
from .training import LENGTH, embed, make_models

OUTER_FOLDS: Final = 5
INNER_FOLDS: Final = 3
SAMPLES: Final = 500  # of the bootstrap
SAMPLES_AT_ONCE: Final = 100
RECALL: Final = 0.7
SHARES: Final = (1 / 8, 1 / 4, 1 / 2, 1.0)  # of the reads or genomes, for the learning curve
EXPONENTS: Final = np.arange(0.1, 1.6, 0.1)  # of the power law that is fitted to the curve
TIMES_AS_MANY: Final = 8.0  # that the curve is extrapolated to
CHOSEN: Final = "chosen by the inner folds"

# Readers that differ in one setting. The inner folds choose it.
FAMILIES: Final = {
    "head, weight decay chosen": "head, weight decay",
    "discriminant, shrinkage chosen": "discriminant, shrinkage",
    "logistic regression, penalty chosen": "logistic regression, penalty",
}
MIDDLE_REGRESSION: Final = f"logistic regression, penalty {MIDDLE_PENALTY}"
BUILT_MEAN: Final = f"mean of head and {MIDDLE_REGRESSION}"  # as `virnuc train --method mean`
ONLY_TO_KNOW: Final = (BUILT_MEAN, TRAINING_ONLY, FOUR_MERS_ONLY)  # cannot be chosen


@dataclass(frozen=True, slots=True)
class Fold:
    """Scores of the genomes that one outer fold holds back."""

    tested: NDArray[np.bool_]  # [rows]
    outer: dict[str, Floats]  # log-odds of the tested rows, by reader, [rows], NaN elsewhere
    inner: dict[str, Floats]  # log-odds of all other rows, by readers of the inner folds, [rows]


# --- Folds ----------------------------------------------------------------------------------------


def deal_folds(rows: pd.DataFrame, n_folds: int, seed: int) -> NDArray[np.int64]:
    """Return the fold of each row, [rows]. The clusters of each kind are dealt in turn.

    So no fold lacks a kind that has as many independent genomes.
    """
    rng = np.random.default_rng(seed)
    kind_of_cluster = rows.groupby("cluster")["kind"].first()
    fold_of_cluster = pd.Series(0, index=kind_of_cluster.index)
    first_fold = 0
    # The kinds of a class follow each other, so that each fold has both classes.
    label_of_kind = rows.groupby("kind")["label"].first().sort_values(kind="stable")
    for kind in label_of_kind.index:
        clusters = rng.permutation(kind_of_cluster.index[kind_of_cluster == kind])
        fold_of_cluster[clusters] = (first_fold + np.arange(len(clusters))) % n_folds
        first_fold += len(clusters)
    return fold_of_cluster[rows["cluster"]].to_numpy()


def score_folds(
    features: Features, shape: HeadShape, spec: TrainSpec, scope: Scope, seed: int
) -> Iterator[Fold]:
    """Yield the scores of each outer fold by all readers of the scope."""
    n_rows = len(features.rows)
    folds = deal_folds(features.rows, OUTER_FOLDS, seed)
    for fold in range(OUTER_FOLDS):
        started = time.monotonic()
        tested = folds == fold
        outer = score_by_others(features, ~tested, tested, shape, spec, scope, seed + fold)
        learnt_rows = np.flatnonzero(~tested)
        inner_folds = np.full(n_rows, -1)
        inner_folds[learnt_rows] = deal_folds(
            features.rows.iloc[learnt_rows], INNER_FOLDS, seed + fold
        )
        inner: dict[str, Floats] = {}
        for inner_fold in range(INNER_FOLDS):
            held_back = inner_folds == inner_fold
            learnt = ~tested & ~held_back
            scores = score_by_others(features, learnt, held_back, shape, spec, scope, seed + fold)
            for name, log_odds in scores.items():
                inner.setdefault(name, np.full(n_rows, np.nan))[held_back] = log_odds[held_back]
        print(f"fold {fold}: {time.monotonic() - started:.0f} s", flush=True)
        yield Fold(tested, outer, inner)


def score_by_others(
    features: Features,
    learnt: NDArray[np.bool_],
    tested: NDArray[np.bool_],
    shape: HeadShape,
    spec: TrainSpec,
    scope: Scope,
    seed: int,
) -> dict[str, Floats]:
    """Return the log-odds of some rows by readers that were fitted on others, [rows].

    Args:
        features: All rows.
        learnt: Marks the rows to learn from.
        tested: Marks the rows to score. The others have NaN.
        shape: Sizes of the head.
        spec: How the head is trained.
        scope: Which readers.
        seed: Seed of the training.
    """
    learnt_features = features.select(np.flatnonzero(learnt))
    sides = assign_training_sides(learnt_features.rows, spec.validation_share, seed)
    lesson = Lesson(learnt_features, sides, shape, spec, seed)
    tested_features = features.select(np.flatnonzero(tested))
    log_odds_of_reader = {}
    for name, reader in fit_readers(lesson, scope).items():
        log_odds = np.full(len(features.rows), np.nan)
        log_odds[tested] = reader(tested_features)
        log_odds_of_reader[name] = log_odds
    return log_odds_of_reader


# --- Choosing and combining -----------------------------------------------------------------------


def add_families(rows: pd.DataFrame, fold: Fold, choices: dict[str, list[str]]) -> None:
    """Add to a fold what is made of several readers: chosen, averaged and calibrated ones.

    Args:
        rows: All rows.
        fold: Its scores; the new ones are added.
        choices: By family, what was chosen in each outer fold; this fold's choice is added.
    """
    aurocs = {name: auroc_of_reads(rows, log_odds) for name, log_odds in fold.inner.items()}
    for family, prefix in FAMILIES.items():
        members = [name for name in aurocs if name.startswith(prefix)]
        if family.startswith(HEAD):
            members.append(HEAD)  # without weight decay
        _choose(fold, family, members, aurocs, choices)
    for other in ("discriminant, shrinkage chosen", "logistic regression, penalty chosen"):
        mean_name = f"mean of head and {other.split(',')[0]}"
        for scores in (fold.outer, fold.inner):
            scores[mean_name] = (scores[HEAD] + scores[other]) / 2
        aurocs[mean_name] = auroc_of_reads(rows, fold.inner[mean_name])
    for scores in (fold.outer, fold.inner):
        scores[BUILT_MEAN] = (scores[HEAD] + scores[MIDDLE_REGRESSION]) / 2
    aurocs[BUILT_MEAN] = auroc_of_reads(rows, fold.inner[BUILT_MEAN])
    _choose(fold, CHOSEN, choosable(aurocs), aurocs, choices)
    for name in (HEAD, *FAMILIES, CHOSEN):
        calibrate(rows, fold, name)


def choosable(aurocs: dict[str, float]) -> list[str]:
    """Return the readers that the inner folds may choose from: no family, no ablation."""
    return [
        name
        for name in aurocs
        if name not in FAMILIES and not any(words in name for words in ONLY_TO_KNOW)
    ]


def _choose(
    fold: Fold,
    family: str,
    members: Sequence[str],
    aurocs: dict[str, float],
    choices: dict[str, list[str]],
) -> None:
    """Add the member with the highest AUROC of the inner folds under the name of its family."""
    best = max(members, key=lambda name: aurocs[name])
    choices.setdefault(family, []).append(best)
    fold.outer[family] = fold.outer[best]
    fold.inner[family] = fold.inner[best]
    aurocs[family] = aurocs[best]


def calibrate(rows: pd.DataFrame, fold: Fold, name: str) -> None:
    """Add log-odds that are calibrated by a line (Platt 1999), fitted to the inner folds."""
    inner = fold.inner[name]
    known = ~np.isnan(inner)
    line = LogisticRegression(C=1e6, class_weight="balanced")
    line.fit(inner[known, None], rows["label"].to_numpy()[known])
    slope, offset = line.coef_[0, 0], line.intercept_[0]
    fold.outer[f"{name}, calibrated"] = slope * fold.outer[name] + offset


# --- Figures --------------------------------------------------------------------------------------


def score_reads(rows: pd.DataFrame, log_odds: Floats) -> pd.DataFrame:
    """Return the reads of all rows that have a score, as a prediction would score them."""
    known = np.flatnonzero(~np.isnan(log_odds))
    known_rows = rows.iloc[known]
    reads = by_level(known_rows, expit(log_odds[known]))["read"]
    first_rows = known_rows.groupby("read").first()
    return reads.assign(**{name: first_rows[name] for name in ("kind", "gc", "source")})


def auroc_of_reads(rows: pd.DataFrame, log_odds: Floats) -> float:
    """Return the AUROC of the reads of all rows that have a score."""
    reads = score_reads(rows, log_odds)
    return float(weighted_metrics(reads, np.ones((1, len(reads))))["auroc"].iloc[0])


def figures_of_reads(reads: pd.DataFrame) -> dict[str, Floats]:
    """Return each figure for all reads and for resampled genomes, [1 + samples]."""
    weights = weights_of_drawn_genomes(reads, SAMPLES)
    parts = [
        _figures_of_samples(reads, part)
        for part in np.array_split(weights, 1 + len(weights) // SAMPLES_AT_ONCE)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _figures_of_samples(reads: pd.DataFrame, weights: Floats) -> dict[str, Floats]:
    """Return each figure for some sets of weights, [samples].

    A kind is visible if it has several independent genomes, so that it was met in the training.
    """
    n_sources = reads.groupby("kind")["source"].nunique()
    is_visible = (n_sources[reads["kind"]] > 1).to_numpy()
    is_virus = (reads["label"] == VIRUS).to_numpy()
    is_rich = (reads["gc"] >= GC_RICH).to_numpy()
    scores = reads["score"].to_numpy()
    metrics = weighted_metrics(reads, weights)
    visible_metrics = weighted_metrics(reads[is_visible], weights[:, is_visible])
    called = consensus.is_viral(scores, DEFAULT_THRESHOLD)[None]
    called_at_recall = scores >= thresholds_of_recall(scores, is_virus, weights)
    visible_thresholds = thresholds_of_recall(
        scores[is_visible], is_virus[is_visible], weights[:, is_visible]
    )
    called_visible = scores >= visible_thresholds
    return {
        "AUROC": metrics["auroc"].to_numpy(),
        "AUROC, visible kinds": visible_metrics["auroc"].to_numpy(),
        "false positives at a recall of 0.70": _share(called_at_recall, weights, ~is_virus),
        "false positives at a recall of 0.70, visible kinds": _share(
            called_visible, weights, ~is_virus & is_visible
        ),
        "recall": metrics["recall"].to_numpy(),
        "false positives": _share(called, weights, ~is_virus),
        "recall at 60 % GC or more": _share(called, weights, is_virus & is_rich),
        "recall at 60 % GC or more, at a recall of 0.70": _share(
            called_at_recall, weights, is_virus & is_rich
        ),
        "Brier score": metrics["brier"].to_numpy(),
        "calibration error": metrics["ece"].to_numpy(),
    }


def thresholds_of_recall(scores: Floats, is_virus: NDArray[np.bool_], weights: Floats) -> Floats:
    """Return the highest threshold with a recall of `RECALL`, for each sample, [samples, 1]."""
    order = np.argsort(-scores[is_virus], kind="stable")
    found = np.cumsum(weights[:, is_virus][:, order], axis=1)
    is_enough = found >= RECALL * found[:, -1:]
    return scores[is_virus][order][is_enough.argmax(axis=1)][:, None]


def _share(called: NDArray[np.bool_], weights: Floats, is_wanted: NDArray[np.bool_]) -> Floats:
    """Return the weighted share of some reads that was called viral, [samples]."""
    wanted_weights = weights[:, is_wanted]
    shares: Floats = (wanted_weights * called[:, is_wanted]).sum(axis=1) / wanted_weights.sum(
        axis=1
    )
    return shares


# --- Learning curve -------------------------------------------------------------------------------


def keep_share(rows: pd.DataFrame, unit: str, share: float, seed: int) -> NDArray[np.bool_]:
    """Return which rows stay if only a share of the reads or of the genomes is there, [rows].

    Args:
        rows: Rows with the columns kind, cluster and the unit.
        unit: "read": of each cluster of genomes this share of its reads. "cluster": of each kind
            this share of its clusters, at least one.
        share: The share.
        seed: Seed of the choice.
    """
    group = "cluster" if unit == "read" else "kind"
    rng = np.random.default_rng(seed)
    units = rows.drop_duplicates(unit)
    units = units.iloc[rng.permutation(len(units))]
    place = units.groupby(group).cumcount()
    size = units.groupby(group)[unit].transform("size")
    kept_units = units[unit][place < np.maximum(1, np.round(share * size))]
    return rows[unit].isin(kept_units).to_numpy()


def learning_curve(
    features: Features, shape: HeadShape, spec: TrainSpec, unit: str, seed: int
) -> dict[str, list[pd.DataFrame]]:
    """Return scored reads for each of `SHARES` of the reads or genomes, by reader."""
    rows = features.rows
    folds = deal_folds(rows, OUTER_FOLDS, seed)
    tables: dict[str, list[pd.DataFrame]] = {}
    for share in SHARES:
        log_odds_of_reader: dict[str, Floats] = {}
        is_kept = keep_share(rows, unit, share, seed)
        for fold in range(OUTER_FOLDS):
            tested = folds == fold
            learnt = ~tested & is_kept
            scores = score_by_others(features, learnt, tested, shape, spec, "main", seed + fold)
            for name, log_odds in scores.items():
                merged = log_odds_of_reader.setdefault(name, np.full(len(rows), np.nan))
                merged[tested] = log_odds[tested]
        for name, log_odds in log_odds_of_reader.items():
            tables.setdefault(name, []).append(score_reads(rows, log_odds))
    return tables


def extrapolate(values: Floats, times: float) -> Floats:
    """Return what a learning curve has with more reads or genomes than there are, [samples].

    The curve is a power law, a - b x^-c with b of at least 0, fitted by least squares.

    Args:
        values: A figure for each of `SHARES` and each sample, [shares, samples].
        times: How many times as many there would be.
    """
    shares = np.array(SHARES)
    best_errors = np.full(values.shape[1], np.inf)
    extrapolated = np.zeros(values.shape[1])
    for exponent in EXPONENTS:
        curve = -(shares**-exponent)
        slopes = (curve - curve.mean()) @ (values - values.mean(axis=0)) / curve.var() / len(curve)
        slopes = np.maximum(slopes, 0)
        limits = values.mean(axis=0) - slopes * curve.mean()
        errors = ((values - limits - slopes * curve[:, None]) ** 2).sum(axis=0)
        is_better = errors < best_errors
        best_errors[is_better] = errors[is_better]
        predictions = np.minimum(limits - slopes * times**-exponent, 1)
        extrapolated[is_better] = predictions[is_better]
    return extrapolated


# --- Tables ---------------------------------------------------------------------------------------


def interval(samples: Floats, sign: str = "") -> str:
    """Return the value for all reads, and the 95 % interval over resampled genomes."""
    low, high = np.nanquantile(samples[1:], (0.025, 0.975))
    return f"{samples[0]:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"


def table_of_figures(figures_of_reader: dict[str, dict[str, Floats]]) -> str:
    """Return a table in Markdown: the figures of the head, and differences from them."""
    base = figures_of_reader[HEAD]
    lines = [f"| reader | {' | '.join(base)} |", f"| --- |{' --- |' * len(base)}"]
    for name, figures in figures_of_reader.items():
        cells = [name]
        for figure, samples in figures.items():
            if name == HEAD:
                cells.append(interval(samples))
            else:
                cells.append(interval(samples - base[figure], sign="+"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def table_of_choices(choices: dict[str, list[str]]) -> str:
    """Return a table in Markdown: how often the inner folds chose each reader."""
    lines = ["| choice | chosen in outer folds |", "| --- | --- |"]
    for family, names in choices.items():
        counts = pd.Series(names).value_counts()
        told = ", ".join(f"{name}: {count}" for name, count in counts.items())
        lines.append(f"| {family} | {told} |")
    return "\n".join(lines) + "\n"


def table_of_curve(unit: str, tables: dict[str, list[pd.DataFrame]]) -> str:
    """Return a table in Markdown: AUROC by the share of the reads or genomes."""
    titles = [f"{share:.3g} of the {unit}s" for share in SHARES]
    lines = [
        f"| reader | {' | '.join(titles)} | last doubling | {TIMES_AS_MANY:g} times as many |",
        f"| --- |{' --- |' * (len(SHARES) + 2)}",
    ]
    for name, reads_of_share in tables.items():
        for figure in ("AUROC", "AUROC, visible kinds"):
            samples = [figures_of_reads(reads)[figure] for reads in reads_of_share]
            cells = [interval(values) for values in samples]
            cells.append(interval(samples[-1] - samples[-2], sign="+"))
            cells.append(interval(extrapolate(np.stack(samples), TIMES_AS_MANY)))
            lines.append(f"| {name}, {figure} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def measure(
    features: Features, shape: HeadShape, spec: TrainSpec, scope: Scope, repeats: int
) -> str:
    """Return all tables in Markdown.

    Args:
        features: Frames of reads of many genomes, with their embeddings.
        shape: Sizes of the head.
        spec: How the head is trained.
        scope: Which readers are compared.
        repeats: How many times the genomes are dealt to outer folds.
    """
    rows = features.rows
    choices: dict[str, list[str]] = {}
    sums: dict[str, dict[str, Floats]] = {}
    with threadpool_limits(1), torch.random.fork_rng(devices=[]):
        for repeat in range(repeats):
            log_odds_of_reader: dict[str, Floats] = {}
            for fold in score_folds(features, shape, spec, scope, 1_000 * (repeat + 1)):
                add_families(rows, fold, choices)
                for name, log_odds in fold.outer.items():
                    merged = log_odds_of_reader.setdefault(name, np.full(len(rows), np.nan))
                    merged[fold.tested] = log_odds[fold.tested]
            for name, log_odds in log_odds_of_reader.items():
                figures = sums.setdefault(name, {})
                for figure, samples in figures_of_reads(score_reads(rows, log_odds)).items():
                    figures[figure] = figures.get(figure, 0) + samples / repeats
        parts = [table_of_figures(sums), table_of_choices(choices)]
        for unit in ("read", "cluster"):
            parts.append(table_of_curve(unit, learning_curve(features, shape, spec, unit, 1_000)))
    return "\n".join(parts)


def load_protein_features(
    wheels: Path, data: Path, out: Path, times: int
) -> tuple[Features, HeadShape, TrainSpec]:
    """Cut reads, embed them, and return their frames with the embeddings of ESM-2 alone."""
    reads = write_reads_of_kinds(wheels, data, out, LENGTH, times)
    models = make_models(wheels, out).real
    run = embed(reads, models, out / "run")
    material = load_material(models, run, spec_of(reads))
    features = material.features
    proteins = features.embeddings[:, material.shape.dna_width :].contiguous()
    # A head needs a column of DNA. Only the sum of both widths matters here.
    shape = material.shape.model_copy(
        update={"dna_width": 1, "protein_width": proteins.shape[1] - 1}
    )
    return Features(features.rows, proteins, features.four_mers), shape, material.spec


def main() -> None:
    """Cut reads, embed them once, and write the tables."""
    parser = argument_parser()
    parser.add_argument("--times", type=int, default=1, help="times as many reads as in `kinds`")
    parser.add_argument("--readers", choices=("linear", "all"), default="all")
    parser.add_argument("--repeats", type=int, default=1, help="times the genomes are dealt")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True)
    features, shape, spec = load_protein_features(
        arguments.wheels, arguments.data, arguments.out, arguments.times
    )
    tables = measure(features, shape, spec, arguments.readers, arguments.repeats)
    (arguments.out / "heads.md").write_text(tables, encoding="utf-8")


if __name__ == "__main__":
    main()
