"""What batches add up to: packing that cannot exceed 1, waits, states, windows over stalls and jumping clocks."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from virnuc_core.telemetry.statistics import (
    alarms,
    batch_metrics,
    by_encoder,
    committed_span_s,
    device_busy,
    device_time_spread,
    device_usage,
    embedding_span,
    host_usage,
    queue_state,
    record_table,
    windows,
)
from virnuc_core.telemetry.tables import BatchRecord, DeviceSample, HostSample, ShardDone

from .measurements import batch, shard


def test_packing_is_tokens_over_slots_tails_included() -> None:
    table = record_table(
        BatchRecord, [batch(0, tokens=1000), batch(1, tokens=1000), batch(2, tokens=100)]
    )
    metrics = batch_metrics(table)
    assert metrics.packing_efficiency == pytest.approx(2100 / 3000)
    assert metrics.min_packing_efficiency == pytest.approx(0.1)
    assert metrics.batches_below_threshold == 1


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 4096), st.integers(1, 4096)), min_size=1))
def test_packing_is_never_above_one_for_batches_that_fit(sizes: list[tuple[int, int]]) -> None:
    table = record_table(
        BatchRecord, [batch(i, tokens=min(a, b), slots=b) for i, (a, b) in enumerate(sizes)]
    )
    packing = batch_metrics(table).packing_efficiency
    assert packing is not None
    assert 0 <= packing <= 1


def test_nothing_launched_is_unknown_not_zero() -> None:
    metrics = batch_metrics(record_table(BatchRecord, []))
    assert metrics.batches == 0
    assert metrics.packing_efficiency is None
    assert metrics.avg_wait_ms is None
    assert metrics.queue is None
    assert metrics.tokens_per_s is None
    assert embedding_span(record_table(BatchRecord, [])) is None
    assert windows(record_table(BatchRecord, []), 30.0, 0.0) == ()


def test_a_batch_without_slots_divides_by_nothing() -> None:
    metrics = batch_metrics(record_table(BatchRecord, [batch(0, tokens=0, slots=0, rows=0)]))
    assert metrics.packing_efficiency is None
    assert metrics.min_packing_efficiency is None


def test_waits() -> None:
    metrics = batch_metrics(
        record_table(BatchRecord, [batch(i, wait_ms=float(i)) for i in range(101)])
    )
    assert (metrics.avg_wait_ms, metrics.p95_wait_ms, metrics.max_wait_ms) == (50, 95, 100)
    assert metrics.waiting_share == pytest.approx(99 / 101)


@pytest.mark.parametrize(
    ("wait_ms", "state"), [(0.99, "full"), (1.0, "normal"), (50.0, "normal"), (50.1, "starved")]
)
def test_queue_states_by_their_limits(wait_ms: float, state: str) -> None:
    assert queue_state(record_table(BatchRecord, [batch(0, wait_ms=wait_ms)])).tolist() == [state]


def test_queue_shares_add_up() -> None:
    waits = (0.2, 0.9, 1.0, 50.0, 50.1)
    shares = batch_metrics(
        record_table(BatchRecord, [batch(i, wait_ms=w) for i, w in enumerate(waits)])
    ).queue
    assert shares is not None
    assert (shares.full, shares.normal, shares.starved) == pytest.approx((0.4, 0.4, 0.2))


def test_throughput_is_over_first_launch_to_last_finish() -> None:
    metrics = batch_metrics(record_table(BatchRecord, [batch(10.0), batch(12.0, device_ms=2000.0)]))
    assert metrics.span_s == pytest.approx(4.0)
    assert metrics.tokens_per_s == pytest.approx(1800 / 4)
    assert metrics.device_s == pytest.approx(2.1)


def test_warm_up_is_left_out_of_the_steady_rate() -> None:
    slow = [batch(i * 10.0) for i in range(10)]
    fast = [batch(100 + i * 0.1) for i in range(20)]
    metrics = batch_metrics(record_table(BatchRecord, [*slow, *fast]))
    assert metrics.steady_tokens_per_s == pytest.approx(20 * 900 / 2.0)
    assert batch_metrics(record_table(BatchRecord, fast[:19])).steady_tokens_per_s is None, (
        "too few to tell"
    )


def test_encoders_are_told_apart() -> None:
    table = record_table(
        BatchRecord,
        [batch(0), batch(1, encoder="dnabert_s", tokens=100), batch(2, encoder="dnabert_s")],
    )
    metrics = by_encoder(table)
    assert metrics["esm2"].batches == 1
    assert metrics["dnabert_s"].tokens == 1000


def test_windows_cut_the_run_and_lose_no_batch() -> None:
    table = record_table(BatchRecord, [batch(100 + i) for i in range(25)])
    cut = windows(table, 10.0, 100.0)
    assert [(w.start_s, round(w.end_s, 6), w.batches) for w in cut] == [
        (0, 10, 10),
        (10, 20, 10),
        (20, 24.1, 5),
    ]
    assert sum(w.tokens for w in cut) == int(table.tokens.sum())
    late = windows(table, 10.0, 93.0)
    assert [(w.start_s, w.batches) for w in late] == [(7, 3), (10, 10), (20, 10), (30, 2)], (
        "begins when the first batch does"
    )


def test_a_stall_is_one_empty_window() -> None:
    table = record_table(BatchRecord, [batch(0.0), batch(95.0)])
    cut = windows(table, 10.0, 0.0)
    assert [(w.start_s, w.end_s, w.batches) for w in cut] == [
        (0, 10, 1),
        (10, 90, 0),
        (90, 95.1, 1),
    ]
    assert cut[1].packing_efficiency is None
    assert cut[1].tokens_per_s == 0


@settings(max_examples=25)
@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30))
@example([0.0, -2.2250738585072014e-308])
def test_a_jumping_clock_makes_no_flood_of_windows(moments: list[float]) -> None:
    table = record_table(BatchRecord, [batch(moment) for moment in moments])
    cut = windows(table, 30.0, 0.0)
    assert len(cut) <= 2 * len(moments)
    assert sum(w.batches for w in cut) == len(moments)


def test_a_window_carries_the_utilisation_of_its_time() -> None:
    samples = record_table(
        DeviceSample,
        [DeviceSample(float(i), "GPU-a", 10.0 * i, None, None, None) for i in range(10)],
    )
    (first_window, second) = windows(
        record_table(BatchRecord, [batch(0.0), batch(5.0)]), 5.0, 0.0, samples
    )
    assert first_window.gpu_util == {"GPU-a": pytest.approx(25.0)}
    assert second.gpu_util == {"GPU-a": pytest.approx(50.0)}, "it ends with its last batch"


def test_the_spread_of_the_devices() -> None:
    shards = record_table(
        ShardDone,
        [
            shard(0, [batch(0)], protein_s=3.0),
            shard(1, [batch(1, device="GPU-b")], device="GPU-b", protein_s=2.0),
        ],
    )
    busy = device_busy(shards)
    assert [b.busy_s for b in busy] == pytest.approx([3.6, 2.6])
    assert device_time_spread(busy) == pytest.approx(1 - 2.6 / 3.6)
    assert device_time_spread(busy[:1]) is None


def test_the_committed_span_ends_with_the_last_commit() -> None:
    batches = [batch(0.0, tokens=900), batch(1.0, tokens=300)]
    shard_table = record_table(
        ShardDone, [shard(0, batches)]
    )  # finished at 2.0, committed 0.2 s later
    assert committed_span_s(record_table(BatchRecord, batches), shard_table) == pytest.approx(2.2)
    assert committed_span_s(record_table(BatchRecord, []), shard_table) == 0
    assert committed_span_s(record_table(BatchRecord, batches), record_table(ShardDone, [])) == 0


def samples(
    device: str, levels: list[float | None], *, power: float | None = 360.0, every_s: float = 1.0
):
    return [
        DeviceSample(i * every_s, device, level, 1000 * (i + 1), power, 50.0 + i)
        for i, level in enumerate(levels)
    ]


def test_each_device_has_its_own_mean() -> None:
    table = record_table(
        DeviceSample, [*samples("GPU-a", [90, 100, 95]), *samples("GPU-b", [10, 20, 30])]
    )
    stats = {device: device_usage(table, device) for device in ("GPU-a", "GPU-b")}
    assert (
        stats["GPU-a"].gpu_util_avg,
        stats["GPU-a"].gpu_util_min,
        stats["GPU-a"].gpu_util_max,
    ) == (95, 90, 100)
    assert stats["GPU-b"].gpu_util_avg == 20
    assert stats["GPU-b"].mem_used_peak == 3000
    assert stats["GPU-b"].temperature_max_c == 52
    assert stats["GPU-a"].sample_count == 3


def test_only_samples_inside_the_window_count() -> None:
    table = record_table(DeviceSample, samples("GPU-a", [0, 0, 100, 100, 0]))
    stats = device_usage(table, "GPU-a", (2.0, 3.0))
    assert stats.gpu_util_avg == 100
    assert stats.sample_count == 2


def test_unknown_samples_are_no_zeros() -> None:
    table = record_table(DeviceSample, samples("GPU-a", [None, 80, None], power=None))
    stats = device_usage(table, "GPU-a")
    assert stats.gpu_util_avg == 80
    assert stats.sample_count == 1
    assert stats.energy_kwh is None
    assert stats.power_avg_w is None


@pytest.mark.parametrize("device", ["GPU-a", "GPU-never-seen"])
def test_no_sample_no_number(device: str) -> None:
    stats = device_usage(record_table(DeviceSample, [], ("GPU-a",)), device)
    assert stats.gpu_util_avg is None
    assert stats.mem_used_peak is None
    assert stats.sample_count == 0


def test_an_hour_at_360_watts_is_0_36_kwh() -> None:
    table = record_table(DeviceSample, samples("GPU-a", [90.0] * 3601))
    assert device_usage(table, "GPU-a").energy_kwh == pytest.approx(0.36)


def counted(energies_j: list[float | None], limited: list[float | None]) -> list[DeviceSample]:
    """Samples of a device at 360 W that counts its energy, one a second."""
    return [
        DeviceSample(float(i), "GPU-a", 90.0, power_w=360.0, energy_j=energy, power_limited=limit)
        for i, (energy, limit) in enumerate(zip(energies_j, limited, strict=True))
    ]


def test_energy_is_that_of_the_devices_own_counter() -> None:
    table = record_table(DeviceSample, counted([1000.0, None, 1700.0, 9000.0], [1, 0, 1, 1]))
    usage = device_usage(table, "GPU-a", (0.0, 2.0))
    assert usage.energy_kwh == pytest.approx(700 / 3.6e6)
    assert usage.power_limited == pytest.approx(2 / 3)


def test_a_counter_that_began_again_is_not_taken() -> None:
    table = record_table(DeviceSample, counted([5000.0, 10.0, 400.0], [None] * 3))
    usage = device_usage(table, "GPU-a")
    assert usage.energy_kwh == pytest.approx(720 / 3.6e6), "two seconds at 360 W"
    assert usage.power_limited is None


def test_a_device_idle_for_ten_seconds_while_embedding_raises_an_alarm() -> None:
    levels = [95.0] * 20 + [30.0] * 12 + [95.0] * 20
    table = record_table(DeviceSample, samples("GPU-a", levels))
    (alarm,) = alarms(table, (0.0, 51.0))
    assert "GPU-a below 50 % for 11 s" in alarm
    assert alarms(table, (32.0, 51.0)) == (), (
        "idle outside the embedding window is nobody's business"
    )


def test_a_short_dip_is_no_alarm() -> None:
    assert (
        alarms(record_table(DeviceSample, samples("GPU-a", [95, 20, 20, 95] * 10)), (0.0, 100.0))
        == ()
    )


def test_uneven_devices_raise_an_alarm() -> None:
    table = record_table(
        DeviceSample, [*samples("GPU-a", [95.0] * 9), *samples("GPU-b", [80.0] * 9)]
    )
    (alarm,) = alarms(table, (0.0, 10.0))
    assert re.match("gpu utilisation of GPU-b is .*, of GPU-a .*: uneven load", alarm)


def test_no_window_no_alarm() -> None:
    assert alarms(record_table(DeviceSample, samples("GPU-a", [0.0] * 100)), None) == ()


def test_host_figures_are_mean_and_peak() -> None:
    host = host_usage(
        record_table(HostSample, [HostSample(i, 10.0 * i, 100 + i) for i in range(4)])
    )
    assert host.cpu_percent_avg == 15
    assert host.cpu_percent_max == 30
    assert host.rss_peak_bytes == 103


def test_a_host_never_sampled_tells_nothing() -> None:
    assert host_usage(record_table(HostSample, [])).cpu_percent_avg is None
