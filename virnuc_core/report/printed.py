"""The printed report: its lines, in the layout of the published one.

Each block has a template, which holds the layout, and a record of what stands in it. Every line is
there, whatever was measured.
"""

from dataclasses import dataclass
from typing import Final, get_args

from virnuc_core.answer import RANDOM_WEIGHTS
from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.profiles import Target
from virnuc_core.report.model import (
    Accounting,
    BaselineMetrics,
    Criterion,
    DeviceMetrics,
    Report,
    RunMetrics,
    Verdict,
    efficiency_target,
)
from virnuc_core.report.text import (
    cell,
    clock,
    format_value,
    gibibytes,
    number,
    one_line,
    percent,
    stage_text,
    target_text,
)
from virnuc_core.report.views.criteria import approval_text
from virnuc_core.report.views.devices import window_speeds
from virnuc_core.report.views.speed import efficiency_facts, efficiency_text
from virnuc_core.telemetry.tables import STAGES

HOURS_PER_SECOND: Final = 1 / 3600
STAGE_WIDTH: Final = 37
SCALING_WIDTH: Final = 24  # of "ESM-2 scaling:" and the blanks behind it


# --- The verdict ----------------------------------------------------------------------------------


def overall_verdict(report: Report) -> str:
    """Return the overall verdict as VirNucPro's report has it: `3 of 7 CRITERIA MET`.

    `ALL CRITERIA MET` stands there only if nothing else failed either. The numbers are those of the
    flow's message: criteria and checks for which the profile has a target. Random weights are named
    behind it, because then the criteria say nothing about verdicts.
    """
    text = f"{report.num_met} of {len(report.requested)} CRITERIA MET"
    if report.outcome == "passed":
        text = "ALL CRITERIA MET"
    if report.random_weights:
        text += f", {RANDOM_WEIGHTS}"
    return text


def further_failures(report: Report) -> str:
    """Return the failures beside the criteria, or an empty string.

    These are missed checks, a regression, and runs that were stopped at the time limit. A missed
    criterion is not named, because it has a line of its own.
    """
    titles = [criterion.title for criterion in report.criteria]
    return ", ".join(failure for failure in report.failures if failure not in titles)


def verdict_counts(report: Report) -> str:
    """Return the number of requested criteria by verdict, the warnings and the further failures.

    For example `6 pass · 1 fail · 0 projected · 0 not run · 0 not asked · no warnings`. The first
    number is the one in the overall verdict.
    """
    verdicts = [criterion.verdict for criterion in report.requested]
    # What the profile does not ask for is not among the requested criteria.
    verdicts += [item.verdict for item in report.criteria if item.verdict == "not asked"]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in get_args(Verdict)]
    num_warnings = len(report.warnings)
    noun = "warning" if num_warnings == 1 else "warnings"
    parts = [*counts, f"{num_warnings or 'no'} {noun}"]
    failures = further_failures(report)
    if failures:
        parts.append(f"also not met: {failures}")
    return " · ".join(parts)


# --- The criteria ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CriteriaBlock:
    """The texts for the template `criteria.txt.j2`. Each criterion is a whole line."""

    one_device_time: str
    two_device_time: str
    scaling: str
    efficiency: str
    protein_scaling: str
    dna_scaling: str
    baseline: str
    baseline_model: str
    baseline_time: str
    baseline_origin: str
    run_model: str
    run_time: str
    speedup: str
    consensus: str
    frame_agreement: str
    score_tolerance: str
    gpu_utilisation: str
    packing: str
    run_label: str
    stages: list[str]
    overall: str


