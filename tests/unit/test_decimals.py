"""Numbers to text: exactly what `str` says, only sooner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from virnuc_core import decimals
from virnuc_core.decimals import shortest


def check(values: NDArray[np.float32]) -> None:
    texts = shortest(values)
    assert texts == list(map(str, values))
    assert np.array_equal(np.array(texts).astype(np.float32), values)


@given(st.lists(st.floats(0, 1, width=32), max_size=60))
def test_it_is_what_str_says(values: list[float]) -> None:
    check(np.array(values, dtype=np.float32))


@pytest.mark.parametrize("seed", range(3))
def test_it_is_what_str_says_all_over_the_range(seed: int) -> None:
    rng = np.random.default_rng(seed)
    low, high = np.array([1e-5, 1], dtype=np.float32).view(np.int32)
    check(rng.integers(low, high, 100_000).astype(np.int32).view(np.float32))  # every bit pattern alike
    check(rng.random(100_000, dtype=np.float32))
    check((1 - 10 ** rng.uniform(-7, -1, 50_000)).astype(np.float32))  # a confident head's scores
    check(np.round(rng.random(20_000), int(rng.integers(1, 7))).astype(np.float32))


def test_edges() -> None:
    powers = np.concatenate([2.0 ** -np.arange(30), 10.0 ** -np.arange(12)]).astype(np.float32)
    check(np.concatenate([powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(2))]))
    check(np.array([0.0, 1.0, 123.25, 1e20, 1e-40, -0.5], dtype=np.float32))
    assert shortest(np.array([np.nan], dtype=np.float32)) == ["nan"]
    assert shortest(np.array([], dtype=np.float32)) == []


def test_what_float64_cannot_decide_is_left_to_str(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decimals, "_UNSURE", 0.6)  # nothing is certain
    values = np.random.default_rng(1).random(1_000, dtype=np.float32)
    _, _, sure = decimals._digits(values.astype(np.float64), values)
    assert not sure.any()
    check(values)


def test_most_numbers_take_the_fast_way() -> None:
    values = np.random.default_rng(1).random(100_000, dtype=np.float32)
    usual = values[values >= decimals.LEAST]
    _, _, sure = decimals._digits(usual.astype(np.float64), usual)
    assert sure.mean() > 0.99
