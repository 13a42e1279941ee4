"""A tiny DNABERT-S with random weights, shared by the tests of that encoder."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from virnuc_core.encoders.model_config import DnabertShape
from virnuc_core.encoders.models import DnabertS
from virnuc_core.encoders.tensor_names import match_tensors

CPU = torch.device("cpu")
HEADS, WIDTH, LAYERS, FFN = 12, 96, 3, 80
SHAPE = DnabertShape(layers=LAYERS, width=WIDTH, heads=HEADS, ffn_width=FFN, vocab=512)


@cache
def checkpoint() -> dict[str, Tensor]:
    """Random weights under the names of the public checkpoint."""
    torch.manual_seed(11)
    sizes: dict[str, tuple[int, ...]] = {
        "bert.embeddings.word_embeddings.weight": (512, WIDTH),
        "bert.embeddings.token_type_embeddings.weight": (2, WIDTH),
        "bert.embeddings.LayerNorm.weight": (WIDTH,),
        "bert.embeddings.LayerNorm.bias": (WIDTH,),
    }
    for i in range(LAYERS):
        p = f"bert.encoder.layer.{i}."
        sizes |= {
            p + "attention.self.Wqkv.weight": (3 * WIDTH, WIDTH),
            p + "attention.self.Wqkv.bias": (3 * WIDTH,),
            p + "attention.output.dense.weight": (WIDTH, WIDTH),
            p + "attention.output.dense.bias": (WIDTH,),
            p + "attention.output.LayerNorm.weight": (WIDTH,),
            p + "attention.output.LayerNorm.bias": (WIDTH,),
            p + "mlp.gated_layers.weight": (2 * FFN, WIDTH),
            p + "mlp.wo.weight": (WIDTH, FFN),
            p + "mlp.wo.bias": (WIDTH,),
            p + "mlp.layernorm.weight": (WIDTH,),
            p + "mlp.layernorm.bias": (WIDTH,),
        }
    return {
        name: torch.randn(size) * (0.2 if len(size) > 1 else 0.1)
        + (1 if "norm.weight" in name.lower() else 0)
        for name, size in sizes.items()
    }


@cache
def ours() -> DnabertS:
    read_tensor = match_tensors(Path("random"), checkpoint(), SHAPE)
    return DnabertS(SHAPE, read_tensor, CPU, precision="fp32", attention="reference")
