"""Figures of one run from its raw files. Nothing is taken over that can be computed from something rawer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from virnuc_core.config import Profile
from virnuc_core.report.files import RECORD, SUMMARY, RawFolder, count, mapping, seconds, text, texts
from virnuc_core.report.model import (
    BaselineMetrics,
    BusyMetrics,
    DeviceInfo,
    DeviceMetrics,
    EncoderMetrics,
    QueueMetrics,
    RunMetrics,
    ScalingMetrics,
    StageMetrics,
    TelemetryMetrics,
)
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import ModelFlops, RunSummary
from virnuc_core.telemetry.batches import (
    BatchSummary,
    by_encoder,
    device_busy,
    device_time_spread,
    embedding_window,
    summarise,
    windows,
)
from virnuc_core.telemetry.flops import (
    EncoderWork,
    cost_per_million,
    mean_ceiling,
    mfu_of_ceiling,
    mfu_of_datasheet,
)
from virnuc_core.telemetry.log import Telemetry
from virnuc_core.telemetry.records import STAGES, Encoder
from virnuc_core.telemetry.tables import BatchTable
from virnuc_core.telemetry.usage import alarms, device_stats, host_stats

VENDOR_WORDS: Final = ("NVIDIA", "GeForce", "Tesla", "Graphics Device")
RESULT_FILES: Final = ("prediction_results.txt", "prediction_results_highestscore.csv", "reads.tsv")
BASELINE_TITLES: Final = {"v1": "v1.0", "vanilla": "vanilla"}


def short_name(device: DeviceInfo) -> str:
    """A device's name as the report prints it: `NVIDIA GeForce RTX 4090` is `RTX 4090`."""
    if device.kind == "cpu":
        return "CPU core"
    words = device.name
    for vendor in VENDOR_WORDS:
        words = words.replace(vendor, "")
    return " ".join(words.split()) or "GPU"


def label(devices: Sequence[DeviceInfo]) -> str:
    """`2x RTX 4090`; unlike devices are listed."""
    names = list(dict.fromkeys(short_name(device) for device in devices))
    if not names:
        return "0x device"
    counts = [sum(short_name(device) == name for device in devices) for name in names]
    return " + ".join(f"{n}x {name}" for n, name in zip(counts, names, strict=True))


def read_devices(*bodies: dict[str, Any]) -> tuple[DeviceInfo, ...]:
    """The devices of a run, from the first of its files that names them."""
    for body in bodies:
        found = []
        listed = body.get("devices")
        for entry in listed if isinstance(listed, list) else ():
            if isinstance(entry, dict) and text(entry, "id"):
                identity = text(entry, "id") or ""
                kind = text(entry, "kind") or ("cpu" if identity.startswith("cpu") else "cuda")
                name = text(entry, "name") or identity
                found.append(DeviceInfo(id=identity, name=name, kind="cpu" if kind == "cpu" else "cuda"))
        if found:
            return tuple(found)
    return ()


def stage_metrics(stages: dict[str, Any], total_s: float | None) -> tuple[StageMetrics, ...]:
    """All nine stages, in order: `null` in `stages` is fused, absent is not measured."""
    found = []
    for name in STAGES:
        spent = seconds(stages, name)
        status: Literal["measured", "fused", "not measured"] = "measured"
        if spent is None:
            status = "fused" if name in stages and stages[name] is None else "not measured"
        share = spent / total_s if spent is not None and total_s else None
        found.append(StageMetrics(name=name, seconds=spent, share=share, status=status))
    return tuple(found)


