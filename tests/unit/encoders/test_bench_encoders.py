"""The benchmark script itself, on tiny models: it runs to the end and its record is whole."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_encoders.py"


@pytest.mark.slow
def test_the_benchmark_runs_on_a_cpu_and_says_what_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("bench_encoders", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    record = tmp_path / "bench.json"
    words = [
        "--device",
        "cpu",
        "--seconds",
        "0.01",
        "--budgets",
        "512",
        "--lengths",
        "52",
        "--json",
        str(record),
    ]
    assert bench.main([*words, "--variants", "reference,fused"]) == 0
    content = json.loads(record.read_text())
    assert content["device"] == "CPU"
    assert {line["encoder"] for line in content["measured"]} == {"esm2", "dnabert_s"}
    for line in content["measured"]:
        assert line["tokens_per_s"] > 0
        assert line["share_of_ceiling"] == line["tokens_per_s"] / line["ceiling_tokens_per_s"]
    assert [line["min"] > 0.999999 for line in content["cosines"]] == [True, True]
    assert {line["variant"] for line in content["not_run"]} == {"fused"}
    assert all("needs a CUDA device" in line["reason"] for line in content["not_run"])
    assert "reference" in capsys.readouterr().out
