"""What a trained classifier's card says for a run: thresholds of scores, and warnings."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnuc_core.config import DEFAULT_THRESHOLD, VerdictSpec
from virnuc_core.encoders.composition import ComparedReads
from virnuc_core.encoders.model_config import HeadCard, HeadShape
from virnuc_core.errors import ConfigError
from virnuc_core.sample_familiarity import SampleFamiliarity

# Reads are like those of the training if their median length differs at most by this factor, and
# at most this share of them is shorter or longer than every read of the training.
MAX_LENGTH_RATIO: Final = 1.5
MAX_SHARE_OUTSIDE: Final = 0.1


class ScoreThresholds(NamedTuple):
    """Which viral scores lead to which verdict."""

    viral: float  # a read with this viral score or more is called viral
    # Reads with a viral score of at least the first and below the second number get no verdict;
    # None: every read gets a verdict.
    uncertain: tuple[float, float] | None


def score_thresholds(head: HeadShape, settings: VerdictSpec) -> ScoreThresholds:
    """Return the thresholds that turn viral scores, which are P(virus), into verdicts.

    By default the threshold is the user's. With the settings `fdr` or `abstain` the thresholds come
    from the classifier's card, where its training recorded them.

    Args:
        head: The classifier, with its card if it has one.
        settings: The user's settings: threshold, false discovery rate, abstain.

    Raises:
        ConfigError: The classifier has no card, or its card lacks the requested numbers, or two
            settings contradict each other.
    """
    if settings.fdr is None and not settings.abstain:
        return ScoreThresholds(settings.threshold, None)

    card = head.card
    if card is None:  # of a classifier that was not trained with virnuc
        raise ConfigError(
            "fdr, abstain: the head has no card that would tell; virnuc train writes heads with one"
        )
    threshold = settings.threshold
    if settings.fdr is not None:
        threshold = _threshold_for_fdr(card, settings.fdr, settings.threshold)
    if not settings.abstain:
        return ScoreThresholds(threshold, None)

    if card.uncertain is None:
        raise ConfigError("abstain: the head's card names no uncertain scores")
    low, high = card.uncertain
    if settings.fdr is not None:
        # A low false discovery rate can require a threshold above the card's uncertain scores.
        # Scores between them and the threshold are not certain enough for either verdict.
        high = max(high, threshold)
    return ScoreThresholds(threshold, (low, high))


def _threshold_for_fdr(card: HeadCard, fdr: float, threshold: float) -> float:
    """Look up the score threshold for a false discovery rate in a classifier's card.

    The false discovery rate is the share of wrong reads among the reads that are called viral.

    Args:
        card: The card, which lists some rates and their scores.
        fdr: The false discovery rate that the user wants.
        threshold: The user's threshold. It must be the default, because `fdr` replaces it.

    Raises:
        ConfigError: The user gave both, or the card does not list this rate or refuses it.
    """
    if threshold != DEFAULT_THRESHOLD:
        raise ConfigError(
            f"fdr {fdr:g} and threshold {threshold:g} both say when a read is viral; give one"
        )
    if fdr in card.expected_fdr and fdr not in card.thresholds:
        raise ConfigError(_refusal(card, fdr))
    if not card.thresholds:
        raise ConfigError(
            f"fdr {fdr:g}: this classifier has no threshold for any false discovery rate, because "
            "its test was too small or its errors too many; use --threshold instead, or train it "
            "with more genomes"
        )
    if fdr not in card.thresholds:
        known_rates = ", ".join(f"{rate:g}" for rate in sorted(card.thresholds))
        raise ConfigError(
            f"fdr {fdr:g}: this classifier has no threshold for this rate; use one of {known_rates}"
        )
    return card.thresholds[fdr]


def _refusal(card: HeadCard, fdr: float) -> str:
    """Return the reason why a card has no threshold for a false discovery rate that it names."""
    expected_rate = card.expected_fdr[fdr]
    known_rates = ", ".join(f"{rate:g}" for rate in sorted(card.thresholds)) or "no rate"
    return (
        f"fdr {fdr:g}: the head's card refuses a threshold for it, because between "
        f"{100 * expected_rate.low:.1f} and {100 * expected_rate.high:.1f} % of the reads called "
        "viral could be wrong in a new sample: the head was tested with too few independent "
        f"genomes, or does not separate well enough. It has thresholds for {known_rates}; "
        "use --threshold instead, or train with more genomes"
    )


def training_mismatches(
    head: HeadShape, lengths: NDArray[np.integer], digests: Mapping[str, str]
) -> tuple[str, ...]:
    """Return warnings if a run is unlike the training of its classifier.

    Args:
        head: The classifier.
        lengths: Bases of each read of the run.
        digests: Digests of the models of the run, by the names of their folders.

    Returns:
        One warning if the encoders are not those of the training, and one if the lengths of the
        reads are far from those of the training. Nothing if the classifier has no card.
    """
    if head.card is None:
        return ()
    warnings = []
    changed_encoders = [
        name for name, digest in head.card.encoders.items() if digests.get(name) != digest
    ]
    if changed_encoders:
        warnings.append(
            f"the head was trained on embeddings by another {' and '.join(changed_encoders)}: "
            "if its weights differ, scores mean nothing"
        )
    if len(lengths) and not _lengths_fit(head.card, lengths):
        warnings.append(_describe_lengths(head.card, lengths))
    return tuple(warnings)


def require_domain(
    head: HeadShape,
    settings: VerdictSpec,
    lengths: NDArray[np.integer],
    familiarity: SampleFamiliarity,
) -> None:
    """Refuse thresholds of the card for reads that are unlike those they were measured on.

    Args:
        head: The classifier.
        settings: The user's settings. Only `fdr` and `abstain` use thresholds of the card.
        lengths: Bases of each read of the run.
        familiarity: How much the reads are like those of the training.

    Raises:
        ConfigError: The reads have other lengths or are of other kinds than those of the training,
            and the user did not ask for the thresholds all the same.
    """
    uses_card = settings.fdr is not None or settings.abstain
    if not uses_card or settings.fdr_outside_domain or head.card is None:
        return
    reason = ""
    if familiarity.is_outside:
        reason = familiarity.remark
    elif len(lengths) and not _lengths_fit(head.card, lengths):
        reason = f"Here {_describe_lengths(head.card, lengths)}."
    if reason:
        raise ConfigError(
            "fdr, abstain: the card's thresholds hold for reads like those of the head's training "
            f"only. {reason} Leave the options out, or add --fdr-outside-domain to use the "
            "thresholds although nobody knows their error rate here"
        )


def domain_note(head: HeadShape, settings: VerdictSpec, compared: ComparedReads) -> str:
    """Return for which reads the thresholds of a card hold; empty if the run does not use them.

    Args:
        head: The classifier.
        settings: The user's settings.
        compared: The reads of the run, compared with the training.
    """
    if head.card is None or (settings.fdr is None and not settings.abstain):
        return ""
    shortest, _, longest = head.card.lengths
    lengths = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
    kinds = "unknown kinds"
    if compared.kinds:
        kinds = f"these kinds: {', '.join(compared.kinds)}"
    return (
        f"The thresholds of --fdr and --abstain hold for reads of {lengths} bases of {kinds}, "
        f"where {100 * head.card.prevalence:g} % of the reads are viral"
        f"{_expected_rate_note(head.card, settings.fdr)}"
    )


def _expected_rate_note(card: HeadCard, fdr: float | None) -> str:
    """Return what the threshold of a false discovery rate gives in new samples, as an addition.

    Args:
        card: The classifier's card.
        fdr: The wanted rate. None: no threshold of the card is used, and nothing is added.
    """
    if fdr is None:
        return ""
    expected_rate = card.expected_fdr.get(fdr)
    if expected_rate is None:
        return (
            f". How far the rate of --fdr {fdr:g} scatters between new samples is unknown: "
            "the head was trained by an older version"
        )
    return (
        f". With --fdr {fdr:g}, {100 * expected_rate.value:.1f} % of the reads called viral are "
        f"expected to be wrong; 95 of 100 new samples of such genomes should have between "
        f"{100 * expected_rate.low:.1f} and {100 * expected_rate.high:.1f} %"
    )


def _share_outside(card: HeadCard, lengths: NDArray[np.integer]) -> float:
    """Return the share of reads that are shorter or longer than every read of the training."""
    shortest, _, longest = card.lengths  # the second number is the median
    return float(np.mean((lengths < shortest) | (lengths > longest)))


def _lengths_fit(card: HeadCard, lengths: NDArray[np.integer]) -> bool:
    """Return whether the reads are about as long as those of the training.

    Their median must be similar, and few reads may lie outside the range of the training.
    """
    _, median_in_training, _ = card.lengths  # shortest, median, longest
    median = float(np.median(lengths))
    is_median_near = (
        median_in_training / MAX_LENGTH_RATIO <= median <= median_in_training * MAX_LENGTH_RATIO
    )
    return is_median_near and _share_outside(card, lengths) <= MAX_SHARE_OUTSIDE


def _describe_lengths(card: HeadCard, lengths: NDArray[np.integer]) -> str:
    """Return the warning that the reads of a run are longer or shorter than those of the training.

    Args:
        card: The classifier's card, with the lengths in its training.
        lengths: Bases of each read of the run.
    """
    shortest, median, longest = card.lengths
    if shortest == longest:
        training_lengths = f"{median} bases"
    else:
        training_lengths = f"{shortest} to {longest} bases, half of them up to {median}"
    percent_outside = 100 * _share_outside(card, lengths)
    return (
        f"the head was trained on reads of {training_lengths}; "
        f"here half are up to {np.median(lengths):.0f}, and {percent_outside:.0f} % outside that "
        "range: do not rely on their scores"
    )
