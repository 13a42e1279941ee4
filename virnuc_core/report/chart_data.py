"""The series the charts show, thinned to a few hundred points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.config import Profile
from virnuc_core.report.files import RawFolder
from virnuc_core.report.model import Bar, Charts, Histogram, Line, RunMetrics
from virnuc_core.rundir import RunDir
from virnuc_core.telemetry.batches import device_busy, embedding_window, windows
from virnuc_core.telemetry.clock import StageTime
from virnuc_core.telemetry.log import Telemetry
from virnuc_core.telemetry.records import STAGES

POINTS: Final = 240
SCORE_BINS: Final = 20
STAGING: Final = STAGES[:4]
ENCODER_STAGES: Final = STAGES[4:6]
RESULTS: Final = STAGES[6:]
LENGTH_BINS: Final = 30
NO_CHARTS: Final = Charts(utilisation=(), cpu=None, gantt=(), read_lengths=None, scores=None, throughput=None)


def charts(raw: RawFolder, run: RunMetrics | None, measured: Telemetry | None, profile: Profile) -> Charts:
    """All series of the judged run; what was not measured is empty."""
    if run is None:
        return NO_CHARTS
    folder = RunDir(raw.root / run.name)
    return Charts(
        utilisation=() if measured is None else _utilisation(measured),
        cpu=None if measured is None else _cpu(measured),
        gantt=_gantt(run, measured),
        read_lengths=_histogram(raw, folder.reads_table, "length"),
        scores=_histogram(raw, folder.predictions, "score2"),
        throughput=None if measured is None else _throughput(measured, profile.window_s),
    )


def _utilisation(measured: Telemetry) -> tuple[Line, ...]:
    found = []
    for device in measured.samples.devices:
        own = measured.samples.of_device(device)
        if len(own):
            times, values = thin(own.time_s - measured.origin_s, own.utilisation)
            found.append(Line(label=device, x=times, y=values))
    return tuple(found)


def _cpu(measured: Telemetry) -> Line | None:
    if not len(measured.host):
        return None
    times, values = thin(measured.host.time_s - measured.origin_s, measured.host.cpu_percent)
    return Line(label="CPU", x=times, y=values)


def _throughput(measured: Telemetry, window_s: float) -> Line | None:
    span = embedding_window(measured.batches)
    if span is None:
        return None
    length = min(window_s, max((span[1] - span[0]) / 20, 0.05))
    cut = windows(measured.batches, measured.samples, length, measured.origin_s)
    middles = np.array([(w.start_s + w.end_s) / 2 for w in cut])
    times, values = thin(middles, np.array([w.tokens_per_s for w in cut]))
    return Line(label="tokens/s", x=times, y=values)


def thin(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[tuple[float, ...], tuple[float | None, ...]]:
    """Means over at most `POINTS` stretches of equal count; a stretch with nothing known is `None`."""
    if not len(x):
        return (), ()
    parts = np.array_split(np.arange(len(x)), min(POINTS, len(x)))
    times, values = [], []
    for part in parts:
        known = y[part][~np.isnan(y[part])]
        times.append(round(float(x[part].mean()), 3))
        values.append(round(float(known.mean()), 3) if known.size else None)
    return tuple(times), tuple(values)


def _gantt(run: RunMetrics, measured: Telemetry | None) -> tuple[Bar, ...]:
    """Every stage with seconds, encoders by device, in seconds since the run's start; staging was before it.

    A stage whose start was not measured stands where it must have been: staging ends as the run starts, results begin
    after the last shard.
    """
    if measured is None:
        return ()
    known = {stage.name: bar for stage in measured.stages if (bar := _known(stage, measured.origin_s)) is not None}
    encoders = _encoder_bars(measured)
    last_s = max((bar.end_s for bar in (*encoders, *known.values())), default=0.0)
    seconds = {stage.name: stage.seconds for stage in run.stages if stage.seconds is not None}
    staging = [known[name] if name in known else _bar(name, seconds) for name in STAGING if name in seconds]
    before_s = sum(bar.end_s for bar in staging if not bar.measured)
    placed = _one_after_another([bar for bar in staging if not bar.measured], -before_s)
    results = [known[name] if name in known else _bar(name, seconds) for name in RESULTS if name in seconds]
    ending = _one_after_another([bar for bar in results if not bar.measured], last_s)
    measured_ones = [bar for bar in (*staging, *results) if bar.measured]
    middle = encoders or tuple(known[name] for name in ENCODER_STAGES if name in known)
    return (*sorted((*placed, *measured_ones, *middle, *ending), key=lambda bar: bar.start_s),)


def _known(stage: StageTime, origin_s: float) -> Bar | None:
    """A stage's bar, when its start and end were measured."""
    if stage.started_s is None or stage.finished_s is None or stage.finished_s < stage.started_s:
        return None
    return Bar(label=stage.name, start_s=stage.started_s - origin_s, end_s=stage.finished_s - origin_s)


def _bar(name: str, seconds: dict[str, float]) -> Bar:
    return Bar(label=name, start_s=0.0, end_s=seconds[name], measured=False)


def _one_after_another(bars: Sequence[Bar], start_s: float) -> list[Bar]:
    found = []
    for bar in bars:
        end_s = start_s + bar.end_s - bar.start_s
        found.append(bar.model_copy(update={"start_s": start_s, "end_s": end_s}))
        start_s = end_s
    return found


def _encoder_bars(measured: Telemetry) -> tuple[Bar, ...]:
    """Each encoder on each device, from its first batch launched to its last finished."""
    bars = []
    for number, busy in enumerate(device_busy(measured.shards), start=1):
        own = measured.batches.of_device(busy.device)
        for encoder, title in (("dnabert_s", "DNABERT-S"), ("esm2", "ESM-2")):
            span = embedding_window(own.of_encoder(encoder))
            if span is not None:
                start_s, end_s = (moment - measured.origin_s for moment in span)
                bars.append(Bar(label=f"{title} on device {number}", start_s=start_s, end_s=end_s))
    return tuple(bars)


def _histogram(raw: RawFolder, path: Path, column: str) -> Histogram | None:
    """Counts of a column of a table of the run; `None` when the table is not there or holds no number."""
    if not path.is_file():
        return None
    raw.use(path)
    try:
        values = pd.read_csv(path, sep="\t", usecols=[column], quoting=3, na_filter=True)[column].dropna().to_numpy()
    except (ValueError, pd.errors.ParserError) as error:
        raw.problems.append(f"{path.name} cannot be read: {error}")
        return None
    if not len(values) or not np.issubdtype(values.dtype, np.number):
        return None
    return score_histogram(values) if column == "score2" else length_histogram(values)


def score_histogram(values: NDArray[np.float64]) -> Histogram:
    """Scores from 0 to 1 in equal bins."""
    counts, edges = np.histogram(values, bins=SCORE_BINS, range=(0.0, 1.0))
    return _as_histogram(edges, counts)


def length_histogram(values: NDArray[np.float64]) -> Histogram:
    """Lengths in bins of whole bases, over their range."""
    low, high = int(values.min()), int(values.max())
    width = max(1, -(-(high - low + 1) // LENGTH_BINS))
    counts, edges = np.histogram(values, bins=np.arange(low, high + width + 1, width))
    return _as_histogram(edges, counts)


def _as_histogram(edges: Sequence[float] | NDArray[np.float64], counts: NDArray[np.intp]) -> Histogram:
    return Histogram(edges=tuple(round(float(e), 6) for e in edges), counts=tuple(int(c) for c in counts))
