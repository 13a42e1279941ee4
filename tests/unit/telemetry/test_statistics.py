"""What batches add up to: packing that cannot exceed 1, waits, states, windows over stalls and jumping clocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.telemetry.statistics import (
    batch_metrics,
    busiest,
    by_encoder,
    committed_tokens_per_s,
    device_busy,
    device_time_spread,
    embedding_span,
    queue_shares,
    windows,
)
from virnuc_core.telemetry.tables import QUEUE_STATES, BatchTable, DeviceSample, SampleTable, ShardTable

from .measurements import batch, shard

NO_SAMPLES = SampleTable.of([])


def test_packing_is_tokens_over_slots_tails_included() -> None:
    table = BatchTable.of([batch(0, tokens=1000), batch(1, tokens=1000), batch(2, tokens=100)])
    found = batch_metrics(table)
    assert found.packing_efficiency == pytest.approx(2100 / 3000)
    assert found.min_packing_efficiency == pytest.approx(0.1)
    assert found.batches_below_threshold == 1


@given(st.lists(st.tuples(st.integers(0, 4096), st.integers(1, 4096)), min_size=1))
def test_packing_is_never_above_one_for_batches_that_fit(sizes: list[tuple[int, int]]) -> None:
    table = BatchTable.of([batch(i, tokens=min(a, b), slots=b) for i, (a, b) in enumerate(sizes)])
    packing = batch_metrics(table).packing_efficiency
    assert packing is not None
    assert 0 <= packing <= 1


def test_nothing_launched_is_unknown_not_zero() -> None:
    found = batch_metrics(BatchTable.of([]))
    assert found.batches == 0
    assert found.packing_efficiency is None
    assert found.avg_wait_ms is None
    assert found.queue is None
    assert found.tokens_per_s is None
    assert embedding_span(BatchTable.of([])) is None
    assert windows(BatchTable.of([]), NO_SAMPLES, 30.0, 0.0) == ()


def test_a_batch_without_slots_divides_by_nothing() -> None:
    found = batch_metrics(BatchTable.of([batch(0, tokens=0, slots=0, rows=0)]))
    assert found.packing_efficiency is None
    assert found.min_packing_efficiency is None


def test_waits() -> None:
    found = batch_metrics(BatchTable.of([batch(i, wait_ms=float(i)) for i in range(101)]))
    assert (found.avg_wait_ms, found.p95_wait_ms, found.max_wait_ms) == (50, 95, 100)
    assert found.waiting_share == pytest.approx(99 / 101)


@pytest.mark.parametrize(("wait_ms", "state"), [(0.99, "full"), (1.0, "normal"), (50.0, "normal"), (50.1, "starved")])
def test_queue_states_by_their_limits(wait_ms: float, state: str) -> None:
    assert QUEUE_STATES[int(BatchTable.of([batch(0, wait_ms=wait_ms)]).queue_state[0])] == state


def test_queue_shares_add_up() -> None:
    shares = queue_shares(BatchTable.of([batch(i, wait_ms=w) for i, w in enumerate((0.2, 0.9, 1.0, 50.0, 50.1))]))
    assert shares is not None
    assert (shares.full, shares.normal, shares.starved) == pytest.approx((0.4, 0.4, 0.2))


def test_throughput_is_over_first_launch_to_last_finish() -> None:
    found = batch_metrics(BatchTable.of([batch(10.0), batch(12.0, device_ms=2000.0)]))
    assert found.span_s == pytest.approx(4.0)
    assert found.tokens_per_s == pytest.approx(1800 / 4)
    assert found.device_s == pytest.approx(2.1)


def test_warm_up_is_left_out_of_the_steady_rate() -> None:
    slow = [batch(i * 10.0) for i in range(10)]
    fast = [batch(100 + i * 0.1) for i in range(20)]
    found = batch_metrics(BatchTable.of([*slow, *fast]))
    assert found.steady_tokens_per_s == pytest.approx(20 * 900 / 2.0)
    assert batch_metrics(BatchTable.of(fast[:19])).steady_tokens_per_s is None, "too few to tell"


def test_encoders_are_told_apart() -> None:
    table = BatchTable.of([batch(0), batch(1, encoder="dnabert_s", tokens=100), batch(2, encoder="dnabert_s")])
    found = by_encoder(table)
    assert found["esm2"].batches == 1
    assert found["dnabert_s"].tokens == 1000


def test_windows_cut_the_run_and_lose_no_batch() -> None:
    table = BatchTable.of([batch(100 + i) for i in range(25)])
    cut = windows(table, NO_SAMPLES, 10.0, 100.0)
    assert [(w.start_s, w.end_s, w.batches) for w in cut] == [(0, 10, 10), (10, 20, 10), (20, 30, 5)]
    assert sum(w.tokens for w in cut) == int(table.tokens.sum())


def test_a_stall_is_one_empty_window() -> None:
    table = BatchTable.of([batch(0.0), batch(95.0)])
    cut = windows(table, NO_SAMPLES, 10.0, 0.0)
    assert [(w.start_s, w.end_s, w.batches) for w in cut] == [(0, 10, 1), (10, 90, 0), (90, 100, 1)]
    assert cut[1].packing_efficiency is None
    assert cut[1].tokens_per_s == 0


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30))
def test_a_jumping_clock_makes_no_flood_of_windows(moments: list[float]) -> None:
    table = BatchTable.of([batch(moment) for moment in moments])
    cut = windows(table, NO_SAMPLES, 30.0, 0.0)
    assert len(cut) <= 2 * len(moments)
    assert sum(w.batches for w in cut) == len(moments)


def test_a_window_carries_the_utilisation_of_its_time() -> None:
    samples = SampleTable.of([DeviceSample(float(i), "GPU-a", 10.0 * i, None, None, None) for i in range(10)])
    (first, second) = windows(BatchTable.of([batch(0.0), batch(5.0)]), samples, 5.0, 0.0)
    assert first.gpu_util == {"GPU-a": pytest.approx(25.0)}
    assert second.gpu_util == {"GPU-a": pytest.approx(70.0)}


def test_a_window_of_no_length_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        windows(BatchTable.of([]), NO_SAMPLES, 0.0, 0.0)


def test_the_busiest_device_and_the_spread() -> None:
    shards = ShardTable.of(
        [shard(0, [batch(0)], esm2_s=3.0), shard(1, [batch(1, device="GPU-b")], device="GPU-b", esm2_s=2.0)]
    )
    busy = device_busy(shards)
    assert [b.busy_s for b in busy] == pytest.approx([3.6, 2.6])
    most = busiest(busy)
    assert most is not None
    assert most.device == "GPU-a"
    assert device_time_spread(busy) == pytest.approx(1 - 2.6 / 3.6)
    assert device_time_spread(busy[:1]) is None
    assert busiest(()) is None


def test_tables_tell_what_is_wrong_with_columns() -> None:
    good = BatchTable.of([batch(0)])
    columns = good.data
    with pytest.raises(ValueError, match="no column wait_ms"):
        BatchTable.from_columns(("GPU-a",), {k: v for k, v in columns.items() if k != "wait_ms"})
    with pytest.raises(ValueError, match="different lengths"):
        BatchTable.from_columns(("GPU-a",), {**columns, "tokens": np.array([1, 2])})


def test_the_committed_rate_ends_with_the_last_commit() -> None:
    batches = [batch(0.0, tokens=900), batch(1.0, tokens=300)]
    done = ShardTable.of([shard(0, batches)])  # finished at 2.0, committed 0.2 s later
    assert committed_tokens_per_s(BatchTable.of(batches), done) == pytest.approx(1200 / 2.2)
    assert committed_tokens_per_s(BatchTable.of([]), done) is None
    assert committed_tokens_per_s(BatchTable.of(batches), ShardTable.of([])) is None
