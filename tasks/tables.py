"""Measurements as rows of the tables that people see in the UI. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from tasks.artifacts import cell, verdict_cell
from virnuc_core.report.model import Comparison, Criterion, Report
from virnuc_core.report.overhead import OverheadFile
from virnuc_core.runfiles import RunSummary
from virnuc_core.telemetry.records import STAGES

Rows = list[dict[str, str]]


def stage_rows(summary: RunSummary) -> Rows:
    """The nine stages of a run: seconds, share of the whole, or that the stage is fused with another."""
    rows = []
    for number, name in enumerate(STAGES, start=1):
        seconds = summary.stages.get(name)
        share = f"{100 * seconds / summary.total_s:.1f} %" if seconds is not None and summary.total_s else "–"
        text = cell(round(seconds, 2)) if seconds is not None else "fused" if name in summary.stages else "not measured"
        rows.append({"stage": f"Stage {number}: {name}", "seconds": text, "share": share})
    total = {"stage": "**Total wall time**", "seconds": cell(round(summary.total_s or 0.0, 2)), "share": "100 %"}
    return [*rows, total]


REMARKS: Final = ("short_for_model", "ambiguous", "duplicate_ids", "skipped")


def fate_rows(summary: RunSummary, tally: Mapping[str, int] | None = None) -> Rows:
    """What became of the reads; the fates add up to the reads that came in. `tally` is what staging counted: its
    remarks on reads, and the records that never became one, follow below the sum."""
    rows = [
        {"fate": cell(name), "reads": cell(count), "share": _share(count, summary.n_reads)}
        for name, count in summary.fates.items()
    ]
    total = {"fate": "**all reads**", "reads": cell(sum(summary.fates.values())), "share": "100 %"}
    remarks = [
        {"fate": cell(f"remark: {name}"), "reads": cell(tally[name]), "share": _share(tally[name], summary.n_reads)}
        for name in REMARKS
        if tally is not None and name in tally
    ]
    return [*rows, total, *remarks]


def _share(count: int, total: int | None) -> str:
    return f"{100 * count / total:.1f} %" if total else "–"


def criteria_rows(report: Report) -> Rows:
    """The criteria, then the profile's further checks; the verdict stands first so that it is seen first."""
    return [_criterion_row(criterion) for criterion in (*report.criteria, *report.checks)]


def _criterion_row(criterion: Criterion) -> dict[str, str]:
    target = "–" if criterion.target is None else with_unit(criterion.target.value, criterion.unit, criterion.target.op)
    return {
        "verdict": verdict_cell(criterion.verdict),
        "criterion": cell(criterion.title),
        "measured": with_unit(criterion.value, criterion.unit),
        "required": target,
        "why": cell(criterion.reason) if criterion.reason else "",
        "samples": "–" if criterion.samples is None else cell(f"{criterion.samples:,} {criterion.samples_of}"),
        "device": cell(criterion.device),
        "id": cell(criterion.perf_id),
    }


def with_unit(value: float | None, unit: str, op: str = "") -> str:
    """A figure as read by people: `≥ 90 %`, `3,200.6 s`, `1.58×`.

    >>> with_unit(90, "%", ">="), with_unit(3200.62, "s"), with_unit(1.58, "x"), with_unit(None, "s")
    ('≥ 90 %', '3,200.6 s', '1.58×', '–')
    """
    if value is None or not math.isfinite(value):
        return cell(value)
    sign = {"": "", "<": "\\< ", "<=": "≤ ", ">": "\\> ", ">=": "≥ "}[op]
    match unit:
        case "%":
            return f"{sign}{value:.4g} %"
        case "s":
            return f"{sign}{value:,.1f} s"
        case "x":
            return f"{sign}{value:.3g}×"
        case _:
            return sign + cell(value)


def percent(share: float | None) -> str:
    """A share of one, in percent."""
    return with_unit(None if share is None else 100 * share, "%")


def scaling_rows(report: Report) -> Rows:
    """Time and speed-up by number of devices."""
    return [
        {
            "devices": cell(figure.num_gpus),
            "time": with_unit(figure.time_seconds, "s"),
            "speed-up": with_unit(figure.speedup, "x"),
            "efficiency": percent(figure.efficiency),
            "ESM-2": with_unit(figure.esm2_scaling, "x"),
            "DNABERT-S": with_unit(figure.dnabert_scaling, "x"),
            "note": "super-linear: check the one-device run" if figure.super_linear else "",
        }
        for figure in report.scaling
    ]


def comparison_rows(comparisons: Sequence[Comparison]) -> Rows:
    """Who was held against whom, and how well they agree."""
    rows = []
    for comparison in comparisons:
        frames, votes, equal = comparison.frames, comparison.consensus, comparison.bitwise
        score = frames.score if frames is not None else None
        rows.append(
            {
                "compared": cell(f"{comparison.a} with {comparison.b}"),
                "per frame": percent(frames.agreement if frames else None),
                "consensus": percent(votes.agreement if votes else None),
                "largest score difference": cell(score.max if score else None),
                "bit for bit": cell(equal.identical if equal else None),
            }
        )
    return rows


def overhead_rows(found: OverheadFile) -> Rows:
    """Pairs of runs with and without commits."""
    return [
        {
            "pair": cell(number),
            "tokens/s with commits": cell(round(pair.with_tokens_per_s)),
            "tokens/s without": cell(round(pair.without_tokens_per_s)),
            "overhead": percent(pair.overhead),
            "worker restarts": cell(pair.restarts),
        }
        for number, pair in enumerate(found.pairs, start=1)
    ]


def overhead_sentence(found: OverheadFile) -> str:
    """What commits cost, in a sentence."""
    shares = sorted(share for pair in found.pairs if (share := pair.overhead) is not None)
    if not shares:
        return "commits were not timed"
    return f"commits cost {percent(shares[len(shares) // 2])} of the tokens/s, over {len(shares)} pairs of runs"


def account_rows(report: Report) -> Rows:
    """What became of the reads of the run that is judged, the remarks on them, and what never became a read."""
    found = report.accounting
    if found is None:
        return []
    rows = [{"what": cell(name), "count": cell(n), "share": _share(n, found.reads)} for name, n in found.fates.items()]
    whole = "**all reads**" if found.adds_up else "**all reads: does not add up**"
    rows.append({"what": whole, "count": cell(sum(found.fates.values())), "share": "100 %"})
    rows += [
        {"what": cell(f"remark: {name}"), "count": cell(n), "share": _share(n, found.reads)}
        for name, n in found.flags.items()
    ]
    left = (("records skipped", found.skipped_records), ("files ignored", found.ignored_files))
    return rows + [{"what": name, "count": cell(n), "share": "–"} for name, n in left]


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
