"""What the tables of a run add up to: each number of its telemetry is computed here, and nowhere else.

A span is a pair of seconds on the host's monotonic clock, both ends included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import numpy as np
from pydantic import computed_field

from virnuc_core.runfiles import RunFile
from virnuc_core.telemetry.tables import (
    ENCODERS,
    QUEUE_STATES,
    BatchTable,
    Encoder,
    Floats,
    HostTable,
    SampleTable,
    ShardTable,
)

Span = tuple[float, float]

LOW_PACKING: Final = 0.80
WAITING_ABOVE_MS: Final = 1.0
WARM_UP_BATCHES: Final = 10
IDLE_BELOW_PERCENT: Final = 50.0
IDLE_FOR_S: Final = 10.0
IMBALANCE_POINTS: Final = 10.0
JOULES_PER_KWH: Final = 3.6e6


# --- batches ----------------------------------------------------------------------------------------------------------


class QueueShares(RunFile):
    """Share of batches in each queue state; they add up to 1."""

    full: float
    normal: float
    starved: float


class BatchCounts(RunFile):
    """What batches come to, whatever time they took. What no batch tells is `None`, never zero for want of data."""

    batches: int
    rows: int
    tokens: int  # real ones
    slots: int  # launched, tails included
    packing_efficiency: float | None  # tokens / slots, 0 to 1
    avg_wait_ms: float | None
    max_wait_ms: float | None


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


def _counts(table: BatchTable) -> BatchCounts:
    tokens, slots = int(table.tokens.sum()), int(table.slots.sum())
    return BatchCounts(
        batches=len(table),
        rows=int(table.rows.sum()),
        tokens=tokens,
        slots=slots,
        packing_efficiency=tokens / slots if slots else None,
        avg_wait_ms=_over(table.wait_ms, np.mean),
        max_wait_ms=_over(table.wait_ms, np.max),
    )


def batch_metrics(table: BatchTable) -> BatchMetrics:
    """Add up the batches of `table`."""
    counts, packing, span = _counts(table), table.packing, embedding_span(table)
    span_s = 0.0 if span is None else span[1] - span[0]
    device_ms = _over(table.device_ms, np.sum)
    return BatchMetrics(
        **dict(counts),
        min_packing_efficiency=_over(packing, np.min),
        batches_below_threshold=int((packing < LOW_PACKING).sum()),
        p95_wait_ms=_over(table.wait_ms, lambda waits: np.percentile(waits, 95)),
        queue=queue_shares(table),
        waiting_share=_over(table.wait_ms, lambda waits: (waits > WAITING_ABOVE_MS).mean()),
        device_s=None if device_ms is None else device_ms / 1000.0,
        span_s=span_s,
        tokens_per_s=counts.tokens / span_s if span_s > 0 else None,
        rows_per_s=counts.rows / span_s if span_s > 0 else None,
        steady_tokens_per_s=_steady(table),
    )


def by_encoder(table: BatchTable) -> dict[Encoder, BatchMetrics]:
    """The metrics of each encoder that has batches."""
    parts = {encoder: table.of_encoder(encoder) for encoder in ENCODERS}
    return {encoder: batch_metrics(own) for encoder, own in parts.items() if len(own)}


def queue_shares(table: BatchTable) -> QueueShares | None:
    """Share of each queue state; `None` without batches."""
    if not len(table):
        return None
    full, normal, starved = (np.bincount(table.queue_state, minlength=len(QUEUE_STATES)) / len(table)).tolist()
    return QueueShares(full=full, normal=normal, starved=starved)


def embedding_span(table: BatchTable) -> Span | None:
    """First launch and last finish of the batches; `None` without batches."""
    if not len(table):
        return None
    return float(table.launched_s.min()), float(max(table.finished_s.max(), table.launched_s.max()))


def _steady(table: BatchTable) -> float | None:
    """Tokens/s without warm-up; `None` when fewer than twice the warm-up batches are there on some device."""
    keep = np.zeros(len(table), dtype=np.bool_)
    for code in np.unique(table.device):
        own = np.flatnonzero(table.device == code)
        if len(own) < 2 * WARM_UP_BATCHES:
            return None
        keep[own[WARM_UP_BATCHES:]] = True
    steady = table.where(keep)
    span = embedding_span(steady)
    if span is None or span[1] <= span[0]:
        return None
    return float(steady.tokens.sum()) / (span[1] - span[0])


class Window(BatchCounts):
    """One stretch of the run. A stretch without any batch is one window, however long."""

    start_s: float  # since the run's start
    end_s: float
    tokens_per_s: float
    starved: int
    gpu_util: dict[str, float]  # device -> mean; only devices with samples in the window


def windows(table: BatchTable, samples: SampleTable, window_s: float, origin_s: float) -> tuple[Window, ...]:
    """Cut the run into windows of `window_s` from `origin_s`; a batch belongs to the window it was launched in.

    Empty windows in a row become one, so that a stall is seen and a jump of the clock cannot make millions of them.
    """
    if window_s <= 0:
        raise ValueError(f"window length must be above 0 s (given {window_s})")
    numbers = np.floor((table.launched_s - origin_s) / window_s).astype(np.int64)
    found: list[Window] = []
    expected = int(numbers.min()) if numbers.size else 0
    for number in np.unique(numbers).tolist():
        if number > expected:
            nothing = table.where(np.zeros(len(table), dtype=np.bool_))
            found.append(_window(nothing, samples, (expected * window_s, number * window_s), origin_s))
        launched = table.where(numbers == number)
        found.append(_window(launched, samples, (number * window_s, (number + 1) * window_s), origin_s))
        expected = number + 1
    return tuple(found)


def _window(batches: BatchTable, samples: SampleTable, span: Span, origin_s: float) -> Window:
    start_s, end_s = span
    inside = samples.between(origin_s + start_s, origin_s + end_s)
    means = {device: _over(inside.of_device(device).utilisation, np.mean) for device in inside.devices}
    counts = _counts(batches)
    return Window(
        **dict(counts),
        start_s=start_s,
        end_s=end_s,
        tokens_per_s=counts.tokens / (end_s - start_s),
        starved=int((batches.queue_state == QUEUE_STATES.index("starved")).sum()),
        gpu_util={device: mean for device, mean in means.items() if mean is not None},
    )


# --- shards -----------------------------------------------------------------------------------------------------------


class DeviceBusy(RunFile):
    """Seconds one device spent on shards."""

    device: str
    shards: int
    dnabert_s: float
    esm2_s: float
    head_s: float
    merge_s: float
    commit_s: float
    first_started_s: float
    last_finished_s: float

    @computed_field  # type: ignore[prop-decorator]  # pydantic's own way
    @property
    def busy_s(self) -> float:
        """Seconds of compute."""
        return self.dnabert_s + self.esm2_s + self.head_s + self.merge_s


def device_busy(shards: ShardTable) -> tuple[DeviceBusy, ...]:
    """Seconds of each device that has done a shard, in the order of the devices."""
    parts = ("dnabert_s", "esm2_s", "head_s", "merge_s", "commit_s")
    return tuple(
        DeviceBusy(
            device=device,
            shards=len(own),
            first_started_s=float(own.started_s.min()),
            last_finished_s=float(own.finished_s.max()),
            **{name: float(own.data[name].sum()) for name in parts},
        )
        for device in shards.devices
        if len(own := shards.of_device(device))
    )


def busiest(busy: Sequence[DeviceBusy]) -> DeviceBusy | None:
    """The device with most seconds: its stage seconds are those a person would have waited for."""
    return max(busy, key=lambda b: b.busy_s, default=None)


def device_time_spread(busy: Sequence[DeviceBusy]) -> float | None:
    """1 − least ÷ most busy seconds over the devices; `None` with fewer than two devices or no time."""
    seconds = [b.busy_s for b in busy]
    if len(seconds) < 2 or max(seconds) <= 0:
        return None
    return 1.0 - min(seconds) / max(seconds)


def committed_tokens_per_s(table: BatchTable, shards: ShardTable) -> float | None:
    """Tokens over the time from the first launch to the last commit; `None` without batches or shards.

    Unlike the rate over the embedding span it holds the commit of the last shard, which nothing hides.
    """
    if not len(table) or not len(shards):
        return None
    span_s = float((shards.finished_s + shards.commit_s).max() - table.launched_s.min())
    return float(table.tokens.sum()) / span_s if span_s > 0 else None


# --- samples ----------------------------------------------------------------------------------------------------------


class DeviceUsage(RunFile):
    """One device within a span. `None` where no sample tells."""

    device: str
    gpu_util_avg: float | None  # percent
    gpu_util_min: float | None
    gpu_util_max: float | None
    mem_used_avg: float | None  # bytes
    mem_used_peak: float | None
    power_avg_w: float | None
    power_peak_w: float | None
    temperature_max_c: float | None
    energy_kwh: float | None
    sample_count: int  # samples that tell the utilisation


class HostUsage(RunFile):
    """The host over a run."""

    cpu_percent_avg: float | None
    cpu_percent_max: float | None
    rss_peak_bytes: float | None
    disk_read_bytes: float | None
    disk_written_bytes: float | None
    sample_count: int


class Alarm(RunFile):
    """Something a person should look at."""

    kind: Literal["idle", "imbalance"]
    devices: tuple[str, ...]
    detail: str


def device_usage(samples: SampleTable, device: str, span: Span | None = None) -> DeviceUsage:
    """What the samples within `span`, or all of them, say of one device."""
    own = samples.of_device(device)
    if span is not None:
        own = own.between(*span)
    return DeviceUsage(
        device=device,
        gpu_util_avg=_over(own.utilisation, np.mean),
        gpu_util_min=_over(own.utilisation, np.min),
        gpu_util_max=_over(own.utilisation, np.max),
        mem_used_avg=_over(own.memory_used_bytes, np.mean),
        mem_used_peak=_over(own.memory_used_bytes, np.max),
        power_avg_w=_over(own.power_w, np.mean),
        power_peak_w=_over(own.power_w, np.max),
        temperature_max_c=_over(own.temperature_c, np.max),
        energy_kwh=energy_kwh(own),
        sample_count=int((~np.isnan(own.utilisation)).sum()),
    )


def energy_kwh(samples: SampleTable) -> float | None:
    """Energy of one device's samples, by the trapezoid rule; `None` with fewer than two power readings."""
    known = ~np.isnan(samples.power_w)
    if int(known.sum()) < 2:
        return None
    return float(np.trapezoid(samples.power_w[known], samples.time_s[known])) / JOULES_PER_KWH


