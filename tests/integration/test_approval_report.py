"""A validation that waits for its reviewer: the answer, or that there is none, stands in the report afterwards."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest

from virnuc.flows.approval import wait_for_approval
from virnuc.flows.prefect_flows.validate import validate
from virnuc_core.profiles import QUESTIONS
from virnuc_core.report.approvals import APPROVALS
from virnuc_core.report.regression import read_approvals
from virnuc_core.report.verify import verify_report

pytestmark = [pytest.mark.usefixtures("prefect_backend", "forked_workers"), pytest.mark.slow]


@pytest.fixture(scope="module")
def validated(
    tmp_path_factory: pytest.TempPathFactory, few_reads: Path, models: Path, prefect_backend: None
) -> dict[str, Any]:
    """Parameters of a validation that is computed already."""
    out_dir = tmp_path_factory.mktemp("approval") / "validation"
    arguments = {
        "reads": [str(few_reads)],
        "out": out_dir,
        "models": models,
        "devices": "cpu:1",
        "profile": "ci-smoke",
    }
    validate(**arguments)
    return arguments


@pytest.fixture(autouse=True)
def _asked_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(wait_for_approval.__kwdefaults__, "poll_s", 1)


def test_without_an_answer_the_report_says_pending_and_a_repetition_computes_nothing(
    validated: dict[str, Any],
) -> None:
    output_dir: Path = validated["out"]
    state = validate(**validated, approval=True, approval_timeout_s=1, return_state=True)
    assert state.is_completed(), state.message
    assert (state.message or "").endswith(
        "nothing had to be computed; pending by nobody (time-out)"
    )
    assert json.loads((output_dir / "report" / "approval.json").read_text())["verdict"] == "pending"
    assert "pending by nobody (time-out)" in (output_dir / "report" / "report.txt").read_text()
    assert (
        json.loads((output_dir / "report" / "report.json").read_text())["approval"]["verdict"]
        == "pending"
    )
    assert verify_report(output_dir).ok

    second_state = validate(**validated, return_state=True)
    assert (second_state.message or "").endswith("; nothing had to be computed")
    assert verify_report(output_dir).ok


@pytest.mark.parametrize(("fails", "kind"), [(True, "FAILED"), (False, "COMPLETED")])
def test_a_rejected_validation_does_not_end_as_if_all_were_well(
    validated: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fails: bool, kind: str
) -> None:
    """What answers when the time is over says no here, in place of a person."""
    monkeypatch.setattr(
        "virnuc.flows.approval.TIME_OUT_ANSWER",
        {"verdict": "rejected", "reviewer": "Ada", "note": "wrong sample"},
    )
    state = validate(
        **validated, approval=True, approval_timeout_s=1, fail_on_criteria=fails, return_state=True
    )
    assert (state.type.value, state.name) == (kind, "Rejected")
    assert "rejected by Ada" in (state.message or "")
    assert (
        json.loads((validated["out"] / "report" / "report.json").read_text())["approval"]["verdict"]
        == "rejected"
    )


def test_all_forms_show_the_answer_of_a_person_and_the_earlier_answers_stay(
    validated: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last answer is sent over the API, as the UI does, and contradicts the figures."""
    folder = validated["out"] / "report"
    earlier = read_approvals(folder / APPROVALS)
    answer = {"verdict": "approved", "reviewer": "Bea", **dict.fromkeys(QUESTIONS, "yes")}
    answer["all_criteria_met"] = "no"
    monkeypatch.setattr("virnuc.flows.approval.TIME_OUT_ANSWER", answer)
    state = validate(**validated, approval=True, approval_timeout_s=1, return_state=True)
    sentence = "'all criteria met' was answered no, but all are met"
    assert "; approved by Bea (contradicts the figures: " in (state.message or "")
    assert sentence in (state.message or "")
    for name in ("report.txt", "report.md", "report.html", "report.json"):
        page = html.unescape((folder / name).read_text(encoding="utf-8"))
        assert "Bea" in page, name
        assert sentence in page, name
    kept = read_approvals(folder / APPROVALS)
    assert kept[:-1] == earlier
    assert [line.approval.reviewer for line in kept[-1:]] == ["Bea"]
    assert verify_report(validated["out"]).differences == []
    (folder / APPROVALS).unlink()
    assert any("of Bea" in line for line in verify_report(validated["out"]).differences)
