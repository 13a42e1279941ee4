"""FLOPs from shapes, ceilings by name, and what a million reads cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from virnuc_core.report.metrics import cost_per_million
from virnuc_core.runfiles import ModelFlops, read, read_usable, write
from virnuc_core.telemetry.flops import (
    EncoderWork,
    datasheet_flops,
    mean_ceiling,
    mfu_of_ceiling,
    mfu_of_datasheet,
)


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),
        ("NVIDIA H200", "fp8", 1979.0),
        ("NVIDIA H100 PCIe", "fp16", 756.0),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.5),
        ("NVIDIA L40S", "bf16", 362.0),
    ],
)
def test_the_datasheet_knows_the_device_by_a_part_of_its_name(name: str, precision: str, tera: float) -> None:
    assert datasheet_flops(name, precision) == tera * 1e12


def test_a_device_or_precision_the_sheet_does_not_have_is_unknown() -> None:
    assert datasheet_flops("Some Processor", "fp32") is None
    assert datasheet_flops("NVIDIA A100", "fp8") is None


def test_mfu_weighs_each_device_by_its_seconds() -> None:
    work = [EncoderWork("a", "NVIDIA H200", 600, 10.0), EncoderWork("b", "NVIDIA L4", 100, 5.0)]
    ceilings = {"a": 100.0, "b": 40.0}
    assert mean_ceiling(work, ceilings) == pytest.approx((10 * 100 + 5 * 40) / 15)
    assert mfu_of_ceiling(work, ceilings) == pytest.approx(700 / (10 * 100 + 5 * 40))
    peaks = 10 * 989.5e12 + 5 * 121e12
    assert mfu_of_datasheet(work, 5e9, "fp16") == pytest.approx(700 * 5e9 / peaks)


def test_mfu_is_unknown_when_a_ceiling_a_time_or_the_work_is() -> None:
    work = [EncoderWork("a", "NVIDIA H200", 600, 10.0), EncoderWork("b", "Some Processor", 100, 5.0)]
    assert mfu_of_ceiling(work, {"a": 100.0}) is None
    assert mfu_of_ceiling([], {"a": 100.0}) is None
    assert mfu_of_ceiling([EncoderWork("a", "x", 5, 0.0)], {"a": 100.0}) is None
    assert mfu_of_datasheet(work, 5e9, "fp16") is None
    assert mfu_of_datasheet(work[:1], None, "fp16") is None
    assert mfu_of_datasheet(work[:1], 5e9, "") is None
    assert mfu_of_datasheet([], 5e9, "fp16") is None


def test_model_flops_survive_the_file_and_bad_numbers_do_not(tmp_path: Path) -> None:
    flops = ModelFlops(esm2_per_token=5.6e9, dnabert_s_per_token=1.7e8, esm2_ceiling_tokens_s={"GPU-1": 90_000.0})
    path = write(tmp_path / "flops.json", flops)
    assert read(path, ModelFlops) == flops
    assert flops.per_token("esm2") == 5.6e9
    assert flops.ceilings("dnabert_s") == {}
    odd = {"esm2_per_token": True, "esm2_ceiling_tokens_s": {"a": -1, "b": "x", "c": 2}, "dnabert_s_per_token": None}
    path.write_text(json.dumps(odd))
    found, said = read_usable(path, ModelFlops)
    assert found == ModelFlops(esm2_ceiling_tokens_s={"c": 2.0})
    assert len(said) == 3


def test_cost_of_a_million_reads() -> None:
    hours, kwh, price = cost_per_million(500_000, 2, 1800.0, 0.7, 3.0).values()
    assert (hours, kwh, price) == pytest.approx((2.0, 1.4, 6.0))


def test_a_cost_that_was_not_measured_is_unknown() -> None:
    assert set(cost_per_million(0, 2, 1800.0, 0.7, 3.0).values()) == {None}
    assert cost_per_million(10, 2, 1800.0, None, None)["kwh_per_million"] is None
    assert cost_per_million(10, 2, None, 1.0, None)["device_hours_per_million"] is None
