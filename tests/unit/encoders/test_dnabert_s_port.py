"""DNABERT-S against a public port, written by others: `pip install -e '.[port]'`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from .encoder_batches import packed_tokens
from .tiny_dnabert_s import FFN, HEADS, LAYERS, SHAPE, WIDTH, checkpoint, ours


def port() -> Any:
    """The port's model with the weights that ours has, under its own names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its many dependencies
        multimolecule = pytest.importorskip("multimolecule", reason="pip install -e '.[port]'")
        config = multimolecule.DnaBertSConfig(
            vocab_size=SHAPE.vocab,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=FFN,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        model = multimolecule.DnaBertSModel(config, add_pooling_layer=False)
    model.load_state_dict(renamed(checkpoint()))
    return model.eval()


def renamed(public: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of the public checkpoint to the port's; its attention has queries, keys and values apart."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in public.items():
        new = (
            name.removeprefix("bert.")
            .replace("LayerNorm", "layer_norm")
            .replace("mlp.layernorm", "mlp.layer_norm")
        )
        new = new.replace("mlp.gated_layers", "mlp.up_proj").replace("mlp.wo", "mlp.down_proj")
        if "Wqkv" in new:
            for part, own in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                tensors[new.replace("Wqkv", part)] = own
        else:
            tensors[new] = tensor
    return tensors


@pytest.mark.filterwarnings("ignore")
def test_packed_rows_equal_the_ports_one_by_one() -> None:
    model, generator = port(), torch.Generator().manual_seed(5)
    rows = [
        torch.randint(5, SHAPE.vocab, (n,), generator=generator) for n in (1, 2, 35, 64, 143, 200)
    ]
    got = ours().embed(packed_tokens(rows, 3, slots=524, capacity=8, max_seqlen=256))[: len(rows)]
    with torch.inference_mode():
        each = [
            model(row[None], attention_mask=torch.ones(1, len(row))).last_hidden_state[0].mean(0)
            for row in rows
        ]
    torch.testing.assert_close(
        got, torch.stack(each), atol=2e-5, rtol=0
    )  # float32 sums in another order
