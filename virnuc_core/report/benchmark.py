"""`benchmark_<time>.json`: the results of a validation for other programs, with metadata.

The name of the file, and the names and the nesting of its first fields, are those of VirNucPro's
benchmark reports, so that programs which read those can read these. Further fields are ours. A
figure that was not measured is `null`.
"""

import json
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Final, Self

from virnuc_core.report.bottlenecks import (
    StageBottleneck,
    stage_bottlenecks,
    stage_gpu_percent,
)
from virnuc_core.report.model import (
    Bottleneck,
    DeviceMetrics,
    EncoderMetrics,
    Report,
    RunMetrics,
    ScalingMetrics,
    StageThroughput,
    Verdict,
)
from virnuc_core.runfiles import ProductRate, RunFile

NAME_TIME: Final = "%Y%m%d_%H%M%S"  # in the names of the files
TITLE_TIME: Final = "%Y-%m-%d %H:%M:%S"


def benchmark_name(created: str) -> str:
    """Return the name of both files without their ends: `benchmark_20260126_184817`.

    Args:
        created: When the validation was started, in ISO form and in the time zone that it names. A
            text of another form is used as it is, without its special characters.
    """
    try:
        time = datetime.fromisoformat(created).strftime(NAME_TIME)
    except ValueError:  # records of old versions say "unknown"
        return former_benchmark_name(created)
    return f"benchmark_{time}"


def former_benchmark_name(created: str) -> str:
    """Return the name that older versions gave the two benchmark files, `.md` and `.json`.

    It has the form `benchmark_2026_01_26T18_48_17_00_00`.

    Args:
        created: When the validation was created, as an ISO time, or another text of an old record.
    """
    time = re.sub(r"[^0-9A-Za-z]+", "_", created).strip("_") or "unknown"
    return f"benchmark_{time}"


def benchmark_title(created: str) -> str:
    """Return the first line of `benchmark_<time>.md`, without the `#`.

    Args:
        created: As in `benchmark_name`.
    """
    try:
        time = datetime.fromisoformat(created).strftime(TITLE_TIME)
    except ValueError:
        time = created
    return f"Benchmark Report - {time}"


