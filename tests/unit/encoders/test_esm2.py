"""ESM-2 over packed tokens against fair-esm's own class, row by row."""

from __future__ import annotations

import math
import warnings
from copy import copy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from virnuc_core.encoders import models as encoder_models
from virnuc_core.encoders.checkpoint import load_encoder
from virnuc_core.encoders.model_config import Esm2Shape
from virnuc_core.encoders.models import DnabertS, Esm2
from virnuc_core.encoders.precision import Resolved
from virnuc_core.encoders.tensor_names import match_tensors
from virnuc_core.encoders.tokenize import Esm2Tokenizer
from virnuc_core.errors import ConfigError

from .encoder_batches import packed, proteins

CPU = torch.device("cpu")
SHAPE = Esm2Shape(layers=3, width=64, heads=4, ffn_width=256)


@cache
def oracle() -> Any:
    """fair-esm's ESM2 with random weights, every bias and norm away from its start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from esm.model.esm2 import ESM2

    torch.manual_seed(3)
    model = ESM2(
        num_layers=SHAPE.layers,
        embed_dim=SHAPE.width,
        attention_heads=SHAPE.heads,
        alphabet="ESM-1b",
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(0.1 * torch.randn_like(weight))
    return model.eval()


@cache
def ours(precision: Resolved = "fp32") -> Esm2:
    """The same weights in our module."""
    read_tensor = match_tensors(Path("oracle"), oracle().state_dict(), SHAPE)
    return Esm2(SHAPE, read_tensor, CPU, precision=precision, attention="reference")


def one_by_one(sequence: bytes) -> torch.Tensor:
    """The oracle's embedding: mean over the first 1,024 residues of the last layer."""
    tokens, _ = Esm2Tokenizer().encode([sequence])
    with torch.no_grad():
        hidden = oracle()(tokens[None], repr_layers=[SHAPE.layers])["representations"][SHAPE.layers]
    return hidden[0, 1 : min(1024, len(sequence)) + 1].mean(0)


@pytest.mark.parametrize(
    "lengths",
    [[1], [50], [1022], [1, 600, 2, 166, 33, 50, 50, 7, 1], list(range(1, 40))],
    ids=["one residue", "one row", "one long row", "mixed", "ascending"],
)
@pytest.mark.parametrize("tail", [0, 100])
def test_packed_rows_equal_fair_esm(lengths: list[int], tail: int) -> None:
    rows = proteins(lengths)
    slots = sum(lengths) + 2 * len(lengths) + tail
    batch = packed(Esm2Tokenizer(), rows, slots=slots, capacity=len(rows) + tail)
    got = ours().embed(batch)
    expected = torch.stack([one_by_one(row) for row in rows])
    assert got.dtype == torch.float32
    assert got.shape == (len(rows) + tail, SHAPE.width)
    torch.testing.assert_close(
        got[: len(rows)], expected, atol=1e-5, rtol=0
    )  # float32 noise of the oracle itself
    assert torch.equal(got[len(rows) :], torch.zeros(tail, SHAPE.width))


def test_many_rows_equal_fair_esm() -> None:
    rows = proteins([5 + i % 60 for i in range(200)])
    got = ours().embed(packed(Esm2Tokenizer(), rows))
    for i in range(0, 200, 13):
        torch.testing.assert_close(got[i], one_by_one(rows[i]), atol=1e-5, rtol=0)


def test_the_mean_stops_at_1024_residues_but_attention_does_not() -> None:
    long = proteins([1500])[0]
    got = ours().embed(packed(Esm2Tokenizer(), [long, b"MKV"], slots=2000))
    torch.testing.assert_close(got[0], one_by_one(long), atol=1e-5, rtol=0)
    cut = ours().embed(packed(Esm2Tokenizer(), [long[:1024]]))
    assert (got[0] - cut[0]).abs().max() > 1e-3


def test_unusual_residues_equal_fair_esm() -> None:
    row = b"XBZUO-.JM*"
    torch.testing.assert_close(
        ours().embed(packed(Esm2Tokenizer(), [row]))[0], one_by_one(row), atol=1e-5, rtol=0
    )


def test_a_row_without_residues_is_zero_and_finite() -> None:
    got = ours().embed(packed(Esm2Tokenizer(), [b"MKV", b"", b"LLL"]))
    assert torch.equal(got[1], torch.zeros(SHAPE.width))
    torch.testing.assert_close(got[2], one_by_one(b"LLL"), atol=1e-5, rtol=0)


