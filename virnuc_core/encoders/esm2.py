"""ESM-2 over packed tokens: pre-norm layers, rotary positions, exact GELU, a final layer norm, mean over residues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.encoders.attention import Backend, Rows, positions, rotary_tables
from virnuc_core.encoders.layers import Affine, Dense, Encoder, Layer, Read, Resolved, WeightReader, dense, product
from virnuc_core.encoders.model_config import Esm2Shape
from virnuc_core.encoders.tokenize import ESM2_PAD, PackedBatch

POOLED_RESIDUES: Final = 1024  # the mean stops here; the residues behind it are attended to
TOKEN_DROPOUT_SCALE: Final = 1 - 0.15 * 0.8  # training hid this share of the residues; no token is hidden here
Inner = Callable[[Tensor, Tensor | None, Layer], tuple[Tensor, Tensor | None]]


class Esm2(Encoder):
    """The encoder: mean over each row's first 1,024 residues, start and end tokens left out.

    Weights are read to `device` one tensor at a time; a misshapen one raises `WeightsError` with its name.
    """

    def __init__(
        self, shape: Esm2Shape, read: Read, device: torch.device, *, precision: Resolved, attention: Backend
    ) -> None:
        weights = WeightReader(read, precision, device)
        layers = weights.layers(shape.layers, "fc1", "fc2", up_bias=True)
        super().__init__(shape, layers, pad_id=ESM2_PAD, precision=precision, attention=attention)
        table = weights.wide("embed.weight")
        if shape.token_dropout:
            table = table * TOKEN_DROPOUT_SCALE
        table[ESM2_PAD] = 0
        self.table = table.to(weights.dtype)  # [vocab, width]; already scaled, zero for the pad token
        self.inv_freq = weights.wide("inv_freq")  # float32 [head_dim / 2]
        self._final_norm = weights.norm("final_norm")
        self._angles = rotary_tables(self.inv_freq, POOLED_RESIDUES + 2)
        # what the stream lacks, float32 [width], before each norm when the products' biases are left out of it
        self._shifts: Sequence[Tensor | None] = [None] * (2 * shape.layers + 1)
        if self._adds_in_product:
            nothing = torch.zeros_like(self._final_norm[0], dtype=torch.float32)
            biases = [one.wide_bias for layer in layers for one in (layer.out, layer.down)]
            self._shifts = list(accumulate(biases, initial=nothing))

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Output of the last layer, after the final norm: [slots, width]."""
        if batch.max_seqlen > self._angles[0].shape[0]:
            self._angles = rotary_tables(self.inv_freq, 1 << (batch.max_seqlen - 1).bit_length())
        cos, sin = self._angles
        x = F.embedding(batch.tokens, self.table)
        rows = Rows(batch.cu_seqlens, batch.rows, batch.max_seqlen, self.shape.heads, cos_table=cos, sin_table=sin)
        if self.attention == "fused":  # looks the angles up by itself
            return self._by_kernels(x, rows)
        place = positions(batch.cu_seqlens, batch.slots)
        return self._by_torch(x, rows._replace(cos=cos[place], sin=sin[place]))

    def pooled_spans(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """The residues, as far as they are averaged; a row without any has an empty span."""
        starts = torch.minimum(cu_seqlens[:-1] + 1, cu_seqlens[1:])
        return starts, torch.maximum(starts, torch.minimum(cu_seqlens[1:] - 1, starts + POOLED_RESIDUES))

    def _by_torch(self, x: Tensor, rows: Rows) -> Tensor:
        """The layers one by one: [slots, width] to the last hidden state."""
        width, eps = (self.width,), self.shape.norm_eps
        for layer in self.layers:
            normed = F.layer_norm(x, width, *layer.attn_norm, eps)
            x = x + dense(self._attend(dense(normed, layer.qkv), rows), layer.out)
            normed = F.layer_norm(x, width, *layer.ffn_norm, eps)
            x = x + dense(F.gelu(dense(normed, layer.up)), layer.down)
        return F.layer_norm(x, width, *self._final_norm, eps)

    def _by_kernels(self, stream: Tensor, rows: Rows) -> Tensor:
        """The same with one pass over memory between two products; `stream` is used up.

        What a layer adds to the stream is kept pending until the norm that follows reads it anyway; or the product
        adds onto the stream in place, and its bias, left out of the stream, is added up for the norms to see.
        """
        from virnuc_core.encoders.kernels import activation, norm  # triton is needed here only

        quantises, eps = self._quantises, self.shape.norm_eps

        def attention(x: Tensor, scale: Tensor | None, layer: Layer) -> tuple[Tensor, Tensor | None]:
            mixed = self._attend(product(x, scale, layer.qkv), rows)
            return activation(mixed, gelu=False, quantise=True) if quantises else (mixed, None)

        def feed_forward(x: Tensor, scale: Tensor | None, layer: Layer) -> tuple[Tensor, Tensor | None]:
            wide = product(x, scale, layer.up)
            return activation(wide, quantise=True) if quantises else (F.gelu(wide), None)

        def half(place: int, pending: Tensor | None, inner: Inner, affine: Affine, last: Dense) -> Tensor | None:
            """One half of a layer: what is pending after it, or None when the product has added it."""
            keep, shift = pending is not None, self._shifts[place]
            normed = norm(stream, affine, eps, delta=pending, keep=keep, shift=shift, quantise=quantises)
            ready = inner(*normed, self.layers[place // 2])
            if not self._adds_in_product:
                return product(*ready, last)
            stream.addmm_(ready[0], last.weight.t())
            return None

        pending: Tensor | None = None
        for i, layer in enumerate(self.layers):
            pending = half(2 * i, pending, attention, layer.attn_norm, layer.out)
            pending = half(2 * i + 1, pending, feed_forward, layer.ffn_norm, layer.down)
        return norm(stream, self._final_norm, eps, delta=pending, shift=self._shifts[-1])[0]
