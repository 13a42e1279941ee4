"""Precisions: what runs where, and int8 with its calibration."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from virnuc.flows.cli import main
from virnuc_core.encoders.backends import torch_device
from virnuc_core.encoders.calibration import read_calibration
from virnuc_core.encoders.checkpoint import load_encoder, open_part
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.encoders.layers import (
    InputStatistics,
    Layer,
    LinearLayer,
    apply_linear,
    as_calibration,
    quantise_layer,
)
from virnuc_core.encoders.model_config import PRODUCTS, Esm2Shape
from virnuc_core.encoders.models import DnabertS, Esm2, embed_sequences
from virnuc_core.encoders.precision import quantise_rows, resolve_precision
from virnuc_core.encoders.quantise import quantise
from virnuc_core.encoders.tokenize import Esm2Tokenizer
from virnuc_core.errors import DeviceError, IncapableError, WeightsError
from virnuc_core.reads.simulate import SimulateSpec, simulate

from .encoder_batches import proteins

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)  # only named: nothing is put there


@pytest.mark.parametrize("asked", ["fp16", "bf16", "int8"])
def test_half_precision_on_a_cpu_is_refused(asked: str, models: Path) -> None:
    for kind, runs in ((Esm2, asked), (DnabertS, "fp16" if asked == "int8" else asked)):
        with pytest.raises(IncapableError, match=f"precision {runs} needs a CUDA device"):
            load_encoder(kind, models, CPU, asked)  # type: ignore[arg-type]


def test_auto_is_fp32_on_a_cpu_and_fp16_on_cuda() -> None:
    assert resolve_precision("auto", CPU) == "fp32"
    assert resolve_precision("auto", CUDA) == "fp16"


@pytest.mark.parametrize(("capability", "fine"), [((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_int8_asks_for_hopper(
    capability: tuple[int, int], fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    if fine:
        assert resolve_precision("int8", CUDA) == "int8"
        return
    with pytest.raises(IncapableError, match=r"capability 9\.0 or later, Some GPU is older"):
        resolve_precision("int8", CUDA)


def test_rounded_rows_give_back_each_row_within_half_a_step() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 64) * torch.logspace(-6, 3, 50).unsqueeze(1)
    x[7] = 0
    rows, scale = quantise_rows(x)
    assert rows.dtype == torch.int8
    assert scale.shape == (50, 1)
    assert (
        (rows * scale - x).abs() <= 0.501 * x.abs().amax(1, keepdim=True).clamp_min(1e-9) / 127
    ).all()
    assert not rows[7].any()


def test_one_row_of_nan_spoils_no_other() -> None:
    x = torch.ones(3, 16)
    x[1] = torch.nan
    rows, scale = quantise_rows(x)
    assert (rows * scale)[[0, 2]].isfinite().all()


@pytest.fixture(scope="module")
def calibrated(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny models with a calibration for int8, made from simulated reads."""
    folder = tmp_path_factory.mktemp("int8")
    shutil.copytree(models, folder / "models")
    simulate(SimulateSpec(reads=400, seed=3), folder / "reads.fasta")
    path, rows = quantise(folder / "models", str(folder / "reads.fasta"), CPU)
    assert path == folder / "models/esm2/int8.safetensors"
    assert rows > 256
    return folder / "models"


def test_int8_by_plain_torch_is_close_to_float32(calibrated: Path) -> None:
    shape, read_tensor = open_part(calibrated, Esm2Shape)
    way: Any = {
        "attention": "reference",
        "calibration": as_calibration(read_calibration(calibrated).layers),
    }
    rows = proteins([49, 50, 48, 20, 33], seed=1)
    exact, rounded_rows = (
        embed_sequences(
            Esm2(shape, read_tensor, CPU, precision=precision, **way), Esm2Tokenizer(), rows, CPU
        )
        for precision in ("fp32", "int8")
    )
    alike = torch.nn.functional.cosine_similarity(exact, rounded_rows)
    assert 0.999 < alike.min() < 1  # rounded it is


