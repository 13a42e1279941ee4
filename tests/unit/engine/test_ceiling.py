"""Ceilings are of GPUs alone, and a process that cannot measure is an error, never a missing number."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.fake_gpus import FakeGpus
from virnuc_core import gpus
from virnuc_core.config import Devices, EngineSpec
from virnuc_core.encoders.layers import Layer, LinearLayer, apply_linear
from virnuc_core.encoders.model_config import DNABERT_SIZES, ESM2_SIZES
from virnuc_core.encoders.precision import quantise_rows, rotated
from virnuc_core.engine.devices import resolve
from virnuc_core.errors import WorkerError
from virnuc_core.runfiles import Device, ModelFlops, ProductRate, RunSummary
from virnuc_core.tools import ceiling
from virnuc_core.tools.ceiling import (
    LinearProduct,
    Sustained,
    linear_products,
    measure_ceilings,
    measure_product,
    power_reader,
    product_rate,
    sustained_rate,
    with_ceilings,
)

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


@pytest.mark.usefixtures("forked_workers")
def test_a_device_that_cannot_be_measured_is_an_error(tiny_models: Path, tmp_path: Path) -> None:
    absent = Device(kind="cuda", id="GPU-00000000-absent", name="absent")
    with pytest.raises(WorkerError, match="GPU-00000000-absent"):
        measure_ceilings(tiny_models, [absent], EngineSpec(precision="fp16"), tmp_path)
    assert no_workers_left()


CPU = torch.device("cpu")


def int8_linear(n_out: int, n_in: int) -> LinearLayer:
    """Return an int8 layer with random weights, as runs have it."""
    generator = torch.Generator().manual_seed(n_out)
    weight, scale = quantise_rows(torch.randn(n_out, n_in, generator=generator))
    return LinearLayer(weight, torch.zeros(n_out), scale.squeeze(1))


def layer_of(make_linear: Callable[[int, int], LinearLayer]) -> Layer:
    """Return a layer of the width 32 whose linear layers are made by a function of their shape."""
    norm = (torch.ones(32), torch.zeros(32))
    return Layer(
        attn_norm=norm,
        qkv=make_linear(96, 32),
        out=make_linear(32, 32),
        ffn_norm=norm,
        up=make_linear(128, 32),
        down=make_linear(32, 128),
    )


def test_int8_is_measured_with_our_product_a_library_and_a_reference() -> None:
    products = linear_products([layer_of(int8_linear)] * 2, 32, CPU)
    assert [product.role for product in products] == ["own", "library", "reference"]
    assert [product.is_used for product in products] == [True, False, False]
    assert "Triton kernel" in products[0].name, "the library for Hopper does not run on a CPU"
    for product in products[1:]:
        sustained = measure_product(product, 0.01, None)
        assert sustained is not None, product.name
        assert sustained.calls_per_s > 0


def test_other_precisions_are_measured_with_the_product_that_runs_use() -> None:
    def fp32_linear(n_out: int, n_in: int) -> LinearLayer:
        return LinearLayer(torch.randn(n_out, n_in), torch.zeros(n_out))

    (product,) = linear_products([layer_of(fp32_linear)], 32, CPU)
    assert (product.name, product.role, product.is_used) == ("torch, fp32", "library", True)
    assert measure_product(product, 0.01, None) is not None


def test_products_beside_ours_multiply_the_same_numbers() -> None:
    # A product of other or of fewer numbers would be a ceiling of other work.
    linear = int8_linear(48, 64)
    rows = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).half()
    x, scale = quantise_rows(rotated(rows.float()))
    expected = apply_linear(rows.float(), linear)  # quantises in the same way
    sums = ceiling._library_int8_product(x, scale, linear)
    assert linear.scale is not None
    assert torch.allclose(sums.float() * scale * linear.scale, expected, rtol=1e-4, atol=1e-4)
    fp8_x, fp8_scale = ceiling._fp8_rows(x.float() * scale)
    fp8 = ceiling._fp8_product(fp8_x, fp8_scale, ceiling._fp8_linear(linear)).float()
    cosines = torch.nn.functional.cosine_similarity(fp8, expected)
    assert cosines.min() > 0.99


def fail() -> None:
    """Fail as a library does that lacks a product for the GPU."""
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")


def test_a_product_that_does_not_run_here_is_not_measured(caplog: pytest.LogCaptureFixture) -> None:
    missing = LinearProduct("cuBLAS, int8", "library", lambda: fail)
    with caplog.at_level(logging.WARNING):
        sustained = measure_product(missing, 0.01, None)
    assert "cuBLAS, int8: not measured (CUBLAS_STATUS_NOT_SUPPORTED)" in caplog.text
    rate = product_rate(missing, "esm2", "GPU-0", 64, sustained)
    assert (rate.tokens_per_s, rate.joules_per_million_tokens, rate.power_limited) == (None,) * 3
    used = LinearProduct("ours", "own", lambda: fail, is_used=True)
    with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
        measure_product(used, 0.01, None)


def test_energy_and_the_power_limit_are_those_of_the_gpu() -> None:
    energies_j = itertools.count(start=100.0, step=7.0)

    def read() -> gpus.Reading:
        return gpus.Reading(energy_j=next(energies_j), is_power_limited=True)

    calls = []
    sustained = sustained_rate(lambda: calls.append(1), 0.0, read)
    # one warm-up, one call, and a reading before, after the call, and at the end
    assert len(calls) == 2
    assert sustained.joules_per_call == 14.0
    assert sustained.power_limited == 1.0
    rate = product_rate(
        LinearProduct("ours", "own", lambda: fail), "esm2", "GPU-0", 1000, Sustained(3.0, 6.0, 0.5)
    )
    assert (rate.tokens_per_s, rate.joules_per_million_tokens) == (3_000.0, 6_000.0)


def test_a_gpu_that_cannot_be_read_has_unknown_power(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "NVML", FakeGpus(driver=None))
    assert power_reader("GPU-0") is None
    monkeypatch.setattr(gpus, "NVML", FakeGpus())  # its reader fails when it is asked
    read = power_reader("GPU-0")
    assert read is not None
    assert read() == gpus.Reading()


def rate_of(product: str, role: str, device: str, tokens_per_s: float | None) -> ProductRate:
    return ProductRate(
        encoder="esm2", device=device, product=product, role=role, tokens_per_s=tokens_per_s
    )


def test_the_ceiling_is_the_fastest_product_in_the_format_of_the_run() -> None:
    products = [
        rate_of("ours", "own", "GPU-0", 200.0),
        rate_of("cuBLAS", "library", "GPU-0", 180.0),
        rate_of("fp8", "reference", "GPU-0", 300.0),
        rate_of("ours", "own", "GPU-1", 200.0),
        rate_of("cuBLAS", "library", "GPU-1", 220.0),
        rate_of("cuBLAS", "library", "GPU-2", None),
    ]
    flops = with_ceilings(ModelFlops(protein_per_token=5.0), products)
    assert flops.protein_ceilings == {"GPU-0": 200.0, "GPU-1": 220.0}
    assert flops.dna_ceilings == {}
    written = RunSummary(flops=flops).model_dump_json()
    assert RunSummary.model_validate_json(written).flops == flops
    older = '{"flops": {"esm2_per_token": 5.0, "esm2_ceiling_tokens_s": {"GPU-0": 1.0}}}'
    flops_of_older = RunSummary.model_validate_json(older).flops
    assert flops_of_older is not None
    assert flops_of_older.products == ()
