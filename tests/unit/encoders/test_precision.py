"""Precisions: what runs where, and float8 rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from virnuc_core.encoders.checkpoint import load_encoder
from virnuc_core.encoders.layers import FP8, WeightReader, quantise_rows, resolve_precision
from virnuc_core.encoders.models import DnabertS, Esm2
from virnuc_core.errors import DeviceError

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)  # only named: nothing is put there


@pytest.mark.parametrize("asked", ["fp16", "bf16", "fp8"])
def test_half_precision_on_a_cpu_is_refused(asked: str, models: Path) -> None:
    for kind in (Esm2, DnabertS):
        with pytest.raises(DeviceError, match=f"precision {asked} needs a CUDA device"):
            load_encoder(kind, models, CPU, asked)  # type: ignore[arg-type]


def test_auto_is_fp32_on_a_cpu_and_fp16_on_cuda() -> None:
    assert resolve_precision("auto", CPU) == "fp32"
    assert resolve_precision("auto", CUDA) == "fp16"


@pytest.mark.parametrize(("capability", "fine"), [((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_fp8_asks_for_hopper(capability: tuple[int, int], fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    if fine:
        assert resolve_precision("fp8", CUDA) == "fp8"
        return
    with pytest.raises(DeviceError, match=r"capability 9\.0 or later, Some GPU is older"):
        resolve_precision("fp8", CUDA)


def test_quantised_rows_give_back_each_row_within_half_a_step() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 64) * torch.logspace(-6, 3, 50).unsqueeze(1)
    x[7] = 0
    rows, scale = quantise_rows(x)
    assert rows.dtype == FP8
    assert scale.shape == (50, 1)
    largest = x.abs().amax(1, keepdim=True)
    assert ((rows.float() * scale - x).abs() <= x.abs() / 16 + largest / 448 / 2**6).all()  # 3 bits of mantissa
    assert torch.equal(rows[7].float(), torch.zeros(64))


def test_one_row_of_nan_spoils_no_other() -> None:
    x = torch.ones(3, 16)
    x[1] = torch.nan
    rows, scale = quantise_rows(x)
    assert (rows.float() * scale)[[0, 2]].isfinite().all()


def test_an_fp8_layer_is_scaled_by_output_row() -> None:
    weight = torch.randn(32, 16) * torch.logspace(-3, 3, 32).unsqueeze(1)
    tensors = {"fc1.weight": weight, "fc1.bias": torch.zeros(32)}
    layer = WeightReader(tensors.__getitem__, "fp8", CPU).linear("fc1")
    assert layer.weight.dtype == FP8
    assert layer.scale is not None
    assert layer.scale.shape == (1, 32)
    assert layer.bias is not None
    assert layer.bias.dtype == torch.bfloat16
    back = layer.weight.float() * layer.scale.t()
    assert ((back - weight).abs().amax(1) <= weight.abs().amax(1) / 16).all()
