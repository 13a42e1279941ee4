"""The reviewer's answer to a validation: the five questions beside its figures, and the record that is kept."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from prefect.input import RunInput
from pydantic import Field, create_model

from tasks.artifacts import markdown_table
from tasks.validate import met_sentence, rows_of
from virnuc_core.report.approval import APPROVAL, QUESTIONS
from virnuc_core.report.model import Report
from virnuc_core.report.views import criteria
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import write
from virnuc_core.validation import ApprovalRecord

Answer = Literal["yes", "no", "not answered"]
Verdict = Literal["approved", "rejected", "pending"]
# the answer given when nobody answers in time
TIMED_OUT: Final = {
    "verdict": "pending",
    "reviewer": "nobody (time-out)",
    "note": "no answer came before the time-out",
}


class Approval(RunInput):
    """What the reviewer is asked. The decision and the name have no default: an empty answer must not count as one.

    The form renders descriptions as Markdown, in which a number at the start would become a list of its own.
    """

    all_criteria_met: Answer = Field("not answered", description=QUESTIONS["all_criteria_met"])
    target_realistic: Answer = Field("not answered", description=QUESTIONS["target_realistic"])
    tuning_could_help: Answer = Field("not answered", description=QUESTIONS["tuning_could_help"])
    code_fix_needed: Answer = Field("not answered", description=QUESTIONS["code_fix_needed"])
    esm2_still_bottleneck: Answer = Field("not answered", description=QUESTIONS["esm2_still_bottleneck"])
    verdict: Verdict = Field(description="The decision")
    reviewer: str = Field(min_length=1, max_length=200, description="Who decides")
    note: str = Field("", max_length=10_000, description="Issues, adjustments, follow-up work")


def form(figures: Mapping[str, str], description: str) -> type[Approval]:
    """The form with the figures of this run beside the questions they belong to, by name of field.

    `description` stands above the form; in a low window the UI hides it, so that nothing may stand there alone.
    """
    fields: dict[str, Any] = {}
    for name, text in figures.items():
        field = Approval.model_fields[name]
        fields[name] = (field.annotation, Field(field.default, description=f"{field.description} {text}"))
    made = create_model("Approval", __base__=Approval, **fields)
    return made.with_initial_data(description=description)


def record(report_dir: Path, answer: Approval, *, flow_run: str) -> ApprovalRecord:
    """Keep who decided what and when beside the report."""
    moment = datetime.now(UTC).isoformat(timespec="seconds")
    kept = ApprovalRecord(when=moment, flow_run=flow_run, **answer.model_dump(mode="json"))
    write(report_dir / APPROVAL, kept)
    return kept


def approval_form(judged: Report, out: Path) -> type[Approval]:
    """What the reviewer is asked, with the figures of this validation beside the questions."""
    rows = rows_of(*criteria(judged))
    missed = [f"{row['Criterion']} {row['Measured']} ({row['Required']})" for row in rows if "FAIL" in row["Verdict"]]
    wanted = ("Verdict", "Criterion", "Measured", "Required")
    table = markdown_table([{name: row[name] for name in wanted} for row in rows])
    link = (RunDir(out).report / "report.html").absolute().as_uri()
    return form(
        {
            "all_criteria_met": f"**{met_sentence(judged)}**",
            "target_realistic": f"Not met: {', '.join(missed)}" if missed else "",
            "tuning_could_help": "(loader workers, token budget, prefetch)",
            "esm2_still_bottleneck": f"How large is the share of non-GPU work? {shares_of_time(judged)}",
        },
        f"{table}\nBottleneck: {judged.bottleneck.kind}. {judged.bottleneck.advice} [The whole report]({link})\n",
    )


def shares_of_time(judged: Report) -> str:
    """Where the time went: the two encoders, and everything else.

    What a stage that is fused takes is part of the stage it is fused with.
    """
    stages = () if judged.run is None else judged.run.stages
    shares = {stage.name: stage.share for stage in stages if stage.share is not None}
    if not shares:
        return "Stage times are not known."
    encoders = [(name, shares.get(name, 0.0)) for name in ("ESM-2", "DNABERT-S")]
    rest = max(0.0, 1.0 - sum(share for _, share in encoders))
    parts = [f"{name} {100 * share:.1f} %" for name, share in [*encoders, ("other work", rest)]]
    return f"**{', '.join(parts)}**"
