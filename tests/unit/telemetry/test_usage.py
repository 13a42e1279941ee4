"""Statistics, energy and alarms from samples that are known."""

from __future__ import annotations

import pytest

from virnuc_core.telemetry.statistics import alarms, device_usage, host_usage
from virnuc_core.telemetry.tables import DeviceSample, HostSample, HostTable, SampleTable


def samples(device: str, levels: list[float | None], *, power: float | None = 360.0, every_s: float = 1.0):
    return [DeviceSample(i * every_s, device, level, 1000 * (i + 1), power, 50.0 + i) for i, level in enumerate(levels)]


def test_each_device_has_its_own_mean() -> None:
    table = SampleTable.of([*samples("GPU-a", [90, 100, 95]), *samples("GPU-b", [10, 20, 30])])
    stats = {device: device_usage(table, device) for device in table.devices}
    assert (stats["GPU-a"].gpu_util_avg, stats["GPU-a"].gpu_util_min, stats["GPU-a"].gpu_util_max) == (95, 90, 100)
    assert stats["GPU-b"].gpu_util_avg == 20
    assert stats["GPU-b"].mem_used_peak == 3000
    assert stats["GPU-b"].temperature_max_c == 52
    assert stats["GPU-a"].sample_count == 3


def test_only_samples_inside_the_window_count() -> None:
    table = SampleTable.of(samples("GPU-a", [0, 0, 100, 100, 0]))
    stats = device_usage(table, "GPU-a", (2.0, 3.0))
    assert stats.gpu_util_avg == 100
    assert stats.sample_count == 2


def test_unknown_samples_are_no_zeros() -> None:
    table = SampleTable.of(samples("GPU-a", [None, 80, None], power=None))
    stats = device_usage(table, "GPU-a")
    assert stats.gpu_util_avg == 80
    assert stats.sample_count == 1
    assert stats.energy_kwh is None
    assert stats.power_avg_w is None


@pytest.mark.parametrize("device", ["GPU-a", "GPU-never-seen"])
def test_no_sample_no_number(device: str) -> None:
    stats = device_usage(SampleTable.of([], ("GPU-a",)), device)
    assert stats.gpu_util_avg is None
    assert stats.mem_used_peak is None
    assert stats.sample_count == 0


def test_an_hour_at_360_watts_is_0_36_kwh() -> None:
    table = SampleTable.of(samples("GPU-a", [90.0] * 3601))
    assert device_usage(table, "GPU-a").energy_kwh == pytest.approx(0.36)


def test_a_device_idle_for_ten_seconds_while_embedding_raises_an_alarm() -> None:
    levels = [95.0] * 20 + [30.0] * 12 + [95.0] * 20
    table = SampleTable.of(samples("GPU-a", levels))
    (alarm,) = alarms(table, (0.0, 51.0))
    assert alarm.kind == "idle"
    assert "GPU-a below 50 % for 11 s" in alarm.detail
    assert alarms(table, (32.0, 51.0)) == (), "idle outside the embedding window is nobody's business"


def test_a_short_dip_is_no_alarm() -> None:
    assert alarms(SampleTable.of(samples("GPU-a", [95, 20, 20, 95] * 10)), (0.0, 100.0)) == ()


def test_uneven_devices_raise_an_alarm() -> None:
    table = SampleTable.of([*samples("GPU-a", [95.0] * 9), *samples("GPU-b", [80.0] * 9)])
    (alarm,) = alarms(table, (0.0, 10.0))
    assert (alarm.kind, alarm.devices) == ("imbalance", ("GPU-b", "GPU-a"))


def test_no_window_no_alarm() -> None:
    assert alarms(SampleTable.of(samples("GPU-a", [0.0] * 100)), None) == ()


def test_host_figures_are_growth_and_peak() -> None:
    host = host_usage(HostTable.of(HostSample(i, 10.0 * i, 100 + i, 1000 * i, None) for i in range(4)))
    assert host.cpu_percent_avg == 15
    assert host.cpu_percent_max == 30
    assert host.rss_peak_bytes == 103
    assert host.disk_read_bytes == 3000
    assert host.disk_written_bytes is None


def test_a_host_never_sampled_tells_nothing() -> None:
    assert host_usage(HostTable.of([])).cpu_percent_avg is None
