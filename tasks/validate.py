"""The steps of a validation: the baseline, the comparison, the report, its verdicts, the reviewer's answer."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from prefect.client.schemas.objects import State
from prefect.input import RunInput
from pydantic import Field, create_model

from tasks.artifacts import (
    VERDICT_MARKS,
    Rows,
    cell,
    emit,
    key,
    markdown_table,
    percent,
    progress_artifact,
    publish_link,
    publish_markdown,
    publish_table,
)
from tasks.step import device_slots, done, first_attempt, step
from virnuc_core.baseline.run import BaselineProgress, run_baseline
from virnuc_core.config import Devices
from virnuc_core.engine.devices import resolve
from virnuc_core.profiles import BaselineSpec, Profile
from virnuc_core.report.approval import APPROVAL, QUESTIONS
from virnuc_core.report.build import write_comparisons
from virnuc_core.report.compare import bitwise, cosines
from virnuc_core.report.compare import compare as compare_results
from virnuc_core.report.formatting import Mark, Table
from virnuc_core.report.model import Criterion, Report
from virnuc_core.report.render import fill, write_report
from virnuc_core.report.verify import dna_width
from virnuc_core.report.views import accounts, agreements, criteria, scaling
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import write
from virnuc_core.validation import ApprovalRecord, BaselineSummary, Comparison

BASELINE = "baseline"
Answer = Literal["yes", "no", "not answered"]
Verdict = Literal["approved", "rejected", "pending"]
# the answer given when nobody answers in time
TIMED_OUT: Final = {
    "verdict": "pending",
    "reviewer": "nobody (time-out)",
    "note": "no answer came before the time-out",
}


@step("baseline", "baseline {spec.name} on {devices}")
def baseline(
    run: RunDir, *, store: Path, models: Path, devices: Devices, spec: BaselineSpec, label: str, force: bool = False
) -> State[BaselineSummary]:
    """The baseline's time and result files in `run`; one of the same reads, weights and devices is used as it is."""
    if force and first_attempt():
        start_over(run)
    progress = progress_artifact(f"progress-{label}-baseline", f"Baseline {spec.name} of {label}")

    def share(so_far: BaselineProgress) -> float:
        return so_far.rows / so_far.total_rows if so_far.total_rows else 1.0

    with device_slots(resolve(devices)), progress as show:
        summary = run_baseline(run, store, models, devices, spec, on_progress=lambda so_far: show(share(so_far)))
        show(1.0)
    return done(summary, _time_of(summary), reused=summary.reused)


def start_over(run: RunDir) -> None:
    """Remove an earlier baseline. Errors: `OSError`; what cannot be removed must not be taken for the new one's."""
    if run.root.exists():
        shutil.rmtree(run.root)


def _time_of(summary: BaselineSummary) -> str:
    """What the baseline's time is and how it is known."""
    if summary.source == "recorded":
        return f"{summary.name}: {summary.wall_s:,.1f} s, recorded in the profile"
    if summary.subset is None:
        return f"{summary.name}: {summary.wall_s:,.1f} s measured on all reads"
    return (
        f"{summary.name}: {summary.measured_s:,.1f} s measured on {summary.subset.reads:,} reads, "
        f"{summary.wall_s:,.1f} s scaled by tokens"
    )


@step("compare", "compare {label}")
def compare(
    out: Path, names: tuple[str, ...], *, tolerance: float, subset: bool, label: str
) -> State[tuple[Comparison, ...]]:
    """`comparison.json` of a validate directory. `subset`: the baseline covers a part of the reads only."""
    found = comparisons(out, names, tolerance=tolerance, subset=subset)
    write_comparisons(out, found)
    publish_table(f"comparison-{label}", rows_of(agreements(found)), f"Agreement of the runs of {label}")
    return done(found, _agreements(found))


def comparisons(out: Path, names: tuple[str, ...], *, tolerance: float, subset: bool) -> tuple[Comparison, ...]:
    """The runs `names` against the baseline, where that left results, and against the first of them."""
    found = []
    if RunDir(out / BASELINE).predictions.is_file():
        found += [
            compare_results(out / BASELINE, out / name, tolerance=tolerance, subset_of_a=subset, names=(BASELINE, name))
            for name in names
        ]
    for name in names[1:]:
        first = names[0]
        a, b = out / first, out / name
        exact = {"cosines": cosines(a, b, dna_width(a)), "bitwise": bitwise(a, b)}
        found.append(compare_results(a, b, tolerance=tolerance, names=(first, name)).model_copy(update=exact))
    return tuple(found)