def host_usage(samples: HostTable) -> HostUsage:
    """What all host samples say; disk numbers are last minus first."""
    return HostUsage(
        cpu_percent_avg=_over(samples.cpu_percent, np.mean),
        cpu_percent_max=_over(samples.cpu_percent, np.max),
        rss_peak_bytes=_over(samples.rss_bytes, np.max),
        disk_read_bytes=_growth(samples.disk_read_bytes),
        disk_written_bytes=_growth(samples.disk_write_bytes),
        sample_count=len(samples),
    )


def alarms(samples: SampleTable, span: Span | None) -> tuple[Alarm, ...]:
    """Devices that idled within the embedding span for `IDLE_FOR_S` or more, and devices far apart."""
    if span is None:
        return ()
    inside = samples.between(*span)
    found: list[Alarm] = []
    means: dict[str, float] = {}
    for device in inside.devices:
        own = inside.of_device(device)
        mean = _over(own.utilisation, np.mean)
        if mean is None:
            continue
        means[device] = mean
        idle_s = _longest_idle(own)
        if idle_s >= IDLE_FOR_S:
            detail = f"gpu utilisation of {device} below {IDLE_BELOW_PERCENT:g} % for {idle_s:.0f} s while embedding"
            found.append(Alarm(kind="idle", devices=(device,), detail=detail))
    if len(means) > 1:
        low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        if means[high] - means[low] > IMBALANCE_POINTS:
            detail = f"gpu utilisation of {low} is {means[low]:.1f} %, of {high} {means[high]:.1f} %: uneven load"
            found.append(Alarm(kind="imbalance", devices=(low, high), detail=detail))
    return tuple(found)


def _longest_idle(samples: SampleTable) -> float:
    """Seconds of one device's longest unbroken stretch of samples under `IDLE_BELOW_PERCENT`."""
    longest = 0.0
    began: float | None = None
    for moment, value in zip(samples.time_s.tolist(), samples.utilisation.tolist(), strict=True):
        if value >= IDLE_BELOW_PERCENT:
            began = None
        elif value < IDLE_BELOW_PERCENT:  # an unknown one neither begins nor breaks a stretch
            began = moment if began is None else began
            longest = max(longest, moment - began)
    return longest


def _over(values: Floats, number: Callable[[Floats], Any]) -> float | None:
    """A number over the values that are known; `None` when none is."""
    known = values[~np.isnan(values)]
    return float(number(known)) if known.size else None


def _growth(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return max(0.0, float(known[-1] - known[0])) if known.size > 1 else None
