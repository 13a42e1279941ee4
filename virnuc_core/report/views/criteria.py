"""Views of the verdicts: the criteria, how each is measured, the regression, and the approval."""

from collections.abc import Iterable
from typing import Final

from virnuc_core.profiles import QUESTIONS
from virnuc_core.report.model import ApprovalState, Criterion, Regression, Report, Verdict
from virnuc_core.report.sections import Row, Section, Table
from virnuc_core.report.text import (
    Mark,
    Number,
    cell,
    format_value,
    number,
    percent,
    target_text,
)

CRITERIA_TITLE: Final = "Criteria"  # of the section that the charts follow


def criteria_section(report: Report) -> Section:
    """Return the section with the seven criteria, and the further checks of the profile."""
    checks = Table(criterion_rows(report.checks), "Further checks")
    return Section(CRITERIA_TITLE, tables=[Table(criterion_rows(report.criteria)), checks])


def criterion_rows(criteria: Iterable[Criterion]) -> list[Row]:
    """Return each criterion with its value; the verdict comes first so that it is seen first."""
    rows: list[Row] = []
    for criterion in criteria:
        measured = samples = None
        if criterion.value is not None:
            measured = Number(format_value(criterion))
        if criterion.samples is not None:
            samples = f"{criterion.samples:,} {criterion.samples_of}"
        rows.append(
            {
                "Verdict": Mark(criterion.verdict),
                "Criterion": criterion.title,
                "Measured": measured,
                "Required": Number(target_text(criterion.target, criterion.unit)),
                "Samples": samples,
                "Why": criterion.reason,
                "Device": criterion.device,
                "ID": criterion.perf_id,
            }
        )
    return rows


def definitions_section(report: Report) -> Section:
    """Return the section that defines each criterion and names its raw files."""
    rows: list[Row] = [
        {
            "Criterion": criterion.title,
            "Definition": criterion.definition,
            "Profile": criterion.profile_line,
            "Raw files": ", ".join(criterion.raw),
        }
        for criterion in (*report.criteria, *report.checks)
    ]
    return Section("How each is measured", tables=[Table(rows)])


def regression_section(regression: Regression) -> Section:
    """Return the section that compares a run with the last one like it."""
    parts = []
    if regression.against_commit:
        parts.append(f"against {regression.against_commit} of {regression.against_created}")
    if regression.reason:
        parts.append(regression.reason)
    return Section(
        "Regression",
        lead=Mark(regression.verdict),
        sentences=[": ".join(parts)],
        tables=[Table(regression_rows(regression))],
    )


def regression_rows(regression: Regression) -> list[Row]:
    """Return a table row for each metric of two compared runs; none if there was no earlier run."""
    return [
        {
            "Metric": metric.name,
            "Before": number(metric.before, 2),
            "Now": number(metric.now, 2),
            "Change": percent(metric.change),
            "Verdict": Mark(metric.verdict),
        }
        for metric in regression.metrics
    ]


def approval_section(approval: ApprovalState) -> Section:
    """Return the section with the decision and the answers of the reviewer."""
    colours: dict[str, Verdict] = {"approved": "pass", "rejected": "fail"}
    colour = colours.get(approval.verdict, "not run")
    # `approval_text` follows a word elsewhere. Here it begins the sentence.
    reviewer = cell(approval_text(approval)).removeprefix(":").strip()
    rows: list[Row] = []
    if approval.reviewer is not None:
        answers = approval.model_dump(include=set(QUESTIONS))
        for name, question in QUESTIONS.items():
            rows.append({"Question": question, "Answer": answers[name] or "not answered"})
    return Section(
        "Approval",
        lead=Mark(colour, approval.verdict),
        sentences=[reviewer, *approval.note.splitlines()],
        tables=[Table(rows)],
    )


def approval_text(approval: ApprovalState) -> str:
    """Return who decided and when: text that follows the decision, such as ` by Ann, 2026-…`."""
    if approval.reviewer is None:
        return ": nobody has answered yet"
    text = f" by {approval.reviewer}"
    if approval.when is not None:
        time = approval.when.replace("T", " ").replace("+00:00", " UTC")
        text += f", {time}"
    if approval.of_earlier_run:
        text += "; the answer is older than these figures"
    if approval.contradictions:
        text += f"; it contradicts the figures: {'; '.join(approval.contradictions)}"
    return text