def _agreements(found: tuple[Comparison, ...]) -> str:
    """The agreements, in a sentence."""
    parts = []
    for comparison in found:
        if comparison.bitwise is not None:
            same = "equal bit for bit" if comparison.bitwise.identical else "NOT equal bit for bit"
            parts.append(f"{comparison.a} and {comparison.b} {same}")
        elif comparison.consensus is not None:
            parts.append(f"{comparison.b} agrees with {comparison.a} to {percent(comparison.consensus.agreement)}")
    return "; ".join(parts) or "nothing to compare"


@step("report", "report {label}")
def report(out: Path, profile: Profile, *, history: Path, label: str) -> State[Report]:
    """Every form of the report in `out/report/`, and one event for each verdict."""
    judged = write_report(out, profile, history)
    for criterion in (*judged.criteria, *judged.checks):
        emit_verdict(criterion, judged, out)
    return done(judged, met_sentence(judged))


def publish(judged: Report, out: Path, label: str) -> None:
    """The verdicts in the UI; the same keys each time, so that each key's page is a history.

    Called by the flow itself, whose artifacts its page shows before those of its tasks.
    """
    name, folder = judged.profile.name, RunDir(out).report
    publish_table(f"criteria-{name}", rows_of(*criteria(judged)), f"**{met_sentence(judged)}** — {label}, {name}")
    if judged.accounting is not None:
        publish_table(f"reads-{name}", rows_of(accounts(judged)), f"What became of the reads of {label}")
    if judged.scaling:
        publish_table(f"scaling-{name}", rows_of(scaling(judged)), f"Scaling of {label}")
    text = fill("body.md.j2", judged)  # without the settings, which Prefect would show as headings
    publish_markdown(f"report-{name}", text, met_sentence(judged), folder / "report.md")
    publish_link(f"report-html-{name}", folder / "report.html", "report.html", "The report with its charts")


def emit_verdict(criterion: Criterion, judged: Report, out: Path) -> None:
    """One event for one verdict."""
    target = criterion.target
    emit(
        f"criterion.{key(criterion.verdict)}",
        f"criterion.{key(criterion.id)}",
        criterion.title,
        {
            "value": criterion.value,
            "target": None if target is None else f"{target.op} {target.value:g} {criterion.unit}",
            "reason": criterion.reason,
            "profile": judged.profile.name,
            "report": str(RunDir(out).report.absolute()),
        },
    )


def emit_outcome(judged: Report, out: Path) -> None:
    """One event for the validation as a whole."""
    passed = not judged.failed
    emit(
        "validation.passed" if passed else "validation.failed",
        f"validation.{key(judged.profile.name)}",
        judged.profile.title,
        {
            "met": judged.met,
            "asked": len(judged.criteria),
            "failed": [criterion.title for criterion in judged.failed],
            "report": str(RunDir(out).report.absolute()),
        },
    )


def rows_of(*tables: Table) -> Rows:
    """Tables of a report's view, one below the other, as Prefect shows them."""
    return [
        {
            name: VERDICT_MARKS[value.verdict] if isinstance(value, Mark) else cell(value)
            for name, value in zip(table.header, row, strict=True)
        }
        for table in tables
        for row in table.rows
    ]


def met_sentence(report: Report) -> str:
    """`6 of 7 criteria met`, and which were missed."""
    missed = ", ".join(criterion.title for criterion in report.failed)
    open_ones = sum(criterion.verdict in ("not run", "projected") for criterion in report.criteria)
    text = f"{report.met} of {len(report.criteria)} criteria met"
    if missed:
        text += f"; not met: {missed}"
    if open_ones:
        text += f"; {open_ones} not judged here"
    return text


# --- the reviewer's answer --------------------------------------------------------------------------------------------


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


def form_with(figures: Mapping[str, str], description: str) -> type[Approval]:
    """The form with the figures of this run beside the questions they belong to, by name of field.

    `description` stands above the form; in a low window the UI hides it, so that nothing may stand there alone.
    """
    fields: dict[str, Any] = {}
    for name, text in figures.items():
        field = Approval.model_fields[name]
        fields[name] = (field.annotation, Field(field.default, description=f"{field.description} {text}"))
    made = create_model("Approval", __base__=Approval, **fields)
    return made.with_initial_data(description=description)


def record_answer(report_dir: Path, answer: Approval, *, flow_run: str) -> ApprovalRecord:
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
    return form_with(
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
