"""The criteria that a validation is judged by: what each is called, and what was measured for it.

Each criterion is a frozen object that stands below the function that measures it. `judging.py`
compares what was measured with the targets of a profile.

To add a criterion:

1. Name its target in `profiles.TargetName`, and set the target in the profiles that ask for it.
2. Write the function that measures it, with its `CriterionSpec` below, and list that in `CHECKS`.
   `CRITERIA` has the seven of VirNucPro's printed report, whose lines are fixed.
3. If it compares runs, say in `judging.judge_report` which runs may not be compared.
4. If no setting of the engine can change it, its `perf_id` is `CORRECTNESS`: it is never tuned.
5. Explain it in docs/report.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from virnuc_core.encoder_names import PROTEIN
from virnuc_core.profiles import Target, TargetName
from virnuc_core.proportions import samples_needed, wilson_interval
from virnuc_core.report.model import BASELINE, Report, RunMetrics
from virnuc_core.rundir import EXACT_FILES
from virnuc_core.validation import NO_COMMIT_PAIRS, BitwiseEquality, CosineStats

CORRECTNESS: Final = "correctness"
MIN_SAMPLES: Final = 10  # utilisation samples of a device; fewer say nothing
NO_EXACT_RUN: Final = "no part was embedded in fp32, or the runs are in fp32 themselves"
NO_TELEMETRY: Final = "there is no telemetry"

# Whose figures a criterion uses: the run on one device, the run on two, the run on the most devices
# if that is not the same, or the run that is judged, whatever it has.
RunChoice = Literal["single", "pair", "many", "judged"]
# What a run must be to say something about performance: large enough, and for "speed" also on the
# devices that the profile is meant for.
Evidence = Literal["speed", "reads"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was measured for one criterion."""

    value: float | None = None
    samples: int | None = None
    not_measured: str = ""  # why it cannot be judged, whatever the run was on
    not_comparable: str = ""  # why it cannot be judged although the run is good evidence
    remark: str = ""  # on a number that is judged
    if_missed: str = ""  # what to do if the target is missed
    failed: bool = False  # whatever the number says
    projected: float | None = None  # the value for as many reads as the target speaks of


Measure = Callable[[Report, RunMetrics | None], Finding]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriterionSpec:
    """A criterion or a further check, before it is judged."""

    id: str
    perf_id: str  # of the requirement that it answers, or CORRECTNESS
    title: str  # {baseline} stands for the baseline's name
    definition: str
    target: TargetName | Literal["same_bytes"]  # the name of its target in a profile
    measure: Measure
    unit: Literal["s", "x", "%", ""] = "%"
    samples_of: str = "reads"
    run: RunChoice = "judged"
    evidence: Evidence = "speed"
    # files that it is computed from: their paths, or "summary" and "telemetry" of the run, or the
    # summary of the one-device run as "single"
    raw: tuple[str, ...] = ("telemetry",)


def _measure_time(report: Report, run: RunMetrics | None, n_devices: int) -> Finding:
    """Return the total time of a run.

    The target is for a certain number of reads. If the run had fewer, the time is projected to that
    number, and the finding says so.

    Args:
        report: The report with all figures.
        run: The run, or None if there was none.
        n_devices: Number of devices that the criterion is about.
    """
    if run is None:
        plural = "" if n_devices == 1 else "s"
        return Finding(not_measured=f"there was no run on {n_devices} device{plural}")
    if len(run.devices) != n_devices:
        reason = f"the run was on {len(run.devices)} devices, not {n_devices}"
        return Finding(not_measured=reason)
    if run.stopped_at_limit:
        limit_s = report.profile.time_limit_s or 0
        remark = f"ended at the profile's limit of {limit_s:g} s: slower than it may be"
        return Finding(run.total_s, run.n_reads, remark=remark, failed=True)
    if run.untimed:
        return _bound_of_time(report, run, n_devices)
    target_reads = report.profile.target_reads or 0
    n_reads = run.n_reads or 0
    if run.total_s is None or not 0 < n_reads < target_reads:
        return Finding(run.total_s, run.n_reads)
    return Finding(
        run.total_s,
        n_reads,
        remark=f"projected from {n_reads:,} to {target_reads:,} reads: no measurement",
        projected=run.total_s * target_reads / n_reads,
    )


