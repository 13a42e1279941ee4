"""Whether GPUs stood idle while a run embedded, and whether the CPU was the reason.

The sampler reads all GPUs and the host at the same moments. Each such moment is one of three: the
GPUs are busy, a GPU idles while the CPU is busy, or a GPU idles and the CPU is not busy either.
"""

from typing import Final, Literal

import pandas as pd

from virnuc_core.runfiles import RunFile
from virnuc_core.telemetry.statistics import IDLE_BELOW_PERCENT
from virnuc_core.telemetry.tables import Span

CPU_BUSY_PERCENT: Final = 90.0  # of all cores of the run
# A core that is at its limit: a loader thread or the launch loop cannot go faster then, although
# the other cores have nothing to do.
CORE_BUSY_PERCENT: Final = 95.0
STARVED_SHARE: Final = 0.10  # of the moments; fewer idle moments are no starvation
MIN_MOMENTS: Final = 10

StarvationVerdict = Literal["not starved", "CPU is the bottleneck", "waits for other things"]


class Starvation(RunFile):
    """The moments at which GPUs and host were read while a run embedded, by what they showed."""

    moments: int
    # Shares of these moments, 0 to 1. Some GPU idles if it is below 50 % busy.
    idle_share: float  # some GPU idles
    idle_cpu_busy_share: float  # and all cores together are at 90 % or more
    idle_core_busy_share: float  # and some core is at 95 % or more, or all cores at 90 %
    verdict: StarvationVerdict


def starvation(samples: pd.DataFrame, host: pd.DataFrame, span: Span | None) -> Starvation | None:
    """Judge whether the GPUs of a run were starved, and by what.

    Args:
        samples: The samples of the devices.
        host: The samples of the host, which have the same times.
        span: The start and the end of the time in which the run embedded, or `None` if it embedded
            nothing.

    Returns:
        `None` if fewer than `MIN_MOMENTS` moments tell the use of both. A run on a CPU has none.
    """
    if span is None:
        return None
    # The host is this machine. It says nothing of devices of other machines (`GPU-…@node`).
    is_local = ~samples.device.astype(str).str.contains("@")
    in_span = samples[is_local & samples.time_s.between(*span)]
    # At each moment the least used GPU counts. A moment without any reading is left out.
    least_used = in_span.groupby("time_s").utilisation.min().dropna()
    moments = host.set_index("time_s").join(least_used.rename("gpu_percent"), how="inner")
    moments = moments[moments.cpu_percent.notna()]
    if len(moments) < MIN_MOMENTS:
        return None
    is_idle = moments.gpu_percent < IDLE_BELOW_PERCENT
    is_cpu_busy = moments.cpu_percent >= CPU_BUSY_PERCENT
    is_core_busy = is_cpu_busy | (moments.busiest_core_percent >= CORE_BUSY_PERCENT)
    idle_share = float(is_idle.mean())
    idle_core_busy_share = float((is_idle & is_core_busy).mean())
    return Starvation(
        moments=len(moments),
        idle_share=idle_share,
        idle_cpu_busy_share=float((is_idle & is_cpu_busy).mean()),
        idle_core_busy_share=idle_core_busy_share,
        verdict=_verdict(idle_share, idle_core_busy_share),
    )


def _verdict(idle_share: float, idle_core_busy_share: float) -> StarvationVerdict:
    """Return the verdict on the shares of moments at which a GPU idled, and a core was busy."""
    if idle_share < STARVED_SHARE:
        return "not starved"
    # The CPU is blamed if it was at its limit at most of the idle moments.
    if idle_core_busy_share >= idle_share / 2:
        return "CPU is the bottleneck"
    return "waits for other things"
