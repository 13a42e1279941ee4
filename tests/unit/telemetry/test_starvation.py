"""GPU and CPU on one clock: who waited for whom."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import pytest

from virnuc_core.telemetry.starvation import Starvation, starvation
from virnuc_core.telemetry.statistics import record_table
from virnuc_core.telemetry.tables import DeviceSample, HostSample

WHOLE = (0.0, 1000.0)


def measured(
    gpu: Sequence[float | None],
    cpu: Sequence[float],
    core: Sequence[float | None] | None = None,
    device: str = "GPU-a",
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Samples of a device and of the host at the same moments, one second apart."""
    devices = [DeviceSample(float(i), device, level) for i, level in enumerate(gpu)]
    cores = core or cpu
    hosts = [
        HostSample(float(i), total, 1 << 20, busiest_core_percent=busiest)
        for i, (total, busiest) in enumerate(zip(cpu, cores, strict=True))
    ]
    return record_table(DeviceSample, devices), record_table(HostSample, hosts)


def judged(samples: pd.DataFrame, host: pd.DataFrame) -> Starvation:
    result = starvation(samples, host, WHOLE)
    assert result is not None
    return result


def test_a_busy_gpu_is_not_starved() -> None:
    result = judged(*measured([95.0] * 20, [99.0] * 20))
    assert result.verdict == "not starved", "the CPU may be busy, too"
    assert (result.moments, result.idle_share) == (20, 0.0)


def test_a_gpu_that_idles_beside_a_busy_cpu_blames_the_cpu() -> None:
    gpu = [95.0] * 15 + [10.0] * 5
    cpu = [40.0] * 15 + [97.0] * 4 + [20.0]
    result = judged(*measured(gpu, cpu))
    assert result.verdict == "CPU is the bottleneck"
    assert result.idle_share == pytest.approx(5 / 20)
    assert result.idle_cpu_busy_share == pytest.approx(4 / 20)


def test_one_core_at_its_limit_is_a_bottleneck_although_the_others_sleep() -> None:
    result = judged(*measured([20.0] * 20, [7.0] * 20, [100.0] * 20))
    assert result.verdict == "CPU is the bottleneck"
    assert (result.idle_cpu_busy_share, result.idle_core_busy_share) == (0.0, 1.0)


def test_a_gpu_that_idles_beside_an_idle_cpu_waits_for_something_else() -> None:
    assert judged(*measured([20.0] * 20, [7.0] * 20)).verdict == "waits for other things"


def test_of_several_gpus_the_least_used_one_counts() -> None:
    busy, host = measured([95.0] * 20, [99.0] * 20)
    idle, _ = measured([5.0] * 20, [99.0] * 20, device="GPU-b")
    both = pd.concat([busy, idle]).reset_index(drop=True)
    assert judged(both, host).verdict == "CPU is the bottleneck"


def test_only_the_time_of_embedding_counts() -> None:
    samples, host = measured([0.0] * 20 + [95.0] * 20, [99.0] * 40)
    result = starvation(samples, host, (20.0, 39.0))
    assert result is not None
    assert (result.verdict, result.moments) == ("not starved", 20)


@pytest.mark.parametrize(
    ("gpu", "device"),
    [
        ([5.0] * 9, "GPU-a"),  # too few
        ([None] * 20, "GPU-a"),  # not read
        ([5.0] * 20, "GPU-a@node7"),  # the host that is read is another machine
    ],
)
def test_what_cannot_be_told_is_not_judged(gpu: list[float | None], device: str) -> None:
    samples, host = measured(gpu, [99.0] * len(gpu), device=device)
    assert starvation(samples, host, WHOLE) is None


def test_a_run_that_embedded_nothing_is_not_judged() -> None:
    assert starvation(*measured([5.0] * 20, [99.0] * 20), None) is None