def criteria_block(report: Report) -> CriteriaBlock:
    """Return the lines of the criteria and of the stages, in the layout of the published report.

    Numbers that were not measured are shown as such. The lines are put together by a template.
    """
    run = report.run
    baseline = report.baseline
    scaling = report.criterion("scaling")
    # The times and speed-ups on the number of devices that the criterion `scaling` was judged on.
    judged_figures = (figure for figure in report.scaling if figure.judged == scaling)
    figure = next(judged_figures, None)
    protein_scaling = dna_scaling = None
    num_devices = 2
    if figure is not None:
        num_devices = figure.num_gpus
        protein_scaling = figure.protein_scaling
        dna_scaling = figure.dna_scaling
    limit_percent = efficiency_target(scaling.target, num_devices)
    shown_efficiency = cell(None if figure is None else efficiency_text(figure))
    efficiency_limit = target_text(limit_percent, "%")

    one_device_label = "1x device" if report.single is None else report.single.label
    device_name = one_device_label.split("x ", 1)[-1]  # "RTX 4090" of "1x RTX 4090"
    two_device_time = report.criterion("two_device_time")
    two_device_label = two_device_time.device or f"2x {device_name}"

    return CriteriaBlock(
        one_device_time=_criterion_line(
            f"{one_device_label}:  ", report.criterion("one_device_time"), width=46
        ),
        two_device_time=_criterion_line(f"{two_device_label}:  ", two_device_time, width=47),
        scaling=_criterion_line("Multi-GPU speedup:      ", scaling, width=52),
        efficiency=_verdict_line(
            "Scaling efficiency:     ", shown_efficiency, efficiency_limit, scaling, width=53
        ),
        protein_scaling=_scaling_line(PROTEIN.title, protein_scaling),
        dna_scaling=_scaling_line(DNA.title, dna_scaling),
        baseline=report.baseline_title,
        baseline_model=_short_label(baseline),
        baseline_time=cell(clock(None if baseline is None else baseline.seconds)),
        baseline_origin=_origin_of_time(baseline),
        run_model=_short_label(run),
        run_time=cell(clock(None if run is None else run.total_s)),
        speedup=_criterion_line(
            "Speedup:                  ", report.criterion("speedup"), width=53, decimals=1
        ),
        consensus=_criterion_line(
            "Consensus label agreement: ", report.criterion("consensus"), width=53
        ),
        frame_agreement=cell(percent(report.lowest_frame_agreement, 2, "%")),
        score_tolerance=f"{report.profile.score_tolerance:g}",
        gpu_utilisation=_criterion_line(
            f"GPU utilization ({PROTEIN.title}):  ", report.criterion("gpu_utilisation"), width=53
        ),
        packing=_criterion_line(
            "Packing efficiency:       ", report.criterion("packing"), width=53
        ),
        run_label="no run" if run is None else run.label,
        stages=[] if run is None else _stage_lines(run),
        overall=overall_verdict(report),
    )


def _criterion_line(words: str, criterion: Criterion, *, width: int, decimals: int = 0) -> str:
    """Return the line of a criterion: value, target and verdict.

    Args:
        words: The beginning of the line.
        criterion: The criterion.
        width: Number of characters before the verdict.
        decimals: Minimal number of decimals of the target.
    """
    limit = target_text(criterion.target, criterion.unit, decimals)
    return _verdict_line(words, format_value(criterion), limit, criterion, width=width)


def _verdict_line(words: str, value: str, limit: str, criterion: Criterion, *, width: int) -> str:
    """Return a line with value, target and verdict. The verdict begins at column `width`."""
    measured = f"  {words}{value} (target: {limit})".ljust(width)
    verdict = criterion.verdict.upper()
    if criterion.verdict == "not run" and criterion.reason:
        verdict += f": {one_line(criterion.reason)}"
    return f"{measured} [{verdict}]"


def _scaling_line(title: str, scaling: float | None) -> str:
    """Return the line with the speed-up of an encoder on several devices."""
    words = f"{title} scaling:".ljust(SCALING_WIDTH)
    return f"  {words}{cell(number(scaling, 2, 'x'))}"


def _short_label(measured: BaselineMetrics | RunMetrics | None) -> str:
    """Return the names of the devices without "RTX" and "GTX": "2x 4090"."""
    if measured is None:
        return "none"
    return measured.label.replace("RTX ", "").replace("GTX ", "")


def _origin_of_time(baseline: BaselineMetrics | None) -> str:
    """Return in a few words how the time of the baseline was obtained.

    A time is "known" if it was recorded elsewhere. It is not used if it was for other devices or
    for more reads than this run had.
    """
    if baseline is None:
        return "not run"
    if baseline.source == "scaled" and baseline.subset is not None:
        return f"scaled by tokens from {baseline.subset.reads:,} reads"
    if baseline.source == "recorded":
        return "known elsewhere, not used" if baseline.problem else "known"
    return "measured"


def _stage_lines(run: RunMetrics) -> list[str]:
    """Return a line for each of the nine stages."""
    lines = []
    for place, stage in enumerate(STAGES, start=1):
        width = STAGE_WIDTH
        if stage == DNA.title:
            width += 1  # the prescribed layout has one dot more in this line
        title = f"  Stage {place}: {stage} ".ljust(width, ".")
        lines.append(f"{title}  {stage_text(run, stage)}")
    return lines


