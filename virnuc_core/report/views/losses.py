"""Views of the losses of time of a run: the named bottleneck, and the table of all losses."""

from collections.abc import Sequence

from virnuc_core.report.model import Bottleneck
from virnuc_core.report.sections import Row
from virnuc_core.report.text import number, percent


def bottleneck_sentence(losses: Sequence[Bottleneck]) -> str:
    """Return the verdict on the largest loss as a sentence: what it is, and what helps.

    Args:
        losses: The losses, the largest first. Nothing is said if there are none.

    Returns:
        The sentence without the name of the loss, which stands before it, or an empty text.
    """
    if not losses:
        return ""
    largest = losses[0]
    saving = ""
    if largest.share is not None:
        share = percent(largest.share)
        saving = f"; removing it would save {largest.saves_s:.1f} s at most, {share} of the time"
    return f"({_verdict(largest)}): {largest.detail}{saving}. Advice: {largest.advice}."


def loss_rows(losses: Sequence[Bottleneck]) -> list[Row]:
    """Return a table row for each loss that was measured."""
    return [
        {
            "Loss": loss.kind,
            "Saves at most": number(loss.saves_s, 1, " s"),
            "Share of time": percent(loss.share),
            "Verdict": _verdict(loss),
            "What": loss.detail,
            "Advice": loss.advice,
        }
        for loss in losses
        if loss.share is not None
    ]


def _verdict(loss: Bottleneck) -> str:
    """Return `expected` if the loss needs no action, otherwise `actionable`."""
    return "expected" if loss.expected else "actionable"
