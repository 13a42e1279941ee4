"""FLOPs from shapes, ceilings by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from virnuc_core.encoder_names import PROTEIN
from virnuc_core.report.metrics import datasheet_flops, encoder_metrics
from virnuc_core.report.model import EncoderMetrics
from virnuc_core.runfiles import ModelFlops, read, write
from virnuc_core.telemetry.statistics import record_table
from virnuc_core.telemetry.tables import BatchRecord
from virnuc_core.validation import read_usable


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
def test_the_datasheet_knows_the_device_by_a_part_of_its_name(
    name: str, precision: str, tera: float
) -> None:
    assert datasheet_flops(name, precision) == tera * 1e12


def test_a_device_or_precision_the_sheet_does_not_have_is_unknown() -> None:
    assert datasheet_flops("Some Processor", "fp32") is None
    assert datasheet_flops("NVIDIA A100", "fp8") is None


NAMES = {"a": "NVIDIA H200", "b": "NVIDIA L4", "x": "Some Processor"}
FLOPS = ModelFlops(protein_per_token=5e9, protein_ceilings={"a": 100.0, "b": 40.0})


def used(flops: ModelFlops, precision: str, **work: tuple[int, float | None]) -> EncoderMetrics:
    """What ESM-2 used of devices that each had one batch: tokens, seconds."""
    batches = [
        BatchRecord(
            device, "esm2", 0, 0, 1, tokens, 1000, 0.1, 0.0, 0.0, seconds and 1000 * seconds
        )
        for device, (tokens, seconds) in work.items()
    ]
    return encoder_metrics(PROTEIN, record_table(BatchRecord, batches), NAMES, flops, precision)


def test_mfu_weighs_each_device_by_its_seconds() -> None:
    metrics = used(FLOPS, "fp16", a=(600, 10.0), b=(100, 5.0))
    assert metrics.ceiling_tokens_per_s == pytest.approx((10 * 100 + 5 * 40) / 15)
    assert metrics.mfu_of_ceiling == pytest.approx(700 / (10 * 100 + 5 * 40))
    peaks = 10 * 989.5e12 + 5 * 121e12
    assert metrics.mfu_of_datasheet == pytest.approx(700 * 5e9 / peaks)


@pytest.mark.parametrize(
    "work", [{"a": (5, 0.0)}, {"a": (600, None)}, {"a": (600, 10.0), "x": (100, 5.0)}]
)
def test_mfu_is_unknown_when_a_ceiling_or_a_time_is(
    work: dict[str, tuple[int, float | None]],
) -> None:
    metrics = used(FLOPS, "fp16", **work)
    assert (metrics.ceiling_tokens_per_s, metrics.mfu_of_ceiling, metrics.mfu_of_datasheet) == (
        None,
        None,
        None,
    )


@pytest.mark.parametrize(("flops_per_token", "precision"), [(None, "fp16"), (5e9, "")])
def test_mfu_of_the_datasheet_needs_flops_and_a_precision(
    flops_per_token: float | None, precision: str
) -> None:
    flops = FLOPS.model_copy(update={"protein_per_token": flops_per_token})
    assert used(flops, precision, a=(600, 10.0)).mfu_of_datasheet is None


def test_model_flops_survive_the_file_and_bad_numbers_do_not(tmp_path: Path) -> None:
    flops = ModelFlops(
        protein_per_token=5.6e9, dna_per_token=1.7e8, protein_ceilings={"GPU-1": 90_000.0}
    )
    path = write(tmp_path / "flops.json", flops)
    assert read(path, ModelFlops) == flops
    for odd in (
        {"esm2_per_token": True},
        {"esm2_ceiling_tokens_s": {"a": -1, "c": 2}},
        {"dnabert_s_per_token": "x"},
    ):
        path.write_text(json.dumps(odd))
        assert read_usable(path, ModelFlops) is None
