"""The reviewer's answer: shown in every form, changes no figure, and is never taken for granted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.damage import edit_json
from virnuc.flows.cli import main
from virnuc_core.profiles import Profile
from virnuc_core.report.approvals import (
    contradictions,
    keep_answer,
    keep_earlier_answer,
    verify_approvals,
)
from virnuc_core.report.build import build_report, read_report, rerender, write_report
from virnuc_core.report.model import Report
from virnuc_core.report.regression import approval_line, read_approvals
from virnuc_core.report.verification import Verification
from virnuc_core.report.verify import verify_report
from virnuc_core.validation import ApprovalRecord

from .validate_directory import copy_made_once, write_json

pytestmark = pytest.mark.usefixtures("telemetry_once")

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


# --- All answers are kept -------------------------------------------------------------------------


def answer_of(reviewer: str, day: int, verdict: str = "approved") -> ApprovalRecord:
    when = f"2026-03-0{day}T09:00:00+00:00"
    fields = {"verdict": verdict, "reviewer": reviewer, "when": when, "flow_run": f"run-{day}"}
    return ApprovalRecord.model_validate(fields)


@pytest.fixture
def answered(finished: tuple[Path, Profile], tmp_path: Path) -> Path:
    """A validation with two answers: rejected by Ada, and later approved by Bea."""

    def answer_twice(folder: Path) -> None:
        out_dir = folder / "out"
        shutil.copytree(finished[0], out_dir)
        history = folder / "virnuc-history.jsonl"
        report = write_report(out_dir, finished[1], history)
        for answer in (answer_of("Ada", 2, "rejected"), answer_of("Bea", 3)):
            keep_answer(out_dir, history, approval_line(report, answer))
        rerender(out_dir)

    copy_made_once("answered twice", answer_twice, tmp_path)
    return tmp_path / "out"


def differences_about(out_dir: Path, *words: str) -> list[str]:
    """Return the differences that contain all these words, of the answers of reviewers only."""
    verification = Verification()
    report = read_report(out_dir / "report" / "report.json")
    history = out_dir.absolute().parent / "virnuc-history.jsonl"
    verify_approvals(verification, out_dir, report, history)
    return [line for line in verification.differences if all(word in line for word in words)]


def test_a_second_answer_leaves_the_first_one(answered: Path) -> None:
    kept = read_approvals(answered / "report" / "approvals.jsonl")
    assert [line.approval.reviewer for line in kept] == ["Ada", "Bea"]
    assert read_approvals(answered.parent / "virnuc-history.jsonl") == kept
    newest = json.loads((answered / "report" / "approval.json").read_text())
    assert newest["reviewer"] == "Bea"
    assert verify_report(answered).differences == []


def test_an_answer_that_an_older_version_kept_alone_is_kept_beside_the_next(
    copied: tuple[Path, Profile],
) -> None:
    out_dir, profile = copied
    history = out_dir.absolute().parent / "virnuc-history.jsonl"
    report = write_report(out_dir, profile, history)
    write_json(out_dir / "report" / "approval.json", ANSWER)
    for answer in (answer_of("Ada", 3), answer_of("Bea", 4)):
        keep_earlier_answer(out_dir, history, report)
        keep_answer(out_dir, history, approval_line(report, answer))
    kept = read_approvals(out_dir / "report" / "approvals.jsonl")
    assert [line.approval.reviewer for line in kept] == ["R. Viewer", "Ada", "Bea"]
    rerender(out_dir)
    assert differences_about(out_dir) == []


@pytest.mark.parametrize("name", ["report/approvals.jsonl", "../virnuc-history.jsonl"])
def test_an_answer_that_was_removed_is_named(answered: Path, name: str) -> None:
    path = answered / name
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b"Ada" not in line))
    assert any("of Ada" in line for line in verify_report(answered).differences)
    assert differences_about(answered, "'rejected' of Ada", "is missing")


@pytest.mark.parametrize("name", ["report/approvals.jsonl", "../virnuc-history.jsonl"])
def test_an_answer_that_was_edited_is_named(answered: Path, name: str) -> None:
    path = answered / name
    path.write_bytes(path.read_bytes().replace(b'"verdict": "rejected"', b'"verdict": "approved"'))
    differences = verify_report(answered).differences
    assert any("it was changed after it was written" in line for line in differences)
    assert differences_about(answered, "Ada", "is missing")


def test_the_newest_answer_cannot_be_removed_or_exchanged(answered: Path) -> None:
    """Also not if the report is written again from what is left."""
    approval_path = answered / "report" / "approval.json"
    edit_json(approval_path, lambda body: body.update(reviewer="Cleo"))
    rerender(answered)
    assert differences_about(answered, "report/approval.json", "reviewer", "Cleo")
    approval_path.unlink()
    rerender(answered)
    assert differences_about(answered, "report/approval.json is missing", "Bea")
    (answered / "report" / "approvals.jsonl").unlink()
    rerender(answered)
    assert differences_about(answered, "'approved' of Bea", "is missing")
    assert differences_about(answered, "'rejected' of Ada", "is missing")


def test_the_history_lists_all_answers(answered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = answered.parent / "virnuc-history.jsonl"
    assert main(["history", str(history)]) == 0
    page = capsys.readouterr().out
    assert page.index("rejected") < page.index("Ada") < page.index("Bea")
    assert main(["history", str(history), "--profile", "another"]) == 2


# --- Contradictions -------------------------------------------------------------------------------


def with_verdict(report: Report, verdict: str) -> Report:
    """Return the report with this verdict on each criterion, and without checks and regression."""
    criteria = [criterion.model_copy(update={"verdict": verdict}) for criterion in report.criteria]
    runs = [run.model_copy(update={"stopped_at_limit": False}) for run in report.runs]
    parts = {"criteria": tuple(criteria), "checks": (), "scaling": (), "regression": None}
    return report.model_copy(update={**parts, "runs": tuple(runs)})


def contradictions_of(report: Report, **answers: str) -> str:
    """Return the contradictions between a report and an answer with these fields, as one text."""
    answer = ApprovalRecord.model_validate({"verdict": "rejected", **answers})
    return "; ".join(contradictions(report, answer))


def test_an_answer_that_contradicts_the_figures_says_so(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    report = build_report(out_dir, profile)
    passed, failed, unjudged = [
        with_verdict(report, verdict) for verdict in ("pass", "fail", "not run")
    ]
    titles = [criterion.title for criterion in failed.failed_criteria]
    assert passed.outcome == "passed"
    assert contradictions_of(passed, verdict="approved", all_criteria_met="yes") == ""
    assert contradictions_of(failed, all_criteria_met="no") == ""
    text = contradictions_of(failed, verdict="approved")
    assert text == f"approved although not met: {', '.join(titles)}"
    assert "approved although not judged" in contradictions_of(unjudged, verdict="approved")
    assert "answered yes, but not met" in contradictions_of(failed, all_criteria_met="yes")
    assert "answered no, but all are met" in contradictions_of(passed, all_criteria_met="no")


def test_the_answer_about_the_bottleneck_is_held_against_the_times(
    copied: tuple[Path, Profile],
) -> None:
    out_dir, profile = copied
    report = with_verdict(build_report(out_dir, profile), "pass")
    assert report.run is not None
    shares = report.run.stage_shares
    longest = max(shares, key=lambda stage: shares[stage])
    right, wrong = ("yes", "no") if longest == "ESM-2" else ("no", "yes")
    assert contradictions_of(report, esm2_still_bottleneck=right) == ""
    text = contradictions_of(report, esm2_still_bottleneck=wrong)
    assert f"answered {wrong}, but {longest} takes the largest share" in text


def test_contradictions_stand_in_every_form_of_the_report(answered: Path) -> None:
    history = answered.parent / "virnuc-history.jsonl"
    report = build_report(answered, build_profile(answered))
    update = {"contradictions": ("approved although it rained",)}
    answer = answer_of("Dora", 4).model_copy(update=update)
    keep_answer(answered, history, approval_line(report, answer))
    rerender(answered)
    folder = answered / "report"
    for name in ("report.txt", "report.md", "report.html", "report.json"):
        page = (folder / name).read_text(encoding="utf-8")
        assert "approved although it rained" in page, name
        assert "Dora" in page
    verdicts = json.loads((folder / "report.json").read_text())["approval"]
    assert (verdicts["verdict"], verdicts["reviewer"]) == ("approved", "Dora")


def build_profile(out_dir: Path) -> Profile:
    """Return the profile that a validation was judged by."""
    return Profile.model_validate(
        json.loads((out_dir / "report" / "report.json").read_text())["profile"]
    )