def _bound_of_time(report: Report, run: RunMetrics, n_devices: int) -> Finding:
    """Return the finding on the time of a run that was interrupted or disturbed.

    Its total time is no measurement. But if the work that it committed took longer than the target
    allows, the target is missed for certain.

    Args:
        report: The report with all figures.
        run: The run.
        n_devices: Number of devices that the criterion is about.
    """
    name: TargetName = "one_device_seconds" if n_devices == 1 else "two_device_seconds"
    target = report.profile.targets.get(name)
    least_s = run.least_s  # time of the committed work: the whole run took at least as long
    if target is None or least_s is None or target.met(least_s):
        return Finding(run.total_s, run.n_reads, not_comparable=run.untimed)
    remark = f"{run.untimed}; but its committed work alone took {least_s:,.1f} s"
    return Finding(least_s, run.n_reads, remark=remark, failed=True)


def measure_one_device_time(report: Report, run: RunMetrics | None) -> Finding:
    """Return the total time of the run on one device."""
    return _measure_time(report, run, n_devices=1)


ONE_DEVICE_TIME: Final = CriterionSpec(
    id="one_device_time",
    perf_id="PERF-01",
    title="Time on one device",
    definition="wall time of the whole pipeline on one device, staging included",
    target="one_device_seconds",
    measure=measure_one_device_time,
    unit="s",
    run="single",
    raw=("summary",),
)


def measure_two_device_time(report: Report, run: RunMetrics | None) -> Finding:
    """Return the total time of the run on two devices."""
    return _measure_time(report, run, n_devices=2)


TWO_DEVICE_TIME: Final = CriterionSpec(
    id="two_device_time",
    perf_id="PERF-01",
    title="Time on two devices",
    definition="wall time of the whole pipeline on two devices, staging included",
    target="two_device_seconds",
    measure=measure_two_device_time,
    unit="s",
    run="pair",
    raw=("summary",),
)


def measure_scaling(report: Report, run: RunMetrics | None) -> Finding:
    """Return how many times faster a run on several devices was than the run on one."""
    if run is None:
        return Finding(not_measured="there was no run on more than one device")
    if report.single is None:
        return Finding(not_measured="there was no run on one device")
    problem = report.single.untimed or run.untimed
    figure = report.figure_of(run)
    if figure is None:
        reason = problem or "the two runs did not do the same work"
        return Finding(samples=run.n_reads, not_comparable=reason)
    remark = ""
    if figure.speedup > figure.num_gpus:
        remark = "super-linear: check the one-device run"
    return Finding(figure.speedup, run.n_reads, not_comparable=problem, remark=remark)


SCALING: Final = CriterionSpec(
    id="scaling",
    perf_id="PERF-03",
    title="Scaling",
    definition="time on one device ÷ time on N devices, same reads, whole pipeline; "
    "efficiency is that ÷ N",
    target="scaling",
    measure=measure_scaling,
    unit="x",
    run="many",
    raw=("single", "summary"),
)


def measure_speedup(report: Report, run: RunMetrics | None) -> Finding:
    """Return how many times faster the run was than the baseline.

    The finding says why the two times cannot be compared, if they cannot.
    """
    if run is None:
        return Finding(not_measured="there was no run")
    baseline = report.baseline
    if baseline is None:
        return Finding(not_measured="the baseline was not run")

    value = None
    if baseline.seconds and run.total_s and not run.stopped_at_limit:
        value = baseline.seconds / run.total_s

    # The number of devices may differ: the baseline is slower also because it cannot use several.
    problem = run.untimed
    if not problem and value is None:
        problem = "the baseline's time was not recorded"

    return Finding(
        value,
        samples=run.n_reads if baseline.subset is None else baseline.subset.reads,
        not_measured=baseline.problem or "",
        not_comparable=problem,
        remark=baseline.origin,
    )


SPEEDUP: Final = CriterionSpec(
    id="speedup",
    perf_id="PERF-01",
    title="Speed-up over {baseline}",
    definition="time of the baseline ÷ time of the run, same machine, same reads",
    target="speedup",
    measure=measure_speedup,
    unit="x",
    samples_of="reads of the baseline",
    raw=("baseline/summary.json", "summary"),
)


