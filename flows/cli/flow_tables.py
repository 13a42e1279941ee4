"""The tables that commands show at the end of a flow. What they show is also in files."""

from collections.abc import Iterable
from typing import Final

from virnuc.flows.settings.profile import ProfileSettings
from virnuc.flows.settings.scale import ScaleSettings
from virnuc.flows.settings.tune import TuneSettings
from virnuc.tasks.run_tables import stage_rows
from virnuc_core.report.build import read_report
from virnuc_core.report.render import REPORT_JSON
from virnuc_core.report.sections import Row, Table
from virnuc_core.report.views.speed import scaling_rows
from virnuc_core.report.views.tools import mark_rows, operation_rows, overhead_rows
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunSummary, read
from virnuc_core.tools.sweep_files import TuneFile
from virnuc_core.tools.trace import TraceTable
from virnuc_core.validation import OverheadFile

SHOWN_OPERATIONS: Final = 10


def scaling_tables(settings: ScaleSettings, _result: object) -> Iterable[Table]:
    """Return time, speed-up and verdict for each number of devices."""
    report = read_report(RunDir(settings.newest).report / REPORT_JSON)
    return [Table(scaling_rows(report), "GPU Scaling")]


def sweep_tables(settings: TuneSettings, _result: object) -> Iterable[Table]:
    """Return speed and verdict of each candidate of a sweep of settings."""
    sweep = read(settings.out / "tune.json", TuneFile)
    rows: list[Row] = []
    for candidate in sweep.candidates:
        names_and_values = [f"{name}={value}" for name, value in candidate.changes.items()]
        is_recommended = candidate.number == sweep.recommended.number
        rate = candidate.median_tokens_per_s
        rows.append(
            {
                "settings": " ".join(names_and_values) or "base",
                "tokens/s": None if rate is None else round(rate),
                "runs": len(candidate.tokens_per_s),
                "queue depth": candidate.queue_depth,
                "verdict": "recommended" if is_recommended else candidate.verdict,
                "why": candidate.reason,
            }
        )
    return [Table(rows, "Settings")]


def profile_tables(settings: ProfileSettings, traces: tuple[TraceTable, ...]) -> Iterable[Table]:
    """Return the stages of the whole run, the recorded ones, and the longest operations."""
    stages: list[Row] = []
    for row in stage_rows(read(RunDir(settings.out).summary, RunSummary)):
        texts = {name: str(value) for name, value in row.items()}
        stages.append({name: text.strip("*") for name, text in texts.items()})  # no Markdown here
    return [
        Table(stages, "The whole run"),
        Table(mark_rows(traces), "Recorded stages"),
        Table(operation_rows(traces, limit=SHOWN_OPERATIONS), "Operations that took most time"),
    ]


def overhead_tables(_settings: object, costs: OverheadFile) -> Iterable[Table]:
    """Return the speed of each pair of runs, with and without a feature."""
    return [Table(overhead_rows(costs.pairs), "Pairs of runs")]
