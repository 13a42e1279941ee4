"""The reviewer's answer: shown in every form, changes no figure, and is never taken for granted."""

from __future__ import annotations

from pathlib import Path

from tests.damage import edit_json
from virnuc_core.profiles import Profile
from virnuc_core.report.build import build_report, rerender, write_report
from virnuc_core.report.verify import verify_report

from .validate_directory import write_json

ANSWER = {
    "schema_version": 1,
    "when": "2026-03-02T09:00:00+00:00",
    "verdict": "approved",
    "reviewer": "R. Viewer",
    "note": "go\n<b>on</b>",
    "all_criteria_met": "no",
    "target_realistic": "yes",
}


def test_the_answer_is_shown_and_changes_no_figure(copied: tuple[Path, Profile]) -> None:
    out_dir, _ = copied
    write_json(out_dir / "report" / "approval.json", ANSWER)
    verification = verify_report(out_dir)
    assert verification.ok, "an answer is no difference"
    assert any("a reviewer has answered" in line for line in verification.remarks)
    report = rerender(out_dir)
    assert report.approval is not None
    assert report.approval.all_criteria_met == "no"
    assert report.approval.esm2_still_bottleneck == "not answered"
    page = (out_dir / "report" / "report.html").read_text(encoding="utf-8")
    assert "APPROVED" in page
    assert "&lt;b&gt;on&lt;/b&gt;" in page
    assert "R. Viewer" in (out_dir / "report" / "report.md").read_text(encoding="utf-8")
    again = verify_report(out_dir)
    assert again.ok
    assert not any("a reviewer has answered" in line for line in again.remarks)


def test_a_changed_or_removed_answer_is_a_difference(copied: tuple[Path, Profile]) -> None:
    out_dir, _ = copied
    answer = out_dir / "report" / "approval.json"
    write_json(answer, {**ANSWER, "verdict": "rejected"})
    rerender(out_dir)
    write_json(answer, ANSWER)
    assert any(line.startswith("approval.verdict") for line in verify_report(out_dir).differences)
    answer.unlink()
    assert any(line.startswith("approval") for line in verify_report(out_dir).differences)


def test_an_answer_older_than_the_figures_says_so(copied: tuple[Path, Profile]) -> None:
    out_dir, _ = copied
    write_json(
        out_dir / "report" / "approval.json", {**ANSWER, "when": "2026-02-01T00:00:00+00:00"}
    )
    assert rerender(out_dir).approval is not None
    assert "the answer is older than these figures" in (
        out_dir / "report" / "report.txt"
    ).read_text(encoding="utf-8")
    assert verify_report(out_dir).ok


def test_an_answer_that_was_asked_for_is_pending(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    assert build_report(out_dir, profile).approval is None
    edit_json(out_dir / "run.json", lambda body: body["spec"].update(approval=True))
    report = write_report(out_dir, profile)
    assert report.approval is not None
    assert (report.approval.verdict, report.approval.reviewer) == ("pending", None)
    write_json(out_dir / "report" / "approval.json", ANSWER)
    assert verify_report(out_dir).ok


def test_an_answer_without_a_verdict_is_a_problem(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    write_json(out_dir / "report" / "approval.json", {**ANSWER, "verdict": "perhaps"})
    report = build_report(out_dir, profile)
    assert report.approval is None
    assert any("approval.json: verdict: input should be" in warning for warning in report.warnings)
