"""The seven criteria, and the further checks a profile may ask for.

A criterion passes or fails on a measured number only. A number that was not measured, or measured on too little or on
other hardware than the target is meant for, is `not run`; one that was stretched from fewer reads is `projected`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from virnuc_core.config import Profile, Target
from virnuc_core.report.metrics import BASELINE_TITLES, short_name
from virnuc_core.report.model import (
    BaselineMetrics,
    Criterion,
    OverheadMetrics,
    RunMetrics,
    ScalingMetrics,
    TelemetryMetrics,
    Verdict,
)
from virnuc_core.runfiles import Comparison

MIN_SAMPLES: Final = 10  # utilisation samples of a device; fewer say nothing
BASELINE: Final = "baseline"
Unit = Literal["s", "x", "%", ""]


@dataclass(frozen=True, slots=True)
class Measured:
    """What the criteria judge."""

    profile: Profile
    single: RunMetrics | None
    many: RunMetrics | None  # the run with more than one device, if there is one
    baseline: BaselineMetrics | None
    scaling: ScalingMetrics | None
    comparisons: tuple[Comparison, ...]
    overhead: OverheadMetrics | None = None

    @property
    def judged(self) -> RunMetrics | None:
        """The run the verdict is about: most devices first."""
        return self.many or self.single


@dataclass(frozen=True, slots=True)
class _Case:
    """A criterion before its verdict."""

    id: str
    perf_id: str
    title: str
    definition: str
    unit: Unit
    field: str  # of the profile's targets
    target: Target | None
    run: RunMetrics | None
    samples_of: str
    raw: tuple[str, ...]


def seven(measured: Measured) -> tuple[Criterion, ...]:
    """The seven criteria, in the order of the report."""
    return (
        _one_device_time(measured),
        _two_device_time(measured),
        scaling(measured),
        _speedup(measured),
        _consensus(measured),
        _utilisation(measured),
        _packing(measured),
    )


def checks(measured: Measured) -> tuple[Criterion, ...]:
    """Further targets of the profile, and the equality of one device's bytes with N devices' bytes."""
    targets = measured.profile.targets
    found = []
    if targets.starved_share is not None:
        found.append(_starved(measured))
    if targets.checkpoint_overhead is not None:
        found.append(_checkpoint_overhead(measured))
    if targets.device_time_spread is not None:
        found.append(_spread(measured))
    if measured.many is not None:
        found.append(_same_bytes(measured))
    return tuple(found)


def _one_device_time(measured: Measured) -> Criterion:
    case = _Case(
        "one_device_time",
        "PERF-01",
        "Time on one device",
        "wall time of the whole pipeline on one device, staging included",
        "s",
        "one_device_seconds",
        measured.profile.targets.one_device_seconds,
        measured.single,
        "reads",
        _summary_of(measured.single),
    )
    return _time(case, measured.profile, wanted_devices=1)


def _two_device_time(measured: Measured) -> Criterion:
    case = _Case(
        "two_device_time",
        "PERF-01",
        "Time on two devices",
        "wall time of the whole pipeline on two devices, staging included",
        "s",
        "two_device_seconds",
        measured.profile.targets.two_device_seconds,
        measured.many,
        "reads",
        _summary_of(measured.many),
    )
    return _time(case, measured.profile, wanted_devices=2)


def _time(case: _Case, profile: Profile, wanted_devices: int) -> Criterion:
    run = case.run
    samples = None if run is None else run.n_reads
    if run is None:
        return _not_run(case, f"there was no run on {wanted_devices} device{'s'[: wanted_devices - 1]}")
    if len(run.devices) != wanted_devices:
        return _not_run(case, f"the run was on {len(run.devices)} devices, not {wanted_devices}")
    if run.stopped_at_limit:
        why = f"ended at the profile's limit of {profile.time_limit_s or 0:g} s: slower than it may be"
        return _verdict(case, run.total_s, "fail" if case.target else "not run", why, samples)
    problem = _no_evidence(case, profile) or _no_time(run)
    if problem:
        return _not_run(case, problem, run.total_s, samples)
    assert run.total_s is not None
    wanted_reads = None if case.target is None else profile.target_reads
    if wanted_reads is not None and run.n_reads is not None and run.n_reads < wanted_reads:
        stretched = run.total_s * wanted_reads / run.n_reads
        why = f"projected from {run.n_reads:,} to {wanted_reads:,} reads: no measurement"
        return _verdict(case, stretched, "projected", why, samples)
    return _judge(case, run.total_s, samples)


def scaling(measured: Measured) -> Criterion:
    """The verdict on the scaling of `measured.many` against `measured.single`."""
    figure, profile = measured.scaling, measured.profile
    target, field = _scaling_target(measured)
    case = _Case(
        "scaling",
        "PERF-03",
        "Scaling",
        "time on one device ÷ time on N devices, same reads, whole pipeline; efficiency is that ÷ N",
        "x",
        field,
        target,
        measured.many,
        "reads",
        (*_summary_of(measured.single), *_summary_of(measured.many)),
    )
    samples = None if measured.many is None else measured.many.n_reads
    if measured.many is None:
        return _not_run(case, "there was no run on more than one device")
    if measured.single is None:
        return _not_run(case, "there was no run on one device")
    problem = _no_evidence(case, profile) or _no_time(measured.single) or _no_time(measured.many)
    if problem is None and figure is None:
        problem = "the two runs did not do the same work"
    if problem or figure is None:
        return _not_run(case, problem or "", None if figure is None else figure.speedup, samples)
    why = "super-linear: check the one-device run" if figure.super_linear else ""
    return _judge(case, figure.speedup, samples, why)


def _scaling_target(measured: Measured) -> tuple[Target | None, str]:
    """The target for the number of devices: `scaling` is for two, bands for any number."""
    devices = 2 if measured.many is None else len(measured.many.devices)
    if devices == 2 and measured.profile.targets.scaling is not None:
        return measured.profile.targets.scaling, "scaling"
    band = measured.profile.scaling_bands.get(str(devices))
    return (None if band is None else Target(op=">=", value=band[0])), f"scaling_bands.{devices}"


def _speedup(measured: Measured) -> Criterion:
    run, baseline, profile = measured.judged, measured.baseline, measured.profile
    title = BASELINE_TITLES.get(profile.baseline.name, profile.baseline.name)
    case = _Case(
        "speedup",
        "PERF-01",
        f"Speed-up over {title}",
        "time of the baseline ÷ time of the run, same machine, same reads",
        "x",
        "speedup",
        profile.targets.speedup,
        run,
        "reads of the baseline",
        ("baseline/summary.json", *_summary_of(run)),
    )
    if run is None:
        return _not_run(case, "there was no run")
    if baseline is None:
        return _not_run(case, "the baseline was not run")
    samples = baseline.subset_reads if baseline.subset_reads is not None else run.n_reads
    value = baseline.seconds / run.total_s if baseline.seconds and run.total_s else None
    problem = baseline.problem or _no_evidence(case, profile) or _no_time(run)
    if problem is None and baseline.source != "recorded" and not _same_kind(baseline, run):
        problem = f"the baseline ran on {baseline.label}, the run on {run.label}"
    if problem is None and value is None:
        problem = "the baseline's time was not recorded"
    if problem or value is None:
        return _not_run(case, problem or "", value, samples)
    return _judge(case, value, samples, baseline_note(baseline))


def baseline_note(baseline: BaselineMetrics) -> str:
    """How the baseline's time is known, when it was not measured over all the reads."""
    if baseline.source == "recorded":
        return f"the baseline's time is recorded in the profile, for {baseline.label}"
    if baseline.source == "scaled":
        return (
            f"baseline measured on {baseline.subset_reads or 0:,} reads and scaled by tokens "
            f"({baseline.subset_tokens or 0:,} of {baseline.total_tokens or 0:,})"
        )
    return ""


