"""Running totals of a run that goes on: what the live display and other watchers ask for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from virnuc_core.telemetry.batches import summarise
from virnuc_core.telemetry.log import dataloader_statistics
from virnuc_core.telemetry.records import BatchRecord, ShardDone
from virnuc_core.telemetry.sampler import Sampler
from virnuc_core.telemetry.tables import BatchTable
from virnuc_core.telemetry.usage import device_stats

RECENT_BATCHES = 2_000


@dataclass(frozen=True, slots=True)
class DeviceProgress:
    """What one device has done so far. `None` where nothing tells."""

    device: str
    rows: int
    tokens: int
    tokens_per_s: float | None
    gpu_util: float | None  # percent, newest sample
    packing_efficiency: float | None  # 0 to 1


class RunMonitor:
    """Totals by device, fed with each committed shard; safe to read from another thread."""

    def __init__(
        self, devices: Sequence[str], sampler: Sampler | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.devices = tuple(devices)
        self._sampler = sampler
        self._now = now
        self._started_s = now()
        self._lock = threading.Lock()
        self._rows = dict.fromkeys(self.devices, 0)
        self._tokens = dict.fromkeys(self.devices, 0)
        self._slots = dict.fromkeys(self.devices, 0)
        self._recent: list[BatchRecord] = []

    def add_shard(self, done: ShardDone) -> None:
        """Count a committed shard."""
        with self._lock:
            for totals, amount in (
                (self._rows, done.rows),
                (self._tokens, sum(b.tokens for b in done.batches)),
                (self._slots, sum(b.slots for b in done.batches)),
            ):
                totals[done.device] = totals.get(done.device, 0) + amount
            self._recent = [*self._recent, *done.batches][-RECENT_BATCHES:]

    def progress(self, device: str) -> DeviceProgress:
        """One device so far."""
        with self._lock:
            rows, tokens, slots = (part.get(device, 0) for part in (self._rows, self._tokens, self._slots))
        elapsed = self._now() - self._started_s
        sample = None if self._sampler is None else self._sampler.latest(device)
        return DeviceProgress(
            device,
            rows,
            tokens,
            tokens / elapsed if elapsed > 0 else None,
            None if sample is None else sample.utilisation,
            tokens / slots if slots else None,
        )

    def total(self) -> DeviceProgress:
        """All devices together; utilisation is their mean."""
        parts = [self.progress(device) for device in self.devices]
        with self._lock:
            tokens, slots = sum(self._tokens.values()), sum(self._slots.values())
            rows = sum(self._rows.values())
        rates = [p.tokens_per_s for p in parts if p.tokens_per_s is not None]
        known = [p.gpu_util for p in parts if p.gpu_util is not None]
        return DeviceProgress(
            "total",
            rows,
            tokens,
            sum(rates) if rates else None,
            sum(known) / len(known) if known else None,
            tokens / slots if slots else None,
        )

    def get_throughput(self) -> dict[str, float | None]:
        """Tokens and rows per second since the start."""
        total = self.total()
        elapsed = self._now() - self._started_s
        return {
            "tokens_per_sec": total.tokens_per_s,
            "sequences_per_sec": total.rows / elapsed if elapsed > 0 else None,
        }

    def get_dataloader_statistics(self) -> dict[str, Any]:
        """Waits, packing and queue states of the newest batches."""
        with self._lock:
            recent = list(self._recent)
        return dataloader_statistics(summarise(BatchTable.of(recent, self.devices)))

    def get_statistics(self) -> dict[str, dict[str, Any]]:
        """By device: utilisation (`gpu_util_avg` …), memory (`mem_used_avg`, `mem_used_peak`) and `sample_count`."""
        if self._sampler is None:
            return {}
        samples = self._sampler.samples()
        found = {}
        for device in self.devices:
            stats = device_stats(samples, device)
            found[device] = {
                name: getattr(stats, name)
                for name in (
                    "gpu_util_avg",
                    "gpu_util_min",
                    "gpu_util_max",
                    "mem_used_avg",
                    "mem_used_peak",
                    "sample_count",
                )
            }
        return found
