"""Set thresholds of `--fdr` on half of the genomes, and ask the other half which rates they give.

`python -m tests.real.thresholds WHEELS DATA OUT` writes the tables to OUT/thresholds.md. The
arguments are those of `kinds`. Half of the reads are taken as viral.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from virnuc_core.config import TrainSpec
from virnuc_core.encoders.composition import judge_sample, read_distances
from virnuc_core.encoders.model_config import Estimate
from virnuc_core.reads.store import OrfStore
from virnuc_core.sample_familiarity import MIN_READS
from virnuc_core.training.evaluation import (
    bootstrap_draws,
    by_level,
    false_discovery_rate,
    fdr_thresholds,
    row_weights,
)
from virnuc_core.training.familiarity import fit_composition
from virnuc_core.training.fitting import HEAD_METHOD, cross_validate, fit_methods
from virnuc_core.training.splits import assign_folds, assign_training_sides
from virnuc_core.training.thresholds import choose_thresholds
from virnuc_core.training.truth import OTHERS, TEST_SIDE, VIRUS

from .kinds import write_reads_of_kinds
from .material import Material, argument_parser, load_material, spec_of
from .training import LENGTH, embed, make_models

SEEDS: Final = range(20, 40)  # the intervals were designed with the seeds 0 to 19
RATES: Final = (0.05, 0.1, 0.2, 0.3)
PREVALENCE: Final = 0.5
SAMPLE_READS: Final = 200  # of each class, drawn with replacement, in a sample that is compared


@dataclass(frozen=True, slots=True)
class Trial:
    """A threshold of one training, and the rate that it gave in one sample."""

    wanted_rate: float
    expected_rate: Estimate  # with the interval for new samples
    resampled: tuple[float, float]  # interval of the training's own rate, over its genomes
    is_given: bool  # not refused by the card
    is_flagged: bool  # the run would refuse `--fdr`, because the sample is unlike the training
    realised_rate: float  # 0 if no read was called viral
    recall: float

    @property
    def is_within(self) -> bool:
        """Return whether the realised rate lies in the interval for new samples."""
        return self.expected_rate.low <= self.realised_rate <= self.expected_rate.high

    @property
    def is_within_resampled(self) -> bool:
        """Return whether the realised rate lies in the interval of the training's own rate."""
        low, high = self.resampled
        return low <= self.realised_rate <= high


def score_reads(rows: pd.DataFrame, scores: NDArray[np.float64]) -> pd.DataFrame:
    """Return scored reads with the columns score, label, cluster, source and kind."""
    reads = by_level(rows, scores)["read"]
    of_read = rows.groupby("read")[["source", "kind"]].first()
    return reads.join(of_read)


def try_thresholds(
    material: Material, training_sources: Iterable[int], asked_sources: Iterable[int], seed: int
) -> list[Trial]:
    """Train on some genomes, set thresholds, and ask other genomes.

    Args:
        material: All frames.
        training_sources: The independent genomes to train on.
        asked_sources: The independent genomes of the sample.
        seed: Seed of the training.

    Returns:
        A trial for each wanted rate that some threshold keeps in the training.
    """
    training = material.select(training_sources)
    sample = material.select(asked_sources)
    spec = TrainSpec(
        truth=Path("none"), repeats=1, prevalence=PREVALENCE, seed=seed, method="network"
    )
    [cross_validation] = cross_validate(training, material.shape, spec)[HEAD_METHOD]
    known_reads = score_reads(training.rows, cross_validation.scores)

    sides = np.full(len(training.rows), TEST_SIDE)
    is_learnt = assign_folds(training.rows, spec.test_share, seed) != 0
    learnt_rows = np.flatnonzero(is_learnt)
    sides[learnt_rows] = assign_training_sides(
        training.rows.iloc[learnt_rows], spec.validation_share, seed
    )
    fitted = fit_methods(training, sides, material.shape, spec, seed)
    sample_reads = score_reads(sample.rows, fitted.scorers[HEAD_METHOD](sample))
    is_flagged = is_unlike(material.store, training.rows, sample_reads, seed)

    test = training.select(np.flatnonzero(sides == TEST_SIDE))
    tested_reads = score_reads(test.rows, fitted.scorers[HEAD_METHOD](test))
    chosen = choose_thresholds(known_reads, tested_reads, RATES, PREVALENCE)
    trials = []
    for rate, score in fdr_thresholds(known_reads, RATES, PREVALENCE).items():
        is_viral = sample_reads["label"] == VIRUS
        trials.append(
            Trial(
                wanted_rate=rate,
                expected_rate=chosen.expected_rates[rate],
                resampled=resampled_interval(known_reads, score),
                is_given=rate in chosen.scores,
                is_flagged=is_flagged,
                realised_rate=false_discovery_rate(sample_reads, score, PREVALENCE) or 0.0,
                recall=float((sample_reads.loc[is_viral, "score"] >= score).mean()),
            )
        )
    return trials


def resampled_interval(reads: pd.DataFrame, threshold: float) -> tuple[float, float]:
    """Return the 95 % interval of the rate of these very genomes, if they are drawn anew."""
    draws = bootstrap_draws(reads.groupby("cluster")["label"].mean(), np.random.default_rng(0))
    weights = row_weights(reads, draws, PREVALENCE)
    called_weights = weights * (reads["score"] >= threshold).to_numpy()
    is_wrong = (reads["label"] == OTHERS).to_numpy()
    rates = called_weights @ is_wrong / np.maximum(called_weights.sum(axis=1), 1e-9)
    low, high = np.quantile(rates[1:], (0.025, 0.975)).tolist()
    return low, high