def run_metrics(raw: RawFolder, name: str, profile: Profile) -> RunMetrics | None:
    """The figures of the run in folder `name`; `None` when it has neither summary nor record."""
    summary, record = raw.json(name, SUMMARY), raw.json(name, RECORD)
    if not summary and not record:
        return None
    devices = read_devices(record, summary)
    wall_s, staging_s = seconds(summary, "wall_s"), seconds(summary, "staging_s")
    total_s = None if wall_s is None or staging_s is None else wall_s + staging_s
    measured = raw.telemetry(name, summary.get("telemetry"))
    resolved = mapping(record, "resolved")
    precision = text(resolved, "precision")
    told = raw.read(RunSummary, name, SUMMARY)
    flops = None if told is None else told.flops
    telemetry = None if measured is None else telemetry_metrics(*measured, devices, flops, precision, profile)
    n_reads, reused = count(summary, "n_reads"), count(summary, "shards_reused")
    resumed = bool(summary.get("resumed")) or bool(reused)
    cost = cost_per_million(
        n_reads or 0,
        len(devices),
        0.0 if resumed or total_s is None else total_s,
        None if telemetry is None else telemetry.energy_kwh,
        profile.price_per_device_hour,
    )
    reads_per_s = n_reads / total_s if n_reads and total_s and not resumed else None
    folder = RunDir(raw.root / name)
    return RunMetrics(
        name=name,
        devices=devices,
        label=label(devices),
        total_s=total_s,
        wall_s=wall_s,
        staging_s=staging_s,
        stages=stage_metrics(mapping(summary, "stages"), total_s),
        n_reads=n_reads,
        n_chunks=count(summary, "n_chunks"),
        n_rows=count(summary, "n_rows"),
        n_uniques=count(summary, "n_uniques"),
        fates={fate: n for fate in mapping(summary, "fates") if (n := count(summary, "fates", fate)) is not None},
        resumed=resumed,
        stopped_at_limit=bool(summary.get("stopped_at_limit")),
        shards_computed=count(summary, "shards_computed"),
        shards_reused=reused,
        restarts=count(summary, "restarts"),
        shards_damaged=len(texts(summary, "damaged")),
        shards_on_less_memory=len(mapping(summary, "reduced_budgets")),
        rows_set_aside=count(summary, "rows_set_aside"),
        precision=precision,
        attention=text(resolved, "attention"),
        warnings=texts(summary, "warnings"),
        missing_files=tuple(file for file in RESULT_FILES if not (folder.root / file).is_file()),
        telemetry=telemetry,
        reads_per_s=reads_per_s,
        hours_projected=profile.projection_reads / reads_per_s / 3600.0 if reads_per_s else None,
        device_hours_per_million=cost.device_hours_per_million,
        kwh_per_million=cost.kwh_per_million,
        price_per_million=cost.price_per_million,
    )


def telemetry_metrics(
    file: str,
    measured: Telemetry,
    devices: Sequence[DeviceInfo],
    summary_flops: ModelFlops | None,
    precision: str | None,
    profile: Profile,
) -> TelemetryMetrics:
    """What the batches, samples and shards of a telemetry file add up to."""
    whole = summarise(measured.batches)
    span = embedding_window(measured.batches)
    cut = windows(measured.batches, measured.samples, profile.window_s, measured.origin_s)
    busy = device_busy(measured.shards)
    used = [device_metrics(measured, device.id) for device in devices]
    energies = [figure.energy_kwh for figure in used]
    host = host_stats(measured.host)
    flops = summary_flops or ModelFlops()
    return TelemetryMetrics(
        file=file,
        batches=whole.batches,
        tokens=whole.tokens,
        slots=whole.slots,
        packing_efficiency=whole.packing_efficiency,
        min_packing_efficiency=whole.min_packing_efficiency,
        batches_below_80=whole.batches_below_threshold,
        tokens_per_s=whole.tokens_per_s,
        steady_tokens_per_s=whole.steady_tokens_per_s,
        embedding_s=None if span is None else whole.span_s,
        encoders=tuple(
            _encoder_metrics(encoder, measured.batches, devices, flops, precision)
            for encoder in by_encoder(measured.batches)
        ),
        queue=_queue_metrics(whole),
        devices=tuple(used),
        busy=tuple(BusyMetrics(device=b.device, shards=b.shards, busy_s=b.busy_s, commit_s=b.commit_s) for b in busy),
        device_time_spread=device_time_spread(busy),
        cpu_percent_mean=host.cpu_percent_avg,
        rss_peak_bytes=host.rss_peak_bytes,
        energy_kwh=sum(e for e in energies if e is not None) if energies and None not in energies else None,
        windows=len(cut),
        windows_without_batch=sum(window.batches == 0 for window in cut),
        alarms=tuple(alarm.detail for alarm in alarms(measured.samples, span)),
    )


def _encoder_metrics(
    name: str, batches: BatchTable, devices: Sequence[DeviceInfo], flops: ModelFlops, precision: str | None
) -> EncoderMetrics:
    encoder: Encoder = "dnabert_s" if name == "dnabert_s" else "esm2"
    table = batches.of_encoder(encoder)
    own = summarise(table)
    work = _work(table, devices)
    ceilings = flops.ceilings(encoder)
    # DNABERT-S stays at fp16 where ESM-2 runs at fp8
    arithmetic = "fp16" if precision == "fp8" and encoder == "dnabert_s" else precision or ""
    return EncoderMetrics(
        encoder=encoder,
        batches=own.batches,
        rows=own.rows,
        tokens=own.tokens,
        slots=own.slots,
        packing_efficiency=own.packing_efficiency,
        tokens_per_s=own.tokens_per_s,
        device_s=own.device_s,
        ceiling_tokens_per_s=mean_ceiling(work, ceilings),
        mfu_of_ceiling=mfu_of_ceiling(work, ceilings),
        mfu_of_datasheet=mfu_of_datasheet(work, flops.per_token(encoder), arithmetic),
    )


