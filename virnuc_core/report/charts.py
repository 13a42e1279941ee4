"""The charts of the report, as SVG text: the same data gives the same bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from virnuc_core.report.model import (
    Bar,
    Histogram,
    HistoryPoint,
    Line,
    Report,
    ScalingMetrics,
)
from virnuc_core.telemetry.statistics import QueueShares

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN: Final = 4.8  # narrow, so that letters stay readable on a phone
INK: Final = "#24292f"
FAINT: Final = "#8c959f"
GRID: Final = "#d8dee4"
RED: Final = "#cf222e"
LINES: Final = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#9a6700", "#0550ae", "#6e7781")
SECONDS: Final = "seconds since the start"
STYLE: Final[dict[Any, Any]] = {
    "svg.hashsalt": "virnuc",
    "svg.fonttype": "none",  # text stays text: small files, sharp at any size
    "savefig.transparent": True,  # the page's own ground, light or dark
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.parse_math": False,  # names come from users: a dollar sign is a dollar sign
    "axes.edgecolor": FAINT,
    **{"axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False},
    "grid.color": GRID,
    **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color"), INK),
    **{"legend.frameon": False, "legend.fontsize": 8.5, "legend.handlelength": 1.4, "legend.columnspacing": 1.2},
}


def generator() -> str:
    """What draws the charts: other versions draw the same figures in other bytes."""
    return f"virnuc, matplotlib {version('matplotlib')}"


def all_charts(report: Report) -> list[tuple[str, str, str]]:
    """Title, description and SVG of every chart there is data for."""
    series, telemetry = report.charts, report.run.telemetry if report.run else None
    used = tuple(line for line in series.utilisation if any(value is not None for value in line.y))
    scaled = (report.scaling, _bands(report)) if report.scaling else None
    found = (
        ("Stages over time", "When each stage ran", _svg(_gantt, series.gantt)),
        (
            "Utilisation",
            "GPU and CPU utilisation over the run",
            _svg(_utilisation, (*used, *filter(None, [series.cpu]))),
        ),
        ("Throughput", "Tokens per second over the run", _svg(_throughput, series.throughput)),
        ("Scaling", "Speed-up against number of devices", _svg(_scaling, scaled)),
        ("Queue states", "How ready the next batch was", _svg(_queue, telemetry.queue if telemetry else None)),
        ("Read lengths", "Reads by length", _svg(_lengths, series.read_lengths)),
        ("Scores", "Rows by score of virus", _svg(_scores, series.scores)),
        ("History", "Earlier runs like this one", history(report.history)),
    )
    return [(title, what, svg) for title, what, svg in found if svg is not None]


def history(points: Sequence[HistoryPoint]) -> str | None:
    """Total time of the runs like this one, oldest first, as SVG; `None` with fewer than two."""
    known = tuple(point for point in points if point.total_s is not None)
    return _svg(_history, known) if len(known) > 1 else None


@lru_cache(maxsize=32)  # drawing is pure and slow, and a report is rendered several times
def _svg(draw: Callable[[Axes, Any], float], data: object) -> str | None:
    """What `draw(axes, data)` draws; it returns the height in inches. `None` without data."""
    if not data:
        return None
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, WIDTH_IN), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        figure.set_figheight(draw(axes, data))
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, borderaxespad=0.2)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue().decode("utf-8")


def _plot(axes: Axes, line: Line, colour: str, label: str = "", style: str = "-") -> None:
    values = [float("nan") if value is None else value for value in line.y]
    marker = "o" if len(values) < 3 else None
    axes.plot(line.x, values, style, color=colour, label=label, linewidth=1.4, marker=marker, markersize=4)


def _from_zero(axes: Axes, values: Iterable[float | None]) -> None:
    axes.set_ylim(0, 1.08 * max((value or 0.0 for value in values), default=0.0) or 1.0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _utilisation(axes: Axes, lines: tuple[Line, ...]) -> float:
    """One line a device, the CPU in grey."""
    for place, line in enumerate(lines):
        cpu = line.label == "CPU"
        label = line.label if len(line.label) <= 14 else f"{line.label[:12]}…"
        _plot(axes, line, FAINT if cpu else LINES[place % len(LINES)], label, "--" if cpu else "-")
    axes.set(ylim=(0, 105), xlabel=SECONDS, ylabel="percent")
    return 2.6


def _throughput(axes: Axes, line: Line) -> float:
    _plot(axes, line, LINES[0])
    _from_zero(axes, line.y)
    axes.set(xlabel=SECONDS, ylabel="tokens/s")
    return 2.2


def _gantt(axes: Axes, bars: tuple[Bar, ...]) -> float:
    """One line a stage, from its start to its end; pale where only its seconds were measured."""
    labels = list(dict.fromkeys(bar.label for bar in bars))
    for bar in bars:
        colour = LINES[0] if "ESM-2" in bar.label else LINES[1] if "DNABERT-S" in bar.label else FAINT
        length_s, alpha = bar.end_s - bar.start_s, 1.0 if bar.measured else 0.45
        axes.barh(labels.index(bar.label), length_s, left=bar.start_s, color=colour, height=0.62, alpha=alpha)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(left=min(0.0, *(bar.start_s for bar in bars)))
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(SECONDS + ("" if all(bar.measured for bar in bars) else "; pale: placed by order"))
    return 0.9 + 0.26 * len(labels)


def _bands(report: Report) -> tuple[tuple[int, float, float], ...]:
    """Devices, lowest and highest speed-up expected, up to the devices that ran."""
    most = max(found.num_gpus for found in report.scaling)
    bands = ((int(n), low, high) for n, (low, high) in report.profile.scaling_bands.items() if n.isdigit())
    return tuple(sorted(band for band in bands if band[0] <= most))


def _scaling(axes: Axes, data: tuple[tuple[ScalingMetrics, ...], tuple[tuple[int, float, float], ...]]) -> float:
    """Measured speed-up by number of devices, with the ideal and what people expect."""
    found, bands = data
    counts, speedups = [1, *(one.num_gpus for one in found)], [1.0, *(one.speedup for one in found)]
    axes.plot([1, max(counts)], [1, max(counts)], "--", color=FAINT, linewidth=1, label="ideal")
    for place, (n, low, high) in enumerate(bands):
        name = "expected" if place == 0 else None
        axes.plot([n, n], [low, high], color=LINES[2], alpha=0.35, linewidth=9, solid_capstyle="butt", label=name)
    axes.plot(counts, speedups, "o-", color=LINES[0], label="measured")
    for n, speedup in zip(counts, speedups, strict=True):
        axes.annotate(f"{speedup:.2f}x", (n, speedup), textcoords="offset points", xytext=(0, -16), ha="center")
    axes.set(xticks=sorted(set(counts)), xlim=(0.6, max(counts) + 0.3), xlabel="devices", ylabel="speed-up")
    axes.set_ylim(0, max(*speedups, *counts) * 1.15)
    return 2.8


def _queue(axes: Axes, found: QueueShares) -> float:
    left = 0.0
    for name, colour in (("full", LINES[2]), ("normal", LINES[5]), ("starved", RED)):
        percent = 100 * getattr(found, name)
        axes.barh(0, percent, left=left, color=colour, label=f"{name} {percent:.1f} %", height=0.5)
        left += percent
    axes.set(yticks=[], xlim=(0, 100), xlabel="percent of batches")
    return 1.25


def _lengths(axes: Axes, found: Histogram) -> float:
    axes.set(xlabel="read length (bases)", ylabel="reads")
    return _histogram(axes, found)


def _scores(axes: Axes, found: Histogram) -> float:
    axes.set(xlabel="score of virus", ylabel="rows")
    return _histogram(axes, found)


def _histogram(axes: Axes, found: Histogram) -> float:
    axes.stairs(found.counts, found.edges, fill=True, color=LINES[0])
    _from_zero(axes, found.counts)
    if len(found.counts) == 1:  # one bar would fill the width and say nothing
        axes.set_xlim(found.edges[0] - 10, found.edges[1] + 10)
    return 2.2


def _history(axes: Axes, known: tuple[HistoryPoint, ...]) -> float:
    totals = [point.total_s or 0.0 for point in known]
    axes.plot(range(len(known)), totals, "o-", color=LINES[0])
    places = list(range(0, len(known), -(-len(known) // 4)))
    axes.set_xticks(places, [f"{known[p].created[:10]}\n{known[p].commit[:7]}" for p in places])
    _from_zero(axes, totals)
    axes.set_ylabel("total time (s)")
    return 2.4
