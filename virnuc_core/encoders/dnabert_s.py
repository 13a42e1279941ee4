"""DNABERT-S over packed tokens: post-norm layers, ALiBi, gated linear units, mean over all tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.encoders.attention import Backend, Rows, alibi_slopes
from virnuc_core.encoders.layers import Affine, Encoder, Read, WeightReader
from virnuc_core.encoders.model_config import DnabertShape
from virnuc_core.encoders.precision import DTYPES, Dense, Resolved, dense, product
from virnuc_core.encoders.tokenize import PackedBatch


class DnabertLayer(NamedTuple):
    """Weights of one layer."""

    qkv: Dense
    out: Dense
    attn_norm: Affine
    gated: Dense  # first half of its output is activated, the second half multiplied in
    wo: Dense
    ffn_norm: Affine

    @property
    def products(self) -> tuple[Dense, ...]:
        """The linear layers."""
        return self.qkv, self.out, self.gated, self.wo


class DnabertWeights(NamedTuple):
    """Weights of the model on one device, in the form one precision runs on."""

    embed: Tensor  # [vocab, width]; the embedding of token type 0 already added
    embed_norm: Affine
    layers: tuple[DnabertLayer, ...]


def place_dnabert(read: Read, shape: DnabertShape, precision: Resolved, device: torch.device) -> DnabertWeights:
    """Read the weights to `device`, one tensor at a time; a misshapen one raises `WeightsError` with its name."""
    weights = WeightReader(read, precision, device)
    embed = weights.wide("embed.weight") + weights.wide("token_type.weight")[0]
    layers = tuple(
        DnabertLayer(
            qkv=weights.linear(f"layers.{i}.qkv"),
            out=weights.linear(f"layers.{i}.out"),
            attn_norm=weights.norm(f"layers.{i}.attn_norm"),
            gated=weights.linear(f"layers.{i}.gated", bias=False),
            wo=weights.linear(f"layers.{i}.wo"),
            ffn_norm=weights.norm(f"layers.{i}.ffn_norm"),
        )
        for i in range(shape.layers)
    )
    return DnabertWeights(embed.to(DTYPES[precision]), weights.norm("embed_norm"), layers)


class DnabertS(Encoder):
    """The encoder: mean over all tokens of each row, first and last included."""

    def __init__(
        self, shape: DnabertShape, weights: DnabertWeights, *, pad_id: int, precision: Resolved, attention: Backend
    ) -> None:
        device = weights.embed.device
        super().__init__(shape, device, pad_id=pad_id, precision=precision, attention=attention)
        self.shape, self.weights = shape, weights
        # there are no positions to add, so the norm behind the embedding is a property of each token
        self._embed = F.layer_norm(weights.embed, (shape.width,), *weights.embed_norm, shape.norm_eps)
        self._slopes = torch.tensor(alibi_slopes(shape.heads), dtype=torch.float32, device=device)
        self._gated = self._gated_weights() if self._adds_in_product else []
        self._shifts = [(_wide_bias(layer.out), _wide_bias(layer.wo)) for layer in weights.layers]

    def _gated_weights(self) -> list[Tensor]:
        """The gated units' weights as the kernel for them wants them; empty where it cannot run."""
        from virnuc_core.encoders.kernels import can_gate, interleave

        able = can_gate(self.shape.ffn_width, self.device)
        return [interleave(layer.gated.weight) for layer in self.weights.layers] if able else []

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Output of the last layer: [slots, width]."""
        with torch.inference_mode():
            x = F.embedding(batch.tokens, self._embed)
            rows = Rows(batch.cu_seqlens, batch.rows, batch.max_seqlen, self.shape.heads, slopes=self._slopes)
            return self._by_kernels(x, rows) if self.attention == "fused" else self._by_torch(x, rows)

    def pooled_spans(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Whole rows."""
        return cu_seqlens[:-1], cu_seqlens[1:]

    def _by_torch(self, x: Tensor, rows: Rows) -> Tensor:
        """The layers one by one: [slots, width] to the last hidden state."""
        width, eps = (self.width,), self.shape.norm_eps
        for layer in self.weights.layers:
            mixed = dense(self._attend(dense(x, layer.qkv), rows), layer.out)
            x = F.layer_norm(mixed + x, width, *layer.attn_norm, eps)
            active, passed = dense(x, layer.gated).chunk(2, dim=-1)
            x = F.layer_norm(dense(F.gelu(active) * passed, layer.wo) + x, width, *layer.ffn_norm, eps)
        return x

    def _by_kernels(self, x: Tensor, rows: Rows) -> Tensor:
        """The same with one pass over memory between two products; `x` is used up.

        Where the product adds onto the stream in place, its bias is left to the norm behind it.
        """
        from virnuc_core.encoders.kernels import activation, gated_unit, norm  # triton is needed here only

        def ready(x: Tensor) -> tuple[Tensor, Tensor | None]:
            return activation(x, gelu=False, quantise=True) if self._quantises else (x, None)

        def gated(x: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
            if self._gated:
                return gated_unit(x, self._gated[i]), None
            both = product(*ready(x), self.weights.layers[i].gated)
            return activation(both, gated=True, quantise=self._quantises)

        def add_and_norm(
            x: Tensor, rows: tuple[Tensor, Tensor | None], last: Dense, shift: Tensor, affine: Affine
        ) -> Tensor:
            if not self._adds_in_product:
                return norm(x, affine, self.shape.norm_eps, delta=product(*rows, last))[0]
            x.addmm_(rows[0], last.weight.t())
            return norm(x, affine, self.shape.norm_eps, shift=shift)[0]

        for i, layer in enumerate(self.weights.layers):
            after_mix, after_unit = self._shifts[i]
            mixed = self._attend(product(*ready(x), layer.qkv), rows)
            x = add_and_norm(x, ready(mixed), layer.out, after_mix, layer.attn_norm)
            x = add_and_norm(x, gated(x, i), layer.wo, after_unit, layer.ffn_norm)
        return x


def _wide_bias(layer: Dense) -> Tensor:
    """The bias of a product in float32, for the norm behind it to add."""
    assert layer.bias is not None
    return layer.bias.float()
