"""A validation that waits for its reviewer: the answer, or that there is none, stands in the report afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.validate import validate
from virnuc_core.validation.verify import verify_report

pytestmark = pytest.mark.usefixtures("prefect_backend")


def test_without_an_answer_the_report_says_pending_and_a_repetition_computes_nothing(
    tmp_path: Path, reads: Path, models: Path
) -> None:
    out = tmp_path / "validation"
    given = {"reads": [str(reads)], "out": out, "models": models, "devices": "cpu:1", "profile": "ci-smoke"}
    waited = {"approval": True, "approval_timeout_s": 1}
    state = validate(**given, **waited, return_state=True)
    assert state.is_completed(), state.message
    assert (state.message or "").endswith("pending by nobody (time-out)")
    assert json.loads((out / "report" / "approval.json").read_text())["verdict"] == "pending"
    assert "pending by nobody (time-out)" in (out / "report" / "report.txt").read_text()
    assert json.loads((out / "report" / "report.json").read_text())["approval"]["verdict"] == "pending"
    assert verify_report(out).ok

    again = validate(**given, return_state=True)
    assert (again.message or "").endswith("; nothing had to be computed")
    assert verify_report(out).ok
