"""DNABERT-S over packed tokens against a slow float64 twin, one row at a time."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from virnuc_core.encoders.checkpoint import load_encoder
from virnuc_core.encoders.models import DnabertS
from virnuc_core.encoders.positions import alibi_slopes
from virnuc_core.encoders.tokenize import DnabertTokenizer

from .encoder_batches import dnas, packed
from .tiny_dnabert_s import CPU, FFN, HEADS, LAYERS, WIDTH, checkpoint, ours

PUBLISHED_SLOPES = [2.0**-i for i in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]


def twin(tokens: Tensor) -> Tensor:
    """Mean of the last layer over all tokens of one row, in float64, written out plainly."""
    w = {name.removeprefix("bert."): tensor.double() for name, tensor in checkpoint().items()}

    def norm(x: Tensor, name: str) -> Tensor:
        centred_x = x - x.mean(-1, keepdim=True)
        return (
            centred_x
            / (centred_x.pow(2).mean(-1, keepdim=True) + 1e-12).sqrt()
            * w[name + ".weight"]
            + w[name + ".bias"]
        )

    x = (
        w["embeddings.word_embeddings.weight"][tokens]
        + w["embeddings.token_type_embeddings.weight"][0]
    )
    x = norm(x, "embeddings.LayerNorm")
    n, dim = len(tokens), WIDTH // HEADS
    distance = torch.tensor(
        [[float(abs(i - j)) for j in range(n)] for i in range(n)], dtype=torch.float64
    )
    for i in range(LAYERS):
        p = f"encoder.layer.{i}."
        qkv = x @ w[p + "attention.self.Wqkv.weight"].T + w[p + "attention.self.Wqkv.bias"]
        heads = []
        for h in range(HEADS):
            q, k, v = (
                qkv[:, part * WIDTH + h * dim : part * WIDTH + (h + 1) * dim] for part in range(3)
            )
            scores = q @ k.T / math.sqrt(dim) - PUBLISHED_SLOPES[h] * distance
            heads.append(scores.softmax(-1) @ v)
        output = (
            torch.cat(heads, 1) @ w[p + "attention.output.dense.weight"].T
            + w[p + "attention.output.dense.bias"]
        )
        x = norm(output + x, p + "attention.output.LayerNorm")
        gate_and_value = x @ w[p + "mlp.gated_layers.weight"].T
        active, gate = gate_and_value[:, :FFN], gate_and_value[:, FFN:]
        gelu = 0.5 * active * (1 + torch.erf(active / math.sqrt(2)))
        x = norm(
            (gelu * gate) @ w[p + "mlp.wo.weight"].T + w[p + "mlp.wo.bias"] + x,
            p + "mlp.layernorm",
        )
    return x.mean(0)


@pytest.mark.parametrize(
    "lengths",
    [[1], [1200], [1, 900, 150, 150, 32, 2, 149], [0, 5]],
    ids=["one base", "long", "mixed", "empty"],
)
@pytest.mark.parametrize("tail", [0, 77])
def test_packed_rows_equal_the_float64_twin(models: Path, lengths: list[int], tail: int) -> None:
    tokenizer = DnabertTokenizer(models)
    rows = dnas(lengths)
    tokens, offsets = tokenizer.encode(rows)
    batch = packed(tokenizer, rows, slots=len(tokens) + tail, capacity=len(rows) + tail)
    got = ours().embed(batch)
    expected = torch.stack([twin(tokens[a:b]) for a, b in pairwise(offsets)])
    torch.testing.assert_close(
        got[: len(rows)].double(), expected, atol=1e-5, rtol=0
    )  # float32 against float64
    assert torch.equal(got[len(rows) :], torch.zeros(tail, WIDTH))


def test_many_rows_equal_the_twin(models: Path) -> None:
    tokenizer = DnabertTokenizer(models)
    rows = dnas([3 + i % 150 for i in range(200)])
    tokens, offsets = tokenizer.encode(rows)
    got = ours().embed(packed(tokenizer, rows))
    for i in range(0, 200, 23):
        expected = twin(tokens[offsets[i] : offsets[i + 1]])
        torch.testing.assert_close(got[i].double(), expected, atol=1e-5, rtol=0)


def test_slopes_are_the_published_ones() -> None:
    assert alibi_slopes(12) == pytest.approx(PUBLISHED_SLOPES, rel=1e-12)
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(2) == [2.0**-4, 2.0**-8]


def test_loaded_encoder_says_what_it_runs(models: Path) -> None:
    dnabert = load_encoder(DnabertS, models, CPU)
    assert (dnabert.attention, dnabert.precision) == ("reference", "fp32")
    assert dnabert.width == 64
    assert dnabert.shape.linear_weights == 2 * (4 * 64**2 + 3 * 64 * 128)
