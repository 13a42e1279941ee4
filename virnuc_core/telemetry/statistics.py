"""What the tables of a run add up to: each number of its telemetry is computed here, and nowhere else.

A table is a DataFrame with the fields of its record as columns (see `tables`). A device or an encoder is a category, a
missing number NaN; here what is not known becomes `None`."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Any, Final

import numpy as np
import pandas as pd

from virnuc_core.runfiles import RunFile
from virnuc_core.telemetry.tables import (
    ENCODERS,
    BatchRecord,
    DeviceSample,
    Encoder,
    HostSample,
    ShardDone,
    Span,
)

ORDER: Final = {
    BatchRecord: "launched_s",
    DeviceSample: "time_s",
    HostSample: "time_s",
    ShardDone: "finished_s",
}
QUEUE_STATES: Final = ("full", "normal", "starved")
FULL_BELOW_MS: Final = 1.0
STARVED_ABOVE_MS: Final = 50.0
LOW_PACKING: Final = 0.80
WARM_UP_BATCHES: Final = 10
IDLE_BELOW_PERCENT: Final = 50.0
IDLE_FOR_S: Final = 10.0
IMBALANCE_POINTS: Final = 10.0
JOULES_PER_KWH: Final = 3.6e6


def frame(kind: type[Any], records: Iterable[Any], devices: Sequence[str] = ()) -> pd.DataFrame:
    """The table of records of one kind, in the order of their times; `devices` stand first among its devices."""
    rows = sorted(records, key=attrgetter(ORDER[kind]))
    names = list(dict.fromkeys([*devices, *(row.device for row in rows if hasattr(row, "device"))]))
    types: dict[Any, Any] = {
        int: "int64",
        str: pd.CategoricalDtype(names),
        Encoder: pd.CategoricalDtype([*ENCODERS]),
    }
    columns = {
        field.name: types.get(field.type, "float64")
        for field in fields(kind)
        if field.name != "batches"
    }
    return pd.DataFrame(
        {name: pd.Series([getattr(r, name) for r in rows], dtype=t) for name, t in columns.items()}
    )


def none_if_nan(value: float) -> float | None:
    """A number, `None` for NaN: what pandas makes of nothing known."""
    return None if np.isnan(value) else float(value)


def _figures(kind: type[RunFile], table: pd.DataFrame) -> dict[str, float | None]:
    """The fields of a record that name, beside their type, a column of the table and what is made of it."""
    asked = {name: field.metadata for name, field in kind.model_fields.items() if field.metadata}
    return {
        name: none_if_nan(getattr(table[column], how)()) for name, (column, how) in asked.items()
    }


class QueueShares(RunFile):
    """Share of batches in each queue state."""

    full: float
    normal: float
    starved: float


class BatchCounts(RunFile):
    """What batches come to, whatever time they took. What no batch tells is `None`, never zero for want of data."""

    batches: int
    rows: int  # sequences, each once: ESM-2, which embeds them last, counts; of one encoder, what it embedded
    tokens: Annotated[int, "tokens", "sum"]  # real ones
    slots: Annotated[int, "slots", "sum"]  # launched, tails included
    packing_efficiency: float | None  # tokens / slots, 0 to 1
    avg_wait_ms: Annotated[float | None, "wait_ms", "mean"]
    max_wait_ms: Annotated[float | None, "wait_ms", "max"]


class BatchMetrics(BatchCounts):
    """Batches added up."""

    min_packing_efficiency: float | None  # of one batch
    batches_below_threshold: int  # packed under 80 %
    p95_wait_ms: float | None
    queue: QueueShares | None
    waiting_share: float | None  # share of batches waited for longer than 1 ms
    device_s: float | None  # sum of device time; None when no batch has one
    span_s: float  # first launch to last finish
    tokens_per_s: float | None  # tokens / span
    rows_per_s: float | None
    steady_tokens_per_s: float | None  # the same without the first 10 batches of each device


def packing(batches: pd.DataFrame) -> pd.Series:
    """Tokens over slots of each batch; NaN for a batch of no slot."""
    return batches.tokens / batches.slots.where(batches.slots > 0)


def queue_state(batches: pd.DataFrame) -> pd.Series:
    """How ready each batch was when the launch loop asked for it, as a category."""
    codes = (batches.wait_ms >= FULL_BELOW_MS).astype("int8") + (batches.wait_ms > STARVED_ABOVE_MS)
    return pd.Series(pd.Categorical.from_codes(codes, pd.Index(QUEUE_STATES)), index=batches.index)


def embedding_span(batches: pd.DataFrame) -> Span | None:
    """First launch, and last finish as far as known: launch plus device time. `None` without batches."""
    if batches.empty:
        return None
    finished_s = batches.launched_s + batches.device_ms.fillna(0.0) / 1000.0
    return float(batches.launched_s.min()), float(finished_s.max())


def _counts(batches: pd.DataFrame, counting: Encoder) -> BatchCounts:
    return BatchCounts(
        **_figures(BatchCounts, batches),
        batches=len(batches),
        rows=int(batches.rows[batches.encoder == counting].sum()),
        packing_efficiency=batches.tokens.sum() / batches.slots.sum()
        if batches.slots.any()
        else None,
    )


def batch_metrics(batches: pd.DataFrame, counting: Encoder = "esm2") -> BatchMetrics:
    """Add up the batches of a table; `counting`: whose rows are its sequences."""
    counts, packed, waits = _counts(batches, counting), packing(batches), batches.wait_ms
    launched_s, finished_s = embedding_span(batches) or (0.0, 0.0)
    span_s = finished_s - launched_s
    # the steady rate: none when a device has fewer than twice the batches of its warm-up
    by_device = batches.groupby("device", observed=True)
    enough = (by_device.size() >= 2 * WARM_UP_BATCHES).all()
    steady = batches[by_device.cumcount() >= (WARM_UP_BATCHES if enough else len(batches))]
    began, ended = embedding_span(steady) or (0.0, 0.0)
    return BatchMetrics(
        **dict(counts),
        min_packing_efficiency=none_if_nan(packed.min()),
        batches_below_threshold=int((packed < LOW_PACKING).sum()),
        p95_wait_ms=none_if_nan(float(waits.quantile(0.95))),
        queue=QueueShares(**queue_state(batches).value_counts(normalize=True))
        if counts.batches
        else None,
        waiting_share=none_if_nan(float((waits > FULL_BELOW_MS).mean())),
        device_s=none_if_nan(batches.device_ms.sum(min_count=1) / 1000.0),
        span_s=span_s,
        tokens_per_s=counts.tokens / span_s if span_s > 0 else None,
        rows_per_s=counts.rows / span_s if span_s > 0 else None,
        steady_tokens_per_s=float(steady.tokens.sum()) / (ended - began) if ended > began else None,
    )


def by_encoder(batches: pd.DataFrame) -> dict[Encoder, BatchMetrics]:
    """The metrics of each encoder that has batches."""
    parts = {encoder: batches[batches.encoder == encoder] for encoder in ENCODERS}
    return {encoder: batch_metrics(own, encoder) for encoder, own in parts.items() if len(own)}


class Window(BatchCounts):
    """One stretch of the run. A stretch without any batch is one window, however long."""

    start_s: float  # since the run's start
    end_s: float
    tokens_per_s: float | None  # None: no time passed
    starved: int
    gpu_util: dict[
        str, float
    ]  # device -> mean; only devices with samples in the window, where samples were given


def windows(
    batches: pd.DataFrame, window_s: float, origin_s: float, samples: pd.DataFrame | None = None
) -> tuple[Window, ...]:
    """Cut the run into windows of `window_s` from `origin_s`; a batch belongs to the window it was launched in. The
    first begins with the first launch, the last ends with the last finish. Empty windows in a row become one."""
    began, ended = embedding_span(batches) or (origin_s, origin_s)
    launched = dict(
        [*batches.groupby(np.floor((batches.launched_s - origin_s) / window_s).astype("int64"))]
    )
    bounds = sorted({bound for number in launched for bound in (number, number + 1)})
    found = []
    for first, end in pairwise(bounds):
        own = launched.get(first, batches[:0])
        start_s = began - origin_s if first == bounds[0] else first * window_s
        end_s = ended - origin_s if end == bounds[-1] else end * window_s
        counts = _counts(own, "esm2")
        inside = (
            None
            if samples is None
            else samples[samples.time_s.between(origin_s + start_s, origin_s + end_s)]
        )
        used = (
            {}
            if inside is None
            else inside.groupby("device", observed=True).utilisation.mean().dropna().to_dict()
        )
        rate = (
            counts.tokens / (end_s - start_s) if end_s - start_s > 1e-9 else None
        )  # less is no time to any clock
        told = {"start_s": start_s, "end_s": end_s, "tokens_per_s": rate, "gpu_util": used}
        found.append(
            Window(**dict(counts), **told, starved=int((own.wait_ms > STARVED_ABOVE_MS).sum()))
        )
    return tuple(found)


class DeviceBusy(RunFile):
    """Seconds one device spent on shards."""

    device: str
    shards: int
    tokens: int = 0  # of both encoders; none in files of older versions
    dnabert_s: Annotated[float, "dnabert_s", "sum"]
    esm2_s: Annotated[float, "esm2_s", "sum"]
    head_s: Annotated[float, "head_s", "sum"]
    commit_s: Annotated[float, "commit_s", "sum"]
    allocated_peak_bytes: Annotated[
        float | None, "allocated_bytes", "max"
    ]  # by torch, on it; None on a CPU
    busy_s: float  # of compute


def device_busy(shards: pd.DataFrame) -> tuple[DeviceBusy, ...]:
    """Seconds of each device that has done a shard, in the order of the devices."""
    return tuple(
        DeviceBusy(
            device=str(device),
            shards=len(own),
            tokens=int(own.protein_tokens.sum() + own.dna_tokens.sum()),
            **_figures(DeviceBusy, own),
            busy_s=own.dnabert_s.sum() + own.esm2_s.sum() + own.head_s.sum(),
        )
        for device, own in shards.groupby("device", observed=True)
    )


def device_time_spread(busy: Sequence[DeviceBusy]) -> float | None:
    """1 − least ÷ most busy seconds over the devices; `None` with fewer than two devices or no time."""
    seconds = [b.busy_s for b in busy]
    return 1.0 - min(seconds) / max(seconds) if len(seconds) > 1 and max(seconds) > 0 else None


def committed_span_s(batches: pd.DataFrame, shards: pd.DataFrame) -> float:
    """Seconds from the first launch to the last commit, which nothing hides; 0 without either."""
    return (
        none_if_nan((shards.finished_s + shards.commit_s).max() - batches.launched_s.min()) or 0.0
    )


class DeviceUsage(RunFile):
    """One device within a span. `None` where no sample tells."""

    device: str
    gpu_util_avg: Annotated[float | None, "utilisation", "mean"]  # percent
    gpu_util_min: Annotated[float | None, "utilisation", "min"]
    gpu_util_max: Annotated[float | None, "utilisation", "max"]
    mem_used_avg: Annotated[float | None, "memory_used_bytes", "mean"]
    mem_used_peak: Annotated[float | None, "memory_used_bytes", "max"]
    power_avg_w: Annotated[float | None, "power_w", "mean"]
    power_peak_w: Annotated[float | None, "power_w", "max"]
    temperature_max_c: Annotated[float | None, "temperature_c", "max"]
    energy_kwh: float | None  # by the trapezoid rule; None with fewer than two power readings
    sample_count: Annotated[int, "utilisation", "count"]  # samples that tell the utilisation


class HostUsage(RunFile):
    """The host over a run."""

    cpu_percent_avg: Annotated[float | None, "cpu_percent", "mean"]
    cpu_percent_max: Annotated[float | None, "cpu_percent", "max"]
    rss_peak_bytes: Annotated[float | None, "rss_bytes", "max"]
    sample_count: int


def device_usage(samples: pd.DataFrame, device: str, span: Span | None = None) -> DeviceUsage:
    """What the samples within `span`, or all of them, say of one device."""
    own = samples[(samples.device == device) & samples.time_s.between(*(span or (-np.inf, np.inf)))]
    metered = own[own.power_w.notna()]
    energy_kwh = (
        np.trapezoid(metered.power_w, metered.time_s) / JOULES_PER_KWH if len(metered) > 1 else None
    )
    return DeviceUsage(**_figures(DeviceUsage, own), device=device, energy_kwh=energy_kwh)


def host_usage(samples: pd.DataFrame) -> HostUsage:
    """What all host samples say."""
    return HostUsage(**_figures(HostUsage, samples), sample_count=len(samples))


def alarms(samples: pd.DataFrame, span: Span | None) -> tuple[str, ...]:
    """A sentence on each device that idled for `IDLE_FOR_S` or more within the embedding span; on devices far apart."""
    if span is None:
        return ()
    found = []
    told = samples[samples.time_s.between(*span) & samples.utilisation.notna()]
    for device, own in told.groupby("device", observed=True):
        idle = own.utilisation < IDLE_BELOW_PERCENT
        stretches = own.time_s[idle].groupby((~idle).cumsum()[idle])  # each unbroken one apart
        idle_s = (stretches.max() - stretches.min()).max()
        if idle_s >= IDLE_FOR_S:
            below = f"below {IDLE_BELOW_PERCENT:g} % for {idle_s:.0f} s while embedding"
            found.append(f"gpu utilisation of {device} {below}")
    means = told.groupby("device", observed=True).utilisation.mean()
    if len(means) and means.max() - means.min() > IMBALANCE_POINTS:
        high = f"of {means.idxmax()} {means.max():.1f} %"
        found.append(
            f"gpu utilisation of {means.idxmin()} is {means.min():.1f} %, {high}: uneven load"
        )
    return tuple(found)
