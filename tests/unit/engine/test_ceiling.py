"""Ceilings are of GPUs alone, and a process that cannot measure is an error, never a missing number."""

from __future__ import annotations

from pathlib import Path

import pytest

from virnuc_core.config import Devices, EngineSpec
from virnuc_core.encoders.model_config import DNABERT_SIZES, ESM2_SIZES
from virnuc_core.engine.devices import resolve
from virnuc_core.errors import WorkerError
from virnuc_core.runfiles import Device
from virnuc_core.tools.ceiling import measure_ceilings

from .runs import no_workers_left


def test_a_cpu_has_no_ceiling_but_the_model_has_its_flops(
    tiny_models: Path, tmp_path: Path
) -> None:
    ceilings = measure_ceilings(
        tiny_models, resolve(Devices.parse("cpu:1")), EngineSpec(), tmp_path
    )
    assert (ceilings.protein_ceilings, ceilings.dna_ceilings) == ({}, {})
    assert ceilings.protein_per_token == 2 * ESM2_SIZES["tiny"].linear_weights
    assert ceilings.dna_per_token == 2 * DNABERT_SIZES["tiny"].linear_weights


def test_a_device_that_cannot_be_measured_is_an_error(tiny_models: Path, tmp_path: Path) -> None:
    absent = Device(kind="cuda", id="GPU-00000000-absent", name="absent")
    with pytest.raises(WorkerError, match="GPU-00000000-absent"):
        measure_ceilings(tiny_models, [absent], EngineSpec(precision="fp16"), tmp_path)
    assert no_workers_left()