def measure_consensus(report: Report, run: RunMetrics | None) -> Finding:
    """Return the lowest agreement of chunk labels with the baseline over the runs, in percent."""
    if run is None:
        return Finding(not_measured="there was no run")
    run_names = {report_run.name for report_run in report.runs}
    with_baseline = [pair for pair in report.comparisons if pair.a == BASELINE]
    agreements = {}
    for comparison in with_baseline:
        if comparison.b in run_names and comparison.consensus is not None:
            agreements[comparison.b] = comparison.consensus
    shares = [part.agreement for part in agreements.values() if part.agreement is not None]
    # The lowest agreement is the result, so the smallest comparison decides if it is evidence.
    n_chunks = min((part.total for part in agreements.values()), default=0)

    min_chunks = report.profile.min_compared_chunks
    not_measured = ""
    if run.name not in agreements:
        not_measured = f"{run.name} was not compared with the baseline"
    elif len(shares) < len(agreements):
        not_measured = "there was no chunk to compare"
    elif n_chunks < min_chunks:
        not_measured = f"{n_chunks:,} chunks compared; the profile needs {min_chunks:,}"

    remark = ""
    subset_sizes = [pair.subset_reads for pair in with_baseline if pair.subset_reads is not None]
    if subset_sizes and subset_sizes[0]:
        n_reads = subset_sizes[0]  # the same for all runs: the baseline ran once
        remark = f"over the {n_reads:,} reads of the baseline's subset"
    return Finding(
        value=100.0 * min(shares) if shares else None,
        samples=n_chunks if agreements else None,
        not_measured=not_measured,
        remark=remark,
    )


CONSENSUS: Final = CriterionSpec(
    id="consensus",
    perf_id=CORRECTNESS,
    title="Consensus label agreement",
    definition="chunks whose consensus equals the baseline's ÷ all chunks of either side; "
    "the lowest over the runs",
    target="consensus_agreement",
    measure=measure_consensus,
    samples_of="chunks",
    raw=("comparison.json",),
)


def measure_gpu_utilisation(_: Report, run: RunMetrics | None) -> Finding:
    """Return the utilisation of the least used device while the protein encoder ran, in percent."""
    if run is None or run.telemetry is None:
        return Finding(not_measured=NO_TELEMETRY)
    devices = run.telemetry.devices
    percent = run.telemetry.lowest_percent("protein")
    if percent is None:
        unseen = [device.device for device in devices if device.protein_percent is None]
        names = ", ".join(unseen) or "any device"
        return Finding(not_measured=f"no NVML sample of {names} while {PROTEIN.title} ran")

    problem = ""
    fewest = min(device.protein_samples for device in devices)
    if fewest < MIN_SAMPLES:
        problem = f"{fewest} samples of a device; {MIN_SAMPLES} are needed"
    lowest = next(device for device in devices if device.protein_percent == percent)
    return Finding(percent, lowest.protein_samples, not_comparable=problem)


GPU_UTILISATION: Final = CriterionSpec(
    id="gpu_utilisation",
    perf_id="PERF-02",
    title=f"GPU utilisation ({PROTEIN.title})",
    definition=f"mean of NVML samples from the first {PROTEIN.title} batch launched "
    "to the last finished; "
    "the lowest device counts",
    target="gpu_utilisation",
    measure=measure_gpu_utilisation,
    samples_of="NVML samples of that device",
)


def measure_packing(_: Report, run: RunMetrics | None) -> Finding:
    """Return the share of the launched token slots that held a token, in percent.

    A batch has a fixed number of slots. Slots without a token are computed in vain.
    """
    if run is None or run.telemetry is None:
        return Finding(not_measured=NO_TELEMETRY)
    telemetry = run.telemetry
    if telemetry.packing_efficiency is None:
        return Finding(not_measured="no batch was launched")
    if telemetry.tokens > telemetry.slots:
        reason = "more tokens than slots: the telemetry is wrong"
        return Finding(samples=telemetry.batches, not_measured=reason)
    return Finding(100.0 * telemetry.packing_efficiency, telemetry.batches)


PACKING: Final = CriterionSpec(
    id="packing",
    perf_id="PERF-05",
    title="Packing efficiency",
    definition="real tokens ÷ token slots launched, both encoders, tails included",
    target="packing_efficiency",
    measure=measure_packing,
    samples_of="batches",
    evidence="reads",
)


def measure_starved_share(_: Report, run: RunMetrics | None) -> Finding:
    """Return the share of the batches for which the GPU had to wait, in percent."""
    if run is None or run.telemetry is None or run.telemetry.queue is None:
        return Finding(not_measured="there is no telemetry of batches")
    return Finding(100.0 * run.telemetry.queue.starved, run.telemetry.batches)


