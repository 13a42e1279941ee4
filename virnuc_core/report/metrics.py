"""The metrics of a validation's runs and of its baseline, from their raw files.

A number that is not there is `None`. Nothing is taken over that can be computed from something
rawer.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Final

import pandas as pd

from virnuc_core.encoder_names import DNA, NAMES, PROTEIN, EncoderNames
from virnuc_core.encoders.registry import encoder_named
from virnuc_core.profiles import BaselineSpec, Profile, load_profile
from virnuc_core.report.comparability import machine_identity, why_other_machine
from virnuc_core.report.model import (
    BASELINE,
    BaselineMetrics,
    DeviceMetrics,
    EncoderMetrics,
    RunMetrics,
    ScalingMetrics,
    TelemetryMetrics,
)
from virnuc_core.report.raw_files import (
    RECORD,
    SUMMARY,
    NamedTelemetry,
    RawFolder,
    device_label,
    run_names,
    short_name,
)
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import Device, ModelFlops, RunCounts, RunRecord, RunSummary
from virnuc_core.telemetry import statistics
from virnuc_core.telemetry.log import Telemetry
from virnuc_core.telemetry.starvation import starvation
from virnuc_core.telemetry.tables import Span
from virnuc_core.validation import BaselineSummary

EMPTY_SPAN: Final = (1.0, 0.0)  # holds no sample
MAX_WINDOWS: Final = 20  # of the table of windows in the report


def run_metrics(raw: RawFolder, name: str, profile: Profile) -> RunMetrics | None:
    """Return the metrics of a run.

    Args:
        raw: The validation's files.
        name: The folder of the run.
        profile: Says for how many reads to project, and what an hour of a device costs.

    Returns:
        `None` if the folder has neither a summary nor a record.
    """
    summary_or_none = raw.read(RunSummary, name, SUMMARY)
    record_or_none = raw.read(RunRecord, name, RECORD)
    if summary_or_none is None and record_or_none is None:
        return None
    summary = summary_or_none or RunSummary()
    record = record_or_none or RunRecord(fingerprints={})
    devices = record.devices or summary.devices
    precision = str(record.resolved.get("precision", ""))

    counts = _counts(summary)
    times = _whole_times(raw, name, counts, machine_identity(record, devices))

    # A run that was stopped at its limit has no telemetry; a file would be of an earlier attempt.
    telemetry = None
    flops = summary.flops or ModelFlops()
    if not summary.stopped_at_limit:
        file = raw.telemetry(name, summary.telemetry)
        if file is not None:
            telemetry = telemetry_metrics(file, devices, flops, precision, profile.window_s)

    was_resumed = summary.resumed or bool(summary.shards_reused) or len(summary.attempts) > 1
    costs = _costs(counts, devices, telemetry, profile)
    # The first three tables exist in every complete run: predictions, consensus and reads. The
    # others may have nothing to list. A run that was stopped at its limit has no result files yet.
    expected_tables: tuple[Path, ...] = ()
    if not summary.stopped_at_limit:
        expected_tables = RunDir(raw.root / name).tables[:3]
    missing_tables = [path.name for path in expected_tables if not raw.has_file(path)]
    return RunMetrics(
        **dict(counts) | {"resumed": was_resumed, "warnings": (*counts.warnings, *times.warnings)},
        name=name,
        devices=devices,
        label=device_label(devices),
        times_s=times.seconds,
        precision=_precision_label(record),
        missing_files=tuple(missing_tables),
        telemetry=telemetry,
        products=flops.products,
        hours_projected=costs.hours_projected,
        device_hours_per_million=costs.device_hours_per_million,
        kwh_per_million=costs.kwh_per_million,
        price_per_million=costs.price_per_million,
    )


def metrics_of_run(run: RunDir) -> RunMetrics | None:
    """Return the metrics of a run that stands alone, outside a validation.

    Projected times and costs are those of the profile `ci-smoke`, because no other was asked for.

    Returns:
        `None` if the directory has neither a summary nor a record.
    """
    # Seen as a validation, the directory of the run is the folder "." of itself.
    return run_metrics(RawFolder(run.root), ".", load_profile("ci-smoke"))


@dataclass(frozen=True, slots=True)
class _WholeTimes:
    """Total times of a run and its repetitions, in seconds, with warnings about those left out."""

    seconds: tuple[float, ...]
    warnings: tuple[str, ...]


def _whole_times(
    raw: RawFolder, name: str, counts: RunCounts, machine: Mapping[str, str]
) -> _WholeTimes:
    """Collect the total times of a run and of its repetitions, the folders `NAME.1`, `NAME.2`, ...

    A time counts if the run did all its work in one attempt, no worker died, and it was on the
    machine of the first run. A repetition on another machine is left out with a warning.

    Args:
        raw: The validation's files.
        name: The folder of the run.
        counts: What the run counted and timed.
        machine: The machine of the run; see `machine_identity`.
    """
    seconds = []
    warnings = []
    if counts.is_timed:  # then `total_s` is not None
        seconds.append(counts.total_s or 0.0)
    for repetition in run_names(raw.root, f"{name}."):
        summary = raw.read(RunSummary, repetition, SUMMARY)
        repeated_record = raw.read(RunRecord, repetition, RECORD)
        if summary is None or repeated_record is None:
            continue
        repeated_counts = _counts(summary)
        if not repeated_counts.is_timed:
            continue
        repeated_machine = machine_identity(repeated_record, summary.devices)
        reason = why_other_machine(name, machine, repetition, repeated_machine)
        if reason:
            warnings.append(reason)
        else:
            seconds.append(repeated_counts.total_s or 0.0)
    return _WholeTimes(tuple(seconds), tuple(warnings))


def _counts(summary: RunSummary) -> RunCounts:
    """Return the counts of a summary.

    The total time is not taken from the summary, but computed from its two parts, staging and the
    rest. So it cannot contradict them.
    """
    total_s = None
    if summary.wall_s is not None and summary.staging_s is not None:
        total_s = summary.wall_s + summary.staging_s
    fields = {name: getattr(summary, name) for name in RunCounts.model_fields}
    return RunCounts(**fields | {"total_s": total_s})


@dataclass(frozen=True, slots=True)
class _Costs:
    """Time, energy and price of reads at the speed of a run. None if the run was not complete."""

    hours_projected: float | None = None  # for the profile's projection_reads
    device_hours_per_million: float | None = None
    kwh_per_million: float | None = None
    price_per_million: float | None = None


def _costs(
    counts: RunCounts,
    devices: Sequence[Device],
    telemetry: TelemetryMetrics | None,
    profile: Profile,
) -> _Costs:
    """Return the time, energy and price of reads at the speed of a run.

    Returns:
        The hours for as many reads as the profile says, and device hours, energy and price for a
        million reads. What is not known is None: the speed of an incomplete run, the energy without
        telemetry, the price if the profile has none for an hour of a device.
    """
    if not counts.sequences_per_hour or not counts.n_reads or not counts.total_s:
        return _Costs()
    hours_projected = profile.projection_reads / counts.sequences_per_hour
    if not devices:
        return _Costs(hours_projected)
    millions = counts.n_reads / 1e6
    device_hours_per_million = len(devices) * counts.total_s / 3600.0 / millions
    kwh = None
    if telemetry is not None and telemetry.energy_kwh is not None:
        kwh = telemetry.energy_kwh / millions
    price = None
    if profile.price_per_device_hour is not None:
        price = device_hours_per_million * profile.price_per_device_hour
    return _Costs(hours_projected, device_hours_per_million, kwh, price)


def telemetry_metrics(
    file: NamedTelemetry,
    devices: Sequence[Device],
    flops: ModelFlops,
    precision: str,
    window_s: float,
) -> TelemetryMetrics:
    """Return the metrics of a run that can be computed from its telemetry file.

    Args:
        file: The telemetry file and its name.
        devices: The devices of the run.
        flops: The operations for one token of each encoder, and the devices' ceilings.
        precision: The arithmetic of the run, which decides what a data sheet promises.
        window_s: The profile's length of a window. A long run has windows of a multiple of it.
    """
    telemetry = file.content
    batches = telemetry.batches
    model_of_device = {device.id: device.name for device in devices}
    device_metrics = [
        _device_metrics(batches, telemetry.samples, device) for device in model_of_device
    ]
    busy = statistics.device_busy(telemetry.shards)
    span = statistics.embedding_span(batches)

    encoders = []
    for encoder in NAMES:
        own_batches = batches[batches.encoder == encoder.name]
        if len(own_batches):
            encoders.append(
                encoder_metrics(encoder, own_batches, model_of_device, flops, precision)
            )

    energies = [device.energy_kwh for device in device_metrics if device.energy_kwh is not None]
    energy_kwh = None  # a sum without some of the devices would be too small
    if energies and len(energies) == len(device_metrics):
        energy_kwh = sum(energies)
    protein_tokens = 0
    for metrics in encoders:
        if metrics.encoder == PROTEIN.name:
            protein_tokens = metrics.tokens
    joules_per_million_tokens = None
    if energy_kwh is not None and protein_tokens:
        joules = energy_kwh * statistics.JOULES_PER_KWH
        joules_per_million_tokens = joules / protein_tokens * 1e6
    return TelemetryMetrics(
        **dict(statistics.batch_metrics(batches)),
        file=file.name,
        encoders=tuple(encoders),
        devices=tuple(device_metrics),
        busy=busy,
        device_time_spread=statistics.device_time_spread(busy),
        energy_kwh=energy_kwh,
        joules_per_million_tokens=joules_per_million_tokens,
        host=statistics.host_usage(telemetry.host),
        alarms=statistics.alarms(telemetry.samples, span),
        starvation=starvation(telemetry.samples, telemetry.host, span),
        windows=_report_windows(telemetry, span, window_s),
    )


def _precision_label(record: RunRecord) -> str | None:
    """Return the arithmetic of a run in words, or `None` if its record does not tell."""
    precision = record.resolved.get("precision")
    if not precision:
        return None
    if record.resolved.get("gelu") == "tanh":
        return f"{precision}, tanh GELU"
    return str(precision)


def _report_windows(
    telemetry: Telemetry, span: Span | None, window_s: float
) -> tuple[statistics.Window, ...]:
    """Cut a run into windows for the report, so that it has a table that a person can read.

    Args:
        telemetry: What the run measured.
        span: The start and the end of the time in which it embedded; `None` if it did not.
        window_s: The profile's length of a window. The shortest multiple of it is taken with which
            there are at most `MAX_WINDOWS`.
    """
    if span is None:
        return ()
    start_s, end_s = span
    multiple = max(1, math.ceil((end_s - start_s) / (window_s * MAX_WINDOWS)))
    return statistics.windows(
        telemetry.batches,
        multiple * window_s,
        telemetry.origin_s,
        telemetry.samples,
        telemetry.host,
    )


def _device_metrics(batches: pd.DataFrame, samples: pd.DataFrame, device: str) -> DeviceMetrics:
    """Return the usage of a device while it embedded, and while each encoder ran on it."""
    own_batches = batches[batches.device == device]

    def usage_during(table: pd.DataFrame) -> statistics.DeviceUsage:
        """Return the usage from the start of the first of these batches to the end of the last."""
        span = statistics.embedding_span(table) or EMPTY_SPAN
        return statistics.device_usage(samples, device, span)

    protein = usage_during(own_batches[own_batches.encoder == PROTEIN.name])
    dna = usage_during(own_batches[own_batches.encoder == DNA.name])
    return DeviceMetrics(
        **dict(usage_during(own_batches)),
        protein_percent=protein.gpu_util_avg,
        protein_samples=protein.sample_count,
        dna_percent=dna.gpu_util_avg,
    )


@cache
def _datasheets() -> dict[str, dict[str, float]]:
    """Return the table of data sheets: TFLOP/s by precision, for each part of a device name."""
    path = Path(__file__).with_name("datasheets.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def datasheet_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a device at a precision, or `None` if the table has none.

    Args:
        device_name: The model name as the driver reports it, for example "NVIDIA L40S".
        precision: The precision of the arithmetic, such as "fp16".
    """
    for name_part, peaks in _datasheets().items():
        if name_part in device_name:
            if precision not in peaks:
                return None
            return peaks[precision] * 1e12  # the table has TFLOP/s
    return None


