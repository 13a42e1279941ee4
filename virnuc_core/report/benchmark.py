"""`benchmark_*.json`: the results of a validation for other programs, with metadata.

A figure that was not measured is `null`.
"""

import json
from typing import Self

from virnuc_core.report.model import (
    Bottleneck,
    DeviceMetrics,
    EncoderMetrics,
    Report,
    RunMetrics,
    ScalingMetrics,
    StageThroughput,
)
from virnuc_core.runfiles import RunFile


class ScalingResult(RunFile):
    """Time and speed-up on a number of devices."""

    num_gpus: int
    time_seconds: float
    speedup: float
    efficiency: float  # 0 to 1

    @classmethod
    def of(cls, figure: ScalingMetrics) -> Self:
        """Return the result of one number of devices."""
        return cls(
            num_gpus=figure.num_gpus,
            time_seconds=figure.time_seconds,
            speedup=figure.speedup,
            efficiency=figure.efficiency,
        )


class DeviceResult(RunFile):
    """Use of one device while it embedded."""

    gpu_util_avg: float | None  # percent
    gpu_util_min: float | None
    gpu_util_max: float | None
    mem_used_avg: float | None  # bytes
    mem_used_peak: float | None
    sample_count: int

    @classmethod
    def of(cls, device: DeviceMetrics) -> Self:
        """Return the result of one device."""
        return cls(
            gpu_util_avg=device.gpu_util_avg,
            gpu_util_min=device.gpu_util_min,
            gpu_util_max=device.gpu_util_max,
            mem_used_avg=device.mem_used_avg,
            mem_used_peak=device.mem_used_peak,
            sample_count=device.sample_count,
        )


class StageResult(RunFile):
    """Speed of one stage."""

    stage: str
    total_sequences: int
    total_time_seconds: float
    throughput_seq_per_sec: float | None
    avg_time_per_sequence_ms: float

    @classmethod
    def of(cls, speed: StageThroughput) -> Self:
        """Return the result of one stage."""
        return cls(
            stage=speed.stage,
            total_sequences=speed.sequences,
            total_time_seconds=speed.seconds,
            throughput_seq_per_sec=speed.sequences_per_s,
            avg_time_per_sequence_ms=speed.ms_per_sequence,
        )


class EncoderResult(RunFile):
    """Speed of one encoder on one device, and its share of what the device can do."""

    tokens_per_sec: float | None
    ceiling_tokens_per_sec: float | None
    of_ceiling: float | None  # 0 to 1
    of_datasheet: float | None

    @classmethod
    def of(cls, encoder: EncoderMetrics) -> Self:
        """Return the result of one encoder."""
        return cls(
            tokens_per_sec=encoder.device_tokens_per_s,
            ceiling_tokens_per_sec=encoder.ceiling_tokens_per_s,
            of_ceiling=encoder.mfu_of_ceiling,
            of_datasheet=encoder.mfu_of_datasheet,
        )


class EfficiencyResult(RunFile):
    """Use of the devices, cost of a million reads, and cost of checkpoints."""

    mfu: dict[str, EncoderResult]  # by encoder
    device_hours_per_million_reads: float | None
    kwh_per_million_reads: float | None
    price_per_million_reads: float | None
    checkpoint_overhead: float | None  # 0 to 1

    @classmethod
    def of(cls, report: Report) -> Self:
        """Return the result of the judged run."""
        run = report.run
        encoders: tuple[EncoderMetrics, ...] = ()
        if run is not None and run.telemetry is not None:
            encoders = run.telemetry.encoders
        return cls(
            mfu={encoder.encoder: EncoderResult.of(encoder) for encoder in encoders},
            device_hours_per_million_reads=None if run is None else run.device_hours_per_million,
            kwh_per_million_reads=None if run is None else run.kwh_per_million,
            price_per_million_reads=None if run is None else run.price_per_million,
            checkpoint_overhead=None if report.overhead is None else report.overhead.median,
        )


class BenchmarkResults(RunFile):
    """All results."""

    scaling: tuple[ScalingResult, ...]
    gpu_stats: dict[str, DeviceResult]  # by device
    throughput: dict[str, StageResult]  # by stage
    efficiency: EfficiencyResult
    losses: tuple[Bottleneck, ...]
    findings: tuple[str, ...]

    @classmethod
    def of(cls, report: Report) -> Self:
        """Return the results of a report."""
        run = report.run
        devices: tuple[DeviceMetrics, ...] = ()
        stages: tuple[StageThroughput, ...] = ()
        if run is not None:
            stages = run.stage_throughput
            if run.telemetry is not None:
                devices = run.telemetry.devices
        return cls(
            scaling=tuple(ScalingResult.of(figure) for figure in report.scaling),
            gpu_stats={device.device: DeviceResult.of(device) for device in devices},
            throughput={speed.stage: StageResult.of(speed) for speed in stages},
            efficiency=EfficiencyResult.of(report),
            losses=report.losses,
            findings=report.findings,
        )


class BenchmarkMetadata(RunFile):
    """What the results were measured with."""

    pytorch_version: str | None
    cuda_version: str | None
    driver_version: str | None
    cuda_driver_version: str | None
    gpu_count: int
    devices: tuple[str, ...]  # names
    git_commit: str | None
    weights: dict[str, str]  # digests of the reads and of each model
    profile: str
    seeds: dict[str, int]

    @classmethod
    def of(cls, report: Report) -> Self:
        """Return the metadata of a report."""
        run: RunMetrics | None = report.run
        devices = () if run is None else run.devices
        record = report.provenance
        return cls(
            pytorch_version=record.versions.get("torch"),
            cuda_version=record.versions.get("cuda"),
            driver_version=record.versions.get("driver"),
            cuda_driver_version=record.versions.get("cuda_driver"),
            gpu_count=sum(device.kind == "cuda" for device in devices),
            devices=tuple(device.name for device in devices),
            git_commit=record.git_commit,
            weights=record.fingerprints,
            profile=report.profile.name,
            seeds=record.seeds,
        )


class BenchmarkFile(RunFile):
    """`benchmark_*.json`."""

    schema_version: int = 1
    timestamp: str
    results: BenchmarkResults
    metadata: BenchmarkMetadata


def benchmark_json(report: Report) -> str:
    """Return the content of `benchmark_*.json` for a report."""
    content = BenchmarkFile(
        timestamp=report.provenance.created,
        results=BenchmarkResults.of(report),
        metadata=BenchmarkMetadata.of(report),
    )
    return json.dumps(content.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"
