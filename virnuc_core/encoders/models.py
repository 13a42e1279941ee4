"""The three networks over packed tokens: ESM-2, DNABERT-S, and the head that scores what they give."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.encoders.layers import (
    DTYPES,
    Encoder,
    Read,
    affine,
    alibi_slopes,
    dense,
    hadamard,
    rotary_tables,
)
from virnuc_core.encoders.model_config import Esm2Shape, HeadShape
from virnuc_core.encoders.registry import DNABERT_S, ESM2, EncoderName
from virnuc_core.encoders.tokenize import ESM2_PAD, PackedBatch, Rows

POOLED_RESIDUES: Final = 1024  # the mean stops here; the residues behind it are attended to
TOKEN_DROPOUT_SCALE: Final = (
    1 - 0.15 * 0.8
)  # training hid this share of the residues; no token is hidden here
HEAD_ROWS: Final = 256  # of one matrix product, always: a row's scores do not depend on how many others came with it


class Esm2(Encoder):
    """ESM-2: mean over each row's first 1,024 residues, start and end tokens left out."""

    INFO = ESM2
    FEED_FORWARD = ("fc1", "fc2", True)

    def _take(self, wide: Read, ready: Read) -> None:
        table = wide("embed.weight")
        if isinstance(self.shape, Esm2Shape) and self.shape.token_dropout:
            table = table * TOKEN_DROPOUT_SCALE
        table[ESM2_PAD] = 0
        self.table = table.to(
            DTYPES[self.precision]
        )  # [vocab, width]; already scaled, zero for the pad token
        self.inv_freq = wide("inv_freq")  # float32 [head_dim / 2]
        self._final_norm = affine(ready, "final_norm")
        self._angles = rotary_tables(self.inv_freq, POOLED_RESIDUES + 2)
        # what the stream lacks, float32 [width], before each norm when the products' biases are left out of it
        self._shifts: Sequence[Tensor | None] = [None] * (2 * self.shape.layers + 1)
        if self.attention == "fused" and self.precision != "int8":
            nothing = torch.zeros_like(self._final_norm[0], dtype=torch.float32)
            biases = [one.wide_bias for layer in self.layers for one in (layer.out, layer.down)]
            self._shifts = list(accumulate(biases, initial=nothing))

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Output of the last layer, after the final norm: [slots, width]."""
        if batch.max_seqlen > self._angles[0].shape[0]:
            self._angles = rotary_tables(self.inv_freq, 1 << (batch.max_seqlen - 1).bit_length())
        x = F.embedding(batch.tokens, self.table)
        rows = Rows(batch.cu_seqlens, batch.rows, batch.max_seqlen, self.shape.heads, *self._angles)
        if self.attention == "fused" and self.precision == "int8":
            return self._in_int8(x, rows)
        eps = self.shape.norm_eps
        for i, layer in enumerate(self.layers):
            normed = self._norm(x, layer.attn_norm, eps, self._shifts[2 * i])
            x = self._onto(x, self._attend(self.dense(normed, layer.qkv), rows), layer.out)
            normed = self._norm(x, layer.ffn_norm, eps, self._shifts[2 * i + 1])
            x = self._onto(x, F.gelu(self.dense(normed, layer.up)), layer.down)
        return self._norm(x, self._final_norm, eps, self._shifts[-1])

    def pooled_spans(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """The residues, as far as they are averaged; a row without any has an empty span."""
        starts = torch.minimum(cu_seqlens[:-1] + 1, cu_seqlens[1:])
        return starts, torch.maximum(
            starts, torch.minimum(cu_seqlens[1:] - 1, starts + POOLED_RESIDUES)
        )

    def _in_int8(self, stream: Tensor, rows: Rows) -> Tensor:
        """The layers in int8: [slots, width] to the last hidden state; `stream` is used up."""
        from virnuc_core.encoders.kernels import (
            int8_product,
            int8_rows,
            norm,
        )  # triton is needed here only

        eps = self.shape.norm_eps
        turning, unit_turning = (
            hadamard(width, stream.device) for width in (self.width, self.shape.ffn_width)
        )
        for layer in self.layers:
            qkv = int8_product(
                *int8_rows(stream, turning, norm=layer.attn_norm, eps=eps), layer.qkv
            )
            int8_product(*int8_rows(self._attend(qkv, rows), turning), layer.out, stream)
            wide = int8_product(*int8_rows(stream, turning, norm=layer.ffn_norm, eps=eps), layer.up)
            int8_product(*int8_rows(wide, unit_turning, gelu=True), layer.down, stream)
        return norm(stream, self._final_norm, eps)


class DnabertS(Encoder):
    """DNABERT-S: mean over all tokens of each row, first and last included."""

    INFO = DNABERT_S
    FEED_FORWARD = ("gated", "wo", False)

    def _take(self, wide: Read, ready: Read) -> None:
        # each token is of type 0; there are no positions to add, so the norm behind the embedding is a property of each
        table = (wide("embed.weight") + wide("token_type.weight")[0]).to(DTYPES[self.precision])
        norm = affine(ready, "embed_norm")
        self.table = F.layer_norm(
            table, (self.width,), *norm, self.shape.norm_eps
        )  # [vocab, width]
        self._slopes = torch.tensor(
            alibi_slopes(self.shape.heads), dtype=torch.float32, device=table.device
        )
        fused = self.attention == "fused"
        # float32 [width] of each layer, for the norms behind its halves to add: the bias of the product before
        self._shifts = [
            (layer.out.wide_bias, layer.down.wide_bias) if fused else (None, None)
            for layer in self.layers
        ]
        self._gated: list[
            Tensor
        ] = []  # the gated units' weights as the kernel for them wants them, where it can run
        if fused and self.precision != "fp32":
            from virnuc_core.encoders.kernels import can_gate, gated_unit, interleave

            self._gated_unit = gated_unit
            if can_gate(self.shape.ffn_width, table.device):
                self._gated = [interleave(layer.up.weight) for layer in self.layers]

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Output of the last layer: [slots, width]."""
        x = F.embedding(batch.tokens, self.table)
        rows = Rows(
            batch.cu_seqlens, batch.rows, batch.max_seqlen, self.shape.heads, slopes=self._slopes
        )
        eps = self.shape.norm_eps
        for i, (layer, (after_mix, after_unit)) in enumerate(
            zip(self.layers, self._shifts, strict=True)
        ):
            x = self._onto(x, self._attend(dense(x, layer.qkv), rows), layer.out)
            x = self._norm(x, layer.attn_norm, eps, after_mix)
            if self._gated:
                unit = self._gated_unit(x, self._gated[i])
            else:
                active, passed = dense(x, layer.up).chunk(2, dim=-1)
                unit = F.gelu(active) * passed
            x = self._norm(self._onto(x, unit, layer.down), layer.ffn_norm, eps, after_unit)
        return x

    def pooled_spans(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Whole rows."""
        return cu_seqlens[:-1], cu_seqlens[1:]


NETWORKS: Final[dict[EncoderName, type[Encoder]]] = {
    network.INFO.name: network for network in (DnabertS, Esm2)
}


class Head:
    """The classifier, joined embeddings to two scores, in float32: linear, batch norm by running statistics, ReLU,
    linear, softmax. The tensors have VirNucPro's names."""

    def __init__(self, shape: HeadShape, read: Read, device: torch.device) -> None:
        self.shape = shape
        self._weights = {name: read(name).to(device).float() for name in shape.tensors()}

    def scores(self, features: Tensor) -> Tensor:
        """P(others) and P(virus) of each row of `features` (float32 [n, dna_width + protein_width], DNA first)."""
        w, blocks = self._weights, []
        mean, variance, *norm = (
            w[f"bn1.{name}"] for name in ("running_mean", "running_var", "weight", "bias")
        )
        with torch.inference_mode():
            for block in F.pad(features.float(), (0, 0, 0, -len(features) % HEAD_ROWS)).split(
                HEAD_ROWS
            ):
                hidden = F.linear(block, w["hidden_layer.weight"], w["hidden_layer.bias"])
                hidden = F.batch_norm(
                    hidden,
                    mean,
                    variance,
                    norm[0],
                    norm[1],
                    training=False,
                    eps=self.shape.norm_eps,
                )
                blocks.append(
                    F.linear(
                        hidden.relu(), w["output_layer.weight"], w["output_layer.bias"]
                    ).softmax(-1)
                )
            return torch.cat(blocks)[: len(features)]  # of no rows one block is split, too
