"""Measurements as rows of the tables that people see in the UI. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tasks.artifacts import cell, verdict_cell
from virnuc_core.report import formatting
from virnuc_core.report.formatting import Mark, Table, number
from virnuc_core.report.model import Report
from virnuc_core.runfiles import OverheadFile, RunSummary
from virnuc_core.telemetry.records import STAGES

Rows = list[dict[str, str]]
REMARKS: Final = ("short_for_model", "ambiguous", "duplicate_ids", "skipped")


def rows_of(*tables: Table) -> Rows:
    """Tables of a report's view, one below the other, as Prefect shows them."""
    return [
        {
            name: verdict_cell(value.verdict) if isinstance(value, Mark) else cell(value)
            for name, value in zip(table.header, row, strict=True)
        }
        for table in tables
        for row in table.rows
    ]


def percent(share: float | None) -> str:
    """A share of one, in percent."""
    return cell(formatting.percent(share))


def stage_rows(summary: RunSummary) -> Rows:
    """The nine stages of a run: seconds, share of the whole, or that the stage is fused with another."""
    rows = []
    for place, name in enumerate(STAGES, start=1):
        seconds = summary.stages.get(name)
        share = seconds / summary.total_s if seconds is not None and summary.total_s else None
        spent = (
            cell(number(seconds, 2)) if seconds is not None else "fused" if name in summary.stages else "not measured"
        )
        rows.append({"stage": f"Stage {place}: {name}", "seconds": spent, "share": percent(share)})
    return [
        *rows,
        {"stage": "**Total wall time**", "seconds": cell(number(summary.total_s or 0.0, 2)), "share": "100 %"},
    ]


def fate_rows(summary: RunSummary, tally: Mapping[str, int] | None = None) -> Rows:
    """What became of the reads; the fates add up to the reads that came in. `tally` is what staging counted: its
    remarks on reads, and the records that never became one, follow below the sum."""

    def row(what: str, count: int) -> dict[str, str]:
        share = percent(count / summary.n_reads if summary.n_reads else None)
        return {"fate": cell(what), "reads": cell(count), "share": share}

    total = {"fate": "**all reads**", "reads": cell(sum(summary.fates.values())), "share": "100 %"}
    remarks = [row(f"remark: {name}", tally[name]) for name in REMARKS if tally is not None and name in tally]
    return [*(row(name, count) for name, count in summary.fates.items()), total, *remarks]


def overhead_rows(found: OverheadFile) -> Rows:
    """Pairs of runs with and without commits."""
    return [
        {
            "pair": cell(place),
            "tokens/s with commits": cell(round(pair.with_tokens_per_s)),
            "tokens/s without": cell(round(pair.without_tokens_per_s)),
            "overhead": percent(pair.overhead),
            "worker restarts": cell(pair.restarts),
        }
        for place, pair in enumerate(found.pairs, start=1)
    ]


def overhead_sentence(found: OverheadFile) -> str:
    """What commits cost, in a sentence."""
    shares = sorted(share for pair in found.pairs if (share := pair.overhead) is not None)
    if not shares:
        return "commits were not timed"
    return f"commits cost {percent(shares[len(shares) // 2])} of the tokens/s, over {len(shares)} pairs of runs"


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
