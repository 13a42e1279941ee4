"""The pages that `make bench` writes: verdicts on scaling, bottlenecks of stages, and advice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.pages import (
    ScalingResult,
    StageThroughputResult,
    judge_scaling,
    judge_stages,
    scaling_page,
    stage_page,
)

ROOT = Path(__file__).resolve().parents[3]
BANDS = {"2": (1.6, 2.0), "4": (3.0, 4.0), "8": (6.0, 8.0)}  # of VirNucPro's phase 6


def stage(name: str, seconds: float, **changes: Any) -> StageThroughputResult:
    """Return the result of a stage that did 100 sequences in so many seconds."""
    fields: dict[str, Any] = {
        "stage": name,
        "scale": "small",
        "total_sequences": 100,
        "total_time_seconds": seconds,
        "mean_time_seconds": seconds,
        "std_time_seconds": 0.0,
        "throughput_seq_per_sec": 100 / seconds,
        "avg_time_per_sequence_ms": 10 * seconds,
        "gpu_util_min": None,
        "gpu_util_avg": None,
        "gpu_util_max": None,
        "peak_memory_gb": None,
    }
    return StageThroughputResult(**(fields | changes))


@pytest.mark.parametrize(
    ("num_gpus", "speedup", "status"),
    [
        (1, 1.0, "BASELINE"),
        (2, 1.59, "FAIL"),
        (2, 1.6, "PASS"),
        (4, 2.99, "FAIL"),
        (4, 4.2, "PASS"),
        (8, None, "NOT RUN"),
        (3, 2.9, "NOT RUN"),
    ],
)
def test_a_speedup_is_judged_by_the_band_of_its_number_of_gpus(
    num_gpus: int, speedup: float | None, status: str
) -> None:
    assert judge_scaling(num_gpus, speedup, BANDS).status == status


def test_the_scaling_page_has_a_verdict_for_each_number_of_gpus() -> None:
    results = [ScalingResult(1, 10.0, 1.0, 1.0, 91.0, 2e9), ScalingResult(2, 7.0, 1.43, 0.715)]
    page = scaling_page(results, BANDS, kind="cuda", sequences=1000)
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert rows[2] == "| 1 | 10.0 | 1.00x | 100.0% | n/a | 91.0% | BASELINE |  |"
    assert rows[3] == "| 2 | 7.0 | 1.43x | 71.5% | 1.6-2x | n/a | FAIL | below 1.6x |"
    assert rows[4].endswith("| NOT RUN | this machine has fewer devices |")
    assert len(rows) == 6  # the head, its rule, and 1, 2, 4 and 8 GPUs


def test_cores_are_shown_and_not_judged() -> None:
    results = [ScalingResult(1, 4.0, 1.0, 1.0), ScalingResult(2, 5.0, 0.8, 0.4)]
    page = scaling_page(results, BANDS, kind="cpu", sequences=100)
    assert "FAIL" not in page
    assert "| 2 | 5.0 | 0.80x | 40.0% | 1.6-2x | n/a | NOT RUN | measured on cores" in page
    assert "start-up takes the time" in page


def test_stages_over_thirty_percent_or_with_an_idle_gpu_are_bottlenecks() -> None:
    """30 % of the time and 80 % utilisation are the limits of VirNucPro's phase 6."""
    results = [
        stage("translation", 31.0),
        stage("dnabert_s", 10.0, gpu_util_min=50.0, gpu_util_avg=79.9, gpu_util_max=99.0),
        stage("esm2", 35.0, gpu_util_min=90.0, gpu_util_avg=95.0, gpu_util_max=99.0),
        stage("merge", 24.0),
    ]
    verdicts = judge_stages(results)
    assert {name for name, verdict in verdicts.items() if verdict.is_bottleneck} == {
        "translation",
        "dnabert_s",
        "esm2",
    }
    assert verdicts["dnabert_s"].reason == "its GPU is 79.9 % busy"
    assert verdicts["esm2"].advice.startswith("expected: ")
    page = stage_page(results)
    assert "- Six-Frame Translation (31.0 % of the time): raise the staging workers" in page
    assert "| DNABERT-S | 50.0% | 79.9% | 99.0% | at least 80% | FAIL |" in page
    assert "| ESM-2 | 90.0% | 95.0% | 99.0% | at least 80% | PASS |" in page
    assert page.count("| yes |") == 3


@pytest.mark.slow
def test_the_benchmarks_of_stages_and_scaling_write_their_pages(tmp_path: Path) -> None:
    """The benchmarks themselves, as `make bench` runs them, on few reads and tiny models."""
    options = ["-p", "benchmark", "-p", "no:cacheprovider", "-q", "-x", "-o", "timeout=0"]
    selection = "(small and Throughput) or bottlenecks or synthetic and 1 or ratios"
    files = ["tests/benchmarks/test_stage_throughput.py", "tests/benchmarks/test_scaling.py"]
    # The benchmarks would be disabled if they seemed to run beside others.
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    environment |= {"VIRNUC_BENCH_REPORTS": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", *options, "-k", selection, *files]
    run = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-3000:]

    [stages_json] = tmp_path.glob("stages_*.json")
    stages = json.loads(stages_json.read_text())["results"]
    assert set(stages) == {"translation", "dnabert_s", "esm2", "merge", "prediction"}
    assert sum(row["share_of_time"] for row in stages.values()) == pytest.approx(1.0)
    assert "## Bottlenecks and Recommendations" in stages_json.with_suffix(".md").read_text()
    [scaling_json] = tmp_path.glob("scaling_*.json")
    scaling = json.loads(scaling_json.read_text())["results"]
    assert scaling["0"]["speedup"] == 1.0
    assert "| 8 | " in scaling_json.with_suffix(".md").read_text()