# --- Beside the criteria --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FurtherBlock:
    """The texts for the template `beside.txt.j2`: further lines, and the warnings."""

    run_label: str
    lines: list[str]
    warnings: list[str]


def further_block(report: Report) -> FurtherBlock:
    """Return the part of the printed report after the criteria: facts, checks and warnings."""
    facts = efficiency_facts(report)
    lines = [_fact_line("Further failures", one_line(further_failures(report)) or "none")]
    lines += _failure_lines(report)
    lines += [_fact_line(title, value) for title, value in facts.items()]
    lines += [_check_line(check) for check in report.further_verdicts]
    lines.append(_fact_line("Regression", _regression_text(report)))
    lines.append(_fact_line("Reads", _reads_text(report.accounting)))
    lines.append(_fact_line("Sample, host", _sample_text(report)))
    lines.append(_fact_line("Driver, CUDA, torch", _software_text(report)))
    approval = "not asked for"
    if report.approval is not None:
        approval = one_line(f"{report.approval.verdict}{approval_text(report.approval)}")
    lines.append(_fact_line("Approval", approval))
    return FurtherBlock(
        run_label="no run" if report.run is None else report.run.label,
        lines=lines,
        warnings=[one_line(warning) for warning in report.warnings],
    )


def _failure_lines(report: Report) -> list[str]:
    """Return a line for each missed criterion with the reason, which its own line has no room for.

    Without a missed criterion there is one line that says so.
    """
    reasons = [
        one_line(f"{criterion.title}: {criterion.reason}") for criterion in report.failed_criteria
    ]
    return [_fact_line("Why not met", reason) for reason in reasons or ["none was missed"]]


def _fact_line(title: str, value: str) -> str:
    """Return a line with a title and, in a column of its own, a value."""
    return f"  {title + ':':<33}{value}"


def _check_line(check: Criterion) -> str:
    """Return the line of a further check: value, target and verdict."""
    verdict = check.verdict.upper()
    if check.id == "same_bytes":
        return _fact_line("Same bytes on all devices", f"[{verdict}]")
    if check.verdict == "not run" and check.reason:
        verdict += f": {one_line(check.reason)}"
    limit = target_text(check.target, check.unit)
    return _fact_line(check.title, f"{format_value(check)} (target: {limit}) [{verdict}]")


def _regression_text(report: Report) -> str:
    """Return the verdict on the comparison with the previous run, with its reason."""
    regression = report.regression
    if regression is None:
        return "not run: there is no history"
    # A pass has no reason: then the date of the run that it was compared with is shown.
    reason = regression.reason or f"against {regression.against_created}"
    return f"[{regression.verdict.upper()}] {reason}"


def _reads_text(accounting: Accounting | None) -> str:
    """Return the number of reads as the sum of their fates: `5 = 2 viral + 3 others`."""
    if accounting is None:
        return "not run"
    fates = [f"{count:,} {fate}" for fate, count in accounting.fates.items()]
    text = f"{accounting.reads:,} = {' + '.join(fates)}"
    if not accounting.adds_up:
        text += " (does NOT add up with the run)"
    return text


def _sample_text(report: Report) -> str:
    """Return the names of sample and host, as far as they are known."""
    names = [report.provenance.spec.get("sample", ""), report.provenance.host]
    known_names = [str(name) for name in names if name]
    return one_line(", ".join(known_names)) or "not recorded"


def _software_text(report: Report) -> str:
    """Return the versions of driver, CUDA and torch."""
    versions = report.provenance.versions
    driver = versions.get("driver") or "none"
    # The CUDA that torch was built for or, if that was not recorded, the newest one of the driver.
    cuda = versions.get("cuda") or versions.get("cuda_driver") or "none"
    torch = versions.get("torch") or "unknown"
    return f"{driver}, {cuda}, {torch}"


# --- The performance summary ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SummaryBlock:
    """The texts for the template `summary.txt.j2`: the lines of each part."""

    workload: list[str]
    throughput: list[str]
    packing: list[str]
    loader: list[str]
    devices: list[str]
    requirements: list[str]


