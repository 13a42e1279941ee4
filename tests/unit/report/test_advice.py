"""The losses of time by class, and the stages the two rules point at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.damage import edit_json
from virnuc_core.report.bottlenecks import (
    LONG_RUN_ADVICE,
    SHORT_RUN_ADVICE,
    rank_losses,
    stage_findings,
)
from virnuc_core.report.build import build_report

from .validate_directory import Recipe, build

pytestmark = pytest.mark.usefixtures("telemetry_once")


def _taking(**rows: float) -> Callable[[Path], None]:
    """A run whose stage table has these rows too: a name with `_` for a blank."""
    seconds_of = {name.replace("_", " "): seconds for name, seconds in rows.items()}

    def change(body: dict) -> None:
        body["stages"].update(seconds_of)
        body["wall_s"] += sum(seconds_of.values())

    return lambda out: edit_json(out / "devices-2" / "summary.json", change)


def _started(out: Path) -> None:
    rows = {
        "Preparation": 1.0,
        "Start-up: import": 6.0,
        "Start-up: weights": 20.0,
        "Shutdown": 2.0,
        "Overlapped": 4.0,
    }
    edit_json(out / "devices-2" / "summary.json", lambda body: body["stages"].update(rows))


# recipe, change, class, whether it is expected, seconds that removing it would save
CASES: dict[str, tuple[Recipe, Callable[[Path], None] | None, str, bool, float]] = {
    "little else than the encoders": (Recipe(), None, "staging", False, 5.0),
    "a start that was partly hidden": (Recipe(), _started, "start-up", False, 25.0),
    "an idle GPU": (Recipe(utilisation=(60.0, 60.0)), None, "GPU compute", False, 34.2 * 0.4),
    "waiting": (Recipe(), _taking(Waiting_for_batches=9.0), "loader", False, 9.0),
    "half-empty batches": (Recipe(packing=0.6), None, "packing", False, 34.2 * 0.4),
    "commits": (Recipe(), _taking(Commits=12.0), "commits", False, 12.0),
    "slow result files": (Recipe(), _taking(Consensus_Scoring=30.0), "results", False, 30.5),
    "workers that died": (Recipe(), _taking(Restarts=14.0), "retries", False, 14.0),
    "a device that stands still": (
        Recipe(),
        _taking(Device_idle=15.0),
        "GPU compute",
        False,
        15.0 + 2.5,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_names_the_largest_loss_and_what_it_costs(tmp_path: Path, name: str) -> None:
    recipe, change, kind, expected, saves_s = CASES[name]
    profile = build(tmp_path, recipe)
    if change is not None:
        change(tmp_path)
    report = build_report(tmp_path, profile)
    largest_loss = report.losses[0]
    assert (largest_loss.kind, largest_loss.expected) == (kind, expected)
    assert largest_loss.saves_s == pytest.approx(saves_s, rel=0.1)
    assert largest_loss.detail
    assert largest_loss.advice
    savings_s = [loss.saves_s for loss in report.losses]
    assert savings_s == sorted(savings_s, reverse=True)
    assert min(savings_s) > 0, "what costs nothing is no loss"
    text = "".join(loss.detail + loss.advice for loss in report.losses)
    assert " 0 %" not in text
    assert "faster GPUs" not in text, "no devices are bought for a run of a minute"


def test_a_long_run_that_only_computes_wants_more_devices(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(utilisation=(93.0, 93.0)))
    run = build_report(tmp_path, profile).run
    assert run is not None
    long = run.model_copy(
        update={"total_s": 3600.0, "stages": {"ESM-2": 3000.0, "Sequence Chunking": 30.0}}
    )
    losses = rank_losses(long)
    assert [(loss.kind, loss.expected) for loss in losses] == [
        ("GPU compute", True),
        ("packing", True),
        ("staging", True),
    ]
    assert losses[0].advice == LONG_RUN_ADVICE
    assert losses[0].saves_s == pytest.approx(3000 * 0.96 * 0.07, rel=0.05)


def test_what_a_ceiling_shows_counts_for_more_than_a_busy_gpu(tmp_path: Path) -> None:
    profile = build(tmp_path)
    run = build_report(tmp_path, profile).run
    assert run is not None
    assert run.telemetry is not None
    slow = tuple(
        device.model_copy(update={"mfu_of_ceiling": 0.5}) for device in run.telemetry.encoders
    )
    losses = rank_losses(
        run.model_copy(update={"telemetry": run.telemetry.model_copy(update={"encoders": slow})})
    )
    assert losses[0].kind == "GPU compute"
    assert "52 % of what its linear layers alone sustain" in losses[0].detail


def test_esm2_over_thirty_percent_is_expected_while_its_gpu_is_busy(tmp_path: Path) -> None:
    profile = build(tmp_path)
    (finding,) = build_report(tmp_path, profile).findings
    assert finding.startswith("ESM-2 takes ")
    assert f"(expected): {SHORT_RUN_ADVICE}" in finding


def test_a_gpu_stage_under_eighty_percent_is_actionable(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(utilisation=(70.0, 95.0)))
    esm2, dnabert_s = build_report(tmp_path, profile).findings
    assert "DNABERT-S takes 1" in dnabert_s, "under 30 %: pointed at by utilisation alone"
    assert "(actionable)" in esm2
    assert "(actionable)" in dnabert_s


def test_nothing_timed_is_unknown() -> None:
    assert rank_losses(None)[0].kind == "unknown"
    assert stage_findings(None) == ()


def test_a_run_without_stages_is_unknown(tmp_path: Path) -> None:
    profile = build(tmp_path)
    edit_json(tmp_path / "devices-2" / "summary.json", lambda body: body.update(stages={}))
    assert build_report(tmp_path, profile).losses[0].kind == "unknown"
