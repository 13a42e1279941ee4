"""The metrics of one run from its raw files. Nothing is taken over that can be computed from something rawer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from virnuc_core.profiles import Profile
from virnuc_core.report.files import BASELINE, RECORD, SUMMARY, RawFolder
from virnuc_core.report.model import (
    BaselineMetrics,
    DeviceMetrics,
    EncoderMetrics,
    RunMetrics,
    ScalingMetrics,
    StageMetrics,
    TelemetryMetrics,
)
from virnuc_core.runfiles import DeviceRecord, ModelFlops, RunRecord, RunSummary
from virnuc_core.telemetry.flops import EncoderWork, mean_ceiling, mfu_of_ceiling, mfu_of_datasheet
from virnuc_core.telemetry.log import Telemetry
from virnuc_core.telemetry.statistics import (
    Span,
    alarms,
    batch_metrics,
    by_encoder,
    device_busy,
    device_time_spread,
    device_usage,
    embedding_span,
    host_usage,
    windows,
)
from virnuc_core.telemetry.tables import STAGES, BatchTable, Encoder
from virnuc_core.validation import BaselineSummary

VENDOR_WORDS: Final = ("NVIDIA", "GeForce", "Tesla", "Graphics Device")
RESULT_FILES: Final = ("prediction_results.txt", "prediction_results_highestscore.csv", "reads.tsv")
BASELINE_TITLES: Final = {"v1": "v1.0", "vanilla": "vanilla"}
NEVER: Final[Span] = (1.0, 0.0)  # holds no sample


def short_name(device: DeviceRecord) -> str:
    """A device's name as the report prints it: `NVIDIA GeForce RTX 4090` is `RTX 4090`."""
    if device.kind == "cpu":
        return "CPU core"
    words = device.name
    for vendor in VENDOR_WORDS:
        words = words.replace(vendor, "")
    return " ".join(words.split()) or "GPU"


def label(devices: Sequence[DeviceRecord]) -> str:
    """`2x RTX 4090`; unlike devices are listed."""
    names = [short_name(device) for device in devices]
    return " + ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names)) or "0x device"


def stage_metrics(stages: Mapping[str, float | None], total_s: float | None) -> tuple[StageMetrics, ...]:
    """All nine stages, in order: `None` in `stages` is fused, absent is not measured."""
    found = []
    for name in STAGES:
        spent = stages.get(name)
        status: Literal["measured", "fused", "not measured"] = "fused" if name in stages else "not measured"
        share = spent / total_s if spent is not None and total_s else None
        found.append(
            StageMetrics(name=name, seconds=spent, share=share, status=status if spent is None else "measured")
        )
    return tuple(found)


def stage_seconds(run: RunMetrics, stage: str) -> float | None:
    """Seconds of a stage; `None` when fused or not measured."""
    return next((metrics.seconds for metrics in run.stages if metrics.name == stage), None)