def _work(table: BatchTable, devices: Sequence[DeviceInfo]) -> list[EncoderWork]:
    """What each device that launched a batch did; none when a batch has no device time."""
    names = {device.id: device.name for device in devices}
    found = []
    for device in table.devices:
        own = summarise(table.of_device(device))
        if own.batches and own.device_s is None:
            return []
        if own.device_s is not None:
            found.append(EncoderWork(device, names.get(device, ""), own.tokens, own.device_s))
    return found


def _queue_metrics(summary: BatchSummary) -> QueueMetrics | None:
    if summary.queue is None:
        return None
    return QueueMetrics(
        mean_wait_ms=summary.avg_wait_ms or 0.0,
        p95_wait_ms=summary.p95_wait_ms or 0.0,
        max_wait_ms=summary.max_wait_ms or 0.0,
        full=summary.queue.full,
        normal=summary.queue.normal,
        starved=summary.queue.starved,
        waiting_over_1ms=summary.waiting_share or 0.0,
    )


def device_metrics(measured: Telemetry, device: str) -> DeviceMetrics:
    """One device's samples, cut to the time each encoder ran on it."""
    own = measured.batches.of_device(device)
    esm2 = device_stats(measured.samples, device, embedding_window(own.of_encoder("esm2")) or NEVER)
    dnabert_s = device_stats(measured.samples, device, embedding_window(own.of_encoder("dnabert_s")) or NEVER)
    both = device_stats(measured.samples, device, embedding_window(own) or NEVER)
    return DeviceMetrics(
        device=device,
        esm2_percent=esm2.gpu_util_avg,
        esm2_samples=esm2.sample_count,
        dnabert_s_percent=dnabert_s.gpu_util_avg,
        dnabert_s_samples=dnabert_s.sample_count,
        embedding_percent=both.gpu_util_avg,
        embedding_min_percent=both.gpu_util_min,
        embedding_max_percent=both.gpu_util_max,
        embedding_samples=both.sample_count,
        memory_mean_bytes=both.mem_used_avg,
        memory_peak_bytes=both.mem_used_peak,
        power_mean_w=both.power_avg_w,
        temperature_max_c=both.temperature_max_c,
        energy_kwh=both.energy_kwh,
    )


NEVER: Final = (1.0, 0.0)  # a window that holds no sample


def baseline_metrics(raw: RawFolder, profile: Profile, run: RunMetrics | None) -> BaselineMetrics | None:
    """The baseline's time: measured, scaled by tokens from a subset, or recorded for the very same devices.

    It holds no staging: the baseline reads the rows from the store, which is in its favour.
    """
    spec = profile.baseline
    summary = raw.json("baseline", SUMMARY)
    if spec.source == "recorded":
        return _recorded_baseline(profile, run, stage_metrics(mapping(summary, "stages"), None))
    if not summary:
        return None
    devices = read_devices(summary, raw.json("baseline", RECORD))
    measured_s = seconds(summary, "measured_s")
    subset = mapping(summary, "subset")
    tokens, total_tokens = count(subset, "tokens"), count(subset, "total_tokens")
    spent, problem = measured_s, None
    if measured_s is None:
        problem = "the baseline's time was not recorded"
    elif subset:
        spent = seconds(summary, "scaled_s")
        if spent is None or not tokens or not total_tokens or tokens > total_tokens:
            spent, problem = None, "the baseline ran on a subset, but what it stands for is not recorded"
    name = text(summary, "name") or spec.name
    return BaselineMetrics(
        name=name,
        label=label(devices),
        devices=len(devices) or None,
        models=tuple(dict.fromkeys(short_name(device) for device in devices)),
        source="scaled" if subset else "measured",
        seconds=spent,
        measured_s=measured_s,
        subset_reads=count(subset, "reads"),
        subset_tokens=tokens,
        total_tokens=total_tokens,
        stages=stage_metrics(mapping(summary, "stages"), spent),
        problem=problem,
    )


def _recorded_baseline(profile: Profile, run: RunMetrics | None, stages: tuple[StageMetrics, ...]) -> BaselineMetrics:
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
        stages=stages,
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


def stage_seconds(run: RunMetrics, stage: str) -> float | None:
    """Seconds of a stage; `None` when fused or not measured."""
    return next((figure.seconds for figure in run.stages if figure.name == stage), None)
