"""The charts of a report: their series, thinned to a few hundred points, and their drawings as SVG.

The series are part of the report's data. The same data gives the same bytes of SVG.
"""

import io
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.profiles import Profile
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
from virnuc_core.report.sections import Chart
from virnuc_core.rundir import RunDir
from virnuc_core.telemetry.log import Telemetry
from virnuc_core.telemetry.statistics import QueueShares, embedding_span, windows
from virnuc_core.telemetry.tables import GPU_STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREY: Final = "#8c959f"
RED: Final = "#cf222e"
COLOURS: Final = (
    "#0969da",
    "#bc4c00",
    "#1a7f37",
    "#8250df",
    "#bf3989",
    "#9a6700",
    "#0550ae",
    "#6e7781",
)
BLUE, ORANGE, GREEN = COLOURS[:3]
OCHRE: Final = COLOURS[5]
# part of the page, because another version of matplotlib draws the same in other bytes
BAR_MARGIN: Final = 10  # beside a single bar, in units of the x axis
GENERATOR: Final = f"virnuc, matplotlib {version('matplotlib')}"
TIME_LABEL: Final = "seconds since the start"
CPU: Final = "CPU"
MAX_POINTS: Final = 240  # of a line
MAX_LENGTH_BINS: Final = 30
SCORE_EDGES: Final = 21
MIN_WINDOW_S: Final = 0.05
LABEL_WIDTH: Final = 14  # characters


# --- Series ---------------------------------------------------------------------------------------


def charts(
    raw: RawFolder, run: RunMetrics | None, telemetry: Telemetry | None, profile: Profile
) -> Charts:
    """Return the data of all charts of the judged run. Data that was not measured is empty.

    Nothing is drawn. The data is stored in `report.json`, so that the charts can be drawn again.

    Args:
        raw: The raw files of the validation.
        run: The judged run.
        telemetry: The telemetry of that run.
        profile: The profile. The throughput is shown in time windows of its length.
    """
    if run is None:
        return Charts()
    folder = RunDir(raw.root / run.name)
    lengths = _column(raw, folder.reads_table, "length")
    scores = _column(raw, folder.predictions, "score2")
    length_counts = None if lengths is None else _length_histogram(lengths)
    score_counts = None if scores is None else _score_histogram(scores)
    if telemetry is None:
        return Charts(read_lengths=length_counts, scores=score_counts)
    return Charts(
        utilisation=_utilisation_lines(telemetry),
        gantt=_stage_bars(telemetry),
        read_lengths=length_counts,
        scores=score_counts,
        throughput=_throughput_line(telemetry, profile.window_s),
    )


def _column(raw: RawFolder, path: Path, column: str) -> NDArray[np.float64] | None:
    """Return the numbers in a column of a table. None if the table or all numbers are missing."""
    table = raw.table(path, {column: "float64"})
    if table is None:
        return None
    numbers = table[column].dropna().to_numpy()
    return numbers if len(numbers) else None


