"""The benchmark script itself, on tiny models: it runs to the end and its record is whole."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from virnuc_core.encoders.model_config import DNABERT_SIZES, ESM2_SIZES
from virnuc_core.errors import VirnucError

CPU = torch.device("cpu")
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_encoders.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """Load the script as a module."""
    spec = importlib.util.spec_from_file_location("bench_encoders", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_int8_is_built_with_int8_layers(bench: ModuleType) -> None:
    # Without a calibration the layers stay in 16 bits, and the ceiling would be theirs.
    shape = ESM2_SIZES["tiny"]
    int8 = bench.build(shape, "int8", "reference", CPU)
    assert {linear.weight.dtype for linear in int8.layers[0].products} == {torch.int8}
    exact = bench.build(shape, "fp32", "reference", CPU)
    batch = bench.mixed_batch("esm2", shape.vocab, CPU)
    rows, expected = (encoder.embed(batch)[: batch.rows] for encoder in (int8, exact))
    cosines = torch.nn.functional.cosine_similarity(rows, expected)
    assert 0.99 < cosines.min() < 0.9999999
    with pytest.raises(VirnucError, match="int8 is for ESM-2"):
        bench.build(DNABERT_SIZES["tiny"], "int8", "reference", CPU)


@pytest.mark.slow
def test_the_benchmark_runs_on_a_cpu_and_says_what_it_left_out(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
