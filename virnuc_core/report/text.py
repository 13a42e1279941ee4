"""`report.txt`: the block that is printed, in its fixed layout, and the words for figures that all forms share."""

from __future__ import annotations

from typing import Final

from virnuc_core.config import Target
from virnuc_core.report.criteria import BASELINE
from virnuc_core.report.metrics import BASELINE_TITLES
from virnuc_core.report.model import Criterion, Report, RunMetrics, StageMetrics
from virnuc_core.telemetry.clock import clock_text

RULE: Final = "=" * 80
TITLE: Final = "PHASE 10: PERFORMANCE VALIDATION RESULTS"
UNKNOWN: Final = "n/a"
MAX_DECIMALS: Final = 6
STAGE_COLUMN: Final = 37
WIDE_STAGE: Final = "DNABERT-S"  # its line has one dot more than the others, as the layout was given


def render_text(report: Report) -> str:
    """The report as text; every line of the layout is there, whatever was measured."""
    lines = [RULE, TITLE, RULE, ""]
    for section in (_timing, _scaling, _speedup, _correctness, _gpu_metrics, _stages):
        lines += [*section(report), ""]
    lines += [f"OVERALL: {overall(report)}", RULE]
    return "\n".join(lines) + "\n"


def overall(report: Report) -> str:
    """`ALL CRITERIA MET` or `3 of 7 CRITERIA MET`."""
    return "ALL CRITERIA MET" if report.all_met else f"{report.met} of {len(report.criteria)} CRITERIA MET"


def _timing(report: Report) -> list[str]:
    one, two = criterion(report, "one_device_time"), criterion(report, "two_device_time")
    one_label = report.single.label if report.single else "1x device"
    many = report.run if report.run is not None and report.run is not report.single else None
    two_label = many.label if many is not None and len(many.devices) > 1 else f"2x {one_label.split('x ', 1)[-1]}"
    return [
        "TIMING",
        _judged(f"  {one_label}:  {shown(one)} (target: {_time_target(one)})", 47, mark(one)),
        _judged(f"  {two_label}:  {shown(two)} (target: {_time_target(two)})", 48, mark(two)),
    ]


def _scaling(report: Report) -> list[str]:
    found = criterion(report, "scaling")
    figure = report.scaling[-1] if report.scaling else None
    devices = figure.num_gpus if figure else 2
    percent = Target(op=found.target.op, value=100.0 * found.target.value / devices) if found.target else None
    efficiency = UNKNOWN if figure is None else f"{near(100.0 * figure.efficiency, 1, percent)}%"
    esm2, dnabert_s = (None, None) if figure is None else (figure.esm2_scaling, figure.dnabert_scaling)
    return [
        "SCALING",
        _judged(f"  Multi-GPU speedup:      {shown(found)} (target: {_target(found.target, 'x')})", 53, mark(found)),
        _judged(f"  Scaling efficiency:     {efficiency} (target: {_target(percent, '%')})", 54, mark(found)),
        f"  ESM-2 scaling:          {_times(esm2, 2)}",
        f"  DNABERT-S scaling:      {_times(dnabert_s, 2)}",
    ]


def _speedup(report: Report) -> list[str]:
    found, baseline = criterion(report, "speedup"), report.baseline
    title = baseline_title(report)
    where = "none" if baseline is None else model_only(baseline.label)
    spent = UNKNOWN if baseline is None or baseline.seconds is None else clock_text(baseline.seconds)
    run_where = "none" if report.run is None else model_only(report.run.label)
    run_spent = UNKNOWN if report.run is None or report.run.total_s is None else clock_text(report.run.total_s)
    return [
        f"SPEEDUP vs {title}",
        f"  {title} baseline ({where}): {spent} ({_how_known(report)})",
        f"  v2.0 result ({run_where}):   {run_spent}",
        _judged(
            f"  Speedup:                  {shown(found)} (target: {_target(found.target, 'x', 1)})", 54, mark(found)
        ),
    ]


def _how_known(report: Report) -> str:
    baseline = report.baseline
    if baseline is None:
        return "not run"
    if baseline.source == "recorded":
        return "known" if baseline.problem is None else "known elsewhere, not used"
    if baseline.source == "scaled":
        reads = UNKNOWN if baseline.subset_reads is None else f"{baseline.subset_reads:,}"
        return f"scaled by tokens from {reads} reads"
    return "measured"


def _correctness(report: Report) -> list[str]:
    found = criterion(report, "consensus")
    frames = [c.frames for c in report.comparisons if c.a == BASELINE and c.frames is not None]
    values = [part.agreement for part in frames if part.agreement is not None]
    lowest = f"{near(100.0 * min(values), 2, None)}%" if values else UNKNOWN
    return [
        "CORRECTNESS",
        _judged(f"  Consensus label agreement: {shown(found)} (target: {_target(found.target, '%')})", 54, mark(found)),
        f"  Per-frame label agreement: {lowest}",
        f"  Score tolerance: {report.profile.score_tolerance:g}",
    ]