def _length_histogram(lengths: NDArray[np.float64]) -> Histogram:
    """Return the number of reads by length, in at most about `MAX_LENGTH_BINS` equal bins."""
    shortest = int(lengths.min())
    longest = int(lengths.max())
    num_lengths = longest - shortest + 1
    # Division rounded up: the width of a bin in whole bases.
    width = max(1, -(-num_lengths // MAX_LENGTH_BINS))
    # The last edge must lie above the longest read.
    return _histogram(lengths, np.arange(shortest, longest + width + 1, width))


def _score_histogram(scores: NDArray[np.float64]) -> Histogram:
    """Return the number of rows by score, in equal bins from 0 to 1."""
    return _histogram(scores, np.linspace(0.0, 1.0, SCORE_EDGES))


def _histogram(values: NDArray[np.float64], edges: NDArray[Any]) -> Histogram:
    """Return the number of values between neighbouring edges."""
    counts, _ = np.histogram(values, edges)
    return Histogram(edges=tuple(np.round(edges, 6).tolist()), counts=tuple(counts.tolist()))


def _utilisation_lines(telemetry: Telemetry) -> tuple[Line, ...]:
    """Return the curves of utilisation over time: one for each GPU, then one for the processor."""
    lines = []
    for name, samples in telemetry.samples.groupby("device", observed=True):
        time_s = samples.time_s - telemetry.origin_s
        lines.append(_thin(str(name), time_s, samples.utilisation))
    host = telemetry.host
    if len(host):
        lines.append(_thin(CPU, host.time_s - telemetry.origin_s, host.cpu_percent))
    return tuple(lines)


def _throughput_line(telemetry: Telemetry, window_s: float) -> Line | None:
    """Return the tokens per second over the run, one point per time window.

    A window lasts `window_s` seconds or, in a short run, a twentieth of the run.
    """
    span = embedding_span(telemetry.batches)
    if span is None:
        return None
    twentieth_s = (span[1] - span[0]) / 20
    length_s = min(window_s, max(twentieth_s, MIN_WINDOW_S))
    parts = windows(telemetry.batches, length_s, telemetry.origin_s)
    middles_s = pd.Series([(part.start_s + part.end_s) / 2 for part in parts])
    rates = pd.Series([part.tokens_per_s for part in parts])
    return _thin("tokens/s", middles_s, rates)


def _thin(label: str, x: "pd.Series[float]", y: "pd.Series[float]") -> Line:
    """Reduce a line to at most `MAX_POINTS` points. Each is the mean of equally many points.

    A point without a known value is None.
    """
    num_points = min(MAX_POINTS, len(x))
    rows = np.arange(len(x))
    # `array_split` makes parts whose sizes differ by one at most.
    sizes = [len(part) for part in np.array_split(rows, num_points)]
    part_of_row = np.repeat(np.arange(num_points), sizes)
    table = pd.DataFrame({"x": x, "y": y})
    means = table.groupby(part_of_row).mean().round(3)
    heights: list[float | None] = []
    for mean in means["y"]:
        heights.append(None if np.isnan(mean) else mean)
    return Line(label=label, x=tuple(means["x"]), y=tuple(heights))


def _stage_bars(telemetry: Telemetry) -> tuple[Bar, ...]:
    """Return a bar for each stage, from its start to its end in seconds since the run's start.

    The two encoders have a bar for each device, from their first batch to their last. Stages
    without a start and an end have none.

    Returns:
        The bars, the earliest first.
    """
    bars = []
    for stage in telemetry.stages:
        if stage.name not in GPU_STAGES.values():
            bars.append(_bar(stage.name, stage.started_s, stage.finished_s, telemetry.origin_s))
    devices = telemetry.batches.groupby("device", observed=True)
    for place, (_, batches) in enumerate(devices, start=1):
        for encoder, title in GPU_STAGES.items():
            span = embedding_span(batches[batches.encoder == encoder])
            if span is not None:
                bars.append(_bar(f"{title} on device {place}", *span, telemetry.origin_s))
    known_bars = [bar for bar in bars if bar is not None]
    return tuple(sorted(known_bars, key=lambda bar: bar.start_s))


def _bar(label: str, start_s: float | None, end_s: float | None, origin_s: float) -> Bar | None:
    """Return a bar, or None if its start or end is unknown, or it would end before it starts."""
    if start_s is None or end_s is None or start_s > end_s:
        return None
    return Bar(label=label, start_s=start_s - origin_s, end_s=end_s - origin_s)


# --- Drawings -------------------------------------------------------------------------------------


def all_charts(report: Report) -> list[Chart]:
    """Draw the charts of a report. A chart without data is left out."""
    series = report.charts
    utilisation = tuple(line for line in series.utilisation if any(_known_values(line)))
    throughput = () if series.throughput is None else (series.throughput,)
    scaling = report.scaling[1:]  # the first is on one device
    # Number of devices, lowest and highest expected speed-up. All data is in tuples, because
    # drawings are remembered by their data.
    bands = tuple(sorted((int(n), *band) for n, band in report.profile.scaling_bands.items()))
    queue = None
    if report.run is not None and report.run.telemetry is not None:
        queue = report.run.telemetry.queue
    history = tuple(entry for entry in report.history if entry.total_s is not None)
    if len(history) < 2:  # one run makes no line
        history = ()
    charts = [
        _chart("Stages over time", "When each stage ran", _draw_gantt, series.gantt),
        _chart(
            "Utilisation",
            "GPU and CPU utilisation over the run",
            _draw_lines,
            utilisation,
            "percent",
        ),
        _chart("Throughput", "Tokens per second over the run", _draw_lines, throughput, "tokens/s"),
        _chart("Scaling", "Speed-up against number of devices", _draw_scaling, scaling, bands),
        _chart("Queue states", "How ready the next batch was", _draw_queue, queue),
        _chart(
            "Read lengths",
            "Reads by length",
            _draw_histogram,
            series.read_lengths,
            "read length (bases)",
            "reads",
        ),
        _chart(
            "Scores",
            "Rows by score of virus",
            _draw_histogram,
            series.scores,
            "score of virus",
            "rows",
        ),
        _chart("History", "Earlier runs like this one", _draw_history, history),
    ]
    return [chart for chart in charts if chart is not None]


def _known_values(line: Line) -> list[bool]:
    """Return one flag per point of a line: its value is known."""
    return [value is not None for value in line.y]


def _chart(
    title: str, description: str, draw: Callable[..., float], data: object, *options: object
) -> Chart | None:
    """Return a chart, or None if there is no data to draw.

    Args:
        title: Title of the chart.
        description: Text for people who cannot see the chart.
        draw: Function that draws the data, see `_svg`.
        data: The data, whose type `draw` knows.
        options: Further arguments of `draw`.
    """
    if not data:
        return None
    return Chart(title, description, _svg(draw, data, *options))


def import_matplotlib() -> None:
    """Import what drawings need of matplotlib, without its warning that there is no home directory.

    Its cache is in a temporary folder then, and the warning would stand in the output of every run.
    The level of its log is restored, because a notebook may use matplotlib as well.
    """
    matplotlib_log = logging.getLogger("matplotlib")
    level = matplotlib_log.level
    matplotlib_log.setLevel(logging.ERROR)
    try:
        import matplotlib.backends.backend_svg
        import matplotlib.figure  # noqa: F401 - the import itself warns
    finally:
        matplotlib_log.setLevel(level)


@lru_cache(maxsize=32)  # drawing is pure and slow, and a report is rendered several times
def _svg(draw: Callable[..., float], data: object, *options: object) -> str:
    """Return a drawing as the text of an SVG image.

    Args:
        draw: Function that draws `data` on matplotlib axes, and returns the height in inches that
            the figure needs.
        data: The data to draw. It must be hashable.
        options: Further arguments of `draw`.
    """
    import_matplotlib()
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(fname=Path(__file__).parent / "templates" / "charts.mplstyle"):
        # The figure is narrow so that its letters stay readable on a phone.
        figure = Figure(figsize=(4.8, 4.8), layout="constrained")
        FigureCanvasSVG(figure)  # attaches itself to the figure
        axes = figure.add_subplot()
        figure.set_figheight(draw(axes, data, *options))
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, borderaxespad=0.2)
        buffer = io.BytesIO()
        # Without date and version, equal data gives equal bytes.
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue().decode("utf-8")


def _scale_from_zero(axes: "Axes", values: Iterable[float | None]) -> None:
    """Set the y axis to begin at 0 and to end a little above the highest value."""
    highest = max((value or 0.0 for value in values), default=0.0)
    axes.set_ylim(0, 1.08 * highest or 1.0)  # an axis from 0 to 0 cannot be drawn
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _draw_lines(axes: "Axes", lines: Sequence[Line], unit: str) -> float:
    """Draw one or several lines over the seconds of a run.

    Percentages have one line per device with its name in the legend, and a grey line for the CPU.

    Returns:
        The height of the figure in inches.
    """
    is_percent = unit == "percent"
    for place, line in enumerate(lines):
        values = [float("nan") if value is None else value for value in line.y]
        label = ""
        if is_percent:
            label = line.label
            if len(label) > LABEL_WIDTH:
                label = f"{label[: LABEL_WIDTH - 2]}…"
        colour = COLOURS[place % len(COLOURS)]
        style = "-"
        if line.label == CPU:
            colour = GREY
            style = "--"
        axes.plot(
            line.x,
            values,
            style,
            color=colour,
            label=label,
            linewidth=1.4,
            marker="o" if len(values) < 3 else None,  # a line through one point is invisible
            markersize=4,
        )
    axes.set(xlabel=TIME_LABEL, ylabel=unit)
    if is_percent:
        axes.set_ylim(0, 105)
        return 2.6
    # Other units have a single line.
    _scale_from_zero(axes, lines[0].y)
    return 2.2


def _draw_gantt(axes: "Axes", bars: tuple[Bar, ...]) -> float:
    """Draw a horizontal bar for each stage, from its start to its end.

    Returns:
        The height of the figure in inches.
    """
    labels = list(dict.fromkeys(bar.label for bar in bars))
    for bar in bars:
        axes.barh(
            labels.index(bar.label),
            bar.end_s - bar.start_s,
            left=bar.start_s,
            color=_stage_colour(bar.label),
            height=0.62,
        )
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()  # the first bar on top
    axes.set_xlim(left=min(0.0, *(bar.start_s for bar in bars)))
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(TIME_LABEL)
    return 0.9 + 0.26 * len(labels)


def _stage_colour(label: str) -> str:
    """Return the colour of a stage's bar: blue and orange for the encoders, grey for all others."""
    if PROTEIN.title in label:
        return BLUE
    if DNA.title in label:
        return ORANGE
    return GREY


def _draw_scaling(
    axes: "Axes", figures: Sequence[ScalingMetrics], bands: Iterable[tuple[int, float, float]]
) -> float:
    """Draw the measured speed-up by number of devices, with the ideal and the expected ones.

    Args:
        axes: Where to draw.
        figures: The measurements on more than one device.
        bands: For each number of devices: the number, the lowest and the highest expected speed-up.

    Returns:
        The height of the figure in inches.
    """
    counts = [1] + [figure.num_gpus for figure in figures]
    speedups = [1.0] + [figure.speedup for figure in figures]
    most_devices = max(counts)
    axes.plot([1, most_devices], [1, most_devices], "--", color=GREY, linewidth=1, label="ideal")
    label: str | None = "expected"  # only the first band has a label: one entry in the legend
    for num_devices, low, high in bands:
        if num_devices > counts[-1]:  # more devices than any run had
            continue
        axes.plot(
            [num_devices, num_devices],
            [low, high],
            color=GREEN,
            alpha=0.35,
            linewidth=9,
            solid_capstyle="butt",
            label=label,
        )
        label = None
    axes.plot(counts, speedups, "o-", color=BLUE, label="measured")
    for num_devices, speedup in zip(counts, speedups, strict=True):
        axes.annotate(
            f"{speedup:.2f}x",
            (num_devices, speedup),
            textcoords="offset points",
            xytext=(0, -16),
            ha="center",
        )
    axes.set(
        xticks=sorted(set(counts)),
        xlim=(0.6, most_devices + 0.3),
        xlabel="devices",
        ylabel="speed-up",
    )
    axes.set_ylim(0, max(*speedups, *counts) * 1.15)
    return 2.8


def _draw_queue(axes: "Axes", queue: QueueShares) -> float:
    """Draw one bar with the shares of batches that were ready in time, just in time, or late.

    Returns:
        The height of the figure in inches.
    """
    left_edge = 0.0
    states = (
        ("full", queue.full, GREEN),
        ("normal", queue.normal, OCHRE),
        ("starved", queue.starved, RED),
    )
    for name, share, colour in states:
        percent = 100 * share
        axes.barh(
            0, percent, left=left_edge, color=colour, label=f"{name} {percent:.1f} %", height=0.5
        )
        left_edge += percent
    axes.set(yticks=[], xlim=(0, 100), xlabel="percent of batches")
    return 1.25


def _draw_histogram(axes: "Axes", histogram: Histogram, xlabel: str, ylabel: str) -> float:
    """Draw a histogram.

    Returns:
        The height of the figure in inches.
    """
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.stairs(histogram.counts, histogram.edges, fill=True, color=BLUE)
    _scale_from_zero(axes, histogram.counts)
    if len(histogram.counts) == 1:  # a single bar would otherwise fill the whole width
        axes.set_xlim(histogram.edges[0] - BAR_MARGIN, histogram.edges[1] + BAR_MARGIN)
    return 2.2


def _draw_history(axes: "Axes", entries: tuple[HistoryEntry, ...]) -> float:
    """Draw the total times of earlier runs. About four points are labelled with date and commit.

    Returns:
        The height of the figure in inches.
    """
    totals_s = [entry.total_s or 0.0 for entry in entries]
    axes.plot(range(len(entries)), totals_s, "o-", color=BLUE)
    step = -(-len(entries) // 4)  # division rounded up
    places = list(range(0, len(entries), step))
    axes.set_xticks(places, [_entry_label(entries[place]) for place in places])
    _scale_from_zero(axes, totals_s)
    axes.set_ylabel("total time (s)")
    return 2.4


def _entry_label(entry: HistoryEntry) -> str:
    """Return the date and the short commit of an earlier run, on two lines."""
    date = entry.created[:10]
    commit = entry.commit[:7]
    return f"{date}\n{commit}"
