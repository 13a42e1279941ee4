"""The benchmark script itself, on a handful of reads: it runs to the end and its record is whole."""

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
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, json.loads(record.read_text())


@pytest.mark.slow
def test_speed_is_told_beside_the_slow_twin(tmp_path: Path) -> None:
    told, record = bench(tmp_path / "bench.json", "--n", "1500", "--repeats", "1", "--workers", "2")
    speed = record["speed"]
    assert isinstance(speed, dict)
    lines = {(line["kind"], line["workers"]): line for line in speed["lines"]}
    assert list(lines) == [("slow twin", 1), ("staging", 1), ("staging", 2), ("apart", 2)]
    assert all(line["reads_per_s"] > 0 for line in lines.values())
    alone = lines["staging", 1]["reads_per_s"]
    assert speed["times_the_twin"] == alone / lines["slow twin", 1]["reads_per_s"]
    assert lines["staging", 2]["over_one"] == lines["staging", 2]["reads_per_s"] / alone
    assert f"{alone:,.0f}" in told


@pytest.mark.slow
def test_memory_is_told_for_each_size(tmp_path: Path) -> None:
    told, record = bench(
        tmp_path / "bench.json", "--memory", "--sizes", "500", "2000", "--workers", "1"
    )
    memory = record["memory"]
    assert isinstance(memory, dict)
    assert [run["reads"] for run in memory["runs"]] == [500, 2000]
    assert memory["largest_over_smallest"]["1"] > 0.5
    assert "2,000 reads,  1 workers: peak" in told