def run_metrics(raw: RawFolder, name: str, profile: Profile) -> RunMetrics | None:
    """The metrics of the run in folder `name`; `None` when it has neither summary nor record."""
    told, made = raw.read(RunSummary, name, SUMMARY), raw.read(RunRecord, name, RECORD)
    if told is None and made is None:
        return None
    summary, record = told or RunSummary(), made or RunRecord(fingerprints={})
    devices = record.devices or summary.devices
    total_s = None if summary.wall_s is None or summary.staging_s is None else summary.wall_s + summary.staging_s
    precision, attention = (_text(record.resolved.get(key)) for key in ("precision", "attention"))
    measured = raw.telemetry(name, summary.telemetry)
    flops = summary.flops or ModelFlops()
    telemetry = None if measured is None else telemetry_metrics(*measured, devices, flops, precision, profile)
    resumed = summary.resumed or bool(summary.shards_reused)
    timed_s = None if resumed else total_s
    reads_per_s = summary.n_reads / timed_s if summary.n_reads and timed_s else None
    energy_kwh = None if telemetry is None else telemetry.energy_kwh
    return RunMetrics(
        name=name,
        devices=devices,
        label=label(devices),
        total_s=total_s,
        wall_s=summary.wall_s,
        staging_s=summary.staging_s,
        stages=stage_metrics(summary.stages, total_s),
        n_reads=summary.n_reads,
        n_chunks=summary.n_chunks,
        n_rows=summary.n_rows,
        n_uniques=summary.n_uniques,
        fates=summary.fates,
        resumed=resumed,
        stopped_at_limit=summary.stopped_at_limit,
        shards_computed=summary.shards_computed,
        shards_reused=summary.shards_reused,
        restarts=summary.restarts,
        shards_damaged=len(summary.damaged),
        shards_on_less_memory=len(summary.reduced_budgets),
        rows_set_aside=summary.rows_set_aside,
        precision=precision,
        attention=attention,
        missing_files=tuple(file for file in RESULT_FILES if not (raw.root / name / file).is_file()),
        telemetry=telemetry,
        reads_per_s=reads_per_s,
        hours_projected=profile.projection_reads / reads_per_s / 3600.0 if reads_per_s else None,
        **cost_per_million(summary.n_reads, len(devices), timed_s, energy_kwh, profile.price_per_device_hour),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def cost_per_million(
    reads: int | None, devices: int, seconds: float | None, energy_kwh: float | None, price_per_hour: float | None
) -> dict[str, float | None]:
    """Device hours, energy and price of a million reads; `None` where it was not measured or no price was given."""
    names = ("device_hours_per_million", "kwh_per_million", "price_per_million")
    if not reads or not devices or not seconds:
        return dict.fromkeys(names)
    millions = reads / 1e6
    hours = devices * seconds / 3600.0 / millions
    kwh = None if energy_kwh is None else energy_kwh / millions
    return dict(zip(names, (hours, kwh, None if price_per_hour is None else hours * price_per_hour), strict=True))


def telemetry_metrics(
    file: str,
    measured: Telemetry,
    devices: Sequence[DeviceRecord],
    flops: ModelFlops,
    precision: str | None,
    profile: Profile,
) -> TelemetryMetrics:
    """What the batches, samples and shards of a telemetry file add up to."""
    batches, samples = measured.batches, measured.samples
    cut = windows(batches, samples, profile.window_s, measured.origin_s)
    busy = device_busy(measured.shards)
    used = tuple(device_metrics(measured, device.id) for device in devices)
    energies = [one.energy_kwh for one in used if one.energy_kwh is not None]
    return TelemetryMetrics(
        **dict(batch_metrics(batches)),
        file=file,
        encoders=tuple(
            EncoderMetrics(
                **dict(own), encoder=encoder, **_efficiency(batches, encoder, devices, flops, precision or "")
            )
            for encoder, own in by_encoder(batches).items()
        ),
        devices=used,
        busy=busy,
        device_time_spread=device_time_spread(busy),
        host=host_usage(measured.host),
        energy_kwh=sum(energies) if energies and len(energies) == len(used) else None,
        windows=len(cut),
        windows_without_batch=sum(window.batches == 0 for window in cut),
        alarms=tuple(alarm.detail for alarm in alarms(samples, embedding_span(batches))),
    )


def device_metrics(measured: Telemetry, device: str) -> DeviceMetrics:
    """One device's samples, cut to the time it embedded, and to the time each encoder ran on it."""
    own = measured.batches.of_device(device)
    whole, esm2, dnabert_s = (
        device_usage(measured.samples, device, embedding_span(table) or NEVER)
        for table in (own, own.of_encoder("esm2"), own.of_encoder("dnabert_s"))
    )
    return DeviceMetrics(
        **dict(whole),
        esm2_percent=esm2.gpu_util_avg,
        esm2_samples=esm2.sample_count,
        dnabert_s_percent=dnabert_s.gpu_util_avg,
        dnabert_s_samples=dnabert_s.sample_count,
    )


def _efficiency(
    batches: BatchTable, encoder: Encoder, devices: Sequence[DeviceRecord], flops: ModelFlops, precision: str
) -> dict[str, float | None]:
    """An encoder's share of what its devices could have done; unknown when a device has no device time."""
    names = {device.id: device.name for device in devices}
    work, table = [], batches.of_encoder(encoder)
    for device in table.devices:
        own = batch_metrics(table.of_device(device))
        if own.device_s is not None:
            work.append(EncoderWork(device, names.get(device, ""), own.tokens, own.device_s))
        elif own.batches:
            work = []
            break
    ceilings = flops.ceilings(encoder)
    # DNABERT-S stays at fp16 where ESM-2 runs at fp8
    arithmetic = "fp16" if precision == "fp8" and encoder == "dnabert_s" else precision
    return {
        "ceiling_tokens_per_s": mean_ceiling(work, ceilings),
        "mfu_of_ceiling": mfu_of_ceiling(work, ceilings),
        "mfu_of_datasheet": mfu_of_datasheet(work, flops.per_token(encoder), arithmetic),
    }


def baseline_metrics(raw: RawFolder, profile: Profile, run: RunMetrics | None) -> BaselineMetrics | None:
    """The baseline's time: measured, scaled by tokens from a subset, or recorded for the very same devices.

    It holds no staging: the baseline reads the rows from the store, which is in its favour.
    """
    summary = raw.read(BaselineSummary, BASELINE, SUMMARY)
    if profile.baseline.source == "recorded":
        return _recorded_baseline(profile, run, {} if summary is None else summary.stages)
    if summary is None:
        return None
    record = raw.read(RunRecord, BASELINE, RECORD)
    devices = summary.devices or (() if record is None else record.devices)
    subset, spent = summary.subset, summary.measured_s
    problem = next((f"{BASELINE}/{SUMMARY} {said}" for said in raw.problems.get(f"{BASELINE}/{SUMMARY}", ())), None)
    if spent is None:
        problem = problem or "the baseline's time was not recorded"
    elif subset is not None:
        spent = summary.scaled_s
        if spent is None or not subset.tokens or not subset.total_tokens or subset.tokens > subset.total_tokens:
            spent, problem = None, "the baseline ran on a subset, but what it stands for is not recorded"
    return BaselineMetrics(
        name=summary.name,
        label=label(devices),
        devices=len(devices) or None,
        models=tuple(dict.fromkeys(short_name(device) for device in devices)),
        source="measured" if subset is None else "scaled",
        seconds=spent,
        measured_s=summary.measured_s,
        subset_reads=None if subset is None else subset.reads,
        subset_tokens=None if subset is None else subset.tokens,
        total_tokens=None if subset is None else subset.total_tokens,
        stages=stage_metrics(summary.stages, spent),
        problem=problem,
    )


def _recorded_baseline(profile: Profile, run: RunMetrics | None, stages: Mapping[str, float]) -> BaselineMetrics:
    """The time a profile records, usable only where the devices are those it was recorded on."""
    spec = profile.baseline
    problem = None
    if spec.recorded_seconds is None or not spec.recorded_device or spec.recorded_devices is None:
        problem = "the profile records no time, device name and number of devices"
    elif run is None or not run.devices:
        problem = "there is no run to compare with"
    elif len(run.devices) != spec.recorded_devices or any(spec.recorded_device not in d.name for d in run.devices):
        recorded = f"{spec.recorded_devices}x {spec.recorded_device}"
        problem = f"the recorded time is of {recorded}, this run was on {run.label}"
    elif profile.target_reads is None or (run.n_reads or 0) < profile.target_reads:
        problem = f"the recorded time is of {profile.target_reads or 'unknown'} reads, this run had {run.n_reads}"
    return BaselineMetrics(
        name=spec.name,
        label=f"{spec.recorded_devices or 0}x {spec.recorded_device or 'unknown'}",
        devices=spec.recorded_devices,
        models=() if spec.recorded_device is None else (spec.recorded_device,),
        source="recorded",
        seconds=spec.recorded_seconds,
        measured_s=None,
        subset_reads=None,
        subset_tokens=None,
        total_tokens=None,
        stages=stage_metrics(stages, None),
        problem=problem,
    )


def scaling_metrics(single: RunMetrics | None, many: RunMetrics | None) -> ScalingMetrics | None:
    """One device against N; `None` when a time is missing, a run was resumed, or the work was not the same."""
    if single is None or many is None or single.name == many.name or len(many.devices) < 2:
        return None
    if single.resumed or many.resumed or not single.total_s or not many.total_s:
        return None
    if (single.n_reads, single.n_rows) != (many.n_reads, many.n_rows):
        return None
    speedup = single.total_s / many.total_s
    return ScalingMetrics(
        num_gpus=len(many.devices),
        time_seconds=many.total_s,
        speedup=speedup,
        efficiency=speedup / len(many.devices),
        esm2_scaling=_stage_ratio(single, many, "ESM-2"),
        dnabert_scaling=_stage_ratio(single, many, "DNABERT-S"),
        super_linear=speedup > len(many.devices),
    )


def _stage_ratio(single: RunMetrics, many: RunMetrics, stage: str) -> float | None:
    one, other = (stage_seconds(run, stage) for run in (single, many))
    return one / other if one is not None and other else None
