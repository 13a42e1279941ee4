"""Shows the answer of a run at the end of a command: the result first, then what to know of it."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import Final

from virnuc_core.answer import Answer

MAX_WIDTH: Final = 100
INDENT: Final = "  "
BULLET: Final = "- "


def answer_lines(answer: Answer, width: int | None = None) -> list[str]:
    """Return the answer as lines: the result, the counts behind it, and what to know first.

    Args:
        answer: The answer of a run, or of several samples together.
        width: Characters of a line. None takes the width of the terminal.
    """
    if width is None:
        width = min(MAX_WIDTH, shutil.get_terminal_size().columns)
    lines = textwrap.wrap(answer.headline, width)
    if answer.reads:
        lines += ["", *_count_lines(answer)]
    if answer.remarks:
        lines += ["", "What to know first"]
        lines += _bullets(answer.remarks, width)
    return lines


def warning_lines(answer: Answer) -> list[str]:
    """Return the last line of a command: that its reads are unlike the training, if they are.

    It is a single line, whatever the width, because programs look for it in the last line.
    """
    if not answer.domain_warning:
        return []
    return [f"{answer.domain_warning[0].upper()}{answer.domain_warning[1:]}."]


def _count_lines(answer: Answer) -> list[str]:
    """Return a line for each count: viral, with a score, without a verdict, and too short."""
    counts = {
        "viral": answer.viral,
        "with a score": answer.scored,
        "without a verdict": answer.without_verdict,
    }
    for reason, count in answer.why_without_verdict.items():
        counts[f"{INDENT}{reason}"] = count
    if answer.too_short is not None:
        counts["of all reads, too short"] = answer.too_short
    title_width = max(len(title) for title in counts)
    count_width = max(len(f"{count:,}") for count in counts.values())
    lines = []
    for title, count in counts.items():
        share = _percent(count, answer.reads)
        lines.append(f"{INDENT}{title:<{title_width}}  {count:>{count_width},}  {share:>7}")
    return lines


def _bullets(remarks: Sequence[str], width: int) -> list[str]:
    """Return the remarks as lines of a list, wrapped to a width."""
    lines: list[str] = []
    for remark in remarks:
        lines += textwrap.wrap(
            remark,
            width,
            initial_indent=INDENT + BULLET,
            subsequent_indent=" " * len(INDENT + BULLET),
            break_on_hyphens=False,
        )
    return lines


def _percent(part: int, whole: int) -> str:
    """Return a share as text."""
    return f"{100 * part / whole:.1f} %"