def encoder_metrics(
    encoder: EncoderNames,
    batches: pd.DataFrame,
    model_of_device: Mapping[str, str],
    flops: ModelFlops,
    precision: str,
) -> EncoderMetrics:
    """Return the metrics of one encoder: counts, and the share of the possible speed it reached.

    The possible speed is the sum over the devices of their computing time multiplied by their peak
    rate. It is unknown if the time or the rate of any device is unknown.

    Args:
        encoder: The encoder.
        batches: Its batches.
        model_of_device: The model name of each device, by its id.
        flops: The FLOPs of a token, and the tokens per second that the linear layers alone sustain
            on each device.
        precision: The precision of the run.
    """
    metrics = statistics.batch_metrics(batches, encoder.name)
    arithmetic = precision
    if precision == "int8" and not encoder_named(encoder.name).has_int8:
        arithmetic = "fp16"  # in an int8 run, this encoder computes in fp16
    flops_per_token = flops.per_token(encoder.molecule)
    ceilings = flops.ceilings(encoder.molecule)

    # min_count=1: the sum for a device without any measured time is NaN, and not 0.
    device_ms = batches.groupby("device", observed=True).device_ms.sum(min_count=1)
    seconds_of_device = device_ms / 1000.0
    ceiling_of_device = []
    peak_of_device = []
    for device in map(str, seconds_of_device.index):
        local_name = device.partition("@")[0]  # on a cluster, the node follows: "GPU-3f2c@node7"
        ceiling_of_device.append(ceilings.get(local_name))
        peak_of_device.append(datasheet_flops(model_of_device.get(device, ""), arithmetic))
    possible_tokens = _weighed_sum(seconds_of_device, ceiling_of_device)
    possible_flops = _weighed_sum(seconds_of_device, peak_of_device)

    ceiling_tokens_per_s = None
    mfu_of_ceiling = None
    if possible_tokens:
        ceiling_tokens_per_s = possible_tokens / float(seconds_of_device.sum())
        mfu_of_ceiling = metrics.tokens / possible_tokens
    mfu_of_datasheet = None
    if flops_per_token and possible_flops:
        mfu_of_datasheet = metrics.tokens * flops_per_token / possible_flops
    return EncoderMetrics(
        **dict(metrics),
        encoder=encoder.name,
        ceiling_tokens_per_s=ceiling_tokens_per_s,
        mfu_of_ceiling=mfu_of_ceiling,
        mfu_of_datasheet=mfu_of_datasheet,
    )


