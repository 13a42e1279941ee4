"""The series the charts show, thinned to a few hundred points."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.profiles import Profile
from virnuc_core.report.files import RawFolder
from virnuc_core.report.model import Bar, Charts, Histogram, Line, RunMetrics
from virnuc_core.rundir import RunDir
from virnuc_core.telemetry.log import Telemetry
from virnuc_core.telemetry.statistics import device_busy, embedding_span, windows
from virnuc_core.telemetry.tables import ENCODERS, STAGES

POINTS: Final = 240
SCORE_BINS: Final = 20
LENGTH_BINS: Final = 30
NO_CHARTS: Final = Charts(utilisation=(), cpu=None, gantt=(), read_lengths=None, scores=None, throughput=None)


def charts(raw: RawFolder, run: RunMetrics | None, measured: Telemetry | None, profile: Profile) -> Charts:
    """All series of the judged run; what was not measured is empty."""
    if run is None:
        return NO_CHARTS
    folder = RunDir(raw.root / run.name)
    lengths, scores = _column(raw, folder.reads_table, "length"), _column(raw, folder.predictions, "score2")
    seconds = {stage.name: stage.seconds for stage in run.stages if stage.seconds is not None}
    found = Charts(
        utilisation=(),
        cpu=None,
        gantt=tuple(_one_after_another(seconds, seconds, 0.0)),
        read_lengths=None if lengths is None else length_histogram(lengths),
        scores=None if scores is None else _histogram(*np.histogram(scores, SCORE_BINS, (0.0, 1.0))),
        throughput=None,
    )
    if measured is None:
        return found
    host, samples, origin_s = measured.host, measured.samples, measured.origin_s
    used = ((device, samples.of_device(device)) for device in samples.devices)
    series = {
        "utilisation": tuple(thin(name, own.time_s - origin_s, own.utilisation) for name, own in used if len(own)),
        "cpu": thin("CPU", host.time_s - origin_s, host.cpu_percent) if len(host) else None,
        "gantt": _gantt(seconds, measured),
        "throughput": _throughput(measured, profile.window_s),
    }
    return found.model_copy(update=series)


def thin(label: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> Line:
    """Means over at most `POINTS` stretches of equal count; a stretch with nothing known is `None`."""
    points = min(POINTS, len(x))
    stretch = np.repeat(np.arange(points), [len(part) for part in np.array_split(x, points or 1)][:points])
    means = pd.DataFrame({"x": x, "y": y}).groupby(stretch).mean().round(3)
    return Line(label=label, x=tuple(means["x"]), y=tuple(None if np.isnan(mean) else mean for mean in means["y"]))


def _throughput(measured: Telemetry, window_s: float) -> Line | None:
    span = embedding_span(measured.batches)
    if span is None:
        return None
    length = min(window_s, max((span[1] - span[0]) / 20, 0.05))
    cut = windows(measured.batches, measured.samples, length, measured.origin_s)
    middles = np.array([(w.start_s + w.end_s) / 2 for w in cut])
    return thin("tokens/s", middles, np.array([w.tokens_per_s for w in cut]))


def _gantt(seconds: dict[str, float], measured: Telemetry) -> tuple[Bar, ...]:
    """Every stage with seconds, encoders by device, in seconds since the run's start; staging was before it.

    A stage whose start was not measured stands where it must have been: staging ends as the run starts, results begin
    after the last shard.
    """
    known = {
        s.name: Bar(label=s.name, start_s=s.started_s - measured.origin_s, end_s=s.finished_s - measured.origin_s)
        for s in measured.stages
        if s.started_s is not None and s.finished_s is not None and s.finished_s >= s.started_s
    }
    encoders = _encoder_bars(measured) or tuple(known[name] for name in STAGES[4:6] if name in known)
    staging, results = (
        [name for name in part if name in seconds and name not in known] for part in (STAGES[:4], STAGES[6:])
    )
    last_s = max((bar.end_s for bar in (*encoders, *known.values())), default=0.0)
    placed = (
        *_one_after_another(staging, seconds, -sum(seconds[name] for name in staging)),
        *(known[name] for name in (*STAGES[:4], *STAGES[6:]) if name in known),
        *encoders,
        *_one_after_another(results, seconds, last_s),
    )
    return tuple(sorted(placed, key=lambda bar: bar.start_s))


def _one_after_another(names: Iterable[str], seconds: dict[str, float], start_s: float) -> list[Bar]:
    found = []
    for name in names:
        found.append(Bar(label=name, start_s=start_s, end_s=start_s + seconds[name], measured=False))
        start_s = found[-1].end_s
    return found


def _encoder_bars(measured: Telemetry) -> tuple[Bar, ...]:
    """Each encoder on each device, from its first batch launched to its last finished."""
    bars = []
    for place, busy in enumerate(device_busy(measured.shards), start=1):
        own = measured.batches.of_device(busy.device)
        for encoder, title in zip(ENCODERS, STAGES[4:6], strict=True):
            span = embedding_span(own.of_encoder(encoder))
            if span is not None:
                start_s, end_s = (moment - measured.origin_s for moment in span)
                bars.append(Bar(label=f"{title} on device {place}", start_s=start_s, end_s=end_s))
    return tuple(bars)


def _column(raw: RawFolder, path: Path, column: str) -> NDArray[np.float64] | None:
    """A column of a table of the run; `None` when the table is not there or holds no number."""
    if not path.is_file():
        return None
    raw.use(path)
    try:
        values = pd.read_csv(path, sep="\t", usecols=[column], quoting=3, na_filter=True)[column].dropna().to_numpy()
    except (ValueError, pd.errors.ParserError) as error:
        raw.problems[path.name] = (f"cannot be read: {error}",)
        return None
    return values if len(values) and np.issubdtype(values.dtype, np.number) else None


def length_histogram(values: NDArray[np.float64]) -> Histogram:
    """Lengths in bins of whole bases, over their range."""
    low, high = int(values.min()), int(values.max())
    width = max(1, -(-(high - low + 1) // LENGTH_BINS))
    return _histogram(*np.histogram(values, bins=np.arange(low, high + width + 1, width)))


def _histogram(counts: NDArray[np.intp], edges: NDArray[np.float64]) -> Histogram:
    return Histogram(edges=tuple(np.round(edges, 6).tolist()), counts=tuple(counts.tolist()))
