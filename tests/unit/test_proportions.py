"""Confidence intervals of shares, beside those of scipy."""

from __future__ import annotations

import pytest
from scipy.stats import binomtest

from virnuc_core.proportions import samples_needed, wilson_interval


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (9, 10), (985, 985), (4_321, 10_000)])
def test_the_interval_is_the_one_of_scipy(successes: int, n: int) -> None:
    interval = wilson_interval(successes / n, n)
    low, high = binomtest(successes, n).proportion_ci(method="wilson")
    assert interval.low == pytest.approx(low, abs=1e-7)
    assert interval.high == pytest.approx(high, abs=1e-7)


@pytest.mark.parametrize("n", range(1, 200))
def test_a_sample_without_a_change_never_excludes_that_there_is_none(n: int) -> None:
    """The interval of a share of 1 ends at 1, and must not end below it by rounding."""
    assert wilson_interval(1.0, n).high == 1.0


@pytest.mark.parametrize(("target", "n"), [(0.0, 0), (0.99, 381), (0.999, 3_838)])
def test_the_sample_that_a_target_needs_is_the_smallest_that_can_show_it(
    target: float, n: int
) -> None:
    assert samples_needed(target) == n
    if n:
        assert binomtest(n, n).proportion_ci(method="wilson").low >= target
        assert binomtest(n - 1, n - 1).proportion_ci(method="wilson").low < target


def test_no_sample_shows_a_share_of_one() -> None:
    assert samples_needed(1.0) > 1_000_000
