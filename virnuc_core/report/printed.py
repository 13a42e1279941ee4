"""`report.txt`: the published layout to the byte, then what stands beside the criteria."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from virnuc_core.config import Target
from virnuc_core.report.criteria import BASELINE
from virnuc_core.report.formatting import NOT_RUN, UNKNOWN, cell, near, number, one_line, shown, stage_text, target_text
from virnuc_core.report.model import Accounting, Criterion, Report
from virnuc_core.report.views import (
    approval_text,
    baseline_title,
    criterion,
    economy,
    overall,
    warnings_of,
)
from virnuc_core.telemetry.clock import clock_text

RULE: Final = "=" * 80
STAGE_COLUMN: Final = 37
WIDE_STAGE: Final = "DNABERT-S"  # its line has one dot more than the others, as the layout was given
FACT_COLUMN: Final = 33


def printed(report: Report) -> str:
    """`report.txt` whole."""
    return printed_block(report) + beside_the_criteria(report)


def printed_block(report: Report) -> str:
    """The block in its fixed layout; every line of it is there, whatever was measured."""
    lines = [RULE, "PHASE 10: PERFORMANCE VALIDATION RESULTS", RULE, ""]
    for part in (_timing, _scaling, _speedup, _correctness, _gpu_metrics, _stages):
        lines += [*part(report), ""]
    return "\n".join([*lines, f"OVERALL: {overall(report)}", RULE]) + "\n"


def _judged(words: str, value: str, target: str, column: int, found: Criterion) -> str:
    """A line of the layout with its verdict, which begins in `column`."""
    return f"{f'  {words}{value} (target: {target})'.ljust(column)} [{found.verdict.upper()}]"


def _plain_target(found: Criterion, decimals: int = 0) -> str:
    return target_text(found.target, found.unit, decimals)


def _timing(report: Report) -> list[str]:
    one, two = criterion(report, "one_device_time"), criterion(report, "two_device_time")
    one_label = report.single.label if report.single else "1x device"
    many = report.run if report.run is not None and report.run is not report.single else None
    two_label = many.label if many is not None and len(many.devices) > 1 else f"2x {one_label.split('x ', 1)[-1]}"
    return [
        "TIMING",
        _judged(f"{one_label}:  ", shown(one), _plain_target(one), 46, one),
        _judged(f"{two_label}:  ", shown(two), _plain_target(two), 47, two),
    ]


def _scaling(report: Report) -> list[str]:
    found = criterion(report, "scaling")
    last = report.scaling[-1] if report.scaling else None
    devices = last.num_gpus if last else 2
    share = Target(op=found.target.op, value=100.0 * found.target.value / devices) if found.target else None
    efficiency = UNKNOWN if last is None else f"{near(100.0 * last.efficiency, 1, share)}%"
    esm2, dnabert_s = (None, None) if last is None else (last.esm2_scaling, last.dnabert_scaling)
    return [
        "SCALING",
        _judged("Multi-GPU speedup:      ", shown(found), _plain_target(found), 52, found),
        _judged("Scaling efficiency:     ", efficiency, target_text(share, "%"), 53, found),
        f"  ESM-2 scaling:          {cell(number(esm2, 2, 'x'))}",
        f"  DNABERT-S scaling:      {cell(number(dnabert_s, 2, 'x'))}",
    ]


def _speedup(report: Report) -> list[str]:
    found, baseline, run = criterion(report, "speedup"), report.baseline, report.run
    title = baseline_title(report)
    where, spent = ("none", None) if baseline is None else (_model_only(baseline.label), baseline.seconds)
    run_where, run_spent = ("none", None) if run is None else (_model_only(run.label), run.total_s)
    return [
        f"SPEEDUP vs {title}",
        f"  {title} baseline ({where}): {_time(spent)} ({_how_known(report)})",
        f"  v2.0 result ({run_where}):   {_time(run_spent)}",
        _judged("Speedup:                  ", shown(found), _plain_target(found, 1), 53, found),
    ]


def _time(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else clock_text(seconds)


def _model_only(label: str) -> str:
    """`2x RTX 4090` as `2x 4090`."""
    return label.replace("RTX ", "").replace("GTX ", "")


def _how_known(report: Report) -> str:
    baseline = report.baseline
    if baseline is None:
        return NOT_RUN
    if baseline.source == "scaled":
        return f"scaled by tokens from {cell(baseline.subset_reads)} reads"
    known = "known" if baseline.problem is None else "known elsewhere, not used"
    return known if baseline.source == "recorded" else "measured"


def _correctness(report: Report) -> list[str]:
    found = criterion(report, "consensus")
    frames = [c.frames.agreement for c in report.comparisons if c.a == BASELINE and c.frames is not None]
    lowest = min((value for value in frames if value is not None), default=None)
    return [
        "CORRECTNESS",
        _judged("Consensus label agreement: ", shown(found), _plain_target(found), 53, found),
        f"  Per-frame label agreement: {cell(number(lowest, 2, '%', 100.0))}",
        f"  Score tolerance: {report.profile.score_tolerance:g}",
    ]


def _gpu_metrics(report: Report) -> list[str]:
    used, packed = criterion(report, "gpu_utilisation"), criterion(report, "packing")
    return [
        "GPU METRICS",
        _judged("GPU utilization (ESM-2):  ", shown(used), _plain_target(used), 53, used),
        _judged("Packing efficiency:       ", shown(packed), _plain_target(packed), 53, packed),
    ]


def _stages(report: Report) -> list[str]:
    run = report.run
    lines = [f"PER-STAGE BREAKDOWN ({'no run' if run is None else run.label})"]
    for place, stage in enumerate(() if run is None else run.stages, start=1):
        column = STAGE_COLUMN + (stage.name == WIDE_STAGE)
        lines.append(f"  Stage {place}: {stage.name} ".ljust(column, ".") + "  " + stage_text(stage))
    return lines


# --- beside the criteria ---------------------------------------------------------------------------------------------


def beside_the_criteria(report: Report) -> str:
    """The lines below the block: efficiency, cost, commits, reads, software, approval and warnings."""
    facts = (
        *economy(report).rows,
        ("Reads", _accounts_text(report.accounting)),
        ("Driver, CUDA, torch", _software(report.provenance.versions)),
        ("Approval", approval_text(report.approval)),
    )
    lines = ["", f"BESIDE THE CRITERIA ({'no run' if report.run is None else report.run.label})"]
    lines += [f"  {f'{words}:':<{FACT_COLUMN}}{value}" for words, value in facts]
    if found := warnings_of(report):
        lines += ["", f"WARNINGS ({len(found)})", *(f"  - {one_line(line)}" for line in found)]
    return "\n".join([*lines, RULE]) + "\n"


def _accounts_text(found: Accounting | None) -> str:
    """`2,000 = 892 viral + 789 others + …`."""
    if found is None:
        return NOT_RUN
    parts = " + ".join(f"{n:,} {name}" for name, n in found.fates.items())
    return f"{found.reads:,} = {parts}{'' if found.adds_up else ' (does NOT add up with the run)'}"


def _software(versions: Mapping[str, str]) -> str:
    """Versions of driver, CUDA and torch, as far as recorded."""
    cuda = versions.get("cuda") or versions.get("cuda_driver")
    return ", ".join((versions.get("driver") or "none", cuda or "none", versions.get("torch") or "unknown"))
