"""A sweep: what it tries, in which order, and what it may recommend."""

from __future__ import annotations

import numpy as np
import pytest

from virnuc_core.config import EngineSpec
from virnuc_core.errors import ConfigError
from virnuc_core.telemetry.statistics import batch_metrics, record_table
from virnuc_core.telemetry.tables import BatchRecord
from virnuc_core.tools.tune import (
    Candidate,
    Trial,
    candidates,
    compare_scores,
    recommend,
    rounds,
)

TOLERANCE = 0.01


def trial(rate: float, difference: float = 0.0, labels_changed: int = 0) -> Trial:
    return Trial(
        **dict(batch_metrics(record_table(BatchRecord, []))) | {"tokens_per_s": rate},
        committed_s=1.0,
        wall_s=2.0,
        utilisation=None,
        shards=1,
        restarts=0,
        reduced=(),
        score_difference=difference,
        labels_changed=labels_changed,
    )


def measured(*rates: tuple[float, ...], difference: float = 0.0) -> tuple[Candidate, ...]:
    """The base and candidates with these rates; `difference` is that of all but the base."""
    found = candidates(
        EngineSpec(), {"token_budget": tuple(1024 * (n + 1) for n in range(len(rates) - 1))}
    )
    for candidate, each in zip(found, rates, strict=True):
        for rate in each:
            candidate.add(trial(rate, difference if candidate.number else 0.0))
    return found


def test_every_combination_is_tried_once_and_the_base_first() -> None:
    base = EngineSpec(token_budget=1024)
    found = candidates(base, {"token_budget": (1024, 2048), "num_workers": (0, 2)})
    assert [c.label for c in found] == [
        "base",
        "num_workers=2",
        "token_budget=2048",
        "token_budget=2048 num_workers=2",
    ]
    assert found[0].engine == base
    assert [one.engine for one in candidates(base, {})] == [base]
    with pytest.raises(ConfigError, match="226 combinations are too many"):
        candidates(base, {"token_budget": range(64, 79), "prefetch_factor": range(1, 16)})


def test_what_is_faster_by_more_than_the_scatter_is_recommended() -> None:
    chosen = recommend(measured((100, 102, 98), (130, 131, 129)), tolerance=TOLERANCE)
    assert chosen.candidate.label == "token_budget=1024"
    assert chosen.gain == pytest.approx(0.30)


def test_of_one_measurement_no_scatter_is_told() -> None:
    assert (
        "the scatter is not known"
        in recommend(measured((100,), (130,)), tolerance=TOLERANCE).reason
    )
    assert (
        "scatter 0.0 %" in recommend(measured((100, 100), (130, 130)), tolerance=TOLERANCE).reason
    )


def test_within_the_scatter_the_base_stays() -> None:
    chosen = recommend(measured((100, 120, 80), (110, 110, 110)), tolerance=TOLERANCE)
    assert chosen.candidate.number == 0
    assert "within the scatter" in chosen.reason


def test_what_changes_results_is_never_recommended() -> None:
    found = measured((100,), (200,), difference=0.02)
    assert found[1].verdict(TOLERANCE) == "changes scores"
    assert recommend(found, tolerance=TOLERANCE).candidate is found[0]


def test_what_turns_a_label_is_never_recommended_however_near_its_scores() -> None:
    found = measured((100,), ())
    found[1].add(trial(200, difference=1e-6, labels_changed=1))
    assert found[1].verdict(TOLERANCE) == "changes labels"
    assert recommend(found, tolerance=TOLERANCE).candidate is found[0]


def test_a_candidate_that_was_measured_less_often_is_not_recommended() -> None:
    found = measured((100, 100), (200,))
    assert recommend(found, tolerance=TOLERANCE).candidate.number == 0


def test_halving_drops_the_slower_half_but_neither_the_base_nor_the_last_three() -> None:
    rates = (1.0, 60.0, 50.0, 40.0, 30.0, 20.0, 10.0)
    asked: list[list[int]] = [[], [], [], []]
    for candidate, repeat, _ in rounds(measured(*[()] * len(rates)), len(asked), halving=True):
        asked[repeat].append(candidate.number)
        candidate.add(trial(rates[candidate.number]))
    assert asked == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_what_cannot_run_is_not_tried_again_and_a_base_that_cannot_is_an_error() -> None:
    found = measured((100,), ())
    asked = []
    for candidate, repeat, name in rounds(found, 2, halving=True):
        asked.append((candidate.number, repeat))
        assert candidate.label in name
        candidate.add("needs a CUDA device" if candidate.number else trial(100))
    assert asked == [(0, 0), (1, 0), (0, 1)]
    assert found[1].verdict(TOLERANCE) == "cannot run"
    with pytest.raises(ConfigError, match="cannot run here: no"):
        found[0].add("no")
    with pytest.raises(ConfigError, match="nothing was measured"):
        recommend(measured(()), tolerance=TOLERANCE)


def test_scores_are_compared_row_by_row_and_a_missing_one_counts_most() -> None:
    a = np.array([[0.9, 0.1], [0.51, 0.49], [np.nan, np.nan]], dtype=np.float32)
    b = np.array([[0.9, 0.1], [0.49, 0.51], [np.nan, np.nan]], dtype=np.float32)
    difference, changed = compare_scores(a, b)
    assert (difference, changed) == (pytest.approx(0.02, abs=1e-6), 1)
    b[2] = 0.5
    assert compare_scores(a, b) == (1.0, 2)
    assert compare_scores(a, a) == compare_scores(a[:0], a[:0]) == (0.0, 0)