def summary_block(report: Report) -> SummaryBlock:
    """Return the lines of the performance summary. Numbers that were not measured are `n/a`."""
    run = report.run
    telemetry = None if run is None else run.telemetry
    num_reads = total_s = reads_per_hour = reads_per_s = hours_projected = None
    if run is not None:
        num_reads = run.n_reads
        total_s = run.total_s
        reads_per_hour = run.sequences_per_hour
        reads_per_s = run.reads_per_s
        hours_projected = run.hours_projected
    total_hours = None if total_s is None else total_s * HOURS_PER_SECOND
    tokens_per_s = packing = lowest_packing = low_batches = None
    slowest_window = fastest_window = None
    mean_wait_ms = p95_wait_ms = starved = None
    devices = ["  n/a"]
    if telemetry is not None:
        tokens_per_s = telemetry.tokens_per_s
        slowest_window, fastest_window = window_speeds(telemetry)
        packing = telemetry.packing_efficiency
        lowest_packing = telemetry.min_packing_efficiency
        low_batches = telemetry.batches_below_threshold
        mean_wait_ms = telemetry.avg_wait_ms
        p95_wait_ms = telemetry.p95_wait_ms
        starved = None if telemetry.queue is None else telemetry.queue.starved
        if telemetry.devices:
            devices = []
        for place, device in enumerate(telemetry.devices):
            devices.append(_device_line(place, device, report.criterion("gpu_utilisation").target))
    projected = f"Projected {report.profile.projection_reads:,}"
    return SummaryBlock(
        workload=[
            _summary_line("Total sequences", number(num_reads, 0)),
            _summary_line("Total runtime", number(total_hours, 4), "hours"),
            _summary_line("Sequences/hour", number(reads_per_hour, 0)),
            _summary_line(projected, number(hours_projected, 2), "hours (projection)"),
        ],
        throughput=[
            _summary_line("Sequences/sec", number(reads_per_s)),
            _summary_line("Tokens/sec", number(tokens_per_s, 0)),
            _summary_line("Tokens/sec, slowest window", number(slowest_window, 0)),
            _summary_line("Tokens/sec, fastest window", number(fastest_window, 0)),
        ],
        packing=[
            _summary_line(
                "Average", percent(packing, unit="", target=report.criterion("packing").target), "%"
            ),
            _summary_line("Minimum", percent(lowest_packing, unit=""), "%"),
            _summary_line("Batches <80%", number(low_batches, 0)),
        ],
        loader=[
            _summary_line("Avg wait time", number(mean_wait_ms, 2), "ms"),
            _summary_line("P95 wait time", number(p95_wait_ms, 2), "ms"),
            _summary_line("Queue starved", percent(starved, unit=""), "%"),
        ],
        devices=devices,
        requirements=[
            _requirement_line(report.criterion("two_device_time"), "time"),
            _requirement_line(report.criterion("gpu_utilisation"), "GPU"),
            _requirement_line(report.criterion("packing"), "packing"),
        ],
    )


def _device_line(place: int, device: DeviceMetrics, target: Target | None) -> str:
    """Return the line of a device in the performance summary: its utilisation and its memory.

    The first number is the one that PERF-02 judges: the utilisation while the protein encoder ran.

    Args:
        place: The number of the device in this run.
        device: The device.
        target: The target of the utilisation.
    """
    protein_use = cell(number(device.protein_percent, 1, " %", target))
    mean_use = cell(number(device.gpu_util_avg, 1, " %"))
    memory = cell(gibibytes(device.mem_used_peak, " GiB"))
    return (
        f"  Device {place} ({device.device}): {protein_use} while {PROTEIN.title} ran, "
        f"{mean_use} on average (peak mem: {memory})"
    )


def _summary_line(title: str, value: str | None, unit: str = "") -> str:
    """Return a line of the performance summary with aligned value and unit."""
    return f"  {title + ':':<28}{cell(value):>14} {unit}".rstrip()


def _requirement_line(criterion: Criterion, name: str) -> str:
    """Return the line of a requirement: its id (such as PERF-01), target, value and verdict."""
    title = f"{criterion.perf_id} ({name} {target_text(criterion.target, criterion.unit)}):"
    line = f"  {title:<32} {format_value(criterion):>12}  [{criterion.verdict.upper()}]"
    if criterion.verdict in ("fail", "projected", "not run") and criterion.reason:
        line += f" {one_line(criterion.reason)}"
    return line
