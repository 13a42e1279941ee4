"""The one class that costs most, and the stages the two rules point at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from virnuc_core.report.advice import GPU_ADVICE, bottleneck, findings
from virnuc_core.report.build import build_report

from .validate_directory import Recipe, build, edit_json


def _cpu_heavy(out: Path) -> None:
    def change(body: dict) -> None:
        body["stages"]["Consensus Scoring"] = 30.0
        body["wall_s"] += 30.0

    edit_json(out / "devices-2" / "summary.json", change)


CASES: dict[str, tuple[Recipe, Callable[[Path], None] | None, str, bool]] = {
    "encoders at work": (Recipe(), None, "GPU compute", True),
    "idle GPU": (Recipe(utilisation=(60.0, 60.0)), None, "GPU compute", False),
    "waiting": (Recipe(wait_ms=120.0), None, "loader", False),
    "half-empty batches": (Recipe(packing=0.6), None, "packing", False),
    "a slow stage off the GPU": (Recipe(), _cpu_heavy, "CPU stage", False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_names_the_class(tmp_path: Path, name: str) -> None:
    recipe, change, kind, expected = CASES[name]
    profile = build(tmp_path, recipe)
    if change is not None:
        change(tmp_path)
    found = build_report(tmp_path, profile).bottleneck
    assert (found.kind, found.expected) == (kind, expected)
    assert found.detail
    assert found.advice


@pytest.mark.parametrize(("stood_still", "kind"), [(1.0, "commit I/O"), (0.0, "GPU compute")])
def test_commits_cost_what_devices_waited_at_most(tmp_path: Path, stood_still: float, kind: str) -> None:
    """Beside the next shard's compute they cost nothing, however long they take."""
    profile = build(tmp_path)
    run = build_report(tmp_path, profile).run
    assert run is not None
    assert run.telemetry is not None
    slow = tuple(busy.model_copy(update={"commit_s": busy.busy_s}) for busy in run.telemetry.busy)
    compute_s = sum(busy.busy_s for busy in slow) / len(slow)
    telemetry = run.telemetry.model_copy(update={"busy": slow, "span_s": (1 + stood_still) * compute_s})
    found = bottleneck(run.model_copy(update={"telemetry": telemetry}))
    assert found.kind == kind
    if stood_still:
        assert f"stands still for {compute_s:.0f} s" in found.detail


def test_the_largest_loss_is_named(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(packing=0.85, wait_ms=400.0))
    assert build_report(tmp_path, profile).bottleneck.kind == "loader"


def test_esm2_over_thirty_percent_is_expected_while_its_gpu_is_busy(tmp_path: Path) -> None:
    profile = build(tmp_path)
    (finding,) = build_report(tmp_path, profile).findings
    assert (finding.stage, finding.expected, finding.advice) == ("ESM-2", True, GPU_ADVICE)


def test_a_gpu_stage_under_eighty_percent_is_actionable(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(utilisation=(70.0, 95.0)))
    found = {finding.stage: finding for finding in build_report(tmp_path, profile).findings}
    assert found["DNABERT-S"].share < 0.3, "pointed at by utilisation alone"
    assert not found["DNABERT-S"].expected
    assert not found["ESM-2"].expected


def test_nothing_timed_is_unknown() -> None:
    assert bottleneck(None).kind == "unknown"
    assert findings(None) == ()


def test_a_run_without_stages_is_unknown(tmp_path: Path) -> None:
    profile = build(tmp_path)
    edit_json(tmp_path / "devices-2" / "summary.json", lambda body: body.update(stages={}))
    assert build_report(tmp_path, profile).bottleneck.kind == "unknown"
