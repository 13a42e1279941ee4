"""Choose score thresholds for false discovery rates, and foretell their rates in new samples.

A threshold is chosen on the genomes of a training. On other genomes it gives another rate, even if
they are of the same kinds: the genomes of the training are a chance selection, and so are those of
the new sample. The interval for new samples (a prediction interval) holds both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import expit, logit, stdtrit

from virnuc_core import consensus
from virnuc_core.encoders.model_config import Estimate
from virnuc_core.training.evaluation import fdr_thresholds
from virnuc_core.training.truth import OTHERS, VIRUS

Floats = NDArray[np.float64]

UPPER_QUANTILE: Final = 0.975  # of the prediction: 95 % of new samples lie within both limits
MAX_RATE_RATIO: Final = 3.0  # of the upper limit to the wanted rate; beyond it nothing is promised
# A sample has no false positive at all with a chance of 2.5 % or more, if fewer independent ones
# than this are expected: exp(-3.69) = 0.025.
MIN_INDEPENDENT_CALLS: Final = -float(np.log(1 - UPPER_QUANTILE))


@dataclass(frozen=True, slots=True)
class FdrThresholds:
    """The thresholds of a head for false discovery rates."""

    scores: dict[float, float]  # by wanted rate: the score; refused rates are absent
    # By wanted rate: the rate to expect in new samples, also of thresholds that are refused because
    # the upper limit is too high. Rates that no score kept are absent.
    expected_rates: dict[float, Estimate]


@dataclass(frozen=True, slots=True)
class _LogShare:
    """The logarithm of the share of reads of a class that are called viral."""

    value: float
    variance: float  # over genomes
    degrees_of_freedom: float  # of the variance


def choose_thresholds(
    reads: pd.DataFrame, tested_reads: pd.DataFrame, rates: Sequence[float], prevalence: float
) -> FdrThresholds:
    """Choose a threshold for each false discovery rate, and refuse those that promise nothing.

    A threshold is refused if its rate in a new sample may be more than `MAX_RATE_RATIO` times the
    wanted one, or as high as if every read was called viral.

    Args:
        reads: Scored reads of genomes that the head did not learn from, with the columns score,
            label, source (number of the independent genome) and kind (such as `phage`).
        tested_reads: Some of the same reads, scored by the final head, which did not learn from
            them either.
        rates: The wanted false discovery rates.
        prevalence: Share of viral reads that the rates hold for.
    """
    scores = {}
    expected_rates = {}
    for rate, score in fdr_thresholds(reads, rates, prevalence).items():
        expected_rate = predict_fdr(reads, tested_reads, score, prevalence)
        expected_rates[rate] = expected_rate
        highest_useful_rate = min(MAX_RATE_RATIO * rate, 1 - prevalence)
        if expected_rate.high <= highest_useful_rate:
            scores[rate] = score
    return FdrThresholds(scores, expected_rates)


def predict_fdr(
    reads: pd.DataFrame, tested_reads: pd.DataFrame, threshold: float, prevalence: float
) -> Estimate:
    """Return the false discovery rate to expect in a new sample, with its 95 % interval.

    The new sample has other genomes of the same kinds: as many independent ones, and the same share
    of reads of each kind.

    The false discovery rate is FDR = (1 - p) f / ((1 - p) f + p r), with the prevalence p, the
    share f of other reads that are called viral and the recall r. So
    log(FDR / (1 - FDR)) = log((1 - p) / p) + log(f) - log(r). The variances of both logarithms come
    from leaving out each independent genome in turn (jackknife; Efron and Stein 1981, Annals of
    Statistics 9:586), within its kind. They count twice: for the genomes of the training and for
    those of the new sample. The quantile is that of Student's distribution, whose degrees of
    freedom fall if few genomes make most of the variance (Satterthwaite 1946, Biometrics Bulletin
    2:110). The square of the step from the heads of the cross-validation to the final head is added
    to the variance.

    Args:
        reads: Scored reads with the columns score, label, source (number of the independent
            genome) and kind.
        tested_reads: Some of the same reads, with their scores by the final head. Both tables are
            indexed by the numbers of the reads.
        threshold: Score from which a read is called viral.
        prevalence: Share of viral reads that the rate holds for.

    Returns:
        The rate and its interval. It is 0 to 1 if a class has a single genome, or if all viral
        reads that are called viral are of one genome.
    """
    # One false positive more than was seen is counted, as for the thresholds themselves.
    fallout = _log_share_called(reads[reads["label"] == OTHERS], threshold, n_added=1)
    recall = _log_share_called(reads[reads["label"] == VIRUS], threshold, n_added=0)
    log_odds = logit(1 - prevalence) + fallout.value - recall.value
    rate = float(expit(log_odds))
    variance = fallout.variance + recall.variance
    if not np.isfinite(variance):
        return Estimate(value=rate, low=0, high=1)
    degrees_of_freedom = variance**2 / (
        fallout.variance**2 / fallout.degrees_of_freedom
        + recall.variance**2 / recall.degrees_of_freedom
    )
    step = _step_to_final_head(reads, tested_reads, threshold)
    quantile = stdtrit(degrees_of_freedom, UPPER_QUANTILE)  # of Student's t
    half_width = quantile * np.sqrt(2 * variance + step**2)
    low = float(expit(log_odds - half_width))
    high = float(expit(log_odds + half_width))
    # A count of n independent events has the relative variance 1 / n.
    n_independent_calls = 1 / fallout.variance
    if n_independent_calls < MIN_INDEPENDENT_CALLS:
        low = 0.0
    return Estimate(value=rate, low=low, high=high)


def _step_to_final_head(reads: pd.DataFrame, tested_reads: pd.DataFrame, threshold: float) -> float:
    """Return by how much the final head changes the logarithm of the odds of the rate.

    The heads of a cross-validation and the final head give the same reads other scores. Both are
    compared on the reads of the final test, so the scatter of genomes is not in the difference.

    Args:
        reads: Scored reads, with the columns score and label.
        tested_reads: The reads of the final test, with their scores by the final head.
        threshold: Score from which a read is called viral.
    """
    same_reads = reads.loc[tested_reads.index]
    steps = []
    for label in (OTHERS, VIRUS):
        is_of_class = (same_reads["label"] == label).to_numpy()
        counts = []
        for table in (same_reads, tested_reads):
            is_called = consensus.is_viral(table["score"].to_numpy(), threshold)
            counts.append(is_called[is_of_class].sum() + 0.5)  # half a read, as there may be none
        before, after = counts
        steps.append(np.log(after / before))
    step_of_fallout, step_of_recall = steps
    return float(step_of_fallout - step_of_recall)


def _log_share_called(reads: pd.DataFrame, threshold: float, n_added: int) -> _LogShare:
    """Return the logarithm of the share of reads that are called viral, and its variance.

    Args:
        reads: Scored reads of one class, with the columns score, source and kind.
        threshold: Score from which a read is called viral.
        n_added: How many reads are counted as called beyond those that were.
    """
    is_called = consensus.is_viral(reads["score"].to_numpy(), threshold)
    genomes = (
        reads.assign(called=is_called)
        .groupby("source")
        .agg(reads=("called", "size"), called=("called", "sum"), kind=("kind", "first"))
    )
    n_called = genomes["called"].sum() + n_added
    share = n_called / len(reads)
    with np.errstate(divide="ignore"):  # nothing is called
        value = float(np.log(share))
    shares_without = _shares_without_each(genomes, n_added)
    if len(genomes) < 2 or not shares_without.all():
        return _LogShare(value, np.inf, 1.0)  # nothing is known of other genomes
    variances = _variances_of_genomes(np.log(shares_without), value, genomes["kind"])
    # Genomes that agree by chance are no reason to claim more than as many independent reads show.
    least_variance = (1 - share) / n_called
    variance = max(variances.sum(), least_variance)
    return _LogShare(value, variance, _effective_number(variances))


def _shares_without_each(genomes: pd.DataFrame, n_added: int) -> Floats:
    """Return the share of reads of a class that are called viral, without each genome in turn.

    The other genomes of its kind take its place, so that the kind keeps its share of the reads. The
    only genome of a kind has no such others, and all genomes of the class take its place.

    Args:
        genomes: Independent genomes with the columns reads, called (reads that are called viral)
            and kind.
        n_added: How many reads are counted as called beyond those that were.

    Returns:
        The shares, [genomes].
    """
    n_reads = genomes["reads"].to_numpy()
    n_called = genomes["called"].to_numpy()
    by_kind = genomes.groupby("kind")
    reads_of_kind = by_kind["reads"].transform("sum").to_numpy()
    called_of_kind = by_kind["called"].transform("sum").to_numpy()
    all_reads = n_reads.sum()
    all_called = n_called.sum() + n_added
    with np.errstate(invalid="ignore", divide="ignore"):  # the only genome of a kind, or of all
        share_of_kind = (called_of_kind - n_called) / (reads_of_kind - n_reads)
        share_of_class = (all_called - n_called) / (all_reads - n_reads)
    called_of_other_kinds = all_called - called_of_kind
    shares = (called_of_other_kinds + share_of_kind * reads_of_kind) / all_reads
    is_only_one = (n_reads == reads_of_kind) & (n_reads < all_reads)
    result: Floats = np.where(is_only_one, share_of_class, shares)
    return result


def _variances_of_genomes(logs: Floats, log_of_all: float, kinds: "pd.Series[str]") -> Floats:
    """Return what each genome adds to the variance of the logarithm of a share, [genomes].

    Args:
        logs: Logarithm of the share without each genome, [genomes].
        log_of_all: Logarithm of the share with all genomes.
        kinds: Kind of each genome.
    """
    logs_of_kind = pd.Series(logs).groupby(kinds.to_numpy())
    n_of_kind = logs_of_kind.transform("size").to_numpy()
    means = logs_of_kind.transform("mean").to_numpy()
    of_several = (n_of_kind - 1) / n_of_kind * (logs - means) ** 2
    of_only_one = (logs - log_of_all) ** 2  # its distance from the other kinds must do
    variances: Floats = np.where(n_of_kind > 1, of_several, of_only_one)
    return variances


def _effective_number(squares: Floats) -> float:
    """Return how many equal numbers would have the same sum and sum of squares, at least 1."""
    if not squares.any():
        return float(len(squares))
    return max(1.0, float(squares.sum() ** 2 / (squares**2).sum()))
