"""The benchmark script runs to its end on a few reads, and its record is complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def bench(record: Path, *words: str) -> tuple[str, dict[str, object]]:
    script = ROOT / "tests" / "benchmarks" / "bench_reads.py"
    command = [sys.executable, str(script), "--json", str(record), *words]
    process = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout, json.loads(record.read_text())


@pytest.mark.slow
def test_speed_is_reported_beside_that_of_the_slow_twin(tmp_path: Path) -> None:
    output, record = bench(
        tmp_path / "bench.json", "--n", "1500", "--repeats", "1", "--workers", "2"
    )
    speed = record["speed"]
    assert isinstance(speed, dict)
    lines = {(line["kind"], line["workers"]): line for line in speed["lines"]}
    assert list(lines) == [("slow twin", 1), ("staging", 1), ("staging", 2), ("apart", 2)]
    assert all(line["reads_per_s"] > 0 for line in lines.values())
    single_worker_speed = lines["staging", 1]["reads_per_s"]
    assert speed["times_the_twin"] == single_worker_speed / lines["slow twin", 1]["reads_per_s"]
    assert (
        lines["staging", 2]["over_one"] == lines["staging", 2]["reads_per_s"] / single_worker_speed
    )
    assert f"{single_worker_speed:,.0f}" in output


@pytest.mark.slow
def test_memory_is_reported_for_each_size(tmp_path: Path) -> None:
    output, record = bench(
        tmp_path / "bench.json", "--memory", "--sizes", "500", "2000", "--workers", "1"
    )
    memory = record["memory"]
    assert isinstance(memory, dict)
    assert [run["reads"] for run in memory["runs"]] == [500, 2000]
    assert memory["largest_over_smallest"]["1"] > 0.5
    assert "2,000 reads,  1 workers: peak" in output
