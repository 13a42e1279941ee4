"""Judge a criterion: compare what was measured with the target of the profile.

A criterion passes or fails only on a number that was measured. If the number was not measured, or
on too few reads, or on other devices than the target is meant for, the criterion is `not run`. If
it was projected from fewer reads, the criterion is `projected`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from virnuc_core.profiles import Profile, Target
from virnuc_core.report.comparability import Comparability
from virnuc_core.report.criteria import (
    CHECKS,
    CONSENSUS,
    CORRECTNESS,
    CRITERIA,
    SAME_BYTES,
    SCALING,
    SPEEDUP,
    CriterionSpec,
    Finding,
)
from virnuc_core.report.evidence import missing_for
from virnuc_core.report.model import (
    BASELINE,
    Criterion,
    Report,
    RunMetrics,
    ScalingMetrics,
    Verdict,
)
from virnuc_core.report.raw_files import RUN_PREFIX, SINGLE_RUN, short_name
from virnuc_core.report.text import UNKNOWN, measured_text, target_text

PAIR_RUN: Final = f"{RUN_PREFIX}2"


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a profile asks of a criterion."""

    target: Target | None  # None: nothing
    field: str  # the field of the profile that says so

    @property
    def profile_line(self) -> str:
        """Return the requirement as the report shows it."""
        if self.target is None:
            return f"{self.field}: not set"
        return f"{self.field}: {self.target.op} {self.target.value:g}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict with its reason, and the value that it is on."""

    verdict: Verdict
    reason: str
    value: float | None


def judge(
    spec: CriterionSpec,
    report: Report,
    *,
    refusal: str = "",
    run: RunMetrics | None = None,
    last_run: str | None = None,
) -> Criterion:
    """Return the verdict on a criterion, with the measured value, the target and the reason.

    The criterion itself measures the value. What it returns, a finding, may also say why there is
    no value, or why the value cannot be judged.

    Args:
        spec: The criterion.
        report: The report so far: all figures, and no verdicts yet.
        refusal: Why the runs that the criterion compares may not be compared. Empty if they may.
        run: Judge this run instead of the run that the criterion chooses.
        last_run: The folder of the run on the most devices that the validation was to make. `None`
            if its record does not name it: then the run with the most devices in the report is it.
    """
    if run is None:
        run = _chosen_run(spec, report)
    if last_run is None and report.run is not None:
        last_run = report.run.name
    requirement = _requirement(spec, report.profile, run)
    if refusal and requirement.target is not None:
        finding = Finding(not_measured=refusal)
    else:
        finding = spec.measure(report, run)
    no_evidence = _why_no_evidence(spec, run, report.profile)
    lost_file = missing_for(spec, report, run, last_run)
    if lost_file:
        # The missing file may have shown that the target was missed. So to lose it is no way out
        # of a failure.
        finding = Finding(remark=lost_file, failed=True)
    judgement = _judgement(finding, requirement.target, no_evidence)
    if judgement.verdict == "fail" and not judgement.reason:
        missed = _missed_text(spec, judgement.value, requirement.target)
        judgement = replace(judgement, reason=missed)
    return Criterion(
        id=spec.id,
        perf_id=spec.perf_id,
        title=spec.title.format(baseline=report.baseline_title),
        definition=spec.definition,
        unit=spec.unit,
        value=judgement.value,
        target=requirement.target,
        verdict=judgement.verdict,
        reason=judgement.reason,
        samples=finding.samples,
        samples_of=spec.samples_of,
        device="" if run is None else run.label,
        profile_line=requirement.profile_line,
        raw=_raw_files(spec, report, run),
    )


def _chosen_run(spec: CriterionSpec, report: Report) -> RunMetrics | None:
    """Return the run whose figures the criterion uses, or `None` if there is none."""
    match spec.run:
        case "single":  # on one device
            return report.single
        case "pair":  # on two devices
            return next((run for run in report.runs if run.name == PAIR_RUN), None)
        case "many":  # on the most devices, if these are more than one
            return report.many
        case "judged":  # on the most devices, also if that is one
            return report.run