def _weighed_sum(seconds: pd.Series, rates: Sequence[float | None]) -> float | None:
    """Return the sum of seconds multiplied by rates, or `None` if any of them is unknown."""
    rates_or_nan = [math.nan if rate is None else rate for rate in rates]
    products = seconds * pd.Series(rates_or_nan, seconds.index, dtype="float64")
    # skipna=False: one unknown product makes the sum NaN.
    return statistics.none_if_nan(products.sum(skipna=False))


def baseline_metrics(
    raw: RawFolder, profile: Profile, run: RunMetrics | None
) -> BaselineMetrics | None:
    """Return the time of the baseline, the original program, and how it was obtained.

    The result's `source` says how: "measured" is a time that was measured here; "scaled" was
    measured here on a subset of the reads, and scaled up to all of them; "recorded" was
    measured elsewhere, and given in the profile or by the user.

    The time does not include staging, because the baseline reads our store. That is an advantage
    for the baseline.

    Args:
        raw: The validation's files.
        profile: The profile, which has the settings of the baseline.
        run: The run that is compared with the baseline.

    Returns:
        The baseline, with a `problem` if its time cannot be used. None if it was not run.
    """
    summary = raw.read(BaselineSummary, BASELINE, SUMMARY)
    spec = profile.baseline
    has_recorded_time = summary is not None and summary.source == "recorded"
    # The user may give a recorded time although the profile wants a measured one. It then takes the
    # place of the profile's settings.
    if has_recorded_time and spec.source == "measured":
        assert summary is not None  # for mypy
        spec = _recorded_spec(spec, summary)
    if spec.source == "recorded":
        n_reads = spec.recorded_reads or profile.target_reads
        return _recorded_baseline(spec, n_reads, run)
    if summary is None:
        return None

    # From here on, the time was measured here. `subset` is None if all reads were measured.
    problem = None
    subset = summary.subset
    # `measured_s` is the time that was measured, and `wall_s` the same, scaled to all reads.
    if summary.measured_s is None or summary.wall_s is None:
        problem = "the baseline's time was not recorded"
    elif subset is not None and not 0 < subset.tokens <= subset.total_tokens:
        problem = "the baseline ran on a subset, but the number of all tokens is not recorded"
    models = [short_name(device) for device in summary.devices]
    return BaselineMetrics(
        name=summary.name,
        label=device_label(summary.devices),
        models=tuple(dict.fromkeys(models)),
        source="measured" if subset is None else "scaled",
        seconds=summary.wall_s if problem is None else None,
        subset=subset,
        problem=problem,
        failed_rows=summary.failed_rows or 0,
    )


