"""Packing: every row once, nothing over budget, almost no slot empty, and a row's company never changes its kernel."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virnuc_core.engine.loader import (
    SHAPE_DIVISORS,
    TokenRows,
    group_bounds,
    join,
    pack,
    packed,
    row_capacity,
    shapes,
)

lengths_and_budget = st.tuples(
    st.lists(st.integers(1, 1200), max_size=300), st.sampled_from([256, 1024, 4096])
)


@given(lengths_and_budget, st.sampled_from([SHAPE_DIVISORS, (1,)]))
@settings(max_examples=200, deadline=None)
def test_every_row_is_placed_once_and_fits(
    case: tuple[list[int], int], parts: tuple[int, ...]
) -> None:
    lengths, budget = case
    batches = pack(lengths, budget, parts)
    assert sorted(i for b in batches for i in b.rows.tolist()) == list(range(len(lengths)))
    for batch in batches:
        tokens = sum(lengths[i] for i in batch.rows)
        assert tokens == batch.tokens <= batch.slots
        assert len(batch.rows) <= row_capacity(batch.slots)
        assert batch.slots in shapes(budget, parts) or (
            len(batch.rows) == 1 and batch.slots % budget == 0
        )
        assert {*group_bounds(np.array(lengths)[batch.rows]).tolist()} == {batch.max_seqlen}


@given(lengths_and_budget)
@settings(max_examples=50, deadline=None)
def test_the_same_lengths_give_the_same_batches(case: tuple[list[int], int]) -> None:
    lengths, budget = case
    first_plan, second = pack(lengths, budget), pack(list(lengths), budget)
    assert [b.rows.tolist() for b in first_plan] == [b.rows.tolist() for b in second]


@pytest.mark.parametrize(("low", "high"), [(40, 52), (80, 102), (150, 168), (20, 60)])
def test_a_shard_of_reads_packs_to_99_percent(low: int, high: int) -> None:
    lengths = np.random.default_rng(1).integers(low, high + 1, size=262_144 // ((low + high) // 2))
    batches = pack(lengths, 16_384)
    assert sum(b.tokens for b in batches) / sum(b.slots for b in batches) >= 0.99


def test_a_row_longer_than_the_budget_travels_alone_in_a_multiple_of_it() -> None:
    batches = pack([5000, 30], 1024)
    assert [(b.slots, b.rows.tolist()) for b in batches] == [(5120, [0]), (64, [1])]


def test_nothing_to_pack_gives_no_batch() -> None:
    assert pack([], 1024) == []


@given(st.lists(st.integers(1, 200), min_size=1, max_size=80))
@settings(max_examples=100, deadline=None)
def test_filled_slots_hold_each_row_whole_and_the_rest_is_padding(lengths: list[int]) -> None:
    rows = [np.arange(n) + 1000 * i for i, n in enumerate(lengths)]
    starts = np.array([0, *np.cumsum(lengths)])
    for plan, batch in packed(TokenRows(np.concatenate(rows), starts), 512, pad=-7):
        cu = batch.cu_seqlens.tolist()
        assert len(cu) == row_capacity(batch.slots) + 1
        for place, row in enumerate(plan.rows.tolist()):
            assert batch.tokens[cu[place] : cu[place + 1]].tolist() == rows[row].tolist()
        assert set(cu[batch.rows :]) == {plan.tokens}
        assert (batch.tokens[plan.tokens :] == -7).all()


def test_joined_slices_equal_one_run() -> None:
    first_rows = TokenRows(np.array([1, 2, 3]), np.array([0, 1, 3]))
    second = TokenRows(np.array([4]), np.array([0, 1]))
    joined_rows = join([first_rows, second])
    assert joined_rows.tokens.tolist() == [1, 2, 3, 4]
    assert joined_rows.starts.tolist() == [0, 1, 3, 4]
