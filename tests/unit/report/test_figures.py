"""Figures that several forms of the report show: each is computed once, in the report's model."""

from __future__ import annotations

import pytest

from virnuc_core.profiles import Target
from virnuc_core.report.model import (
    Accounting,
    BaselineMetrics,
    Report,
    RunMetrics,
    StageThroughput,
    efficiency_target,
)
from virnuc_core.validation import BaselineSubset, StagingTally


@pytest.fixture
def run(judged: Report) -> RunMetrics:
    """2,000 rows, half of them repeats, of 1,000 reads in 100 s."""
    assert judged.run is not None
    counts = {"n_reads": 1_000, "n_rows": 2_000, "n_uniques": 1_000, "total_s": 100.0}
    stages = {
        "Sequence Chunking": 4.0,
        "ESM-2": 50.0,
        "DNABERT-S": 25.0,
        "Feature Merging": None,
        "Commits": 1.0,
    }
    assert judged.run.telemetry is not None
    parts = [
        part.model_copy(update={"rows": 1_000 if part.encoder == "esm2" else 500})
        for part in judged.run.telemetry.encoders
    ]
    telemetry = judged.run.telemetry.model_copy(update={"encoders": tuple(parts)})
    return judged.run.model_copy(update={**counts, "stages": stages, "telemetry": telemetry})


def test_the_throughput_of_a_stage_counts_reads_then_rows_and_embedded_rows_of_an_encoder(
    run: RunMetrics,
) -> None:
    chunking, esm2, dnabert_s = run.stage_throughput
    assert chunking == StageThroughput("Sequence Chunking", 1_000, 4.0)
    assert esm2 == StageThroughput("ESM-2", 1_000, 50.0)
    assert dnabert_s == StageThroughput("DNABERT-S", 500, 25.0)
    assert chunking.sequences_per_s == 250.0
    assert chunking.ms_per_sequence == 4.0


def test_a_stage_that_took_no_time_has_no_throughput() -> None:
    assert StageThroughput("Consensus Scoring", 10, 0.0).sequences_per_s is None


def test_shares_of_the_time(run: RunMetrics) -> None:
    assert run.stage_shares == {
        "Sequence Chunking": 0.04,
        "ESM-2": 0.5,
        "DNABERT-S": 0.25,
        "Commits": 0.01,
    }
    assert run.other_work_share == 0.25
    assert run.share_of_time(10.0) == 0.1
    assert run.share_of_time(None) is None


def test_without_a_total_there_is_no_share(run: RunMetrics) -> None:
    untimed_run = run.model_copy(update={"total_s": None})
    assert untimed_run.stage_shares == {}
    assert untimed_run.share_of_time(10.0) is None
    assert untimed_run.reads_per_s is None


def test_reads_a_second_and_repeated_rows(run: RunMetrics) -> None:
    assert run.reads_per_s == pytest.approx(10.0)
    assert run.repeated_rows == 1_000


def test_tokens_a_second_of_a_device(judged: Report) -> None:
    assert judged.run is not None
    assert judged.run.telemetry is not None
    encoder = judged.run.telemetry.encoders[0]
    changed_encoder = encoder.model_copy(update={"tokens": 3_000, "device_s": 1.5})
    assert changed_encoder.device_tokens_per_s == 2_000.0
    assert changed_encoder.model_copy(update={"device_s": None}).device_tokens_per_s is None


def test_the_share_of_a_fate() -> None:
    accounting = Accounting(
        reads=200, fates={"viral": 50}, flags={}, adds_up=True, staging=StagingTally()
    )
    assert accounting.share(50) == 0.25
    assert accounting.share(None) is None
    assert accounting.model_copy(update={"reads": 0}).share(0) is None


def test_a_speed_up_target_is_an_efficiency_in_percent() -> None:
    assert efficiency_target(Target(op=">=", value=1.8), 2) == Target(op=">=", value=90.0)
    assert efficiency_target(None, 2) is None


@pytest.mark.parametrize(
    ("source", "reads", "text"),
    [
        ("measured", None, ""),
        ("scaled", 300, "baseline measured on 300 reads and scaled by tokens (4,000 of 80,000)"),
        ("recorded", None, "the baseline's time was not measured here but recorded, on 2x H200"),
    ],
)
def test_how_the_time_of_the_baseline_is_known(source: str, reads: int | None, text: str) -> None:
    subset = None
    if reads is not None:
        subset = BaselineSubset(reads=reads, tokens=4_000, total_tokens=80_000)
    baseline = BaselineMetrics.model_validate(
        {
            "name": "v1",
            "label": "2x H200",
            "models": ("H200",),
            "source": source,
            "seconds": 10.0,
            "subset": subset,
        }
    )
    assert baseline.origin == text


def test_the_lowest_agreement_of_frames_is_over_the_comparisons_with_the_baseline(
    judged: Report,
) -> None:
    assert judged.baseline_title == "v1.0"
    of_baseline = [comparison for comparison in judged.comparisons if comparison.a == "baseline"]
    agreements = [
        comparison.frames.agreement for comparison in of_baseline if comparison.frames is not None
    ]
    assert judged.lowest_frame_agreement == min(share for share in agreements if share is not None)
    assert judged.model_copy(update={"comparisons": ()}).lowest_frame_agreement is None