def test_position_128_is_the_same_number_wherever_the_row_lies() -> None:
    row = proteins([300], seed=5)[0]
    front = ours().compute_hidden_states(packed(Esm2Tokenizer(), [row], slots=1000))
    padded_batch = ours().compute_hidden_states(
        packed(Esm2Tokenizer(), [b"M" * 96, row], slots=1000)
    )
    assert torch.equal(front[129], padded_batch[98 + 129])


def test_what_stands_in_dead_slots_reaches_no_row() -> None:
    rows = proteins([10, 20])
    batch = packed(Esm2Tokenizer(), rows, slots=100, capacity=8)
    clean = ours().embed(batch)
    poisoned_model = copy(ours())
    poisoned_model.table = poisoned_model.table.clone()
    poisoned_model.table[31] = torch.nan  # a token that no residue has
    tokens = batch.tokens.clone()
    tokens[batch.real_tokens :] = 31
    got = poisoned_model.embed(replace(batch, tokens=tokens))
    assert torch.equal(got, clean)


def test_rotary_frequencies_are_the_saved_ones() -> None:
    tensors = dict(oracle().state_dict())
    for name in list(tensors):
        if name.endswith("inv_freq"):
            tensors[name] = tensors[name] * 2
    read_tensor = match_tensors(Path("doubled"), tensors, SHAPE)
    doubled_model = Esm2(SHAPE, read_tensor, CPU, precision="fp32", attention="reference")
    assert torch.equal(doubled_model.inv_freq, 2 * ours().inv_freq)


def test_half_precision_keeps_the_rotary_frequencies_in_float32() -> None:
    half = ours("fp16")
    assert half.layers[0].qkv.weight.dtype == torch.float16
    assert half.inv_freq.dtype == torch.float32
    assert torch.equal(half.inv_freq, ours().inv_freq)


def test_loaded_encoder_says_what_it_runs(models: Path) -> None:
    esm2 = load_encoder(Esm2, models, CPU)
    assert (esm2.attention, esm2.precision) == ("reference", "fp32")
    assert esm2.width == 64
    assert esm2.shape.linear_weights == 2 * 12 * 64**2  # two layers of 12 width² weights each


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by tanh as Hendrycks and Gimpel (2016) write it."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def test_tanh_gelu_is_that_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    read_tensor = match_tensors(Path("oracle"), oracle().state_dict(), SHAPE)
    build = partial(Esm2, SHAPE, read_tensor, CPU, precision="fp32", attention="reference")
    batch = packed(Esm2Tokenizer(), [b"MKTAYIAK", b"GSHM"], slots=64, capacity=4)
    exact = build().embed(batch)[:2]
    by_tanh = build(gelu="tanh").embed(batch)[:2]
    assert not torch.equal(by_tanh, exact)
    assert torch.nn.functional.cosine_similarity(by_tanh, exact).min() > 0.9999
    monkeypatch.setattr(encoder_models.F, "gelu", tanh_gelu)
    assert torch.allclose(build().embed(batch)[:2], by_tanh, atol=1e-5)


def test_with_the_kernels_gelu_is_computed_within_the_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_tensor = match_tensors(Path("oracle"), oracle().state_dict(), SHAPE)
    esm2 = Esm2(SHAPE, read_tensor, CPU, precision="fp32", attention="reference", gelu="tanh")
    x = torch.randn(6, SHAPE.width, generator=torch.Generator().manual_seed(5))
    expected = esm2._tanh_gelu(x, esm2.layers[0].up)
    monkeypatch.setattr(esm2, "_backend", replace(esm2._backend, has_kernels=True))
    got = esm2._tanh_gelu(x, esm2.layers[0].up)
    # On a CPU this product computes the exact GELU, which differs by less than 5e-4.
    assert torch.allclose(got, expected, atol=1e-3)


def test_gelu_by_tanh_is_refused_on_a_cpu(models: Path) -> None:
    with pytest.raises(ConfigError, match="gelu 'tanh' needs a CUDA device, this is cpu"):
        load_encoder(Esm2, models, CPU, gelu="tanh")
    dnabert_s = load_encoder(DnabertS, models, CPU, gelu="tanh")  # it has a gated unit
    assert dnabert_s.gelu == "exact"
