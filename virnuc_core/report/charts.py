"""The charts of the report: their series, thinned to a few hundred points, and the SVG text drawn of them.

The series stand in the report's data; the same data gives the same bytes of SVG."""

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.profiles import Profile
from virnuc_core.reads.subsets import read_table
from virnuc_core.report.model import (
    Bar,
    Charts,
    Histogram,
    HistoryEntry,
    Line,
    Report,
    RunMetrics,
    ScalingMetrics,
)
from virnuc_core.report.raw_files import RawFolder
from virnuc_core.rundir import RunDir
from virnuc_core.telemetry.log import Telemetry
from virnuc_core.telemetry.statistics import QueueShares, embedding_span, windows
from virnuc_core.telemetry.tables import GPU_STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAINT: Final = "#8c959f"
GENERATOR: Final = (
    f"virnuc, matplotlib {version('matplotlib')}"  # other versions draw the same in other bytes
)
LINES: Final = (
    "#0969da",
    "#bc4c00",
    "#1a7f37",
    "#8250df",
    "#bf3989",
    "#9a6700",
    "#0550ae",
    "#6e7781",
)
SECONDS: Final = "seconds since the start"


def charts(
    raw: RawFolder, run: RunMetrics | None, measured: Telemetry | None, profile: Profile
) -> Charts:
    """All series of the judged run; what was not measured is empty."""
    if run is None:
        return Charts()
    folder = RunDir(raw.root / run.name)
    lengths, scores = (
        _column(raw, folder.reads_table, "length"),
        _column(raw, folder.predictions, "score2"),
    )
    found: dict[str, Any] = {}
    if lengths is not None:  # in bins of whole bases, over their range
        low, high = int(lengths.min()), int(lengths.max())
        width = max(1, -(-(high - low + 1) // 30))
        found["read_lengths"] = _histogram(lengths, np.arange(low, high + width + 1, width))
    if scores is not None:
        found["scores"] = _histogram(scores, np.linspace(0.0, 1.0, 21))
    if measured is not None:
        devices, host = measured.samples.groupby("device", observed=True), measured.host
        used = {str(name): (own.time_s, own.utilisation) for name, own in devices}
        used |= {"CPU": (host.time_s, host.cpu_percent)} if len(host) else {}
        found["utilisation"] = tuple(
            _thin(name, x - measured.origin_s, y) for name, (x, y) in used.items()
        )
        found["gantt"] = _gantt(measured)
    if measured is not None and (span := embedding_span(measured.batches)) is not None:
        length_s = min(profile.window_s, max((span[1] - span[0]) / 20, 0.05))
        cut = windows(measured.batches, length_s, measured.origin_s)
        middles = pd.Series([(w.start_s + w.end_s) / 2 for w in cut])
        found["throughput"] = _thin("tokens/s", middles, pd.Series([w.tokens_per_s for w in cut]))
    return Charts(**found)


def _thin(label: str, x: "pd.Series[float]", y: "pd.Series[float]") -> Line:
    """Means over at most 240 stretches of equal count; a stretch with nothing known is `None`."""
    points = min(240, len(x))
    sizes = [len(part) for part in np.array_split(np.arange(len(x)), points)]
    means = (
        pd.DataFrame({"x": x, "y": y}).groupby(np.repeat(np.arange(points), sizes)).mean().round(3)
    )
    return Line(
        label=label,
        x=tuple(means["x"]),
        y=tuple(None if np.isnan(mean) else mean for mean in means["y"]),
    )


def _gantt(measured: Telemetry) -> tuple[Bar, ...]:
    """Rows of the stage table that have a start and an end, encoders by device, in seconds since the run's start."""
    titles, zero_s = GPU_STAGES.values(), measured.origin_s
    spans = [
        (one.name, one.started_s, one.finished_s)
        for one in measured.stages
        if one.name not in titles
    ]
    for place, (_, own) in enumerate(measured.batches.groupby("device", observed=True), start=1):
        for encoder, title in GPU_STAGES.items():
            spans.append(
                (
                    f"{title} on device {place}",
                    *(embedding_span(own[own.encoder == encoder]) or (None, None)),
                )
            )
    known = (
        (name, start, end)
        for name, start, end in spans
        if start is not None and end is not None and start <= end
    )
    bars = (
        Bar(label=name, start_s=start - zero_s, end_s=end - zero_s) for name, start, end in known
    )
    return tuple(sorted(bars, key=lambda bar: bar.start_s))


def _column(raw: RawFolder, path: Path, column: str) -> NDArray[np.float64] | None:
    """A column of a table of the run; `None` when the table is not there or holds no number."""
    table = raw.attempt(path, lambda path: read_table(path, {column: "float64"}))
    known = None if table is None else table[column].dropna().to_numpy()
    return None if known is None or not len(known) else known


def _histogram(values: NDArray[np.float64], edges: NDArray[Any]) -> Histogram:
    return Histogram(
        edges=tuple(np.round(edges, 6).tolist()),
        counts=tuple(np.histogram(values, edges)[0].tolist()),
    )


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing with what it shows."""

    title: str
    description: str
    svg: str


def all_charts(report: Report) -> list[Chart]:
    """Return every chart there is data for."""
    series, telemetry = report.charts, report.run.telemetry if report.run else None
    used = tuple(line for line in series.utilisation if any(value is not None for value in line.y))
    tokens, several = (series.throughput,) if series.throughput else (), report.scaling[1:]
    runs = tuple(run for run in report.history if run.total_s is not None)
    bands = tuple(sorted((int(n), *band) for n, band in report.profile.scaling_bands.items()))
    found = (
        ("Stages over time", "When each stage ran", _svg(_draw_gantt, series.gantt)),
        ("Utilisation", "GPU and CPU utilisation over the run", _svg(_draw_lines, used, "percent")),
        ("Throughput", "Tokens per second over the run", _svg(_draw_lines, tokens, "tokens/s")),
        ("Scaling", "Speed-up against number of devices", _svg(_draw_scaling, several, bands)),
        (
            "Queue states",
            "How ready the next batch was",
            _svg(_draw_queue, telemetry.queue if telemetry else None),
        ),
        (
            "Read lengths",
            "Reads by length",
            _svg(_draw_histogram, series.read_lengths, "read length (bases)", "reads"),
        ),
        (
            "Scores",
            "Rows by score of virus",
            _svg(_draw_histogram, series.scores, "score of virus", "rows"),
        ),
        (
            "History",
            "Earlier runs like this one",
            _svg(_draw_history, runs if len(runs) > 1 else ()),
        ),
    )
    return [Chart(title, what, svg) for title, what, svg in found if svg is not None]


@lru_cache(maxsize=32)  # drawing is pure and slow, and a report is rendered several times
def _svg(draw: Callable[..., float], data: object, *more: object) -> str | None:
    """What `draw(axes, data, *more)` draws; it returns the height in inches. `None` without data."""
    if not data:
        return None
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(fname=Path(__file__).parent / "templates" / "charts.mplstyle"):
        # narrow, so that letters stay readable on a phone
        figure = Figure(figsize=(4.8, 4.8), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        figure.set_figheight(draw(axes, data, *more))
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, borderaxespad=0.2)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue().decode("utf-8")


def _from_zero(axes: "Axes", values: Iterable[float | None]) -> None:
    axes.set_ylim(0, 1.08 * max((value or 0.0 for value in values), default=0.0) or 1.0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _draw_lines(axes: "Axes", lines: Sequence[Line], unit: str) -> float:
    """Values over the seconds of a run; of percentages one line a device, and the CPU in grey."""
    for place, line in enumerate(lines):
        values = [float("nan") if value is None else value for value in line.y]
        label = (
            ""
            if unit != "percent"
            else line.label
            if len(line.label) <= 14
            else f"{line.label[:12]}…"
        )
        colour, style = (FAINT, "--") if line.label == "CPU" else (LINES[place % len(LINES)], "-")
        marker = "o" if len(values) < 3 else None
        axes.plot(
            line.x,
            values,
            style,
            color=colour,
            label=label,
            linewidth=1.4,
            marker=marker,
            markersize=4,
        )
    axes.set(xlabel=SECONDS, ylabel=unit)
    if unit == "percent":
        axes.set_ylim(0, 105)
        return 2.6
    _from_zero(axes, lines[0].y)
    return 2.2


def _draw_gantt(axes: "Axes", bars: tuple[Bar, ...]) -> float:
    """One line a stage, from its start to its end."""
    labels = list(dict.fromkeys(bar.label for bar in bars))
    for bar in bars:
        colour = (
            LINES[0] if "ESM-2" in bar.label else LINES[1] if "DNABERT-S" in bar.label else FAINT
        )
        axes.barh(
            labels.index(bar.label),
            bar.end_s - bar.start_s,
            left=bar.start_s,
            color=colour,
            height=0.62,
        )
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(left=min(0.0, *(bar.start_s for bar in bars)))
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(SECONDS)
    return 0.9 + 0.26 * len(labels)


def _draw_scaling(
    axes: "Axes", found: Sequence[ScalingMetrics], bands: Iterable[tuple[int, float, float]]
) -> float:
    """Measured speed-up by number of devices, with the ideal and what people expect."""
    counts, speedups = [1, *(one.num_gpus for one in found)], [1.0, *(one.speedup for one in found)]
    axes.plot([1, max(counts)], [1, max(counts)], "--", color=FAINT, linewidth=1, label="ideal")
    for place, (n, low, high) in enumerate(band for band in bands if band[0] <= counts[-1]):
        name = "expected" if place == 0 else None
        axes.plot(
            [n, n],
            [low, high],
            color=LINES[2],
            alpha=0.35,
            linewidth=9,
            solid_capstyle="butt",
            label=name,
        )
    axes.plot(counts, speedups, "o-", color=LINES[0], label="measured")
    for n, speedup in zip(counts, speedups, strict=True):
        axes.annotate(
            f"{speedup:.2f}x",
            (n, speedup),
            textcoords="offset points",
            xytext=(0, -16),
            ha="center",
        )
    axes.set(
        xticks=sorted(set(counts)),
        xlim=(0.6, max(counts) + 0.3),
        xlabel="devices",
        ylabel="speed-up",
    )
    axes.set_ylim(0, max(*speedups, *counts) * 1.15)
    return 2.8


def _draw_queue(axes: "Axes", found: QueueShares) -> float:
    left = 0.0
    for name, colour in (("full", LINES[2]), ("normal", LINES[5]), ("starved", "#cf222e")):
        percent = 100 * getattr(found, name)
        axes.barh(0, percent, left=left, color=colour, label=f"{name} {percent:.1f} %", height=0.5)
        left += percent
    axes.set(yticks=[], xlim=(0, 100), xlabel="percent of batches")
    return 1.25


def _draw_histogram(axes: "Axes", found: Histogram, xlabel: str, ylabel: str) -> float:
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.stairs(found.counts, found.edges, fill=True, color=LINES[0])
    _from_zero(axes, found.counts)
    if len(found.counts) == 1:  # one bar would fill the width and say nothing
        axes.set_xlim(found.edges[0] - 10, found.edges[1] + 10)
    return 2.2


def _draw_history(axes: "Axes", known: tuple[HistoryEntry, ...]) -> float:
    totals = [point.total_s or 0.0 for point in known]
    axes.plot(range(len(known)), totals, "o-", color=LINES[0])
    places = list(range(0, len(known), -(-len(known) // 4)))
    axes.set_xticks(places, [f"{known[p].created[:10]}\n{known[p].commit[:7]}" for p in places])
    _from_zero(axes, totals)
    axes.set_ylabel("total time (s)")
    return 2.4
