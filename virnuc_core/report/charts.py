"""The charts of the report, as SVG text: the same data gives the same bytes.

Drawing is pure and slow, so each chart of the newest data is remembered.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from virnuc_core.report.model import (
    Bar,
    Histogram,
    HistoryPoint,
    Line,
    QueueMetrics,
    Report,
    RunMetrics,
    ScalingMetrics,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REMEMBERED: Final = 32
WIDTH_IN: Final = 4.8  # narrow, so that letters stay readable on a phone
INK: Final = "#24292f"
FAINT: Final = "#8c959f"
GRID: Final = "#d8dee4"
LINES: Final = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#9a6700", "#0550ae", "#6e7781")
STYLE: Final[dict[Any, Any]] = {
    "svg.hashsalt": "virnuc",
    "svg.fonttype": "none",  # text stays text: small files, sharp at any size
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.parse_math": False,  # names come from users: a dollar sign is a dollar sign
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2,
}


@contextmanager
def _figure(height_in: float, out: list[str]) -> Iterator[Axes]:
    """Axes to draw on; at the end the figure is appended to `out` as SVG text."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure.add_subplot()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    out.append(buffer.getvalue().decode("utf-8"))


def all_charts(report: Report) -> list[tuple[str, str, str]]:
    """Title, description and SVG of every chart there is data for."""
    series, run = report.charts, report.run
    found: list[tuple[str, str, str | None]] = [
        ("Stages over time", "When each stage ran", gantt(series.gantt or one_after_the_other(run))),
        ("Utilisation", "GPU and CPU utilisation over the run", utilisation(series.utilisation, series.cpu)),
        ("Throughput", "Tokens per second over the run", throughput(series.throughput)),
        ("Scaling", "Speed-up against number of devices", scaling(report.scaling, _bands(report))),
        ("Queue states", "How ready the next batch was", queue(run.telemetry.queue if run and run.telemetry else None)),
        ("Read lengths", "Reads by length", histogram(series.read_lengths, "read length (bases)", "reads")),
        ("Scores", "Rows by score of virus", histogram(series.scores, "score of virus", "rows")),
        ("History", "Earlier runs like this one", history(report.history)),
    ]
    return [(title, what, svg) for title, what, svg in found if svg is not None]


@lru_cache(maxsize=REMEMBERED)
def utilisation(lines: tuple[Line, ...], cpu: Line | None) -> str | None:
    """Utilisation over time, one line a device, the CPU in grey; `None` without samples."""
    shown = [line for line in lines if any(value is not None for value in line.y)]
    if not shown and cpu is None:
        return None
    out: list[str] = []
    with _figure(2.6, out) as axes:
        if cpu is not None:
            _draw(axes, cpu, FAINT, "CPU", style="--")
        for place, line in enumerate(shown):
            _draw(axes, line, LINES[place % len(LINES)], short(line.label))
        axes.set_ylim(0, 105)
        axes.set_xlabel("seconds since the start")
        axes.set_ylabel("percent")
        _legend(axes)
    return out[0]


def _draw(axes: Axes, line: Line, colour: str, label: str, style: str = "-") -> None:
    values = [float("nan") if value is None else value for value in line.y]
    marker = "o" if len(values) < 3 else None
    axes.plot(line.x, values, style, color=colour, label=label, linewidth=1.4, marker=marker, markersize=4)


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, borderaxespad=0.2)


def short(label: str) -> str:
    """A device's id, short enough for a legend."""
    return label if len(label) <= 14 else f"{label[:12]}…"


@lru_cache(maxsize=REMEMBERED)
def throughput(line: Line | None) -> str | None:
    """Tokens per second over time."""
    if line is None or not line.x:
        return None
    out: list[str] = []
    with _figure(2.2, out) as axes:
        _draw(axes, line, LINES[0], "tokens/s")
        axes.set_ylim(0, 1.08 * max((value or 0.0 for value in line.y), default=0.0) or 1.0)
        axes.set_xlabel("seconds since the start")
        axes.set_ylabel("tokens/s")
        _thousands(axes)
    return out[0]


