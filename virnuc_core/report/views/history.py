"""View of past validations."""

from collections.abc import Iterable

from virnuc_core.report.model import HistoryEntry, Regression
from virnuc_core.report.sections import Row
from virnuc_core.report.text import number, percent


def trend_rows(runs: Iterable[tuple[HistoryEntry, Regression]]) -> list[Row]:
    """Return a table row for each run of a history.

    Args:
        runs: The runs, each with its comparison to the previous comparable run.
    """
    rows: list[Row] = []
    for entry, regression in runs:
        change = None  # of the speed, against the previous comparable run
        for metric in regression.metrics:
            if metric.name == "tokens_per_s":
                change = metric.change
        verdict = regression.verdict
        rows.append(
            {
                "when": entry.created.replace("T", " ")[:16],
                "met": entry.criteria_met,
                "regression": f"{verdict}: {regression.reason}" if regression.reason else verdict,
                "total s": number(entry.total_s),
                "tokens/s": number(entry.tokens_per_s, 0),
                "change": percent(change),
                "commit": entry.commit[:12],
                "reads": entry.n_reads,
                "profile": entry.profile,
                "devices": f"{entry.devices} {entry.precision}",
            }
        )
    return rows
