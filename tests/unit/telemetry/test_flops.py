"""FLOPs from shapes, ceilings by name, and what a million reads cost."""

from __future__ import annotations

import pytest

from virnuc_core.telemetry.flops import (
    EncoderShape,
    attention_flops_per_token,
    cost_per_million,
    datasheet_flops,
    linear_flops_per_token,
    mfu,
)

ESM2_3B = EncoderShape(layers=36, width=2560, ffn_width=10_240)
DNABERT_S = EncoderShape(layers=12, width=768, ffn_width=3072, gated=True)


def test_linear_flops_are_two_for_each_weight() -> None:
    assert linear_flops_per_token(ESM2_3B) == 2 * 36 * (4 * 2560**2 + 2 * 2560 * 10_240)
    assert linear_flops_per_token(DNABERT_S) == 2 * 12 * (4 * 768**2 + 3 * 768 * 3072)


def test_attention_grows_with_length() -> None:
    assert attention_flops_per_token(ESM2_3B, 100) == 2 * attention_flops_per_token(ESM2_3B, 50)


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


def test_mfu() -> None:
    assert mfu(1000, 5e9, 10.0, 1e12) == pytest.approx(0.5)
    assert mfu(1000, 5e9, 0.0, 1e12) is None
    assert mfu(1000, 5e9, 10.0, None) is None


def test_cost_of_a_million_reads() -> None:
    cost = cost_per_million(500_000, 2, 1800.0, 0.7, 3.0)
    assert cost.device_hours_per_million == pytest.approx(2.0)
    assert cost.kwh_per_million == pytest.approx(1.4)
    assert cost.price_per_million == pytest.approx(6.0)


def test_a_cost_that_was_not_measured_is_unknown() -> None:
    assert cost_per_million(0, 2, 1800.0, 0.7, 3.0).device_hours_per_million is None
    assert cost_per_million(10, 2, 1800.0, None, None).kwh_per_million is None
