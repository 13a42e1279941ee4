"""The steps of a validation: the baseline, the comparison, the report, and what people see and hear of its verdicts."""

from __future__ import annotations

import shutil
from pathlib import Path

from prefect.client.schemas.objects import State

from tasks.artifacts import (
    VERDICT_MARKS,
    Rows,
    cell,
    emit,
    key,
    percent,
    progress_artifact,
    publish_link,
    publish_markdown,
    publish_table,
)
from tasks.guard import device_slots
from tasks.step import done, first_attempt, step
from virnuc_core.baseline.run import BaselineProgress, run_baseline
from virnuc_core.config import Devices
from virnuc_core.engine.devices import resolve
from virnuc_core.profiles import BaselineSpec, Profile
from virnuc_core.report.build import write_comparisons
from virnuc_core.report.compare import bitwise, cosines
from virnuc_core.report.compare import compare as compare_results
from virnuc_core.report.formatting import Mark, Table
from virnuc_core.report.model import Criterion, Report
from virnuc_core.report.render import fill, write_report
from virnuc_core.report.verify import dna_width
from virnuc_core.report.views import accounts, agreements, criteria, scaling
from virnuc_core.rundir import RunDir
from virnuc_core.validation import BaselineSummary, Comparison

BASELINE = "baseline"


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