def test_smoothing_and_bias_keep_a_product_of_uneven_inputs() -> None:
    torch.manual_seed(5)
    uneven = torch.logspace(-2, 1, 64)
    x = (torch.randn(400, 64) + 0.5) * uneven
    products = {name: LinearLayer(torch.randn(64, 64), torch.randn(64)) for name in PRODUCTS}
    norm = (uneven.clone(), uneven / 2)
    layer = Layer(norm, products["qkv"], products["out"], norm, products["up"], products["down"])
    made = quantise_layer(
        layer, dict.fromkeys(PRODUCTS, InputStatistics(x.abs().amax(0), x.mean(0))), torch.float32
    )
    plain = torch.nn.functional.layer_norm(x, (64,), *norm)
    smooth = torch.nn.functional.layer_norm(x, (64,), *made.attn_norm)
    for got, expected in (
        (apply_linear(smooth, made.qkv), apply_linear(plain, layer.qkv)),
        (apply_linear(x, made.out), apply_linear(x, layer.out)),
    ):
        assert (got - expected).norm() < 0.02 * expected.norm()
        assert (got - expected).mean(0).norm() < 0.01 * expected.norm() / 20
    assert made.qkv.weight.dtype == torch.int8


def test_int8_without_its_calibration_is_refused(
    calibrated: Path, models: Path, tmp_path: Path
) -> None:
    assert set(fingerprint(calibrated, "int8")) - set(fingerprint(calibrated, "fp16")) == {"int8"}
    with pytest.raises(
        WeightsError, match=r"int8\.safetensors: no such file; .* virnuc models quantize"
    ):
        fingerprint(models, "int8")
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    calibration_file = tmp_path / "esm2/int8.safetensors"
    shutil.copy(calibrated / "esm2/int8.safetensors", calibration_file)
    config = tmp_path / "esm2/config.json"
    config.write_text(config.read_text().replace('"origin": "', '"origin": "another '))
    with pytest.raises(WeightsError, match="made for other weights of ESM-2"):
        fingerprint(tmp_path, "int8")
    content = (calibrated / "esm2/int8.safetensors").read_bytes()
    for damaged_content in (
        b"nothing",
        content[:-4] + b"\xff\xff\xff\xff",
        content[:-4] + b"\0\0\x80\x4b",
    ):  # NaN, 16777216
        calibration_file.write_bytes(damaged_content)
        with pytest.raises(WeightsError, match="is no calibration for this ESM-2"):
            fingerprint(tmp_path, "int8")


def test_weights_whose_numbers_overflow_are_not_calibrated(
    calibrated: Path, tmp_path: Path
) -> None:
    shutil.copytree(calibrated, tmp_path / "models")
    weights, stored_numbers = (
        tmp_path / "models/esm2/model.safetensors",
        tmp_path / "models/esm2/int8.safetensors",
    )
    bytes_before = stored_numbers.read_bytes()
    save_file(
        {
            name: tensor * (1e30 if tensor.ndim == 2 else 1)
            for name, tensor in load_file(weights).items()
        },
        weights,
    )
    with pytest.raises(
        WeightsError, match="esm2: gives NaN or infinity for rows of these reads; see virnuc models"
    ):
        quantise(tmp_path / "models", str(calibrated.with_name("reads.fasta")), CPU)
    assert stored_numbers.read_bytes() == bytes_before


@pytest.mark.parametrize("name", ["meta", "mps", "nothing"])
def test_a_device_of_no_use_is_refused_in_a_short_line(name: str) -> None:
    with pytest.raises(DeviceError, match=f"device {name} cannot be used: .{{10,100}}$"):
        torch_device(name)


def test_few_reads_are_no_calibration(
    calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reads = tmp_path / "few.fasta"
    simulate(SimulateSpec(reads=10, seed=3), reads)
    assert main(["models", "quantize", str(calibrated), str(reads), "--device", "cpu"]) == 2
    assert "256 are needed" in capsys.readouterr().err
