"""The answers of reviewers: whether one is complete and agrees with the figures, and where all are
kept.

`report/approval.json` is the newest answer. `report/approvals.jsonl` has a line for each answer,
and so has the history of validations. No answer is ever overwritten there.
"""

from pathlib import Path
from typing import Final

from virnuc_core.encoder_names import PROTEIN
from virnuc_core.profiles import NOT_ANSWERED, QUESTIONS, Review
from virnuc_core.report.model import Report
from virnuc_core.report.regression import (
    ApprovalLine,
    append_approval,
    approval_line,
    history_gaps,
    read_approvals,
)
from virnuc_core.report.text import percent
from virnuc_core.report.verification import Verification
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import read, write
from virnuc_core.safe_files import output_directory
from virnuc_core.system_errors import path_exists
from virnuc_core.validation import ApprovalRecord

APPROVAL: Final = "approval.json"
APPROVALS: Final = "approvals.jsonl"


def unanswered_questions(review: Review) -> tuple[str, ...]:
    """Return the names of the questions that a reviewer has not answered."""
    answers = review.model_dump(include=set(QUESTIONS))
    return tuple(name for name in QUESTIONS if answers[name] == NOT_ANSWERED)


def contradictions(report: Report, answer: ApprovalRecord) -> tuple[str, ...]:
    """Return a sentence for each point in which a reviewer's answer contradicts the figures.

    Args:
        report: The report that the answer is about.
        answer: The answer. Questions that are not answered contradict nothing.

    Returns:
        The sentences. Empty if the answer and the figures agree.
    """
    sentences = []
    shortcoming = _shortcoming(report)
    if answer.verdict == "approved" and shortcoming:
        sentences.append(f"approved although {shortcoming}")
    if answer.all_criteria_met == "yes" and shortcoming:
        sentences.append(f"'all criteria met' was answered yes, but {shortcoming}")
    if answer.all_criteria_met == "no" and not shortcoming:
        sentences.append("'all criteria met' was answered no, but all are met")
    bottleneck = _bottleneck_contradiction(report, answer)
    if bottleneck:
        sentences.append(bottleneck)
    return tuple(sentences)


def _shortcoming(report: Report) -> str:
    """Return why a validation did not pass, as half a sentence. Empty if it passed."""
    if report.failures:
        return f"not met: {', '.join(report.failures)}"
    unmet = [criterion.title for criterion in report.requested if criterion.verdict != "pass"]
    if unmet:
        return f"not judged: {', '.join(unmet)}"
    if report.outcome != "passed":
        return "the profile asks for nothing that could be judged"
    return ""


def _bottleneck_contradiction(report: Report, answer: ApprovalRecord) -> str:
    """Return how the answer about the bottleneck contradicts the times of the stages.

    The bottleneck is the stage with the largest share of the time. The text is empty if the answer
    agrees, was not given, or no times are known.
    """
    shares = {} if report.run is None else report.run.stage_shares
    if not shares or answer.esm2_still_bottleneck == NOT_ANSWERED:
        return ""
    longest_stage = max(shares, key=lambda stage: shares[stage])
    is_bottleneck = longest_stage == PROTEIN.title
    if is_bottleneck == (answer.esm2_still_bottleneck == "yes"):
        return ""
    return (
        f"'{PROTEIN.title} still the bottleneck' was answered {answer.esm2_still_bottleneck}, but "
        f"{longest_stage} takes the largest share of the time ({percent(shares[longest_stage])})"
    )


def keep_answer(out: Path, history: Path, line: ApprovalLine) -> None:
    """Add a reviewer's answer to all answers of a validation, and make it the newest.

    Earlier answers stay. An answer that is there already is not added again.

    Args:
        out: The validation's directory; `report/approvals.jsonl` and `report/approval.json` are
            written.
        history: The file of past validations, which gets the same line.
        line: The answer, as a line of the history.
    """
    folder = RunDir(out).report
    # In this block, no symbolic link within the output directory is followed.
    with output_directory(out):
        append_approval(folder / APPROVALS, line)
        write(folder / APPROVAL, line.approval)
    append_approval(history, line)


def keep_earlier_answer(out: Path, history: Path, report: Report) -> None:
    """Add the answer of `report/approval.json` to all answers, before another one replaces it.

    Older versions kept only the newest answer. Without an answer nothing happens.

    Args:
        out: The validation's directory.
        history: The file of past validations, which gets the same line.
        report: The report of the validation.
    """
    folder = RunDir(out).report
    if not path_exists(folder / APPROVAL):
        return
    answer = read(folder / APPROVAL, ApprovalRecord)
    kept = [line.approval for line in read_approvals(folder / APPROVALS)]
    if answer not in kept:
        keep_answer(out, history, approval_line(report, answer))


def verify_approvals(
    verification: Verification, out: Path, report: Report, history: Path | None
) -> None:
    """Check that no answer of a reviewer was removed or edited.

    The newest answer, the answers beside the report and those in the history must agree.

    Args:
        verification: Collects the differences.
        out: The validation's directory.
        report: Its report, which tells which answers of the history are about this validation.
        history: The history of validations. None if it is not there: then only the files beside the
            report are compared.
    """
    folder = RunDir(out).report
    kept_path = folder / APPROVALS
    kept_name = kept_path.relative_to(out).as_posix()
    kept = read_approvals(kept_path)
    for gap in history_gaps(kept_path):
        verification.add_difference(gap)
    if history is not None:
        listed = read_approvals(history)
        for line in listed:
            if _is_about(line, report) and line not in kept:
                text = f"{kept_name}: {_describe(line)} is missing, which {history.name} has"
                verification.add_difference(text)
        for line in kept:
            if line not in listed:
                text = f"{history.name}: {_describe(line)} is missing, which {kept_name} has"
                verification.add_difference(text)
    if not kept:  # nobody has answered, or an older version kept only the newest answer
        return
    name = (folder / APPROVAL).relative_to(out).as_posix()
    if path_exists(folder / APPROVAL):
        newest = read(folder / APPROVAL, ApprovalRecord, check=False)
        verification.compare(f"{name} against {kept_name}", newest, kept[-1].approval)
    else:
        verification.add_difference(f"{name} is missing: {_describe(kept[-1])} in {kept_name}")


def _is_about(line: ApprovalLine, report: Report) -> bool:
    """Return whether an answer in the history is about this validation."""
    return line == approval_line(report, line.approval)


def _describe(line: ApprovalLine) -> str:
    """Return a short text that says which answer a line holds."""
    answer = line.approval
    return f"the answer '{answer.verdict}' of {answer.reviewer} ({answer.when})"