def is_unlike(store: OrfStore, training: pd.DataFrame, sample: pd.DataFrame, seed: int) -> bool:
    """Return whether a run over as many reads of each class is refused `--fdr`.

    Args:
        store: All reads.
        training: The frames of the training.
        sample: The reads of the sample, indexed by their numbers, with the column label.
        seed: Seed of the choice of reads.
    """
    composition = fit_composition(store, training, seed)
    if composition is None:
        return False
    distances = read_distances(store, composition)
    rng = np.random.default_rng(seed)
    chosen = []
    for label in (OTHERS, VIRUS):
        members = sample.index[sample["label"] == label].to_numpy()
        chosen.append(rng.choice(members, SAMPLE_READS))
    return judge_sample(composition, distances[np.concatenate(chosen)]).is_outside


# --- Samples inside and outside of what a head was trained on -------------------------------------


def split_sources(genomes: pd.DataFrame, seed: int) -> tuple[set[int], set[int]]:
    """Deal independent genomes to two halves, within each kind and in random order.

    Args:
        genomes: Label and kind of each independent genome.
        seed: Seed of the order.
    """
    rng = np.random.default_rng(seed)
    halves: tuple[set[int], set[int]] = set(), set()
    for _, of_class in genomes.groupby("label"):
        turn = int(rng.integers(2))
        for _, of_kind in of_class.groupby("kind"):
            for source in rng.permutation(of_kind.index.to_numpy()).tolist():
                halves[turn].add(source)
                turn = 1 - turn
    return halves


def try_known_kinds(material: Material) -> list[list[Trial]]:
    """Return the trials of random halves of the genomes of all kinds with several genomes."""
    genomes = material.genomes
    n_genomes = genomes["kind"].map(genomes["kind"].value_counts())
    genomes = genomes[n_genomes > 1]
    trials_of_splits = []
    for seed in SEEDS:
        training, sample = split_sources(genomes, seed)
        trials_of_splits.append(try_thresholds(material, training, sample, seed))
    return trials_of_splits


def try_foreign_kinds(material: Material) -> list[list[Trial]]:
    """Return the trials of samples whose other reads are of a kind that the training lacks.

    Each draw leaves out one kind of others, in turn. Half of all other genomes are the training. The
    sample has the viruses of the other half, and the reads of the kind that was left out.
    """
    genomes = material.genomes
    reads = material.features.rows.drop_duplicates("read")
    n_reads = reads.loc[reads["label"] == OTHERS, "kind"].value_counts()
    foreign_kinds = sorted(n_reads.index[n_reads >= MIN_READS])
    trials_of_draws = []
    for seed in SEEDS:
        is_foreign = genomes["kind"] == foreign_kinds[seed % len(foreign_kinds)]
        training, rest = split_sources(genomes[~is_foreign], seed)
        viruses = set(genomes.index[genomes["label"] == VIRUS])
        foreign = set(genomes.index[is_foreign])
        trials_of_draws.append(try_thresholds(material, training, (rest & viruses) | foreign, seed))
    return trials_of_draws


# --- Tables ---------------------------------------------------------------------------------------

COLUMNS: Final = (
    "wanted rate",
    "a score keeps it",
    "within the interval of resampled genomes",
    "within that for new samples",
    "not refused",
    "of these within",
    "lower and upper limit (medians)",
    "realised rate, recall (medians)",
    "outside the interval: flagged",
    "refused or flagged",
)


def table_of(trials_of_splits: list[list[Trial]]) -> str:
    """Return a line for each wanted rate as a table in Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"| {' | '.join(['---'] * len(COLUMNS))} |"]
    n_splits = len(trials_of_splits)
    for rate in RATES:
        trials = [
            trial for trials in trials_of_splits for trial in trials if trial.wanted_rate == rate
        ]
        given = [trial for trial in trials if trial.is_given]
        outside = [trial for trial in trials if not trial.is_within]
        # Without a threshold, or with a refused one, `--fdr` ends with a message.
        n_used = sum(not trial.is_flagged for trial in given)
        limits, realised = "", ""
        if trials:
            low = np.median([trial.expected_rate.low for trial in trials])
            high = np.median([trial.expected_rate.high for trial in trials])
            limits = f"{low:.2f} to {high:.2f}"
            rate_in_sample = np.median([trial.realised_rate for trial in trials])
            recall = np.median([trial.recall for trial in trials])
            realised = f"{rate_in_sample:.3f}, {recall:.2f}"
        cells = [
            f"{100 * rate:g} %",
            f"{len(trials)} of {n_splits}",
            f"{sum(trial.is_within_resampled for trial in trials)} of {len(trials)}",
            f"{sum(trial.is_within for trial in trials)} of {len(trials)}",
            f"{len(given)}",
            f"{sum(trial.is_within for trial in given)} of {len(given)}",
            limits,
            realised,
            f"{sum(trial.is_flagged for trial in outside)} of {len(outside)}",
            f"{n_splits - n_used} of {n_splits}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def measure(material: Material) -> str:
    """Return the tables of known and of foreign kinds."""
    with threadpool_limits(1), torch.random.fork_rng(devices=[]):
        known = table_of(try_known_kinds(material))
        foreign = table_of(try_foreign_kinds(material))
    return f"## Known kinds\n\n{known}\n## Foreign kinds\n\n{foreign}"


def main() -> None:
    """Cut reads, embed them once, and write the tables."""
    arguments = argument_parser().parse_args()
    arguments.out.mkdir(parents=True)
    reads = write_reads_of_kinds(arguments.wheels, arguments.data, arguments.out, LENGTH)
    models = make_models(arguments.wheels, arguments.out).real
    run = embed(reads, models, arguments.out / "run")
    material = load_material(models, run, spec_of(reads))
    tables = measure(material)
    (arguments.out / "thresholds.md").write_text(tables, encoding="utf-8")


if __name__ == "__main__":
    main()