def _same_kind(baseline: BaselineMetrics, run: RunMetrics) -> bool:
    """Whether the baseline ran on the run's kind of device; on fewer of them is a handicap of its own algorithm."""
    names = {short_name(device) for device in run.devices}
    return bool(names) and set(baseline.models) == names


def _consensus(measured: Measured) -> Criterion:
    run, profile = measured.judged, measured.profile
    against = [c for c in measured.comparisons if c.a == BASELINE]
    names = [figure.name for figure in (measured.single, measured.many) if figure is not None]
    parts = {c.b: c.consensus for c in against if c.b in names and c.consensus is not None}
    case = _Case(
        "consensus",
        "correctness",
        "Consensus label agreement",
        "chunks whose consensus equals the baseline's ÷ all chunks of either side; the lowest over the runs",
        "%",
        "consensus_agreement",
        profile.targets.consensus_agreement,
        run,
        "chunks",
        ("comparison.json",),
    )
    values = [part.agreement for part in parts.values() if part.agreement is not None]
    samples = min((part.total for part in parts.values()), default=None)
    value = 100.0 * min(values) if values else None
    problem = None
    if run is None:
        problem = "there was no run"
    elif run.name not in parts:
        problem = f"{run.name} was not compared with the baseline"
    elif value is None or len(values) < len(parts):
        problem = "there was no chunk to compare"
    elif samples is not None and samples < profile.min_compared_chunks:
        problem = f"{samples:,} chunks compared; the profile needs {profile.min_compared_chunks:,}"
    if problem or value is None:
        return _not_run(case, problem or "", value, samples)
    subset = next((c.subset_reads for c in against if c.subset_reads is not None), None)
    return _judge(
        case,
        value,
        samples,
        f"over the {subset:,} reads that the baseline ran on and that have a row" if subset else "",
    )