def _requirement(spec: CriterionSpec, profile: Profile, run: RunMetrics | None) -> Requirement:
    """Return the target that the profile has for a criterion.

    The target `scaling` is for two devices. For other numbers of devices, the profile has a band of
    expected speed-ups, and the target is its lower end.

    Returns:
        The target, None if the profile has none, and the field of the profile that it comes from.
    """
    # Equal bytes are no matter of choice, so no profile has a target for them.
    if spec.target == SAME_BYTES.target:
        return Requirement(Target(op=">=", value=1.0), "every profile asks")
    target = profile.targets.get(spec.target)
    n_devices = 2 if run is None else len(run.devices)
    has_target_for_devices = n_devices == 2 and target is not None
    if spec.id != SCALING.id or has_target_for_devices:
        return Requirement(target, spec.target)
    band = profile.scaling_bands.get(str(n_devices))
    field = f"scaling_bands.{n_devices}"
    if band is None:
        return Requirement(None, field)
    low, _ = band
    return Requirement(Target(op=">=", value=low), field)


def _judgement(finding: Finding, target: Target | None, no_evidence: str) -> Judgement:
    """Return the verdict on a measurement.

    The checks are in order of precedence: no target, a certain failure, reasons why the value
    cannot be judged, and finally the comparison of the value with the target.

    Args:
        finding: The measurement.
        target: The target in the profile, or None.
        no_evidence: Why the run cannot show that the target is met. Empty if it can.
    """
    value = finding.value
    if target is None:
        if value is not None:
            return Judgement("not asked", "the profile does not ask for it", value)
        reason = finding.not_measured or finding.not_comparable or finding.remark
        return Judgement("not run", reason, value)
    if finding.failed:
        return Judgement("fail", finding.remark, value)
    problem = finding.not_measured or no_evidence or finding.not_comparable
    if problem:
        return Judgement("not run", problem, value)
    if finding.projected is not None:
        return Judgement("projected", finding.remark, finding.projected)
    if value is None:
        return Judgement("not run", "", value)
    if not finding.samples:
        return Judgement("not run", "nothing was counted", value)
    if target.met(value):
        return Judgement("pass", finding.remark, value)
    return Judgement("fail", finding.if_missed or finding.remark, value)


def _missed_text(spec: CriterionSpec, value: float | None, target: Target | None) -> str:
    """Return the reason of a failure that has no other: `33:45 is not <30 min`."""
    measured = UNKNOWN if value is None else measured_text(value, target, spec.unit, spec.id)
    return f"{measured} is not {target_text(target, spec.unit)}"


def _why_no_evidence(spec: CriterionSpec, run: RunMetrics | None, profile: Profile) -> str:
    """Return why a run cannot show that a target of speed is met, or an empty string if it can.

    The run may have too few reads, or other devices than those that the profile is for. Criteria of
    correctness can be judged on any run.
    """
    if spec.perf_id == CORRECTNESS:
        return ""
    if run is None or run.n_reads is None:
        return "the number of reads was not recorded"
    if run.n_rows == 0:
        return "no read has an open reading frame, so nothing was embedded"
    if run.n_reads < profile.min_reads:
        return f"{run.n_reads:,} reads; the profile needs {profile.min_reads:,}"
    if spec.evidence == "reads":
        return ""
    if not run.devices:
        return "the devices were not recorded"
    if not profile.device_names:  # meant for any GPU
        if run.devices[0].kind == "cpu":
            return f"{run.label}: the target is meant for GPUs"
        return ""
    for device in run.devices:
        names = f"{device.name} {short_name(device)}".lower()
        if not any(wanted_name.lower() in names for wanted_name in profile.device_names):
            meant_devices = " or ".join(profile.device_names)
            device_name = short_name(device)
            return (
                f"the target is meant for {meant_devices}; "
                f"on {device_name} it is for reference only"
            )
    return ""


