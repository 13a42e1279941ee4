"""The padded networks against independent ones: fair-esm's ESM-2, and DNABERT-S written head by head in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from virnuc_core.baseline.networks import (
    embed_rows,
    load_network,
    load_tensors,
    plain_scores,
)
from virnuc_core.encoder_names import EncoderName
from virnuc_core.encoders.checkpoint import open_part
from virnuc_core.encoders.convert import init_random
from virnuc_core.encoders.model_config import DnabertShape, Esm2Shape, HeadShape

CPU = torch.device("cpu")
PROTEINS = [b"MKV", b"ACDEFGHIKLMNPQRSTVWY", b"G", b"MLXBZUOKK" * 7, b"WW" * 40]
DNAS = [b"ACGTACGTTTGA", b"ATGCNNGT", b"A" * 90, b"ACGGTCAGCTAAGCTCATCGCA" * 9, b"TTG"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    init_random(folder, esm2="tiny", dnabert_s="tiny", model_length=500, seed=3)
    return folder


def fair_esm(models: Path) -> torch.nn.Module:
    """fair-esm's own model with the weights of `models`."""
    from esm.model.esm2 import ESM2

    shape, read_tensor = open_part(models, Esm2Shape)
    model = ESM2(shape.layers, shape.width, shape.heads, alphabet="ESM-1b", token_dropout=True)
    state = model.state_dict()

    def put(theirs: str, ours: Tensor) -> None:
        assert state[theirs].shape == ours.shape, theirs
        state[theirs] = ours

    put("embed_tokens.weight", read_tensor("embed.weight"))
    for i in range(shape.layers):
        p, q = f"layers.{i}", f"layers.{i}"
        for kind in ("weight", "bias"):
            for name, part in zip("qkv", read_tensor(f"{p}.qkv.{kind}").chunk(3), strict=True):
                put(f"{q}.self_attn.{name}_proj.{kind}", part)
            put(f"{q}.self_attn.out_proj.{kind}", read_tensor(f"{p}.out.{kind}"))
            put(f"{q}.self_attn_layer_norm.{kind}", read_tensor(f"{p}.attn_norm.{kind}"))
            put(f"{q}.fc1.{kind}", read_tensor(f"{p}.fc1.{kind}"))
            put(f"{q}.fc2.{kind}", read_tensor(f"{p}.fc2.{kind}"))
            put(f"{q}.final_layer_norm.{kind}", read_tensor(f"{p}.ffn_norm.{kind}"))
        put(f"{q}.self_attn.rot_emb.inv_freq", read_tensor("inv_freq"))
    for kind in ("weight", "bias"):
        put(f"emb_layer_norm_after.{kind}", read_tensor(f"final_norm.{kind}"))
    model.load_state_dict(state)
    return model.eval()


def test_esm2_is_fair_esms(models: Path) -> None:
    from esm.data import Alphabet

    model, shape = fair_esm(models), open_part(models, Esm2Shape)[0]
    batch = [(str(i), p.decode()) for i, p in enumerate(PROTEINS)]
    tokens = Alphabet.from_architecture("ESM-1b").get_batch_converter()(batch)[2]
    with torch.inference_mode():
        hidden = model(tokens, repr_layers=[shape.layers])["representations"][shape.layers]
    expected = torch.stack([hidden[i, 1 : 1 + len(p)].mean(0) for i, p in enumerate(PROTEINS)])
    ours = embed_rows(load_network(models, "esm2", CPU, torch.float32), PROTEINS, [[0, 1, 2, 3, 4]])
    assert expected.std() > 0.05, "the comparison needs numbers that differ from row to row"
    torch.testing.assert_close(
        ours, expected, atol=2e-5, rtol=0
    )  # float32, two ways to order the same sums


def slow_dnabert(models: Path, tokens: list[int]) -> Tensor:
    """One row of DNABERT-S in float64, token by token and head by head."""
    shape, read_tensor = open_part(models, DnabertShape)
    w = {name: read_tensor(name).double() for name in shape.tensors()}
    d, n = shape.head_dim, len(tokens)

    def norm(x: Tensor, name: str) -> Tensor:
        centred_x = x - x.mean(-1, keepdim=True)
        scale = (centred_x.pow(2).mean(-1, keepdim=True) + shape.norm_eps).sqrt()
        return centred_x / scale * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = norm(w["embed.weight"][tokens] + w["token_type.weight"][0], "embed_norm")
    for layer in range(shape.layers):
        p = f"layers.{layer}"
        qkv = x @ w[f"{p}.qkv.weight"].T + w[f"{p}.qkv.bias"]
        heads = []
        for head in range(shape.heads):
            q, k, v = (
                qkv[:, part * shape.width + head * d : part * shape.width + (head + 1) * d]
                for part in range(3)
            )
            slope = 2.0 ** (-8 * (head + 1) / shape.heads)
            scores = torch.tensor(
                [
                    [float(q[i] @ k[j]) / math.sqrt(d) - slope * abs(i - j) for j in range(n)]
                    for i in range(n)
                ],
                dtype=torch.float64,
            )
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            heads.append(weights @ v)
        attention_output = torch.cat(heads, dim=-1) @ w[f"{p}.out.weight"].T + w[f"{p}.out.bias"]
        x = norm(attention_output + x, f"{p}.attn_norm")
        gate_and_value = x @ w[f"{p}.gated.weight"].T
        a, b = gate_and_value[:, : shape.ffn_width], gate_and_value[:, shape.ffn_width :]
        gelu = a * 0.5 * (1 + torch.erf(a / math.sqrt(2)))
        x = norm((gelu * b) @ w[f"{p}.wo.weight"].T + w[f"{p}.wo.bias"] + x, f"{p}.ffn_norm")
    return x.mean(0)


