"""The interval of a threshold holds for new genomes, and thresholds that promise nothing are refused."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from virnuc_core.encoders.model_config import Estimate
from virnuc_core.training.evaluation import false_discovery_rate, fdr_thresholds
from virnuc_core.training.thresholds import (
    MAX_RATE_RATIO,
    FdrThresholds,
    choose_thresholds,
    predict_fdr,
)

PREVALENCE = 0.5
RATE = 0.1
N_SAMPLES = 40


def draw_reads(
    seed: int,
    n_others: int = 12,
    n_viruses: int = 40,
    scatter: float = 0.8,
    kinds: tuple[float, ...] = (0.0,),
) -> pd.DataFrame:
    """Return scored reads of genomes whose log odds scatter around those of their class.

    Args:
        seed: Seed of the genomes.
        n_others: Genomes that are not viral.
        n_viruses: Genomes of viruses.
        scatter: Spread of the mean log odds of genomes. That of the reads of a genome is 1.
        kinds: Mean log odds of each kind of the genomes that are not viral.
    """
    rng = np.random.default_rng(seed)
    n_genomes = n_others + n_viruses
    label_of_genome = np.repeat([0, 1], [n_others, n_viruses])
    kind_of_genome = np.where(label_of_genome == 1, len(kinds), np.arange(n_genomes) % len(kinds))
    mean_of_genome = np.array([*kinds, 3.5])[kind_of_genome]
    mean_of_genome += scatter * rng.normal(size=n_genomes)
    reads_of_genome = rng.geometric(1 / 40, n_genomes) + 5
    if len(kinds) > 1:
        reads_of_genome[:] = 25  # each kind has the same share of the reads in each sample
    genome = np.repeat(np.arange(n_genomes), reads_of_genome)
    log_odds = mean_of_genome[genome] + rng.normal(size=len(genome))
    return pd.DataFrame(
        {
            "label": label_of_genome[genome],
            "cluster": genome,
            "source": genome,
            "kind": kind_of_genome[genome].astype(str),
            "score": 1 / (1 + np.exp(-log_odds)),
        }
    )


def predict(reads: pd.DataFrame, threshold: float) -> Estimate:
    """Return the rate in new samples, if the final head scores as those of the cross-validation."""
    reads = reads.reset_index(drop=True)
    return predict_fdr(reads, reads, threshold, PREVALENCE)


def choose(reads: pd.DataFrame, rate: float) -> FdrThresholds:
    """Choose a threshold, if the final head scores as those of the cross-validation."""
    return choose_thresholds(reads, reads, (rate,), PREVALENCE)


@pytest.mark.parametrize(
    "settings",
    [{}, {"kinds": (-2.0, 0.0, 1.0), "n_others": 18}],
    ids=["one kind", "several kinds"],
)
def test_the_rate_of_new_genomes_lies_within_the_interval_in_19_of_20_samples(
    settings: dict[str, float],
) -> None:
    n_within = 0
    for sample in range(N_SAMPLES):
        training = draw_reads(sample, **settings)
        new_sample = draw_reads(1_000 + sample, **settings)
        threshold = fdr_thresholds(training, (RATE,), PREVALENCE)[RATE]
        realised_rate = false_discovery_rate(new_sample, threshold, PREVALENCE)
        assert realised_rate is not None
        expected_rate = predict(training, threshold)
        n_within += expected_rate.low <= realised_rate <= expected_rate.high
    assert n_within >= 0.95 * N_SAMPLES


def test_the_expected_rate_is_at_most_the_wanted_one() -> None:
    chosen = choose(draw_reads(0, n_others=100), RATE)
    expected_rate = chosen.expected_rates[RATE]
    assert expected_rate.low < expected_rate.value <= RATE + 1e-9 < expected_rate.high


def test_more_genomes_give_a_narrower_interval() -> None:
    limits = []
    for n_genomes in (10, 40, 160):
        limits_of_draws = []
        for seed in range(5):
            reads = draw_reads(seed, n_others=n_genomes, n_viruses=n_genomes)
            expected_rate = choose(reads, RATE).expected_rates[RATE]
            limits_of_draws.append(expected_rate.high)
        limits.append(np.median(limits_of_draws))
    assert limits[0] > 1.3 * limits[1] > 1.3**2 * limits[2]


def test_more_reads_of_the_same_genomes_do_not_make_up_for_genomes() -> None:
    reads = draw_reads(2)
    threshold = fdr_thresholds(reads, (RATE,), PREVALENCE)[RATE]
    once = predict(reads, threshold)
    ten_times = predict(pd.concat([reads] * 10), threshold)
    assert ten_times.high > 0.8 * once.high


@pytest.mark.parametrize("n_others", [2, 4])
def test_with_few_genomes_a_threshold_is_refused(n_others: int) -> None:
    few = choose(draw_reads(3, n_others=n_others), RATE)
    assert few.scores == {}
    assert few.expected_rates[RATE].high > MAX_RATE_RATIO * RATE
    many = choose(draw_reads(3, n_others=100), RATE)
    assert set(many.scores) == {RATE}


def test_a_rate_that_is_no_better_than_calling_every_read_viral_is_refused() -> None:
    rate = 0.45  # of a class that is half of the reads
    chosen = choose(draw_reads(4), rate)
    assert chosen.expected_rates[rate].high < MAX_RATE_RATIO * rate
    assert chosen.scores == {}


@pytest.mark.parametrize("label", [0, 1])
def test_one_genome_of_a_class_tells_nothing_of_others(label: int) -> None:
    reads = draw_reads(5)
    reads.loc[reads["label"] == label, "source"] = -1
    expected_rate = predict(reads, 0.9)
    assert (expected_rate.low, expected_rate.high) == (0, 1)


def test_if_one_genome_has_all_viral_calls_nothing_is_known() -> None:
    reads = draw_reads(6)
    is_last_genome = reads["source"] == reads["source"].max()
    reads["score"] = np.where(is_last_genome, 0.9, 0.1)
    expected_rate = predict(reads, 0.5)
    assert (expected_rate.low, expected_rate.high) == (0, 1)


def test_no_viral_call_at_all_is_no_rate() -> None:
    expected_rate = predict(draw_reads(7), 1.1)
    assert (expected_rate.low, expected_rate.high) == (0, 1)


def test_the_only_genome_of_a_kind_widens_the_interval() -> None:
    """Nothing is known of how genomes of this kind scatter; its distance from other kinds counts."""
    reads = draw_reads(8, kinds=(-2.0, 1.0))
    others = reads["label"] == 0
    first_genome = reads.loc[others & (reads["kind"] == "1"), "source"].min()
    is_kept = ~others | (reads["kind"] == "0") | (reads["source"] == first_genome)
    with_single = reads[is_kept]
    without = with_single[with_single["source"] != first_genome]
    wide = predict(with_single, 0.9)
    narrow = predict(without, 0.9)
    assert wide.high - wide.low > narrow.high - narrow.low


def test_few_false_positives_may_be_none_in_a_new_sample() -> None:
    reads = draw_reads(9, scatter=0.0)
    highest_score_of_others = reads.loc[reads["label"] == 0, "score"].max()
    expected_rate = predict(reads, highest_score_of_others)
    assert expected_rate.low == 0
    assert expected_rate.value > 0


@pytest.mark.parametrize("shift", [-0.3, 0.3])
def test_a_final_head_that_scores_otherwise_widens_the_interval(shift: float) -> None:
    reads = draw_reads(10)
    tested_reads = reads[reads["source"] % 5 == 0]
    threshold = fdr_thresholds(reads, (RATE,), PREVALENCE)[RATE]
    same = predict_fdr(reads, tested_reads, threshold, PREVALENCE)
    moved_reads = tested_reads.assign(score=tested_reads["score"] + shift)
    other = predict_fdr(reads, moved_reads, threshold, PREVALENCE)
    assert other.value == same.value
    assert other.low < same.low
    assert other.high > same.high