def _gpu_metrics(report: Report) -> list[str]:
    utilisation, packing = criterion(report, "gpu_utilisation"), criterion(report, "packing")
    used = f"  GPU utilization (ESM-2):  {shown(utilisation)} (target: {_target(utilisation.target, '%')})"
    packed = f"  Packing efficiency:       {shown(packing)} (target: {_target(packing.target, '%')})"
    return [
        "GPU METRICS",
        _judged(used, 54, mark(utilisation)),
        _judged(packed, 54, mark(packing)),
    ]


def _stages(report: Report) -> list[str]:
    run = report.run
    lines = [f"PER-STAGE BREAKDOWN ({'no run' if run is None else run.label})"]
    for number, stage in enumerate(() if run is None else run.stages, start=1):
        column = STAGE_COLUMN + (stage.name == WIDE_STAGE)
        lines.append(f"  Stage {number}: {stage.name} ".ljust(column, ".") + "  " + stage_text(stage))
    return lines


def stage_text(stage: StageMetrics) -> str:
    """`502s (15.7%)`, `0s (fused)` or `n/a (not measured)`."""
    if stage.seconds is None:
        return "0s (fused)" if stage.status == "fused" else f"{UNKNOWN} (not measured)"
    spent = f"{stage.seconds:.0f}s" if stage.seconds >= 10 else f"{stage.seconds:.1f}s"
    return f"{spent} ({UNKNOWN if stage.share is None else f'{100.0 * stage.share:.1f}%'})"


def criterion(report: Report, name: str) -> Criterion:
    """A criterion of the seven by its id."""
    return next(c for c in report.criteria if c.id == name)


def mark(found: Criterion) -> str:
    """`[PASS]`, `[FAIL]`, `[PROJECTED]` or `[NOT RUN]`."""
    return f"[{found.verdict.upper()}]"


def shown(found: Criterion) -> str:
    """A criterion's value, with decimals enough that it stands to its target as the exact value does."""
    if found.value is None:
        return UNKNOWN
    target = found.target
    match found.unit:
        case "s":
            return _near_time(found.value, target)
        case "x":
            return f"{near(found.value, 1 if found.id == 'speedup' else 2, target)}x"
        case "%":
            decimals = 2 if found.id == "consensus" else 1
            digits = near(found.value, decimals, target)
            return f"{digits.removesuffix('.0')}%"
        case _:
            return near(found.value, 0, target)


def near(value: float, decimals: int, target: Target | None) -> str:
    """`value` rounded to `decimals`, or to as many more as keep it on its side of the target.

    >>> near(89.96, 1, Target(op=">", value=90)), near(89.96, 1, None), near(1.9, 2, Target(op=">=", value=1.9))
    ('89.96', '90.0', '1.90')
    """
    for places in range(decimals, MAX_DECIMALS + 1):
        digits = f"{value:.{places}f}"
        if target is None or _same_side(value, float(digits), target):
            return digits
    return repr(value)


def _same_side(exact: float, rounded: float, target: Target) -> bool:
    """Whether both meet the target or both miss it; a value that misses it is not shown as sitting on it."""
    if rounded == target.value != exact and not target.met(exact):
        return False
    return target.met(exact) == target.met(rounded)


def _near_time(seconds: float, target: Target | None) -> str:
    digits = clock_text(seconds)
    if target is None or target.met(seconds) == target.met(float(int(seconds))):
        return digits
    return f"{digits}{f'{seconds % 1:.3f}'.lstrip('0')}"


def _judged(line: str, column: int, verdict: str) -> str:
    return f"{line.ljust(column - 1)} {verdict}"


def _time_target(found: Criterion) -> str:
    target = found.target
    if target is None:
        return "none"
    return f"{target.op}{duration(target.value)}"


def duration(seconds: float) -> str:
    """`30 min`, `1 hour`, `10 hours`, `45 s`: a target as people say it."""
    if seconds >= 3600 and seconds % 3600 == 0:
        hours = int(seconds // 3600)
        return f"{hours} hour{'s' if hours > 1 else ''}"
    if seconds >= 60 and seconds % 60 == 0:
        return f"{int(seconds // 60)} min"
    return f"{seconds:g} s"


def _target(target: Target | None, unit: str, decimals: int = 0) -> str:
    if target is None:
        return "none"
    digits = f"{target.value:g}"
    if decimals and "." not in digits:
        digits = f"{target.value:.{decimals}f}"
    return f"{target.op}{digits}{unit}"


def target_text(found: Criterion) -> str:
    """A criterion's target in its own unit, `none` where the profile does not ask."""
    return _time_target(found) if found.unit == "s" else _target(found.target, found.unit)


def _times(value: float | None, decimals: int) -> str:
    return UNKNOWN if value is None else f"{value:.{decimals}f}x"


def baseline_title(report: Report) -> str:
    """`v1.0` or `vanilla`."""
    name = report.baseline.name if report.baseline else report.profile.baseline.name
    return BASELINE_TITLES.get(name, name)


def model_only(label: str) -> str:
    """`2x RTX 4090` as `2x 4090`."""
    return label.replace("RTX ", "").replace("GTX ", "")


def overview_runs(report: Report) -> tuple[RunMetrics, ...]:
    """The runs, fewest devices first."""
    return tuple(sorted(report.runs, key=lambda run: len(run.devices)))
