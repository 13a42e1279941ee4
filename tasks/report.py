"""The steps that measure, compare and judge runs; those that fit a head; and the reviewer's answer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from prefect.client.schemas.objects import State

from virnuc.tasks.artifacts import (
    Markdown,
    Rows,
    artifact_key,
    host_key,
    publish_markdown,
    publish_table,
    table_cell,
)
from virnuc.tasks.events import emit
from virnuc.tasks.task import completed, retrying_task
from virnuc_core.profiles import Profile
from virnuc_core.report import messages
from virnuc_core.report.build import write_report
from virnuc_core.report.charts import all_charts
from virnuc_core.report.model import Report
from virnuc_core.report.regression import REGRESSION, RegressionFile, trend
from virnuc_core.report.render import charts_markdown, report_body
from virnuc_core.report.sections import Row
from virnuc_core.report.text import Mark
from virnuc_core.report.views.criteria import criteria_section
from virnuc_core.report.views.reads import fate_rows
from virnuc_core.report.views.speed import scaling_rows
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import read

# how the UI shows the verdicts; with signs that every font has, no emoji
VERDICT_MARKS: Final = {
    "pass": "✓ **PASS**",
    "fail": "✗ **FAIL**",
    "projected": "≈ projected",
    "not run": "– not run",
    "not asked": "– not asked",
}
SHOWN: Final = (
    "Stages over time",
    "Utilisation",
    "Throughput",
    "History",
)  # an artifact is below 100 KiB
NIGHTS: Final = 20


@retrying_task("report", "report {label}")
def report_validation(out: Path, profile: Profile, *, history: Path, label: str) -> State[Report]:
    """Every form of the report in `out/report/`, and one event for each verdict."""
    judged = write_report(out, profile, history)
    common = {"profile": profile.name, "report": str(RunDir(out).report.absolute())}
    for criterion in (*judged.criteria, *judged.further):
        target = criterion.target
        wanted = None if target is None else f"{target.op} {target.value:g} {criterion.unit}"
        payload = {"value": criterion.value, "target": wanted, "reason": criterion.reason} | common
        emit(
            f"criterion.{artifact_key(criterion.verdict)}",
            f"criterion.{artifact_key(criterion.id)}",
            criterion.title,
            payload,
        )
    if (found := judged.regression) is not None:
        payload = found.model_dump(mode="json") | common
        emit(
            f"regression.{artifact_key(found.verdict)}",
            f"regression.{artifact_key(profile.name)}",
            profile.title,
            payload,
        )
    return completed(judged, messages.met(judged))


def publish_report(judged: Report, out: Path, label: str) -> None:
    """The verdicts in the UI, under the same keys each time; on the flow's page they come before those of its tasks."""
    name, folder = judged.profile.name, RunDir(out).report
    told = Markdown(
        f"**{table_cell(messages.met(judged))}** — {table_cell(label)}, {table_cell(name)}"
    )
    publish_table(
        host_key(f"criteria-{name}"), with_verdict_marks(criteria_section(judged).rows), told
    )
    if judged.accounting is not None:
        publish_table(
            f"reads-{name}",
            fate_rows(judged),
            f"What became of the reads of {label}",
        )
    if len(judged.scaling) > 1:
        publish_table(
            host_key(f"scaling-{name}"),
            with_verdict_marks(scaling_rows(judged)),
            f"Scaling of {label}",
        )
    text = report_body(judged)  # without the settings, which Prefect would show as headings
    publish_markdown(host_key(f"report-{name}"), text, messages.met(judged), folder / "report.md")
    charts = [chart for chart in all_charts(judged) if chart.title in SHOWN]
    text = charts_markdown(charts)
    publish_markdown(host_key(f"charts-{name}"), text, f"Charts of {label}", folder / "report.html")
    if (kept := RunDir(out).root / REGRESSION).is_file():
        compared = read(kept, RegressionFile)
        nights = trend((*compared.history, compared.entry))[-NIGHTS:]
        publish_table(
            host_key(f"trend-{name}"),
            nights[::-1],
            f"Newest first, of the last {NIGHTS} on these devices",
        )


def emit_outcome(judged: Report, out: Path) -> None:
    """One event for the validation as a whole."""
    payload = {"met": judged.met, "asked": len(judged.asked), "failed": list(judged.missed)}
    payload |= {"report": str(RunDir(out).report.absolute())}
    emit(
        f"validation.{artifact_key(judged.outcome)}",
        f"validation.{artifact_key(judged.profile.name)}",
        judged.profile.title,
        payload,
    )


def with_verdict_marks(rows: Sequence[Row]) -> Rows:
    """Return the rows of a table with verdicts as Prefect shows them."""
    shown: list[dict[str, object]] = []
    for row in rows:
        cells: dict[str, object] = dict(row)
        for column, value in row.items():
            if isinstance(value, Mark):
                cells[column] = Markdown(VERDICT_MARKS[value.verdict])
        shown.append(cells)
    return shown
