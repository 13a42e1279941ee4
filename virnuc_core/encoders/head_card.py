"""What a trained classifier's card says for a run: thresholds of scores, and warnings."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnuc_core.config import DEFAULT_THRESHOLD, VerdictSpec
from virnuc_core.encoders.model_config import HeadCard, HeadShape
from virnuc_core.errors import ConfigError

MAX_LENGTH_RATIO: Final = 1.5  # of the median read's length to that in training, or the reverse
MAX_SHARE_OUTSIDE: Final = 0.1  # of the reads may be shorter or longer than any in training


class ScoreThresholds(NamedTuple):
    """Which viral scores lead to which verdict."""

    viral: float  # from here on a read is viral
    uncertain: tuple[float, float] | None  # from the first to below the second no verdict is given


def score_thresholds(head: HeadShape, asked: VerdictSpec) -> ScoreThresholds:
    """Return the thresholds of scores that settings and the classifier's card lead to.

    Raises:
        ConfigError: The card does not have what is asked for, or two settings contradict.
    """
    if asked.fdr is None and not asked.abstain:
        return ScoreThresholds(asked.threshold, None)
    card = head.card
    if card is None:
        raise ConfigError(
            "fdr, abstain: the head has no card that would tell; virnuc train writes heads with one"
        )
    threshold = asked.threshold
    if asked.fdr is not None:
        threshold = _threshold_for_fdr(card, asked.fdr, asked.threshold)
    if not asked.abstain:
        return ScoreThresholds(threshold, None)
    if card.uncertain is None:
        raise ConfigError("abstain: the head's card names no uncertain scores")
    low, high = card.uncertain
    if asked.fdr is not None:
        # With few viral reads the threshold is high, and scores up to it are uncertain.
        high = max(high, threshold)
    return ScoreThresholds(threshold, (low, high))


def _threshold_for_fdr(card: HeadCard, fdr: float, threshold: float) -> float:
    """Return the viral score from which a false discovery rate holds."""
    if threshold != DEFAULT_THRESHOLD:
        raise ConfigError(
            f"fdr {fdr:g} and threshold {threshold:g} both say when a read is viral; give one"
        )
    if fdr not in card.thresholds:
        known_rates = ", ".join(f"{rate:g}" for rate in sorted(card.thresholds)) or "none"
        raise ConfigError(
            f"fdr {fdr:g}: the head's card has no threshold for it; it has those for {known_rates}"
        )
    return card.thresholds[fdr]


def training_mismatches(
    head: HeadShape, lengths: NDArray[np.integer], digests: Mapping[str, str]
) -> tuple[str, ...]:
    """Say where a run differs from the classifier's training.

    Args:
        head: The classifier.
        lengths: Bases of each read.
        digests: Digests of the parts of the models directory.

    Returns:
        One sentence about encoders that are not those of its training, and one about reads whose
        lengths are far from those of its training, if there is something to say.
    """
    if head.card is None:
        return ()
    warnings = []
    other_encoders = [
        name for name, digest in head.card.encoders.items() if digests.get(name) != digest
    ]
    if other_encoders:
        warnings.append(
            f"the head was trained on embeddings by another {' and '.join(other_encoders)}: "
            "if its weights differ, scores mean nothing"
        )
    if len(lengths) and not _lengths_fit(head.card, lengths):
        warnings.append(_describe_lengths(head.card, lengths))
    return tuple(warnings)


def _share_outside(card: HeadCard, lengths: NDArray[np.integer]) -> float:
    """Return the share of reads that are shorter or longer than any in training."""
    shortest, _, longest = card.lengths
    return float(np.mean((lengths < shortest) | (lengths > longest)))


def _lengths_fit(card: HeadCard, lengths: NDArray[np.integer]) -> bool:
    """Return whether the lengths of reads are about those of the training."""
    _, median_in_training, _ = card.lengths
    median = float(np.median(lengths))
    is_median_near = (
        median_in_training / MAX_LENGTH_RATIO <= median <= median_in_training * MAX_LENGTH_RATIO
    )
    return is_median_near and _share_outside(card, lengths) <= MAX_SHARE_OUTSIDE


def _describe_lengths(card: HeadCard, lengths: NDArray[np.integer]) -> str:
    """Say how the lengths of reads differ from those of the training."""
    shortest, median, longest = card.lengths
    if shortest == longest:
        in_training = f"{median} bases"
    else:
        in_training = f"{shortest} to {longest} bases, half of them up to {median}"
    percent_outside = 100 * _share_outside(card, lengths)
    return (
        f"the head was trained on reads of {in_training}; "
        f"here half are up to {np.median(lengths):.0f}, and {percent_outside:.0f} % outside that "
        "range: do not rely on their scores"
    )
