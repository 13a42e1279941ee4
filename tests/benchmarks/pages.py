"""What the benchmarks of `make bench` write: results as JSON, and pages in Markdown with verdicts.

The names of the fields are those of VirNucPro's benchmarks. The rule for bottlenecks, and the
advice, are those of the report of a validation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.report.benchmark import NAME_TIME, TITLE_TIME
from virnuc_core.report.bottlenecks import (
    BUSY_PERCENT,
    IDLE_GPU_ADVICE,
    LONG_RUN_ADVICE,
    STAGE_ADVICE,
    TIME_SHARE,
)
from virnuc_core.report.filling import markdown_table
from virnuc_core.report.sections import Row
from virnuc_core.report.text import number, percent

# The benchmarks of stages, and the stages of the report that they measure alone
STAGE_TITLES: Final = {
    "translation": "Six-Frame Translation",
    DNA.name: DNA.title,
    PROTEIN.name: PROTEIN.title,
    "merge": "Feature Merging",
    "prediction": "Model Prediction",
}
GPU_STAGES: Final = (DNA.name, PROTEIN.name)


@dataclass(frozen=True, slots=True)
class ScalingResult:
    """Time and speed-up on one number of devices."""

    num_gpus: int
    time_seconds: float  # the median of the rounds
    speedup: float
    efficiency: float  # 0 to 1
    gpu_util_avg: float | None = None  # percent, of the least used GPU; None on cores
    mem_used_peak: float | None = None  # bytes, of the GPU with most; None on cores


@dataclass(frozen=True, slots=True)
class ScalingVerdict:
    """What a profile says about a speed-up."""

    status: str  # PASS, FAIL, BASELINE, or NOT RUN
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StageThroughputResult:
    """What one stage came to at one scale; the time is the median of the rounds."""

    stage: str
    scale: str
    total_sequences: int
    total_time_seconds: float
    mean_time_seconds: float
    std_time_seconds: float
    throughput_seq_per_sec: float
    avg_time_per_sequence_ms: float
    gpu_util_min: float | None  # percent; None on cores
    gpu_util_avg: float | None
    gpu_util_max: float | None
    peak_memory_gb: float | None


@dataclass(frozen=True, slots=True)
class StageVerdict:
    """Whether a stage is a bottleneck, and what helps."""

    share_of_time: float  # 0 to 1, of all stages that were measured
    is_bottleneck: bool
    reason: str = ""
    advice: str = ""


# --- Scaling --------------------------------------------------------------------------------------


def judge_scaling(
    num_gpus: int,
    speedup: float | None,
    bands: Mapping[str, tuple[float, float]],
    *,
    why_not: str = "",
) -> ScalingVerdict:
    """Return the verdict on the speed-up on a number of devices.

    Args:
        num_gpus: The number of devices.
        speedup: The speed-up, or None if it was not measured.
        bands: The lowest and the highest expected speed-up, by the number of devices.
        why_not: Why nothing can be judged here. Empty if it can.
    """
    if num_gpus == 1:
        return ScalingVerdict("BASELINE")
    if speedup is None or why_not:
        return ScalingVerdict("NOT RUN", why_not or "not measured")
    band = bands.get(str(num_gpus))
    if band is None:
        return ScalingVerdict("NOT RUN", "the profile has no band for so many devices")
    lowest, highest = band
    if speedup < lowest:
        return ScalingVerdict("FAIL", f"below {lowest:g}x")
    if speedup > highest:
        return ScalingVerdict("PASS", f"above {highest:g}x: check the run on one device")
    return ScalingVerdict("PASS")


def scaling_page(
    results: Sequence[ScalingResult],
    bands: Mapping[str, tuple[float, float]],
    *,
    kind: str,
    sequences: int,
) -> str:
    """Return the page on scaling, with a verdict for each number of devices of the profile.

    Args:
        results: What was measured.
        bands: As for `judge_scaling`.
        kind: `cuda` or `cpu`. Cores share memory and caches, so they are not judged.
        sequences: The number of reads.
    """
    measured = {result.num_gpus: result for result in results}
    why_not = "" if kind == "cuda" else "measured on cores, which the profile is not about"
    rows: list[Row] = []
    for num_gpus in sorted({*measured, *map(int, bands)}):
        result = measured.get(num_gpus)
        reason = why_not if result is not None else "this machine has fewer devices"
        speedup = None if result is None else result.speedup
        verdict = judge_scaling(num_gpus, speedup, bands, why_not=reason)
        low_and_high = bands.get(str(num_gpus))
        expected = None if low_and_high is None else f"{low_and_high[0]:g}-{low_and_high[1]:g}x"
        rows.append(
            {
                "GPUs": num_gpus,
                "Time (s)": None if result is None else number(result.time_seconds),
                "Speedup": number(speedup, 2, "x"),
                "Efficiency": None if result is None else percent(result.efficiency, unit="%"),
                "Expected": expected,
                "Lowest GPU Util": None if result is None else number(result.gpu_util_avg, 1, "%"),
                "Status": verdict.status,
                "Why": verdict.reason,
            }
        )
    lead = f"{sequences:,} reads through the command line, on devices of the kind `{kind}`."
    note = ""
    if any(result.speedup < 1 for result in results):
        note = "\nMore devices took longer than one: with so few reads, start-up takes the time.\n"
    return f"## GPU Scaling\n\n{lead}\n\n{markdown_table(rows)}{note}"


# --- Stages ---------------------------------------------------------------------------------------


def judge_stages(results: Sequence[StageThroughputResult]) -> dict[str, StageVerdict]:
    """Return the verdict on each stage, by its name.

    A stage is a bottleneck if it takes more than 30 % of the time of all stages, or if it is one
    of the encoders and its GPU is less than 80 % busy.

    Args:
        results: One result for each stage, all of one scale.
    """
    total_s = sum(result.total_time_seconds for result in results)
    verdicts = {}
    for result in results:
        share = result.total_time_seconds / total_s if total_s else 0.0
        busy = result.gpu_util_avg
        is_idle = result.stage in GPU_STAGES and busy is not None and busy < BUSY_PERCENT
        reasons = []
        if share > TIME_SHARE:
            reasons.append(f"{100 * share:.1f} % of the time")
        if is_idle:
            reasons.append(f"its GPU is {busy:.1f} % busy")
        advice = ""
        if is_idle:
            advice = IDLE_GPU_ADVICE
        elif reasons and result.stage == PROTEIN.name:
            advice = f"expected: {LONG_RUN_ADVICE}"  # it has most of the arithmetic
        elif reasons:
            advice = STAGE_ADVICE[STAGE_TITLES[result.stage]]
        verdicts[result.stage] = StageVerdict(share, bool(reasons), ", ".join(reasons), advice)
    return verdicts


def stage_page(results: Sequence[StageThroughputResult]) -> str:
    """Return the page on the stages: their speed, bottlenecks, advice, and the verdict PERF-02.

    Args:
        results: One result for each stage, all of one scale.
    """
    verdicts = judge_stages(results)
    rows: list[Row] = [
        {
            "Stage": STAGE_TITLES[result.stage],
            "Seq/sec": number(result.throughput_seq_per_sec),
            "Time (s)": number(result.total_time_seconds, 3),
            "Std (s)": number(result.std_time_seconds, 3),
            "Share": percent(verdicts[result.stage].share_of_time, unit="%"),
            "GPU Util %": number(result.gpu_util_avg),
            "Peak Mem (GB)": number(result.peak_memory_gb, 2),
            "Bottleneck": "yes" if verdicts[result.stage].is_bottleneck else "no",
        }
        for result in results
    ]
    details = []
    for stage, verdict in verdicts.items():
        if verdict.is_bottleneck:
            details.append(f"- {STAGE_TITLES[stage]} ({verdict.reason}): {verdict.advice}.\n")
    scale = results[0].scale if results else "none"
    return (
        f"## Throughput by Stage\n\nScale: {scale}.\n\n{markdown_table(rows)}"
        f"\n## Bottlenecks and Recommendations\n\n{''.join(details) or 'None.'}"
        f"\n## GPU Utilization (PERF-02)\n\n{markdown_table(_utilisation_rows(results))}"
    )


def _utilisation_rows(results: Sequence[StageThroughputResult]) -> list[Row]:
    """Return the utilisation of the GPU in the encoders, with a verdict on each."""
    rows: list[Row] = []
    for result in results:
        if result.stage not in GPU_STAGES:
            continue
        status = "NOT RUN"  # on cores
        if result.gpu_util_avg is not None:
            status = "PASS" if result.gpu_util_avg >= BUSY_PERCENT else "FAIL"
        rows.append(
            {
                "Stage": STAGE_TITLES[result.stage],
                "Min": number(result.gpu_util_min, 1, "%"),
                "Avg": number(result.gpu_util_avg, 1, "%"),
                "Max": number(result.gpu_util_max, 1, "%"),
                "Required": f"at least {BUSY_PERCENT:g}%",
                "Status": status,
            }
        )
    return rows


# --- Files ----------------------------------------------------------------------------------------


def write_page(folder: Path, name: str, title: str, body: str, data: object) -> Path:
    """Write `<name>_<time>.md` with a title, and `<name>_<time>.json`; return the first path."""
    now = datetime.now(UTC)
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{name}_{now.strftime(NAME_TIME)}.md"
    page.write_text(f"# {title} - {now.strftime(TITLE_TIME)}\n\n{body}", encoding="utf-8")
    content = {"timestamp": now.isoformat(), "results": data}
    text = json.dumps(content, indent=2) + "\n"
    page.with_suffix(".json").write_text(text, encoding="utf-8")
    return page


def stage_data(results: Sequence[StageThroughputResult]) -> dict[str, dict[str, object]]:
    """Return each stage's figures with its verdict, for the JSON file, by the name of the stage."""
    verdicts = judge_stages(results)
    return {result.stage: asdict(result) | asdict(verdicts[result.stage]) for result in results}


def scaling_data(results: Sequence[ScalingResult]) -> dict[str, dict[str, object]]:
    """Return the figures of each number of devices, for the JSON file, by devices (`0,1`)."""
    data = {}
    for result in results:
        devices = ",".join(str(place) for place in range(result.num_gpus))
        data[devices] = asdict(result)
    return data