def _recorded_spec(spec: BaselineSpec, summary: BaselineSummary) -> BaselineSpec:
    """Return the settings of the baseline with the recorded time that a summary holds."""
    changes: dict[str, object] = {"name": summary.name, "source": "recorded"}
    changes |= {"recorded_seconds": summary.wall_s, "recorded_reads": summary.recorded_reads}
    if summary.devices:
        changes["recorded_device"] = summary.devices[0].name
        changes["recorded_devices"] = len(summary.devices)
    return spec.model_copy(update=changes)


def _recorded_baseline(
    spec: BaselineSpec, n_reads: int | None, run: RunMetrics | None
) -> BaselineMetrics:
    """Return a recorded time. It counts only for the devices and reads that it was recorded on."""
    recorded_devices = f"{spec.recorded_devices or 0}x {spec.recorded_device or 'unknown'}"
    return BaselineMetrics(
        name=spec.name,
        label=recorded_devices,
        models=() if spec.recorded_device is None else (spec.recorded_device,),
        source="recorded",
        seconds=spec.recorded_seconds,
        problem=_why_recorded_time_does_not_count(spec, recorded_devices, n_reads, run),
    )


def _why_recorded_time_does_not_count(
    spec: BaselineSpec, recorded: str, n_reads: int | None, run: RunMetrics | None
) -> str | None:
    """Return why a recorded time cannot be compared with a run, or `None` if it can.

    Args:
        spec: The recorded time and its devices.
        recorded: Those devices as text.
        n_reads: How many reads were processed in the recorded time.
        run: The run to compare it with.
    """
    device_name = spec.recorded_device
    if spec.recorded_seconds is None or not device_name or spec.recorded_devices is None:
        return "no time, device name and number of devices was recorded"
    if run is None or not run.devices:
        return "there is no run to compare with"
    are_devices_alike = all(device_name in device.name for device in run.devices)
    if len(run.devices) != spec.recorded_devices or not are_devices_alike:
        here = f"this run was on {run.label}"
        return f"for reference only: the recorded time is of {recorded}, {here}"
    if n_reads is None or (run.n_reads or 0) < n_reads:
        here = f"this run had {run.n_reads}"
        return f"for reference only: the recorded time is of {n_reads or 'unknown'} reads, {here}"
    return None


