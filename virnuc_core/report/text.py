"""Write numbers, targets and table cells as text.

No number is rounded across its target: 89.96 % never reads 90 %.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from virnuc_core.markdown import Markdown, escape_markdown
from virnuc_core.profiles import Target
from virnuc_core.telemetry.live import clock_text

if TYPE_CHECKING:
    from virnuc_core.report.model import Criterion, RunMetrics, Verdict

UNKNOWN: Final = "n/a"
NOT_MEASURED: Final = "not measured"
GIBIBYTE: Final = 1 << 30
MAX_DECIMALS: Final = 6


class Number(str):
    """A number as text. A column of numbers is aligned to the right."""

    __slots__ = ()


class Link(str):
    """A text that leads to another page. Forms without links show the text alone.

    Attributes:
        address: The address of the page, relative to the one with the link.
    """

    __slots__ = ("address",)
    address: str

    def __new__(cls, text: str, address: str) -> Self:
        """Return the text with its address."""
        link = super().__new__(cls, text)
        link.address = address
        return link


@dataclass(frozen=True, slots=True)
class Mark:
    """A verdict in a table or before a text.

    Attributes:
        verdict: Decides the colour.
        word: What is written, where it is another word than the verdict.
    """

    verdict: "Verdict"
    word: str = ""

    @property
    def label(self) -> str:
        """Return the word that is shown."""
        return (self.word or self.verdict).upper()

    def __str__(self) -> str:
        return f"[{self.label}]"


Cell = str | int | float | Mark | None  # `Number` and `Link` are `str`; `None` was not measured


def cell(value: object) -> str:
    """Return a value as plain text. Control characters, which could act on a terminal, become �."""
    if value is None:
        return UNKNOWN
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return "".join(c if c in "\t\n" or c.isprintable() else "�" for c in text)


def one_line(value: object) -> str:
    """Return a value as plain text on one line."""
    return " ".join(cell(value).split())


def markdown_cell(value: object) -> str:
    """Return a value as text for a line or a table cell of a Markdown page.

    Text from outside is shown as it is. A value of the class `Markdown` is already Markdown.
    """
    if isinstance(value, Markdown):
        return value
    text = escape_markdown(cell(value))
    # Some programs show `\\<` as the beginning of HTML, but all of them know these names.
    return text.replace("\\<", "&lt;").replace("\\>", "&gt;")


def number(
    value: float | None, digits: int = 1, unit: str = "", target: Target | None = None
) -> Number | None:
    """Return a number with its unit.

    Args:
        value: The number in the unit that is shown.
        digits: Decimals that are shown. With a target there may be more.
        unit: The text after the digits, including a blank.
        target: If given, rounding does not move the number across this threshold.

    Returns:
        The text, or `None` if the value is `None`.
    """
    if value is None:
        return None
    if target is None:
        return Number(f"{value:,.{digits}f}{unit}")
    return Number(round_beside_target(value, digits, target) + unit)


def percent(
    share: float | None, digits: int = 1, unit: str = " %", target: Target | None = None
) -> Number | None:
    """Return a share of 0 to 1 as a percentage. `target` is in percent."""
    if share is None:
        return None
    return number(share * 100, digits, unit, target)


def gibibytes(size: float | None, unit: str = "") -> Number | None:
    """Return a size in bytes as GiB, which are 2³⁰ bytes.

    Every size of memory in a report is written by this function.

    Args:
        size: The size in bytes.
        unit: The text after the digits: ` GiB`, or nothing in a column that names the unit.
    """
    if size is None:
        return None
    return number(size / GIBIBYTE, 2, unit)


def clock(seconds: float | None) -> str | None:
    """Return a duration as hours, minutes and seconds, or `None` if it is not known."""
    if seconds is None:
        return None
    return clock_text(seconds)


def round_beside_target(value: float, decimals: int, target: Target | None) -> str:
    """Return a value as text, rounded so that it stays on the same side of its target.

    The text has `decimals` decimals, or more if rounding would move the value across the target.

    >>> round_beside_target(89.96, 1, Target(op=">", value=90))
    '89.96'
    >>> round_beside_target(89.96, 1, None)
    '90.0'
    >>> round_beside_target(1.9, 2, Target(op=">=", value=1.9))
    '1.90'
    """
    for places in range(decimals, MAX_DECIMALS + 1):
        digits = f"{value:.{places}f}"
        shown = float(digits)
        if target is None or value == shown:
            return digits
        is_met = target.met(value)
        # A value that misses its target must not be shown as the target itself.
        seems_equal = not is_met and shown == target.value
        if target.met(shown) == is_met and not seems_equal:
            return digits
    return repr(value)


def format_value(criterion: "Criterion") -> str:
    """Return the value of a criterion, with enough decimals to show whether it meets its target.

    A value that was computed for more reads than were measured is marked: `33:45 (projected)`.
    """
    if criterion.value is None:
        return UNKNOWN
    text = measured_text(criterion.value, criterion.target, criterion.unit, criterion.id)
    if criterion.verdict == "projected":
        return f"{text} (projected)"
    return text


def measured_text(value: float, target: Target | None, unit: str, criterion_id: str) -> str:
    """Return the value of a criterion as text, without a mark.

    Args:
        value: The value.
        target: Its target. Rounding does not move the value across it.
        unit: `s`, `x`, `%` or nothing.
        criterion_id: The id of the criterion, on which the number of decimals depends.
    """
    if unit == "s":
        return _format_seconds(value, target)
    if unit == "x":
        decimals = 1 if criterion_id == "speedup" else 2
        return f"{round_beside_target(value, decimals, target)}x"
    if unit == "%":
        decimals = 2 if criterion_id == "consensus" else 1
        return f"{round_beside_target(value, decimals, target).removesuffix('.0')}%"
    decimals = 0 if value == int(value) else 4
    return round_beside_target(value, decimals, target)


def _format_seconds(seconds: float, target: Target | None) -> str:
    """Return a duration as hours, minutes and seconds.

    Milliseconds are shown only if whole seconds would be on the other side of the target.
    """
    whole_seconds = float(int(seconds))
    if target is None or target.met(seconds) == target.met(whole_seconds):
        return clock_text(seconds)
    thousandths = f"{seconds % 1:.3f}".lstrip("0")
    return clock_text(seconds) + thousandths


def target_text(target: Target | None, unit: str, decimals: int = 0) -> str:
    """Return a target as people say it: `>=1.9x`, `<30 min`, or `none` without a target.

    Args:
        target: The threshold.
        unit: Its unit.
        decimals: Decimals of a whole number; other numbers keep the digits that they have.
    """
    if target is None:
        return "none"
    if unit == "s":
        return _duration_target_text(target)
    digits = f"{target.value:g}"
    if decimals and "." not in digits:
        digits = f"{target.value:.{decimals}f}"
    return f"{target.op}{digits}{unit}"


def _duration_target_text(target: Target) -> str:
    """Return a limit in seconds as text: in hours or minutes if it is a whole number of them."""
    seconds = target.value
    if seconds == 0:
        return f"{target.op}0 s"
    if seconds % 3600 == 0:
        hours = seconds / 3600
        unit = "hours" if hours > 1 else "hour"
        return f"{target.op}{hours:.0f} {unit}"
    if seconds % 60 == 0:
        return f"{target.op}{seconds / 60:.0f} min"
    return f"{target.op}{seconds:g} s"


def stage_text(run: "RunMetrics", stage: str) -> str:
    """Return the time of a stage: `502s (15.7%)`, `0s (fused)` or `n/a (not measured)`.

    Args:
        run: The run.
        stage: A row of the stage table, or `Total`.
    """
    seconds = run.total_s if stage == "Total" else run.stages.get(stage)
    if seconds is None:
        return "0s (fused)" if stage in run.stages else "n/a (not measured)"
    decimals = 0 if seconds >= 10 else 1
    share = cell(percent(run.share_of_time(seconds), unit="%"))
    return f"{seconds:.{decimals}f}s ({share})"
