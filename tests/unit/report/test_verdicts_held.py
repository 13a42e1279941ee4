"""The criterion `verdicts_held`: judged where the sample can tell, by an interval that scipy has, too."""

from __future__ import annotations

import pytest
from scipy.stats import binomtest

from virnuc_core.profiles import Target, load_profile
from virnuc_core.report.criteria import VERDICTS_HELD
from virnuc_core.report.judging import judge
from virnuc_core.report.model import Report
from virnuc_core.validation import Comparison

from .validate_directory import agreement_of


@pytest.mark.parametrize(
    ("chunks", "changed", "asked", "verdict"),
    [
        (985, 0, 99.9, "not run"),
        (985, 1, 99.9, "not run"),
        (985, 2, 99.9, "not run"),
        (985, 3, 99.9, "fail"),  # 99.695 %: even the interval's upper end misses
        (3837, 0, 99.9, "not run"),
        (3838, 0, 99.9, "pass"),
        (3838, 4, 99.9, "fail"),
        (10_000, 9, 99.9, "pass"),
        (10_000, 10, 99.9, "pass"),
        (10_000, 11, 99.9, "fail"),
        (380, 0, 99.0, "not run"),
        (381, 3, 99.0, "pass"),
        (10_000, 0, 100.0, "not run"),  # no sample shows that
        (10_000, 1, 100.0, "fail"),
    ],
)
def test_verdicts_are_held_only_where_the_sample_can_tell(
    judged: Report, chunks: int, changed: int, asked: float, verdict: str
) -> None:
    profile = load_profile("h200-1m").model_copy(
        update={"targets": {"verdicts_held": Target(op=">=", value=asked)}}
    )
    agreement = agreement_of(chunks, changed)
    comparison = Comparison(a="fp32", b="devices-2", tolerance=0.01, consensus=agreement)
    judged_criterion = judge(
        VERDICTS_HELD, judged.model_copy(update={"profile": profile, "comparisons": (comparison,)})
    )
    assert (judged_criterion.verdict, judged_criterion.value, judged_criterion.samples) == (
        verdict,
        pytest.approx(100 - 100 * changed / chunks),
        chunks,
    )
    low, high = (
        100 * end for end in binomtest(chunks - changed, chunks).proportion_ci(method="wilson")
    )
    assert f"95 % interval {low:.3f} to {high:.3f} %" in judged_criterion.reason
    assert (" are needed" in judged_criterion.reason) == (verdict == "not run")


def test_a_sample_that_is_too_small_says_how_many_chunks_are_needed(judged: Report) -> None:
    comparison = Comparison(a="fp32", b="devices-2", tolerance=0.01, consensus=agreement_of(985, 1))
    report = judged.model_copy(
        update={"profile": load_profile("h200-1m"), "comparisons": (comparison,)}
    )
    assert (
        judge(VERDICTS_HELD, report).reason
        == "985 chunks, 95 % interval 99.427 to 99.982 %; 3,838 are needed"
    )