def scaling_metrics(single: RunMetrics | None, many: RunMetrics | None) -> ScalingMetrics | None:
    """Compare the times of the run on one device and of a run on several.

    Args:
        single: The run on one device.
        many: The run on several devices.

    Returns:
        How many times faster the second run was, also by encoder. `None` if a time is missing or
        cannot be judged (for example of a resumed run), or if they did not do the same work.
    """
    if single is None or many is None or not single.times_s or not many.times_s or not many.devices:
        return None
    is_same_work = (single.n_reads, single.n_rows) == (many.n_reads, many.n_rows)
    if not is_same_work or single.untimed or many.untimed:
        return None
    time_s = median(many.times_s)
    speedup = median(single.times_s) / time_s
    return ScalingMetrics(
        num_gpus=len(many.devices),
        time_seconds=time_s,
        times_s=many.times_s,
        speedup=speedup,
        efficiency=speedup / len(many.devices),
        protein_scaling=_stage_speedup(single, many, PROTEIN.title),
        dna_scaling=_stage_speedup(single, many, DNA.title),
    )


def _stage_speedup(single: RunMetrics, many: RunMetrics, stage: str) -> float | None:
    """Return how many times faster a stage was on N devices, or `None` if it was not timed."""
    single_s = single.stages.get(stage)
    many_s = many.stages.get(stage)
    if single_s is None or not many_s:
        return None
    return single_s / many_s
