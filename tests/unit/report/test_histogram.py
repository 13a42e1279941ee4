"""The histograms of the page that every prediction writes."""

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from virnuc_core.report.histogram import BAR_COLOUR, draw_histogram, ticks

SVG = "{http://www.w3.org/2000/svg}"


def bar_outline(svg: str) -> list[tuple[float, float]]:
    """Return height and right edge of each bar in the drawing, in its units."""
    paths = ElementTree.fromstring(svg).findall(f"{SVG}path")
    (bars,) = [path for path in paths if path.get("fill") == BAR_COLOUR]
    outline = bars.get("d") or ""
    match = re.match(r"M\S+ (\S+?)V", outline)
    assert match is not None
    base = float(match[1])
    return [(base - float(y), float(x)) for y, x in re.findall(r"V([\d.]+)H([\d.]+)", outline)]


def texts_of(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_heights_of_bars_are_proportional_to_the_counts() -> None:
    bars = bar_outline(draw_histogram([0, 1, 2, 3], [10, 0, 40], "length", "reads"))
    heights = [height for height, _ in bars]
    assert heights[1] == 0
    assert heights[2] / heights[0] == pytest.approx(4, rel=0.01)


def test_widths_of_bars_are_proportional_to_the_bins() -> None:
    bars = bar_outline(draw_histogram([0, 10, 30, 60], [1, 1, 1], "length", "reads"))
    edges = [edge for _, edge in bars]
    assert (edges[2] - edges[1]) / (edges[1] - edges[0]) == pytest.approx(1.5, rel=0.01)


@pytest.mark.parametrize("counts", [[0], [7], [10**9], [0, 0, 0]])
def test_extreme_counts_are_drawn_within_the_picture(counts: list[int]) -> None:
    svg = draw_histogram(range(len(counts) + 1), counts, "length", "reads")
    root = ElementTree.fromstring(svg)
    numbers = [
        float(line.get(name) or 0) for line in root.iter(f"{SVG}line") for name in ("x2", "y2")
    ]
    assert all(0 <= number <= 346 for number in numbers)
    assert "nan" not in svg
    assert "inf" not in svg


def test_labels_are_escaped() -> None:
    assert "a<b & c" in texts_of(draw_histogram([0, 1, 2], [1, 2], "a<b & c", "reads"))


# The expected ticks were chosen by hand: round numbers, five or six of them at most.
@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 100.0, [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]),
        (35.0, 151.0, [50.0, 75.0, 100.0, 125.0, 150.0]),
        (0.0, 1080.0, [0.0, 250.0, 500.0, 750.0, 1000.0]),
        (1_000_000.0, 1_000_050.0, [1_000_000.0 + 10 * step for step in range(6)]),
    ],
)
def test_ticks_are_round_numbers_within_the_axis(
    low: float, high: float, expected: list[float]
) -> None:
    assert ticks(low, high) == expected


@pytest.mark.parametrize("low", [0, 99, 150, 12_345])
@pytest.mark.parametrize("width", [1, 2, 12, 13, 21, 60, 1000])
def test_lengths_have_whole_numbers_at_their_ticks(low: int, width: int) -> None:
    counts = [1] * 3
    edges = [low, low + width, low + 2 * width, low + 3 * width]
    texts = texts_of(draw_histogram(edges, counts, "length", "reads", is_whole=True))
    numbers = [text for text in texts if text[0].isdigit()]
    assert len(numbers) >= 4
    assert all(number.replace(",", "").isdigit() for number in numbers)


def test_large_lengths_keep_all_their_digits() -> None:
    texts = texts_of(draw_histogram([1_000_000, 1_000_025, 1_000_050], [1, 2], "length", "reads"))
    assert "1,000,010" in texts


@pytest.mark.slow
def test_the_page_of_a_prediction_needs_neither_matplotlib_nor_reports_of_validations() -> None:
    code = (
        "import sys, virnuc_core.report.summary_page as page;"
        "page.read_charts([0, 1], [3], [1, 2]);"
        "page.load_templates();"
        "heavy = {'matplotlib', 'virnuc_core.report.model', 'virnuc_core.report.render'};"
        "print(*sorted(heavy & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.split() == []
