"""Draws a histogram as SVG without matplotlib, whose import takes longer than a small prediction.

The same numbers give the same bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

# Sizes in units of the drawing, which is shown about 1.2 times as large.
WIDTH: Final = 346.0
HEIGHT: Final = 158.0
LEFT: Final = 62.0
RIGHT: Final = 12.0
TOP: Final = 8.0
BOTTOM: Final = 36.0
FONT_SIZE: Final = 9.5
TEXT_COLOUR: Final = "#24292f"
AXIS_COLOUR: Final = "#8c959f"
GRID_COLOUR: Final = "#d8dee4"
BAR_COLOUR: Final = "#0969da"
HEADROOM: Final = 1.08  # the y axis ends this much above the highest bar
MAX_TICKS: Final = 6
SINGLE_BAR_MARGIN: Final = 10.0  # beside a single bar, in units of the x axis
NICE_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)  # times a power of ten


@dataclass(frozen=True, slots=True)
class _Axis:
    """How the values of an axis lie in the drawing.

    Attributes:
        low: The value at the beginning of the axis.
        high: The value at its end. It is larger.
        start: The place of its beginning in the drawing.
        end: The place of its end.
        is_whole: The axis has ticks at whole numbers only.
    """

    low: float
    high: float
    start: float
    end: float
    is_whole: bool = False

    def place(self, value: float) -> float:
        """Return the place of a value in the drawing."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return the values of the ticks."""
        return ticks(self.low, self.high, is_whole=self.is_whole)


def draw_histogram(
    edges: Sequence[float],
    counts: Sequence[int],
    x_label: str,
    y_label: str,
    *,
    is_whole: bool = False,
) -> str:
    """Return a histogram as the text of an SVG image.

    Args:
        edges: The edges of the bins in ascending order, one more than there are bins.
        counts: The count of each bin.
        x_label: What the edges are, with the unit.
        y_label: What is counted.
        is_whole: The x axis has whole numbers only, for example bases.
    """
    x_low, x_high = edges[0], edges[-1]
    if len(counts) == 1:  # a single bar would otherwise fill the whole width
        x_low -= SINGLE_BAR_MARGIN
        x_high += SINGLE_BAR_MARGIN
    highest = HEADROOM * max(counts) or 1.0  # an axis from 0 to 0 cannot be drawn
    x_axis = _Axis(x_low, x_high, LEFT, WIDTH - RIGHT, is_whole)
    y_axis = _Axis(0.0, highest, HEIGHT - BOTTOM, TOP, is_whole=True)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" '
        f'width="{WIDTH:g}pt" height="{HEIGHT:g}pt" font-family="sans-serif" '
        f'font-size="{FONT_SIZE}" fill="{TEXT_COLOUR}">',
        *_grid(x_axis, y_axis),
        _bars(edges, counts, x_axis, y_axis),
        *_axis_lines(),
        *_tick_labels(x_axis, y_axis),
        *_axis_labels(x_label, y_label),
        "</svg>\n",
    ]
    return "\n".join(parts)


def ticks(low: float, high: float, *, is_whole: bool = False) -> list[float]:
    """Return at most `MAX_TICKS` round numbers from `low` to `high`, at equal distances.

    Args:
        low: The beginning of an axis.
        high: Its end, which is larger.
        is_whole: Return whole numbers only.
    """
    smallest_step = (high - low) / (MAX_TICKS - 1)
    if is_whole:
        smallest_step = max(1.0, smallest_step)
    power = 10.0 ** math.floor(math.log10(smallest_step))
    steps = [nice * power for nice in NICE_STEPS]
    if is_whole:
        steps = [step for step in steps if step == int(step)]
    step = next(step for step in steps if step >= 0.999 * smallest_step)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[str]:
    """Return a thin line for each tick of both axes."""
    lines = []
    for value in x_axis.ticks():
        x = x_axis.place(value)
        lines.append(_line(x, TOP, x, HEIGHT - BOTTOM, GRID_COLOUR))
    for value in y_axis.ticks():
        y = y_axis.place(value)
        lines.append(_line(LEFT, y, WIDTH - RIGHT, y, GRID_COLOUR))
    return lines


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    """Return a thin straight line."""
    return (
        f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" '
        f'stroke="{colour}" stroke-width="0.8"/>'
    )


def _bars(edges: Sequence[float], counts: Sequence[int], x_axis: _Axis, y_axis: _Axis) -> str:
    """Return all bars as one area, so that no gaps appear between neighbours."""
    left = x_axis.place(edges[0])
    bottom = y_axis.place(0.0)
    # In SVG, M moves to a point, V and H draw to a height and to a column, and Z closes the area.
    commands = [f"M{left:.2f} {bottom:.2f}"]
    for right_edge, count in zip(edges[1:], counts, strict=True):
        top = y_axis.place(count)
        right = x_axis.place(right_edge)
        commands.append(f"V{top:.2f}H{right:.2f}")
    commands.append(f"V{bottom:.2f}Z")
    outline = "".join(commands)
    return f'<path fill="{BAR_COLOUR}" d="{outline}"/>'


def _axis_lines() -> list[str]:
    """Return the lines of the two axes."""
    bottom = HEIGHT - BOTTOM
    return [
        _line(LEFT, bottom, WIDTH - RIGHT, bottom, AXIS_COLOUR),
        _line(LEFT, TOP, LEFT, bottom, AXIS_COLOUR),
    ]


def _tick_labels(x_axis: _Axis, y_axis: _Axis) -> list[str]:
    """Return the numbers at the ticks."""
    labels = []
    for value in x_axis.ticks():
        x = x_axis.place(value)
        y = HEIGHT - BOTTOM + 12.0
        labels.append(f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="middle">{_number(value)}</text>')
    for value in y_axis.ticks():
        y = y_axis.place(value) + 3.3  # half the height of a digit
        x = LEFT - 5.0
        labels.append(f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="end">{_number(value)}</text>')
    return labels


def _number(value: float) -> str:
    """Return a number of a tick as text, with commas and without zeros at its end."""
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:g}"


def _axis_labels(x_label: str, y_label: str) -> list[str]:
    """Return the titles of the two axes."""
    x_middle = (LEFT + WIDTH - RIGHT) / 2
    y_middle = (TOP + HEIGHT - BOTTOM) / 2
    return [
        f'<text x="{x_middle:.2f}" y="{HEIGHT - 8:.2f}" text-anchor="middle">'
        f"{escape(x_label)}</text>",
        f'<text transform="translate(10 {y_middle:.2f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>",
    ]
