"""The step that judges a validation and writes its report; and how the report appears in the UI."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from virnuc.tasks.artifacts import (
    Rows,
    artifact_key,
    host_key,
    publish_markdown,
    publish_table,
    table_cell,
)
from virnuc.tasks.events import emit
from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.result_links import with_links
from virnuc.tasks.task import retrying_task
from virnuc_core.markdown import Markdown, code_span
from virnuc_core.profiles import Profile
from virnuc_core.report import messages
from virnuc_core.report.build import write_report
from virnuc_core.report.charts import all_charts
from virnuc_core.report.model import Criterion, Report
from virnuc_core.report.regression import REGRESSION, RegressionFile, trend
from virnuc_core.report.render import charts_markdown, report_body
from virnuc_core.report.sections import Row
from virnuc_core.report.text import Mark
from virnuc_core.report.views.criteria import criteria_section
from virnuc_core.report.views.reads import fate_rows
from virnuc_core.report.views.speed import scaling_rows
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import read
from virnuc_core.system_errors import path_exists

# how the UI shows the verdicts, with signs that every font has and without emoji
VERDICT_MARKS: Final = {
    "pass": "✓ **PASS**",
    "fail": "✗ **FAIL**",
    "projected": "≈ projected",
    "not run": "– not run",
    "not asked": "– not asked",
}
# charts that the UI shows; an artifact must stay below 100 KiB
SHOWN_CHARTS: Final = ("Stages over time", "Utilisation", "Throughput", "History")
MAX_NIGHTS: Final = 20  # rows of the trend


@retrying_task("report", "report {label}")
def report_validation(out: Path, profile: Profile, *, history: Path, label: str) -> Outcome[Report]:
    """Judge a validation, write every form of its report, and send an event for each verdict.

    Args:
        out: The directory of the validation; the report is written to `out/report/`.
        profile: The thresholds.
        history: The file of past validations, to which a line is added.
        label: The name of the sample, for names in the UI.
    """
    report = write_report(out, profile, history)
    facts = {"profile": profile.name, "report": _report_folder(out)}
    for criterion in (*report.criteria, *report.further_verdicts):
        _emit_criterion(criterion, facts)
    if report.regression is not None:
        verdict = artifact_key(report.regression.verdict)
        emit(
            f"regression.{verdict}",
            f"regression.{artifact_key(profile.name)}",
            profile.title,
            report.regression.model_dump(mode="json") | facts,
        )
    return completed(report, messages.criteria_message(report))


def publish_report(report: Report, out: Path, label: str) -> None:
    """Show the report in the UI, under the same keys each time.

    Called by the flow itself: on a flow run's page its artifacts come before those of its tasks.

    Args:
        report: The judged report.
        out: The directory of the validation.
        label: The name of the sample.
    """
    profile_name = report.profile.name
    _publish_verdicts(report, out, label)
    if report.accounting is not None:
        publish_table(
            f"reads-{profile_name}",
            fate_rows(report),
            f"What became of the reads of {label}",
        )
    if len(report.scaling) > 1:
        publish_table(
            host_key(f"scaling-{profile_name}"),
            with_verdict_marks(scaling_rows(report)),
            f"Scaling of {label}",
        )
    _publish_texts(report, out, label)
    _publish_trend(report, out)


def emit_outcome(report: Report, out: Path) -> None:
    """Send one event for the validation as a whole: how many criteria are met, and which are not.

    Args:
        report: The judged report.
        out: The directory of the validation.
    """
    payload = {
        "met": report.num_met,
        "asked": len(report.requested),
        "failed": list(report.failures),
        "report": _report_folder(out),
    }
    emit(
        f"validation.{artifact_key(report.outcome)}",
        f"validation.{artifact_key(report.profile.name)}",
        report.profile.title,
        payload,
    )


def with_verdict_marks(rows: Sequence[Row]) -> Rows:
    """Return the rows with each verdict replaced by a mark in Markdown, such as `✓ **PASS**`."""
    return [{column: _marked(value) for column, value in row.items()} for row in rows]


def _marked(value: object) -> object:
    """Return a verdict as its mark, and any other value as it is."""
    if isinstance(value, Mark):
        return Markdown(VERDICT_MARKS[value.verdict])
    return value


def _report_folder(out: Path) -> str:
    """Return the absolute path of the report of a validation."""
    return str(RunDir(out).report.absolute())


def _emit_criterion(criterion: Criterion, facts: dict[str, str]) -> None:
    """Send an event about the verdict on one criterion, as `virnuc.criterion.pass`.

    Args:
        criterion: The judged criterion. Without a threshold its target is None.
        facts: Facts about the validation, which every event has: its profile and its report.
    """
    target = criterion.target
    target_text = None
    if target is not None:
        target_text = f"{target.op} {target.value:g} {criterion.unit}"
    payload: dict[str, Any] = {
        "value": criterion.value,
        "target": target_text,
        "reason": criterion.reason,
        **facts,
    }
    emit(
        f"criterion.{artifact_key(criterion.verdict)}",
        f"criterion.{artifact_key(criterion.id)}",
        criterion.title,
        payload,
    )


def _publish_verdicts(report: Report, out: Path, label: str) -> None:
    """Show the table of criteria, and say where the whole report is."""
    name = report.profile.name
    summary = table_cell(messages.criteria_message(report))
    text = Markdown(f"**{summary}** — {table_cell(label)}, {table_cell(name)}.")
    page = RunDir(out).report / "report.html"
    description = Markdown(
        f"{with_links(text, result=page, kind='Report')} · On the worker's machine "
        f"{code_span(f'virnuc report {shlex.quote(str(out.absolute()))} --serve')} shows it."
    )
    publish_table(
        host_key(f"criteria-{name}"), with_verdict_marks(criteria_section(report).rows), description
    )


def _publish_texts(report: Report, out: Path, label: str) -> None:
    """Show the report as a text, and its charts."""
    name = report.profile.name
    folder = RunDir(out).report
    # The front matter of report.md is left out, because Prefect would show it as headings.
    text = report_body(report)
    publish_markdown(
        host_key(f"report-{name}"), text, messages.criteria_message(report), folder / "report.md"
    )
    charts = [chart for chart in all_charts(report) if chart.title in SHOWN_CHARTS]
    text = charts_markdown(charts)
    publish_markdown(host_key(f"charts-{name}"), text, f"Charts of {label}", folder / "report.html")


def _publish_trend(report: Report, out: Path) -> None:
    """Show the newest validations on these devices as a table, the newest first.

    Nothing is shown if this validation was not compared with earlier ones.
    """
    regression = RunDir(out).root / REGRESSION
    if not path_exists(regression):
        return
    comparison = read(regression, RegressionFile)
    nights = trend((*comparison.history, comparison.entry))[-MAX_NIGHTS:]
    newest_first = nights[::-1]
    publish_table(
        host_key(f"trend-{report.profile.name}"),
        newest_first,
        f"Newest first, of the last {MAX_NIGHTS} on these devices",
    )