def _thousands(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


@lru_cache(maxsize=REMEMBERED)
def gantt(bars: tuple[Bar, ...]) -> str | None:
    """One line a stage, from its start to its end; pale where only its seconds were measured."""
    if not bars:
        return None
    out: list[str] = []
    labels = list(dict.fromkeys(bar.label for bar in bars))
    with _figure(0.9 + 0.26 * len(labels), out) as axes:
        for bar in bars:
            place = labels.index(bar.label)
            colour = LINES[0] if "ESM-2" in bar.label else LINES[1] if "DNABERT-S" in bar.label else FAINT
            length_s = bar.end_s - bar.start_s
            axes.barh(place, length_s, left=bar.start_s, color=colour, height=0.62, alpha=1.0 if bar.measured else 0.45)
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.set_xlim(left=min(0.0, *(bar.start_s for bar in bars)))
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(
            "seconds since the start" + ("" if all(bar.measured for bar in bars) else "; pale: placed by order")
        )
    return out[0]


def one_after_the_other(run: RunMetrics | None) -> tuple[Bar, ...]:
    """Stages of which only the seconds are known, laid end to end."""
    bars, start_s = [], 0.0
    for stage in () if run is None else run.stages:
        if stage.seconds is not None:
            bars.append(Bar(label=stage.name, start_s=start_s, end_s=start_s + stage.seconds, measured=False))
            start_s += stage.seconds
    return tuple(bars)


def _bands(report: Report) -> tuple[tuple[int, float, float], ...]:
    """Devices, lowest and highest speed-up expected, up to the devices that ran."""
    most = max((figure.num_gpus for figure in report.scaling), default=0)
    bands = ((int(n), low, high) for n, (low, high) in report.profile.scaling_bands.items() if n.isdigit())
    return tuple(sorted(band for band in bands if band[0] <= most))


@lru_cache(maxsize=REMEMBERED)
def scaling(figures: tuple[ScalingMetrics, ...], bands: tuple[tuple[int, float, float], ...]) -> str | None:
    """Measured speed-up by number of devices, with the ideal and what people expect."""
    if not figures:
        return None
    counts = [1, *(figure.num_gpus for figure in figures)]
    speedups = [1.0, *(figure.speedup for figure in figures)]
    out: list[str] = []
    with _figure(2.8, out) as axes:
        axes.plot([1, max(counts)], [1, max(counts)], "--", color=FAINT, linewidth=1, label="ideal")
        for place, (n, low, high) in enumerate(bands):
            name = "expected" if place == 0 else None
            axes.plot([n, n], [low, high], color=LINES[2], alpha=0.35, linewidth=9, solid_capstyle="butt", label=name)
        axes.plot(counts, speedups, "o-", color=LINES[0], label="measured")
        for n, speedup in zip(counts, speedups, strict=True):
            axes.annotate(f"{speedup:.2f}x", (n, speedup), textcoords="offset points", xytext=(0, -16), ha="center")
        axes.set_xticks(sorted(set(counts)))
        axes.set_xlim(0.6, max(counts) + 0.3)
        axes.set_ylim(0, max(*speedups, *counts) * 1.15)
        axes.set_xlabel("devices")
        axes.set_ylabel("speed-up")
        _legend(axes)
    return out[0]


@lru_cache(maxsize=REMEMBERED)
def queue(found: QueueMetrics | None) -> str | None:
    """Shares of the three queue states."""
    if found is None:
        return None
    out: list[str] = []
    with _figure(1.25, out) as axes:
        left = 0.0
        parts = (("full", found.full, LINES[2]), ("normal", found.normal, LINES[5]))
        for name, share, colour in (*parts, ("starved", found.starved, "#cf222e")):
            axes.barh(0, 100 * share, left=left, color=colour, label=f"{name} {100 * share:.1f} %", height=0.5)
            left += 100 * share
        axes.set_yticks([])
        axes.set_xlim(0, 100)
        axes.set_xlabel("percent of batches")
        _legend(axes)
    return out[0]


@lru_cache(maxsize=REMEMBERED)
def histogram(found: Histogram | None, x_label: str, y_label: str) -> str | None:
    """Counts between edges."""
    if found is None or not sum(found.counts):
        return None
    out: list[str] = []
    with _figure(2.2, out) as axes:
        widths = [b - a for a, b in zip(found.edges, found.edges[1:], strict=False)]
        axes.bar(found.edges[:-1], found.counts, width=widths, align="edge", color=LINES[0], edgecolor="white")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if len(found.counts) == 1:  # one bar would fill the width and say nothing
            axes.set_xlim(found.edges[0] - 10, found.edges[1] + 10)
        _thousands(axes)
    return out[0]


@lru_cache(maxsize=REMEMBERED)
def history(points: tuple[HistoryPoint, ...]) -> str | None:
    """Total time of the runs like this one, oldest first; `None` with fewer than two."""
    known = [point for point in points if point.total_s is not None]
    if len(known) < 2:
        return None
    out: list[str] = []
    with _figure(2.4, out) as axes:
        axes.plot(range(len(known)), [point.total_s or 0.0 for point in known], "o-", color=LINES[0])
        step = -(-len(known) // 4)
        places = list(range(0, len(known), step))
        axes.set_xticks(places, [f"{known[p].created[:10]}\n{known[p].commit[:7]}" for p in places])
        axes.set_ylim(0, 1.08 * max(point.total_s or 0.0 for point in known) or 1.0)
        axes.set_ylabel("total time (s)")
    return out[0]
