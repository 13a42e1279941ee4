"""Times are compared only if they were measured on one machine, and undisturbed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from virnuc_core.profiles import Profile
from virnuc_core.report.build import build_report
from virnuc_core.report.model import Criterion, Report

from .validate_directory import edit_json

pytestmark = pytest.mark.usefixtures("telemetry_once")

Change = Callable[[dict[str, Any]], object]


def criterion(report: Report, name: str) -> Criterion:
    """Return a criterion of a report by its id."""
    return next(criterion for criterion in report.criteria if criterion.id == name)


def set_device(**changes: str) -> Change:
    """Return a change of the first device of a record or summary."""
    return lambda body: body["devices"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda body: body.update(host="lab-gpu-2"), "host (lab-gpu-1 and lab-gpu-2)"),
        (lambda body: body.update(host=""), "host (lab-gpu-1 and unknown)"),
        (lambda body: body["versions"].update(driver="590.1"), "driver (580.95.05 and 590.1)"),
        (lambda body: body["versions"].update(torch="2.9.0"), "torch (2.13.0 and 2.9.0)"),
        (lambda body: body["versions"].pop("torch"), "torch (2.13.0 and nothing)"),
    ],
    ids=["host", "no host", "driver", "torch", "no torch"],
)
@pytest.mark.parametrize(("part", "name"), [("devices-2", "scaling"), ("baseline", "speedup")])
def test_times_of_different_machines_are_not_compared(
    copied: tuple[Path, Profile], change: Change, expected: str, part: str, name: str
) -> None:
    out, profile = copied
    machine_of = {"devices-2": "devices-1", "baseline": "devices-2"}
    # The two sides are named in the order baseline, one device, several devices.
    sides = (machine_of[part], part) if part == "devices-2" else (part, machine_of[part])
    edit_json(out / part / "run.json", change)
    report = build_report(out, profile)
    verdict = criterion(report, name)
    assert verdict.verdict == "not run"
    for side in sides:
        assert side in verdict.reason
    values = expected.partition("(")[2].rstrip(")").split(" and ")
    for value in (expected.partition(" ")[0], *values):
        assert value in verdict.reason
    assert any(verdict.reason in warning for warning in report.warnings)
    # Results do not depend on the machine, so they are still compared.
    assert criterion(report, "consensus").verdict == "pass"


@pytest.mark.parametrize("file", ["run.json", "summary.json"])
@pytest.mark.parametrize(
    "change", [set_device(name="NVIDIA L4"), set_device(kind="cpu")], ids=["model", "kind"]
)
def test_a_device_of_another_model_or_kind_is_another_machine(
    copied: tuple[Path, Profile], change: Change, file: str
) -> None:
    """A processor that is called RTX 4090 is no RTX 4090."""
    out, profile = copied
    for name in {"run.json", "summary.json"} if file == "run.json" else {file}:
        edit_json(out / "devices-1" / name, change)
    scaling = criterion(build_report(out, profile), "scaling")
    assert scaling.verdict == "not run"
    assert "devices" in scaling.reason


def test_records_that_name_no_host_are_no_proof_of_one_machine(
    copied: tuple[Path, Profile],
) -> None:
    out, profile = copied
    for part in ("baseline", "devices-1", "devices-2"):
        edit_json(out / part / "run.json", lambda body: body.pop("host"))
    report = build_report(out, profile)
    for name in ("scaling", "speedup"):
        assert criterion(report, name).verdict == "not run"
        assert "do not tell their host" in criterion(report, name).reason


def test_a_repetition_on_another_machine_is_left_out_with_a_warning(
    copied: tuple[Path, Profile],
) -> None:
    out, profile = copied
    shutil.copytree(out / "devices-2", out / "devices-2.1")
    edit_json(out / "devices-2.1" / "summary.json", lambda body: body.update(wall_s=1.0))
    with_both = build_report(out, profile)
    assert with_both.run is not None
    assert len(with_both.run.times_s) == 2

    edit_json(out / "devices-2.1" / "run.json", lambda body: body.update(host="lab-gpu-2"))
    report = build_report(out, profile)
    summary = json.loads((out / "devices-2" / "summary.json").read_text())
    assert report.run is not None
    assert report.run.times_s == (summary["wall_s"] + summary["staging_s"],)
    assert any("devices-2.1" in warning and "lab-gpu-2" in warning for warning in report.warnings)


@pytest.mark.parametrize("disturbed", ["devices-1", "devices-2"])
def test_a_run_with_restarts_is_not_a_timing_on_either_side(
    copied: tuple[Path, Profile], disturbed: str
) -> None:
    out, profile = copied
    edit_json(out / disturbed / "summary.json", lambda body: body.update(restarts=2))
    report = build_report(out, profile)
    time_criterion = {"devices-1": "one_device_time", "devices-2": "two_device_time"}[disturbed]
    for name in (time_criterion, "scaling"):
        assert criterion(report, name).verdict == "not run"
        assert f"{disturbed} was disturbed (2 workers were started again)" in (
            criterion(report, name).reason
        )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda body: body.update(restarts=1), "workers that died and were started again: 1"),
        (lambda body: body.update(rows_set_aside=3), "rows set aside"),
        (lambda body: body.update(warnings=["2 lines of the logs tell of errors"]), "2 lines"),
        (lambda body: body.update(damaged=["00001.h5"]), "found damaged"),
    ],
    ids=["restarts", "rows set aside", "lines of errors", "damaged shards"],
)
def test_troubles_of_the_run_that_is_compared_against_are_warnings(
    copied: tuple[Path, Profile], change: Change, expected: str
) -> None:
    out, profile = copied
    edit_json(out / "devices-1" / "summary.json", change)
    warnings = build_report(out, profile).warnings
    assert any(warning.startswith("devices-1") and expected in warning for warning in warnings)


def test_a_missing_file_of_the_run_that_is_compared_against_is_a_warning(
    copied: tuple[Path, Profile],
) -> None:
    out, profile = copied
    (out / "devices-1" / "prediction_results.txt").unlink()
    warnings = build_report(out, profile).warnings
    assert "devices-1: prediction_results.txt is missing." in warnings
