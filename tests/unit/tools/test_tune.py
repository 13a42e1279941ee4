"""A sweep: what it tries, in which order, and what it may recommend."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from virnuc_core.config import EngineSpec
from virnuc_core.errors import ConfigError
from virnuc_core.profiles import load_profile
from virnuc_core.rundir import DeviceRequests, lock_device
from virnuc_core.runfiles import Device
from virnuc_core.telemetry.statistics import batch_metrics, record_table
from virnuc_core.telemetry.tables import BatchRecord
from virnuc_core.tools.tune import (
    Candidate,
    Recommendation,
    ScoreChange,
    Trial,
    compare_scores,
    is_held_by_another_run,
    make_candidates,
    recommend,
    require_enough_reads,
    schedule_trials,
)

TOLERANCE = 0.01


def make_trial(rate: float, difference: float = 0.0, labels_changed: int = 0) -> Trial:
    """Return a trial with this rate in tokens/s."""
    metrics = dict(batch_metrics(record_table(BatchRecord, [])))
    metrics["tokens_per_s"] = rate
    return Trial(
        **metrics,
        committed_s=1.0,
        wall_s=2.0,
        utilisation=None,
        shards=1,
        restarts=0,
        reduced=(),
        score_difference=difference,
        labels_changed=labels_changed,
    )


def measured_candidates(
    *rates: tuple[float, ...], difference: float = 0.0
) -> tuple[Candidate, ...]:
    """Return the base and candidates with these rates.

    Args:
        rates: For each of them the rate of each trial.
        difference: Difference of scores of all but the base.
    """
    budgets = [1024 * number for number in range(1, len(rates))]
    candidates = make_candidates(EngineSpec(), {"token_budget": budgets})
    for candidate, candidate_rates in zip(candidates, rates, strict=True):
        for rate in candidate_rates:
            candidate.add(make_trial(rate, difference if candidate.number else 0.0))
    return candidates


def recommend_of(*rates: tuple[float, ...]) -> Recommendation:
    """Recommend one of the candidates with these rates."""
    return recommend(measured_candidates(*rates), tolerance=TOLERANCE)


def test_every_combination_is_tried_once_and_the_base_first() -> None:
    base = EngineSpec(token_budget=1024)
    candidates = make_candidates(base, {"token_budget": (1024, 2048), "num_workers": (0, 2)})
    assert [candidate.label for candidate in candidates] == [
        "base",
        "num_workers=2",
        "token_budget=2048",
        "token_budget=2048 num_workers=2",
    ]
    assert candidates[0].engine == base


def test_without_a_setting_to_sweep_only_the_base_is_tried() -> None:
    base = EngineSpec(token_budget=1024)
    assert [candidate.engine for candidate in make_candidates(base, {})] == [base]


def test_too_many_combinations_are_refused() -> None:
    swept = {"token_budget": range(64, 79), "prefetch_factor": range(1, 16)}  # 15 x 15 and the base
    with pytest.raises(ConfigError, match="226 combinations are too many"):
        make_candidates(EngineSpec(token_budget=1024), swept)


def test_settings_that_are_faster_by_more_than_the_scatter_are_recommended() -> None:
    recommendation = recommend_of((100, 102, 98), (130, 131, 129))
    assert recommendation.candidate.label == "token_budget=1024"
    assert recommendation.gain == pytest.approx(0.30)


def test_nothing_is_recommended_from_a_single_measurement() -> None:
    recommendation = recommend_of((100,), (130,))
    assert (recommendation.candidate.number, recommendation.gain) == (0, 0.0)
    assert "measured once, so the scatter is not known" in recommendation.reason


def test_the_scatter_is_named_with_how_it_was_estimated() -> None:
    reason = recommend_of((100, 100), (130, 130)).reason
    assert reason.endswith("scatter 0.0 % (range of 2 measurements each)")


@pytest.mark.parametrize("rates", [((90, 110), (119, 119)), ((100, 100), (105, 125))])
def test_the_scatter_is_the_whole_range_of_the_base_or_of_the_candidate(
    rates: tuple[tuple[float, ...], ...],
) -> None:
    """The base scatters by 20 %, or the candidate by 17 %; the gains are 19 % and 15 %."""
    recommendation = recommend_of(*rates)
    assert recommendation.candidate.number == 0
    assert "within the scatter of" in recommendation.reason


def test_fewer_reads_than_the_profile_asks_for_are_refused() -> None:
    profile = load_profile("phase10-1m")
    require_enough_reads(10_000, profile)
    with pytest.raises(ConfigError, match="9,999 reads are too few to tune: profile phase10-1m"):
        require_enough_reads(9_999, profile)


def test_within_the_scatter_the_base_stays() -> None:
    recommendation = recommend_of((100, 120, 80), (110, 110, 110))
    assert recommendation.candidate.number == 0
    assert "within the scatter" in recommendation.reason


def test_settings_that_change_scores_are_never_recommended() -> None:
    candidates = measured_candidates((100,), (200,), difference=0.02)
    assert candidates[1].verdict(TOLERANCE) == "changes scores"
    assert recommend(candidates, tolerance=TOLERANCE).candidate is candidates[0]


def test_settings_that_change_a_label_are_never_recommended_however_near_their_scores() -> None:
    candidates = measured_candidates((100,), ())
    candidates[1].add(make_trial(200, difference=1e-6, labels_changed=1))
    assert candidates[1].verdict(TOLERANCE) == "changes labels"
    assert recommend(candidates, tolerance=TOLERANCE).candidate is candidates[0]


def test_a_candidate_that_was_measured_less_often_is_not_recommended() -> None:
    assert recommend_of((100, 100), (200,)).candidate.number == 0


def test_halving_drops_the_slower_half_but_neither_the_base_nor_the_last_three() -> None:
    rates = (1.0, 60.0, 50.0, 40.0, 30.0, 20.0, 10.0)
    candidates = measured_candidates(*[()] * len(rates))
    measured_in_round: list[list[int]] = [[], [], [], []]
    for candidate, repeat, _ in schedule_trials(candidates, 4, halving=True):
        measured_in_round[repeat].append(candidate.number)
        candidate.add(make_trial(rates[candidate.number]))
    assert measured_in_round == [
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]


def test_settings_that_cannot_run_are_not_tried_again() -> None:
    candidates = measured_candidates((100,), ())
    scheduled_trials = []
    for candidate, repeat, name in schedule_trials(candidates, 2, halving=True):
        scheduled_trials.append((candidate.number, repeat))
        assert candidate.label in name
        if candidate.number == 0:
            candidate.add(make_trial(100))
        else:
            candidate.add("needs a CUDA device")
    assert scheduled_trials == [(0, 0), (1, 0), (0, 1)]
    assert candidates[1].verdict(TOLERANCE) == "cannot run"


def test_a_base_that_cannot_run_is_an_error() -> None:
    base = measured_candidates((100,))[0]
    with pytest.raises(ConfigError, match="cannot run here: no"):
        base.add("no")


def test_a_base_of_which_nothing_was_measured_is_an_error() -> None:
    with pytest.raises(ConfigError, match="nothing was measured"):
        recommend_of(())


def test_scores_are_compared_row_by_row_and_a_missing_one_counts_most() -> None:
    base = np.array([[0.9, 0.1], [0.51, 0.49], [np.nan, np.nan]], dtype=np.float32)
    scores = np.array([[0.9, 0.1], [0.49, 0.51], [np.nan, np.nan]], dtype=np.float32)
    change = compare_scores(base, scores)
    assert change.max_difference == pytest.approx(0.02, abs=1e-6)
    assert change.n_labels_changed == 1
    scores[2] = 0.5
    assert compare_scores(base, scores) == ScoreChange(1.0, 2)
    assert compare_scores(base, base) == ScoreChange(0.0, 0)
    assert compare_scores(base[:0], base[:0]) == ScoreChange(0.0, 0)


@pytest.mark.parametrize(
    ("is_served", "is_idle", "is_held"),
    [(False, False, True), (True, False, True), (True, True, False)],
)
def test_an_idle_worker_of_a_server_does_not_count_as_a_run_on_the_device(
    is_served: bool, is_idle: bool, is_held: bool
) -> None:
    gpu = Device(id=f"GPU-tuned-{os.getpid()}", kind="cuda", name="none")
    assert not is_held_by_another_run([gpu])
    lock = lock_device(gpu.local, 0)
    stopped = threading.Event()
    if is_served:
        requests = DeviceRequests(gpu.local)

        def answer() -> None:
            """Answer as the server of an idle, or of a lent worker."""
            while not stopped.wait(0.01):
                requests.answer(requests.take(), is_free=is_idle)
            requests.close()

        thread = threading.Thread(target=answer)
        thread.start()
    assert is_held_by_another_run([gpu]) == is_held
    stopped.set()
    if is_served:
        thread.join()
    os.close(lock)