def _utilisation(measured: Measured) -> Criterion:
    run = measured.judged
    case = _Case(
        "gpu_utilisation",
        "PERF-02",
        "GPU utilisation (ESM-2)",
        "mean of NVML samples from the first ESM-2 batch launched to the last finished; the lowest device counts",
        "%",
        "gpu_utilisation",
        measured.profile.targets.gpu_utilisation,
        run,
        "NVML samples of that device",
        _telemetry_of(run),
    )
    telemetry = None if run is None else run.telemetry
    if telemetry is None:
        return _not_run(case, "there is no telemetry")
    unseen = [figure.device for figure in telemetry.devices if figure.esm2_percent is None]
    if unseen or not telemetry.devices:
        return _not_run(case, f"no NVML sample of {', '.join(unseen) or 'any device'} while ESM-2 ran")
    lowest = min(telemetry.devices, key=lambda figure: figure.esm2_percent or 0.0)
    fewest = min(figure.esm2_samples for figure in telemetry.devices)
    problem = _no_evidence(case, measured.profile)
    if problem is None and fewest < MIN_SAMPLES:
        problem = f"{fewest} samples of a device; {MIN_SAMPLES} are needed"
    if problem or lowest.esm2_percent is None:
        return _not_run(case, problem or "", lowest.esm2_percent, lowest.esm2_samples)
    return _judge(case, lowest.esm2_percent, lowest.esm2_samples)


def _packing(measured: Measured) -> Criterion:
    run = measured.judged
    case = _Case(
        "packing",
        "PERF-05",
        "Packing efficiency",
        "real tokens ÷ token slots launched, both encoders, tails included",
        "%",
        "packing_efficiency",
        measured.profile.targets.packing_efficiency,
        run,
        "batches",
        _telemetry_of(run),
    )
    telemetry = None if run is None else run.telemetry
    if telemetry is None or telemetry.packing_efficiency is None:
        return _not_run(case, "there is no telemetry" if telemetry is None else "no batch was launched")
    value = 100.0 * telemetry.packing_efficiency
    if telemetry.tokens > telemetry.slots:
        return _not_run(case, "more tokens than slots: the telemetry is wrong", None, telemetry.batches)
    problem = _too_few_reads(run, measured.profile)
    if problem:
        return _not_run(case, problem, value, telemetry.batches)
    return _judge(case, value, telemetry.batches)


def _starved(measured: Measured) -> Criterion:
    run = measured.judged
    case = _Case(
        "starved_share",
        "PERF-05",
        "Starved batches",
        "batches the launch loop waited over 50 ms for ÷ all batches",
        "%",
        "starved_share",
        measured.profile.targets.starved_share,
        run,
        "batches",
        _telemetry_of(run),
    )
    telemetry = None if run is None else run.telemetry
    if telemetry is None or telemetry.queue is None:
        return _not_run(case, "there is no telemetry of batches")
    value = 100.0 * telemetry.queue.starved
    problem = _no_evidence(case, measured.profile)
    return _not_run(case, problem, value, telemetry.batches) if problem else _judge(case, value, telemetry.batches)


def _checkpoint_overhead(measured: Measured) -> Criterion:
    case = _Case(
        "checkpoint_overhead",
        "PERF-05",
        "Checkpoint overhead",
        "1 − tokens/s with commits ÷ tokens/s without, first launch to last commit; the median over the pairs",
        "%",
        "checkpoint_overhead",
        measured.profile.targets.checkpoint_overhead,
        measured.judged,
        "pairs of runs",
        ("checkpoint_overhead.json",),
    )
    found = measured.overhead
    if found is None or found.median is None:
        return _not_run(case, "no pair of runs with and without commits" if found is None else found.problem or "")
    value = 100.0 * found.median
    problem = found.problem or _no_evidence(case, measured.profile)
    if problem:
        return _not_run(case, problem, value, found.pairs)
    judged = _judge(case, value, found.pairs)
    if judged.verdict != "fail":
        return judged
    return judged.model_copy(update={"reason": f"try shard_tokens above {found.shard_tokens:,}, or a faster disk"})


def _spread(measured: Measured) -> Criterion:
    run = measured.many
    case = _Case(
        "device_time_spread",
        "PERF-03",
        "Spread of device times",
        "1 − least ÷ most busy seconds over the devices",
        "%",
        "device_time_spread",
        measured.profile.targets.device_time_spread,
        run,
        "devices",
        _telemetry_of(run),
    )
    telemetry: TelemetryMetrics | None = None if run is None else run.telemetry
    if run is None or telemetry is None or telemetry.device_time_spread is None:
        return _not_run(case, "there was no run on more than one device, or its telemetry is missing")
    if len(telemetry.busy) < len(run.devices):
        return _not_run(case, "a device did no shard", 100.0 * telemetry.device_time_spread, len(telemetry.busy))
    problem = _no_evidence(case, measured.profile)
    value = 100.0 * telemetry.device_time_spread
    return _not_run(case, problem, value, len(telemetry.busy)) if problem else _judge(case, value, len(telemetry.busy))


