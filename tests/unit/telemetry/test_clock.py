"""The stage clock: nine names, seconds that add up, and a block in the log that people grep for."""

from __future__ import annotations

import re

import pytest

from virnuc_core.telemetry.live import clock_text, pipeline_summary
from virnuc_core.telemetry.tables import STAGES, StageClock


def test_a_stage_that_runs_twice_adds_up() -> None:
    clock = StageClock()
    clock.add("ESM-2", 2.0, started_s=10.0)
    clock.add("ESM-2", 3.0, started_s=20.0)
    (stage,) = clock.times()
    assert (stage.name, stage.seconds, stage.started_s, stage.finished_s) == ("ESM-2", 5, 10, 23)


def test_stages_come_in_the_order_of_the_nine() -> None:
    clock = StageClock()
    for name in reversed(STAGES):
        clock.add(name, 1.0)
    assert tuple(clock.seconds()) == STAGES


def test_a_fused_stage_has_no_time_of_its_own() -> None:
    clock = StageClock()
    clock.fuse("Feature Merging", "ESM-2")
    assert clock.seconds() == {"Feature Merging": None}
    with pytest.raises(ValueError, match="fused into 'ESM-2'"):
        clock.add("Feature Merging", 1.0)
    clock.add("ESM-2", 1.0)
    with pytest.raises(ValueError, match="cannot be fused"):
        clock.fuse("ESM-2", "DNABERT-S")


@pytest.mark.parametrize("name", ["esm2", "", "Stage 6: ESM-2"])
def test_an_unknown_stage_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not one of the nine"):
        StageClock().add(name, 1.0)


def test_negative_seconds_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        StageClock().add("ESM-2", -0.1)


def test_the_summary_block_is_found_by_the_usual_greps() -> None:
    clock = StageClock()
    clock.add("Sequence Chunking", 7.3)
    clock.fuse("Feature Merging", "ESM-2")
    clock.add("ESM-2", 1383.2)
    lines = pipeline_summary(clock.times(), 2025.0).splitlines()
    at = lines.index("PIPELINE SUMMARY")
    after = lines[at + 1 : at + 16]  # grep -A 15
    assert [line.split(": ")[1].split(" .")[0] for line in after if line.startswith("Stage ")] == list(STAGES)
    (total,) = [line for line in after if "Total wall time" in line]
    assert re.search(r"Total wall time: 33:45 \(2025\.0 s\)", total)
    assert any(re.fullmatch(r"Stage 6: ESM-2 \.+  1383\.2 s \(68\.3 %\)", line) for line in after)
    assert any("0.0 s (fused into ESM-2)" in line for line in after)
    assert sum("not measured" in line for line in after) == 6


def test_no_total_divides_by_nothing() -> None:
    clock = StageClock()
    clock.add("ESM-2", 0.0)
    assert "0.0 s" in pipeline_summary(clock.times(), 0.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "00:00"), (59.999, "00:59"), (3599.9, "59:59"), (3600, "1:00:00"), (-5, "00:00")]
)
def test_times_are_cut_not_rounded(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


def test_a_stage_can_be_seen_without_seconds_of_its_own() -> None:
    clock = StageClock()
    clock.add("ESM-2", 4.0)
    clock.seen("ESM-2", 10.0, 20.0)
    clock.seen("ESM-2", 8.0, 12.0)
    (esm2,) = clock.times()
    assert (esm2.seconds, esm2.started_s, esm2.finished_s) == (4.0, 8.0, 20.0)
    with pytest.raises(ValueError, match="not one of the nine"):
        clock.seen("Lunch", 0.0, 1.0)