def test_dnabert_s_is_the_slow_one(models: Path) -> None:
    reader = load_network(models, "dnabert_s", CPU, torch.float32)
    ours = embed_rows(reader, DNAS, [[0, 1, 2, 3, 4]])
    expected = [slow_dnabert(models, reader.tokenizer.encode([s])[0].tolist()) for s in DNAS]
    assert torch.stack(expected).std() > 0.05
    torch.testing.assert_close(
        ours.double(), torch.stack(expected), atol=2e-5, rtol=0
    )  # float32 against float64


@pytest.mark.parametrize("which", ["esm2", "dnabert_s"])
def test_padding_changes_nothing(models: Path, which: EncoderName) -> None:
    reader = load_network(models, which, CPU, torch.float32)
    rows = PROTEINS if which == "esm2" else DNAS
    embedded_alone = embed_rows(reader, rows, [[row] for row in range(len(rows))])
    embedded_together = embed_rows(reader, rows, [[4, 2], [3, 0, 1]])
    torch.testing.assert_close(
        embedded_together, embedded_alone, atol=5e-6, rtol=0
    )  # float32, other sizes of the same matrix products
    assert torch.equal(embed_rows(reader, rows, [[4, 2], [3, 0, 1]]), embedded_together)


def test_esm2_mean_leaves_out_the_ends_and_what_is_beyond_the_limit(models: Path) -> None:
    reader = load_network(models, "esm2", CPU, torch.float32)
    protein = b"MKVLAGWY" * 130  # 1040 residues
    tokens = reader.tokenizer.encode([protein])[0][None]
    with torch.inference_mode():
        hidden = reader.compute_hidden_states(tokens, torch.ones_like(tokens, dtype=torch.bool))[0]
    torch.testing.assert_close(embed_rows(reader, [protein], [[0]])[0], hidden[1:1025].mean(0))


def test_head_is_written_out(models: Path) -> None:
    shape, read_tensor = open_part(models, HeadShape)
    w = {name: read_tensor(name).double() for name in shape.tensors()}
    features = torch.randn(5, shape.width, generator=torch.Generator().manual_seed(1))
    x = features.double() @ w["hidden_layer.weight"].T + w["hidden_layer.bias"]
    x = (x - w["bn1.running_mean"]) / (w["bn1.running_var"] + shape.norm_eps).sqrt() * w[
        "bn1.weight"
    ] + w["bn1.bias"]
    x = x.clamp(min=0) @ w["output_layer.weight"].T + w["output_layer.bias"]
    expected = x.exp() / x.exp().sum(-1, keepdim=True)
    ours = plain_scores(
        load_tensors(read_tensor, shape.tensors(), CPU, torch.float32), features, shape.norm_eps
    )
    torch.testing.assert_close(
        ours.double(), expected, atol=1e-6, rtol=0
    )  # float32 against float64


def test_half_precision_weights_keep_the_rotary_frequencies(models: Path) -> None:
    network = load_network(models, "esm2", CPU, torch.float16)
    assert network.tensors["embed.weight"].dtype == torch.float16
    assert network.tensors["inv_freq"].dtype == torch.float32


@pytest.mark.parametrize("which", ["esm2", "dnabert_s"])
def test_half_precision_stays_close_to_single(models: Path, which: EncoderName) -> None:
    rows = PROTEINS if which == "esm2" else DNAS
    half = embed_rows(load_network(models, which, CPU, torch.float16), rows, [[4, 2], [3, 0, 1]])
    single = embed_rows(load_network(models, which, CPU, torch.float32), rows, [[4, 2], [3, 0, 1]])
    assert half.dtype == torch.float32
    assert not torch.equal(half, single)
    assert (
        torch.cosine_similarity(half, single).min() > 0.9999
    )  # 11 bits of mantissa over two layers
