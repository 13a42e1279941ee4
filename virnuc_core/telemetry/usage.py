"""What the samples say of each device: utilisation, memory, power, energy, and the alarms."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from virnuc_core.telemetry.tables import HostTable, SampleTable

log = logging.getLogger(__name__)

IDLE_BELOW_PERCENT: Final = 50.0
IDLE_FOR_S: Final = 10.0
IMBALANCE_POINTS: Final = 10.0
JOULES_PER_KWH: Final = 3.6e6


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """One device between two moments. `None` where no sample tells."""

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


@dataclass(frozen=True, slots=True)
class HostStats:
    """The host between two moments."""

    cpu_percent_avg: float | None
    cpu_percent_max: float | None
    rss_peak_bytes: float | None
    disk_read_bytes: float | None
    disk_written_bytes: float | None
    sample_count: int


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something a person should look at."""

    kind: Literal["idle", "imbalance"]
    devices: tuple[str, ...]
    detail: str


def device_stats(samples: SampleTable, device: str, window: tuple[float, float] | None = None) -> DeviceStats:
    """Statistics of one device from `window[0]` to `window[1]` (seconds of the samples' clock), or of all samples."""
    own = samples.of_device(device)
    if window is not None:
        own = own.between(*window)
    known = own.utilisation[~np.isnan(own.utilisation)]
    return DeviceStats(
        device=device,
        gpu_util_avg=_mean(known),
        gpu_util_min=_least(known),
        gpu_util_max=_most(known),
        mem_used_avg=_mean(own.memory_used_bytes),
        mem_used_peak=_most(own.memory_used_bytes),
        power_avg_w=_mean(own.power_w),
        power_peak_w=_most(own.power_w),
        temperature_max_c=_most(own.temperature_c),
        energy_kwh=energy_kwh(own),
        sample_count=len(known),
    )


def energy_kwh(samples: SampleTable) -> float | None:
    """Energy of one device's samples, by the trapezoid rule; `None` with fewer than two power readings."""
    known = ~np.isnan(samples.power_w)
    if int(known.sum()) < 2:
        return None
    return float(np.trapezoid(samples.power_w[known], samples.time_s[known])) / JOULES_PER_KWH


def host_stats(samples: HostTable) -> HostStats:
    """Statistics of all host samples; disk figures are last minus first."""
    return HostStats(
        cpu_percent_avg=_mean(samples.cpu_percent),
        cpu_percent_max=_most(samples.cpu_percent),
        rss_peak_bytes=_most(samples.rss_bytes),
        disk_read_bytes=_growth(samples.disk_read_bytes),
        disk_written_bytes=_growth(samples.disk_write_bytes),
        sample_count=len(samples),
    )


def alarms(samples: SampleTable, window: tuple[float, float] | None) -> tuple[Alarm, ...]:
    """Devices that idled within the embedding window for `IDLE_FOR_S` or more, and devices far apart."""
    if window is None:
        return ()
    inside = samples.between(*window)
    found: list[Alarm] = []
    means: dict[str, float] = {}
    for device in inside.devices:
        own = inside.of_device(device)
        known = ~np.isnan(own.utilisation)
        if not known.any():
            continue
        times, utilisation = own.time_s[known], own.utilisation[known]
        means[device] = float(utilisation.mean())
        idle_s = _longest_below(times, utilisation, IDLE_BELOW_PERCENT)
        if idle_s >= IDLE_FOR_S:
            detail = f"gpu utilisation of {device} below {IDLE_BELOW_PERCENT:g} % for {idle_s:.0f} s while embedding"
            found.append(Alarm("idle", (device,), detail))
    if len(means) > 1:
        low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        if means[high] - means[low] > IMBALANCE_POINTS:
            detail = f"gpu utilisation of {low} is {means[low]:.1f} %, of {high} {means[high]:.1f} %: uneven load"
            found.append(Alarm("imbalance", (low, high), detail))
    return tuple(found)


def log_alarms(found: Sequence[Alarm]) -> None:
    """Say each alarm in the log."""
    for alarm in found:
        log.warning("%s", alarm.detail)


def _longest_below(times: NDArray[np.float64], values: NDArray[np.float64], limit: float) -> float:
    """Seconds of the longest unbroken stretch of samples under `limit`."""
    longest = 0.0
    began: float | None = None
    for moment, value in zip(times.tolist(), values.tolist(), strict=True):
        if value >= limit:
            began = None
        elif began is None:
            began = moment
        else:
            longest = max(longest, moment - began)
    return longest


def _known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[~np.isnan(values)]


def _mean(values: NDArray[np.float64]) -> float | None:
    known = _known(values)
    return float(known.mean()) if known.size else None


def _least(values: NDArray[np.float64]) -> float | None:
    known = _known(values)
    return float(known.min()) if known.size else None


def _most(values: NDArray[np.float64]) -> float | None:
    known = _known(values)
    return float(known.max()) if known.size else None


def _growth(values: NDArray[np.float64]) -> float | None:
    known = _known(values)
    return max(0.0, float(known[-1] - known[0])) if known.size > 1 else None
