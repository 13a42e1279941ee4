"""The benchmark script itself, on tiny models: it runs to the end and its record is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_benchmark_runs_on_a_cpu_and_says_what_it_left_out(tmp_path: Path) -> None:
    record = tmp_path / "bench.json"
    script = ROOT / "tests" / "benchmarks" / "bench_encoders.py"
    words = ["--device", "cpu", "--seconds", "0.05", "--budgets", "512", "--lengths", "52", "--json", str(record)]
    words = [sys.executable, str(script), *words, "--variants", "plain+reference,kernels+fused"]
    ended = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert ended.returncode == 0, ended.stderr
    content = json.loads(record.read_text())
    assert content["device"] == "CPU"
    assert {line["encoder"] for line in content["measured"]} == {"esm2", "dnabert_s"}
    for line in content["measured"]:
        assert line["tokens_per_s"] > 0
        assert line["share_of_ceiling"] == line["tokens_per_s"] / line["ceiling_tokens_per_s"]
    assert [line["min"] > 0.999999 for line in content["cosines"]] == [True, True]
    assert {line["variant"] for line in content["not_run"]} == {"kernels+fused"}
    assert all("needs a CUDA device" in line["reason"] for line in content["not_run"])
    assert "plain+reference" in ended.stdout