STARVED_SHARE: Final = CriterionSpec(
    id="starved_share",
    perf_id="PERF-05",
    title="Starved batches",
    definition="batches the launch loop waited over 50 ms for ÷ all batches",
    target="starved_share",
    measure=measure_starved_share,
    samples_of="batches",
)


def measure_checkpoint_overhead(report: Report, _: RunMetrics | None) -> Finding:
    """Return by how much commits reduce the tokens per second, in percent.

    A commit writes a finished shard to the disk.
    """
    overhead = report.overhead
    if overhead is None:
        return Finding(not_measured=NO_COMMIT_PAIRS)
    if overhead.median is None:
        return Finding(not_measured=overhead.problem)
    return Finding(
        100.0 * overhead.median,
        samples=len(overhead.commit_overheads),
        not_measured=overhead.problem,
        if_missed=f"try shard_tokens above {overhead.shard_tokens:,}, or a faster disk",
    )


CHECKPOINT_OVERHEAD: Final = CriterionSpec(
    id="checkpoint_overhead",
    perf_id="PERF-05",
    title="Checkpoint overhead",
    definition="1 − tokens/s with commits ÷ tokens/s without, first launch to last commit; "
    "the median over the pairs",
    target="checkpoint_overhead",
    measure=measure_checkpoint_overhead,
    samples_of="pairs of runs",
    raw=("checkpoint_overhead.json",),
)


def measure_device_time_spread(_: Report, run: RunMetrics | None) -> Finding:
    """Return the difference in busy time between the most and the least busy device, in percent."""
    telemetry = None if run is None else run.telemetry
    if run is None or telemetry is None or telemetry.device_time_spread is None:
        reason = "there was no run on more than one device, or its telemetry is missing"
        return Finding(not_measured=reason)
    not_measured = ""
    if len(telemetry.busy) < len(run.devices):
        not_measured = "a device did no shard"
    spread = 100.0 * telemetry.device_time_spread
    return Finding(spread, len(telemetry.busy), not_measured=not_measured)


DEVICE_TIME_SPREAD: Final = CriterionSpec(
    id="device_time_spread",
    perf_id="PERF-03",
    title="Spread of device times",
    definition="1 − least ÷ most busy seconds over the devices",
    target="device_time_spread",
    measure=measure_device_time_spread,
    samples_of="devices",
    run="many",
)


def _cosines_to_fp32(report: Report) -> list[CosineStats]:
    """Return the cosines to the embeddings in fp32, one record for each encoder and run."""
    cosines: list[CosineStats] = []
    for comparison in report.comparisons:
        if comparison.a == EXACT_FILES:
            cosines.extend(comparison.cosines)
    return cosines


def measure_centred_worst(report: Report, _: RunMetrics | None) -> Finding:
    """Return the lowest centred cosine between a sequence's embedding and its embedding in fp32."""
    cosines = _cosines_to_fp32(report)
    if not cosines:
        return Finding(not_measured=NO_EXACT_RUN)
    lowest_cosine = min(cosine.minimum for cosine in cosines)
    return Finding(lowest_cosine, samples=min(cosine.n for cosine in cosines))


CENTRED_WORST: Final = CriterionSpec(
    id="centred_worst",
    perf_id=CORRECTNESS,
    title="Worst centred cosine to fp32",
    definition="least cosine of a sequence's mean embedding to the one in fp32, "
    "both less the mean of all; the lower encoder",
    target="centred_worst",
    measure=measure_centred_worst,
    unit="",
    samples_of="sequences",
    raw=("comparison.json",),
)


def measure_centred_mean(report: Report, _: RunMetrics | None) -> Finding:
    """Return the mean centred cosine to the embeddings in fp32: that of the lower encoder."""
    cosines = _cosines_to_fp32(report)
    if not cosines:
        return Finding(not_measured=NO_EXACT_RUN)
    lowest_mean = min(cosine.mean for cosine in cosines)
    return Finding(lowest_mean, samples=min(cosine.n for cosine in cosines))


CENTRED_MEAN: Final = CriterionSpec(
    id="centred_mean",
    perf_id=CORRECTNESS,
    title="Mean centred cosine to fp32",
    definition="the same cosine, its mean over the sequences that were embedded in fp32 too; "
    "the lower encoder",
    target="centred_mean",
    measure=measure_centred_mean,
    unit="",
    samples_of="sequences",
    raw=("comparison.json",),
)