def _raw_files(spec: CriterionSpec, report: Report, run: RunMetrics | None) -> tuple[str, ...]:
    """Return the names of the existing files from which the criterion is computed.

    In the list of the criterion, `single`, `summary` and `telemetry` stand for files whose names
    depend on the run. Its other entries are names of files.
    """
    files: dict[str, str | None] = {"single": None, "summary": None, "telemetry": None}
    if report.single is not None:
        files["single"] = f"{report.single.name}/summary.json"
    if run is not None:
        files["summary"] = f"{run.name}/summary.json"
        if run.telemetry is not None:
            files["telemetry"] = run.telemetry.file
    paths = (files.get(part, part) for part in spec.raw)
    return tuple(path for path in paths if path)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The verdicts of a report."""

    criteria: tuple[Criterion, ...]
    checks: tuple[Criterion, ...]
    scaling: tuple[ScalingMetrics, ...]  # the report's figures, each with its own verdict


def judge_report(
    report: Report, comparability: Comparability, last_run: str | None = None
) -> Verdicts:
    """Judge all criteria, the checks that the profile asks for, and each figure of scaling.

    Args:
        report: The report so far: all figures, and no verdicts yet.
        comparability: Which runs may be compared with each other and with the baseline.
        last_run: The folder of the run on the most devices that the validation was to make, if its
            record names it.
    """
    scaled_run = _run_for_scaling(report)
    # For each criterion that compares: why the two sides may not be compared. Empty if they may.
    all_names = [run.name for run in report.runs]
    scaled_name = [] if scaled_run is None else [scaled_run.name]
    judged_name = [] if report.run is None else [report.run.name]
    refusals = {
        SCALING.id: comparability.timing_refusal(SINGLE_RUN, scaled_name),
        SAME_BYTES.id: comparability.refusal(SINGLE_RUN, all_names),
        SPEEDUP.id: comparability.timing_refusal(BASELINE, judged_name),
        CONSENSUS.id: comparability.refusal(BASELINE, all_names),
    }

    def judge_all(specs: Iterable[CriterionSpec]) -> tuple[Criterion, ...]:
        """Return the verdicts on several criteria."""
        criteria = []
        for spec in specs:
            run = scaled_run if spec is SCALING else None  # the other criteria choose their run
            refusal = refusals.get(spec.id, "")
            criteria.append(judge(spec, report, refusal=refusal, run=run, last_run=last_run))
        return tuple(criteria)

    checks = [spec for spec in CHECKS if spec.target in report.profile.targets]
    if report.many is not None:
        checks.append(SAME_BYTES)
    return Verdicts(
        criteria=judge_all(CRITERIA),
        checks=judge_all(checks),
        scaling=_judge_scaling(report, scaled_run),
    )


def _runs_on_several(report: Report) -> list[RunMetrics]:
    """Return the runs on more than one device, the one with the fewest devices first."""
    return [run for run in report.runs if run is not report.single]


def _run_for_scaling(report: Report) -> RunMetrics | None:
    """Return the run on which the scaling criterion is judged.

    If the profile has a target of scaling, which is for two devices, it is the run on two devices.
    Otherwise it is the largest run for which the profile has a band.
    """
    profile = report.profile
    device_counts = {int(count) for count in profile.scaling_bands}
    if "scaling" in profile.targets:
        device_counts = {2}
    for run in reversed(_runs_on_several(report)):
        if len(run.devices) in device_counts:
            return run
    return report.many


def _judge_scaling(report: Report, scaled_run: RunMetrics | None) -> tuple[ScalingMetrics, ...]:
    """Return the figures of scaling, each with its own verdict.

    Args:
        report: The report so far.
        scaled_run: The run on which the criterion `scaling` is judged. The verdicts on other runs
            have the number of devices in their titles.
    """
    figures = [*report.scaling]
    for run in _runs_on_several(report):
        figure = report.figure_of(run)
        if figure is None:
            continue
        spec = SCALING
        if run is not scaled_run:
            spec = replace(SCALING, title=f"Scaling on {figure.num_gpus} devices")
        judgement = judge(spec, report, run=run)
        figures[figures.index(figure)] = figure.model_copy(update={"judged": judgement})
    return tuple(figures)
