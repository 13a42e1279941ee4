"""What the packed batches add up to: packing, waits, queue states, throughput, windows, stage seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from virnuc_core.telemetry.tables import ENCODERS, QUEUE_STATES, BatchTable, Floats, SampleTable, ShardTable

LOW_PACKING: Final = 0.80
WAITING_ABOVE_MS: Final = 1.0
WARM_UP_BATCHES: Final = 10


@dataclass(frozen=True, slots=True)
class QueueShares:
    """Share of batches in each queue state; they add up to 1."""

    full: float
    normal: float
    starved: float


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """Batches added up. What no batch tells is `None`; nothing is zero for want of data."""

    batches: int
    rows: int
    tokens: int  # real ones
    slots: int  # launched, tails included
    packing_efficiency: float | None  # tokens / slots, 0 to 1
    min_packing_efficiency: float | None  # of one batch
    batches_below_threshold: int  # packed under 80 %
    avg_wait_ms: float | None
    p95_wait_ms: float | None
    max_wait_ms: float | None
    queue: QueueShares | None
    waiting_share: float | None  # share of batches waited for longer than 1 ms
    device_s: float | None  # sum of device time; None when no batch has one
    span_s: float  # first launch to last finish
    tokens_per_s: float | None  # tokens / span
    rows_per_s: float | None
    steady_tokens_per_s: float | None  # the same without the first 10 batches of each device


@dataclass(frozen=True, slots=True)
class Window:
    """One stretch of the run. A stretch without any batch is one window, however long."""

    start_s: float  # since the run's start
    end_s: float
    batches: int
    rows: int
    tokens: int
    slots: int
    packing_efficiency: float | None
    tokens_per_s: float
    avg_wait_ms: float | None
    max_wait_ms: float | None
    starved: int
    gpu_util: dict[str, float]  # device -> mean; only devices with samples in the window


def summarise(table: BatchTable) -> BatchSummary:
    """Add up the batches of `table`."""
    count = len(table)
    tokens, slots, rows = int(table.tokens.sum()), int(table.slots.sum()), int(table.rows.sum())
    single = packing_of_each(table)
    span = embedding_window(table)
    span_s = 0.0 if span is None else span[1] - span[0]
    device_known = table.device_ms[~np.isnan(table.device_ms)]
    return BatchSummary(
        batches=count,
        rows=rows,
        tokens=tokens,
        slots=slots,
        packing_efficiency=tokens / slots if slots else None,
        min_packing_efficiency=float(np.nanmin(single)) if slots else None,
        batches_below_threshold=int((single < LOW_PACKING).sum()),
        avg_wait_ms=float(table.wait_ms.mean()) if count else None,
        p95_wait_ms=float(np.percentile(table.wait_ms, 95)) if count else None,
        max_wait_ms=float(table.wait_ms.max()) if count else None,
        queue=queue_shares(table),
        waiting_share=float((table.wait_ms > WAITING_ABOVE_MS).mean()) if count else None,
        device_s=float(device_known.sum()) / 1000.0 if device_known.size else None,
        span_s=span_s,
        tokens_per_s=tokens / span_s if span_s > 0 else None,
        rows_per_s=rows / span_s if span_s > 0 else None,
        steady_tokens_per_s=_steady(table),
    )


def packing_of_each(table: BatchTable) -> Floats:
    """Tokens over slots of each batch; NaN for a batch of no slot."""
    slots = table.slots.astype(np.float64)
    packing: Floats = np.divide(table.tokens, slots, out=np.full(len(table), np.nan), where=slots > 0)
    return packing


def queue_shares(table: BatchTable) -> QueueShares | None:
    """Share of each queue state; `None` without batches."""
    if not len(table):
        return None
    counts = np.bincount(table.queue_state, minlength=len(QUEUE_STATES)) / len(table)
    return QueueShares(float(counts[0]), float(counts[1]), float(counts[2]))


def embedding_window(table: BatchTable) -> tuple[float, float] | None:
    """First launch and last finish of the batches, on the host's monotonic clock; `None` without batches."""
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
    span = embedding_window(steady)
    if span is None or span[1] <= span[0]:
        return None
    return float(steady.tokens.sum()) / (span[1] - span[0])


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


def _window(batches: BatchTable, samples: SampleTable, span: tuple[float, float], origin_s: float) -> Window:
    start_s, end_s = span
    summary = summarise(batches)
    inside = samples.between(origin_s + start_s, origin_s + end_s)
    utilisation = {}
    for device in inside.devices:
        own = inside.of_device(device).utilisation
        known = own[~np.isnan(own)]
        if known.size:
            utilisation[device] = float(known.mean())
    return Window(
        start_s=start_s,
        end_s=end_s,
        batches=summary.batches,
        rows=summary.rows,
        tokens=summary.tokens,
        slots=summary.slots,
        packing_efficiency=summary.packing_efficiency,
        tokens_per_s=summary.tokens / (end_s - start_s),
        avg_wait_ms=summary.avg_wait_ms,
        max_wait_ms=summary.max_wait_ms,
        starved=int((batches.queue_state == QUEUE_STATES.index("starved")).sum()),
        gpu_util=utilisation,
    )


@dataclass(frozen=True, slots=True)
class DeviceBusy:
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

    @property
    def busy_s(self) -> float:
        """Seconds of compute."""
        return self.dnabert_s + self.esm2_s + self.head_s + self.merge_s


def device_busy(shards: ShardTable) -> tuple[DeviceBusy, ...]:
    """Seconds of each device that has done a shard, in the order of the devices."""
    found = []
    for device in shards.devices:
        own = shards.of_device(device)
        if not len(own):
            continue
        found.append(
            DeviceBusy(
                device,
                len(own),
                float(own.dnabert_s.sum()),
                float(own.esm2_s.sum()),
                float(own.head_s.sum()),
                float(own.merge_s.sum()),
                float(own.commit_s.sum()),
                float(own.started_s.min()),
                float(own.finished_s.max()),
            )
        )
    return tuple(found)


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

    Unlike the rate over the embedding window it holds the commit of the last shard, which nothing hides.
    """
    if not len(table) or not len(shards):
        return None
    span_s = float((shards.finished_s + shards.commit_s).max() - table.launched_s.min())
    return float(table.tokens.sum()) / span_s if span_s > 0 else None


def by_encoder(table: BatchTable) -> dict[str, BatchSummary]:
    """Summary of each encoder that has batches."""
    found = {}
    for encoder in ENCODERS:
        own = table.of_encoder(encoder)
        if len(own):
            found[encoder] = summarise(own)
    return found