def measure_verdicts_held(report: Report, _: RunMetrics | None) -> Finding:
    """Return the share of the chunks that have the same label as in fp32, in percent.

    The criterion fails only if the whole 95 % confidence interval is below the target. It is not
    judged if the sample is too small to show that the target is met.
    """
    with_fp32 = (pair for pair in report.comparisons if pair.a == EXACT_FILES)
    comparison = next(with_fp32, None)
    consensus = None if comparison is None else comparison.consensus
    if consensus is None or consensus.agreement is None:
        return Finding(not_measured=NO_EXACT_RUN)

    n_chunks = consensus.total
    interval = wilson_interval(consensus.agreement, n_chunks)
    low, high = 100.0 * interval.low, 100.0 * interval.high
    interval_text = f"95 % interval {low:.3f} to {high:.3f} %"

    # Without a target in the profile, the value is only shown. No sample is too small for that.
    target = report.profile.targets.get("verdicts_held") or Target(op=">=", value=0.0)
    n_needed = samples_needed(target.value / 100.0)
    not_measured = ""
    if n_chunks < n_needed:
        not_measured = f"{n_chunks:,} chunks, {interval_text}; {n_needed:,} are needed"
    return Finding(
        100.0 * consensus.agreement,
        samples=n_chunks,
        not_measured=not_measured,
        remark=interval_text,
        failed=not (target.met(low) or target.met(high)),
    )


VERDICTS_HELD: Final = CriterionSpec(
    id="verdicts_held",
    perf_id=CORRECTNESS,
    title="Verdicts as in fp32",
    definition="chunks whose consensus is that of fp32 ÷ "
    "all chunks that were embedded whole in fp32",
    target="verdicts_held",
    measure=measure_verdicts_held,
    samples_of="chunks",
    raw=("comparison.json",),
)


def measure_same_bytes(report: Report, _: RunMetrics | None) -> Finding:
    """Return 1 if the files of all runs equal those of the one-device run byte for byte, else 0."""
    run_names = {run.name for run in report.runs}
    equalities: dict[str, BitwiseEquality] = {}
    for comparison in report.comparisons:
        if {comparison.a, comparison.b} <= run_names and comparison.bitwise is not None:
            equalities[comparison.b] = comparison.bitwise  # side a is the run on one device

    missing = []
    for run in report.runs:
        if run is not report.single and run.name not in equalities:
            missing.append(run.name)
    if missing or report.single is None:
        names = ", ".join(missing)
        return Finding(not_measured=f"{names} not compared bit for bit with a run on one device")

    n_compared = 0
    for equality in equalities.values():
        n_compared += equality.files_compared + equality.shards_compared
    models = {device.name for run in report.runs for device in run.devices}
    if len(models) > 1:
        reason = "devices of different models need not agree bit for bit"
        return Finding(samples=n_compared, not_measured=reason)
    differences = []
    for name, equality in equalities.items():
        differences += [f"{name}: {file}" for file in equality.differing]
    if differences:
        return Finding(0.0, n_compared, remark="; ".join(differences))
    # Nothing differs, and still the sides are not called identical: there was nothing to compare.
    if not all(equality.identical for equality in equalities.values()):
        return Finding(not_measured="there were no shards, or no result files, to compare")
    return Finding(1.0, n_compared)


SAME_BYTES: Final = CriterionSpec(
    id="same_bytes",
    perf_id=CORRECTNESS,
    title="One device and N devices agree bit for bit",
    definition="result files and shards of the one-device run and of each N-device run "
    "hold the same bytes (1 yes, 0 no)",
    target="same_bytes",
    measure=measure_same_bytes,
    unit="",
    samples_of="files and shards",
    run="many",
    raw=("comparison.json",),
)

# The seven that every report shows
CRITERIA: Final = (
    ONE_DEVICE_TIME,
    TWO_DEVICE_TIME,
    SCALING,
    SPEEDUP,
    CONSENSUS,
    GPU_UTILISATION,
    PACKING,
)
# Further ones, which a report shows if the profile has a target for them
CHECKS: Final = (
    STARVED_SHARE,
    CHECKPOINT_OVERHEAD,
    DEVICE_TIME_SPREAD,
    CENTRED_WORST,
    CENTRED_MEAN,
    VERDICTS_HELD,
)