class ScalingResult(RunFile):
    """Time and speed-up on a number of devices, and the verdict on it."""

    num_gpus: int
    time_seconds: float
    speedup: float
    efficiency: float  # 0 to 1
    esm2_scaling: float | None  # of the time of this stage alone
    dnabert_scaling: float | None
    verdict: Verdict | None = None  # None: the speed-up on so many devices is not judged
    reason: str = ""

    @property
    def config(self) -> str:
        """Return the devices as `--gpus` of VirNucPro has them: `0`, `0,1`, `0,1,2,3`.

        The numbers are places in the list of the devices of the run, which uses the first ones.
        """
        return ",".join(str(place) for place in range(self.num_gpus))

    @classmethod
    def of(cls, figure: ScalingMetrics) -> Self:
        """Return the result of one number of devices."""
        return cls(
            num_gpus=figure.num_gpus,
            time_seconds=figure.time_seconds,
            speedup=figure.speedup,
            efficiency=figure.efficiency,
            esm2_scaling=figure.protein_scaling,
            dnabert_scaling=figure.dna_scaling,
            verdict=None if figure.judged is None else figure.judged.verdict,
            reason="" if figure.judged is None else figure.judged.reason,
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
    """Speed of one stage, and whether it is a bottleneck."""

    stage: str
    total_sequences: int
    total_time_seconds: float
    throughput_seq_per_sec: float | None
    avg_time_per_sequence_ms: float
    share_of_time: float | None  # 0 to 1, of the whole run
    gpu_util_avg: float | None  # percent, of the least used GPU; None for stages without a GPU
    is_bottleneck: bool
    advice: str  # empty unless it is a bottleneck

    @classmethod
    def of(
        cls, speed: StageThroughput, run: RunMetrics, bottleneck: StageBottleneck | None
    ) -> Self:
        """Return the result of one stage.

        Args:
            speed: The speed of the stage.
            run: The run that the stage is of.
            bottleneck: What is said about the stage if it is a bottleneck, else None.
        """
        return cls(
            stage=speed.stage,
            total_sequences=speed.sequences,
            total_time_seconds=speed.seconds,
            throughput_seq_per_sec=speed.sequences_per_s,
            avg_time_per_sequence_ms=speed.ms_per_sequence,
            share_of_time=run.stage_shares.get(speed.stage),
            gpu_util_avg=stage_gpu_percent(run, speed.stage),
            is_bottleneck=bottleneck is not None,
            advice="" if bottleneck is None else bottleneck.advice,
        )


def _stage_results(run: RunMetrics | None) -> dict[str, StageResult]:
    """Return the result of each stage of a run that has a speed, by the name of the stage."""
    if run is None:
        return {}
    bottlenecks = {bottleneck.stage: bottleneck for bottleneck in stage_bottlenecks(run)}
    results = {}
    for speed in run.stage_throughput:
        results[speed.stage] = StageResult.of(speed, run, bottlenecks.get(speed.stage))
    return results


class EncoderResult(RunFile):
    """Speed of one encoder on one device, and its share of what the device can do."""

    device_tokens_per_sec: float | None  # of computing time, per device
    ceiling_tokens_per_sec: float | None
    of_ceiling: float | None  # 0 to 1
    of_datasheet: float | None

    @classmethod
    def of(cls, encoder: EncoderMetrics) -> Self:
        """Return the result of one encoder."""
        return cls(
            device_tokens_per_sec=encoder.device_tokens_per_s,
            ceiling_tokens_per_sec=encoder.ceiling_tokens_per_s,
            of_ceiling=encoder.mfu_of_ceiling,
            of_datasheet=encoder.mfu_of_datasheet,
        )


class EfficiencyResult(RunFile):
    """Use of the devices, cost of a million reads, and cost of checkpoints."""

    mfu: dict[str, EncoderResult]  # by encoder
    device_hours_per_million_reads: float | None
    kwh_per_million_reads: float | None
    joules_per_million_tokens: float | None  # of the protein encoder, all devices
    price_per_million_reads: float | None
    checkpoint_overhead: float | None  # 0 to 1
    persistent_models_speedup: float | None  # over loading the models once more halfway
    products: tuple[ProductRate, ...]  # the linear layers alone, measured before the run

    @classmethod
    def of(cls, report: Report) -> Self:
        """Return the result of the judged run."""
        run = report.run
        overhead = report.overhead
        encoders: tuple[EncoderMetrics, ...] = ()
        joules_per_million_tokens = None
        if run is not None and run.telemetry is not None:
            encoders = run.telemetry.encoders
            joules_per_million_tokens = run.telemetry.joules_per_million_tokens
        return cls(
            mfu={encoder.encoder: EncoderResult.of(encoder) for encoder in encoders},
            device_hours_per_million_reads=None if run is None else run.device_hours_per_million,
            kwh_per_million_reads=None if run is None else run.kwh_per_million,
            joules_per_million_tokens=joules_per_million_tokens,
            price_per_million_reads=None if run is None else run.price_per_million,
            checkpoint_overhead=None if overhead is None else overhead.median,
            persistent_models_speedup=(
                None if overhead is None else overhead.persistent_models_speedup
            ),
            products=() if run is None else run.products,
        )


class BenchmarkResults(RunFile):
    """All results."""

    scaling: dict[str, ScalingResult]  # by the devices, such as "0,1"
    scaling_list: tuple[ScalingResult, ...]  # the same, one device first
    gpu_stats: dict[str, DeviceResult]  # by device
    throughput: dict[str, StageResult]  # by stage
    efficiency: EfficiencyResult
    losses: tuple[Bottleneck, ...]
    findings: tuple[str, ...]

    @classmethod
    def of(cls, report: Report) -> Self:
        """Return the results of a report."""
        devices: Sequence[DeviceMetrics] = ()
        if report.run is not None and report.run.telemetry is not None:
            devices = report.run.telemetry.devices
        scaling_list = tuple(ScalingResult.of(figure) for figure in report.scaling)
        return cls(
            scaling={result.config: result for result in scaling_list},
            scaling_list=scaling_list,
            gpu_stats={device.device: DeviceResult.of(device) for device in devices},
            throughput=_stage_results(report.run),
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
    """`benchmark_<time>.json`.

    Until version 1, `results.scaling` was a list. That list is `results.scaling_list` now.
    """

    schema_version: int = 2
    timestamp: str
    results: BenchmarkResults
    metadata: BenchmarkMetadata


def benchmark_json(report: Report) -> str:
    """Return the content of `benchmark_<time>.json` for a report."""
    content = BenchmarkFile(
        timestamp=report.provenance.created,
        results=BenchmarkResults.of(report),
        metadata=BenchmarkMetadata.of(report),
    )
    return json.dumps(content.model_dump(mode="json"), indent=2, allow_nan=False) + "\n"