def _same_bytes(measured: Measured) -> Criterion:
    run, single = measured.many, measured.single
    case = _Case(
        "same_bytes",
        "correctness",
        "One device and N devices agree bit for bit",
        "result files and shards of the one-device run and the N-device run hold the same bytes (1 yes, 0 no)",
        "",
        "every profile asks",
        Target(op=">=", value=1.0),
        run,
        "files and shards",
        ("comparison.json",),
    )
    names = {figure.name for figure in (run, single) if figure is not None}
    found = [c.bitwise for c in measured.comparisons if {c.a, c.b} == names and c.bitwise is not None]
    if not found:
        return _not_run(case, "the two runs were not compared bit for bit")
    equality = found[0]
    samples = equality.files_compared + equality.shards_compared
    if run is not None and single is not None and len({d.name for d in (*run.devices, *single.devices)}) > 1:
        return _not_run(case, "devices of different models need not agree bit for bit", None, samples)
    if not samples:
        return _not_run(case, "; ".join(equality.differing))
    return _judge(case, 1.0 if equality.identical else 0.0, samples, "; ".join(equality.differing))


def _summary_of(run: RunMetrics | None) -> tuple[str, ...]:
    return () if run is None else (f"{run.name}/summary.json",)


def _telemetry_of(run: RunMetrics | None) -> tuple[str, ...]:
    return () if run is None or run.telemetry is None else (run.telemetry.file,)


def _no_time(run: RunMetrics) -> str | None:
    if run.resumed:
        return f"{run.name} was resumed ({run.shards_reused or 0} shards are of an earlier run): its time is not whole"
    if run.stopped_at_limit:
        return f"{run.name} was ended at the time limit"
    return None if run.total_s else f"the time of {run.name} was not recorded"


def _too_few_reads(run: RunMetrics | None, profile: Profile) -> str | None:
    if run is None or run.n_reads is None:
        return "the number of reads was not recorded"
    if run.n_reads < profile.min_reads:
        return f"{run.n_reads:,} reads; the profile needs {profile.min_reads:,}"
    return None


def _no_evidence(case: _Case, profile: Profile) -> str | None:
    """Why a speed of this run says nothing about the profile's target; `None` when it does."""
    if case.target is None:
        return None  # `_judge` says that the profile does not ask
    return _too_few_reads(case.run, profile) or _other_device(case.run, profile)


def _other_device(run: RunMetrics | None, profile: Profile) -> str | None:
    """Targets are meant for the devices the profile names, or for any GPU when it names none."""
    if run is None or not run.devices:
        return "the devices were not recorded"
    if not profile.device_names:
        return f"{run.label}: the target is meant for GPUs" if run.devices[0].kind == "cpu" else None
    for device in run.devices:
        if not any(part.lower() in f"{device.name} {short_name(device)}".lower() for part in profile.device_names):
            meant = " or ".join(profile.device_names)
            return f"the target is meant for {meant}; on {short_name(device)} it is for reference only"
    return None


def _judge(case: _Case, value: float, samples: int | None, why: str = "") -> Criterion:
    if case.target is None:
        return _not_run(case, "the profile does not ask for it", value, samples)
    if not samples:
        return _not_run(case, "nothing was counted", value, samples)
    return _verdict(case, value, "pass" if case.target.met(value) else "fail", why, samples)


def _not_run(case: _Case, reason: str, value: float | None = None, samples: int | None = None) -> Criterion:
    if case.target is None:
        reason = "the profile does not ask for it"
    return _verdict(case, value, "not run", reason, samples)


def _verdict(case: _Case, value: float | None, verdict: Verdict, reason: str, samples: int | None) -> Criterion:
    target = "not set" if case.target is None else f"{case.target.op} {case.target.value:g}"
    return Criterion(
        id=case.id,
        perf_id=case.perf_id,
        title=case.title,
        definition=case.definition,
        unit=case.unit,
        value=value,
        target=case.target,
        verdict=verdict,
        reason=reason,
        samples=samples,
        samples_of=case.samples_of,
        device="" if case.run is None else case.run.label,
        profile_line=f"{case.field}: {target}",
        raw=case.raw,
    )


def count(criteria: Sequence[Criterion], verdict: Verdict) -> int:
    """How many criteria have this verdict."""
    return sum(criterion.verdict == verdict for criterion in criteria)
