"""ESM-2 over packed tokens: pre-norm layers, rotary positions, exact GELU, a final layer norm, mean over residues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.encoders.attention import Backend, Rows, positions, rotary_tables
from virnuc_core.encoders.layers import Affine, Encoder, Read, WeightReader
from virnuc_core.encoders.model_config import Esm2Shape
from virnuc_core.encoders.precision import DTYPES, Dense, Resolved, dense, product
from virnuc_core.encoders.tokenize import ESM2_PAD, PackedBatch

POOLED_RESIDUES: Final = 1024  # the mean stops here; the residues behind it are attended to
TOKEN_DROPOUT_SCALE: Final = 1 - 0.15 * 0.8  # training hid this share of the residues; no token is hidden here


class Esm2Layer(NamedTuple):
    """Weights of one layer."""

    attn_norm: Affine
    qkv: Dense
    out: Dense
    ffn_norm: Affine
    fc1: Dense
    fc2: Dense

    @property
    def products(self) -> tuple[Dense, ...]:
        """The linear layers."""
        return self.qkv, self.out, self.fc1, self.fc2


class Esm2Weights(NamedTuple):
    """Weights of the model on one device, in the form one precision runs on."""

    embed: Tensor  # [vocab, width]; already scaled, zero for the pad token
    inv_freq: Tensor  # float32 [head_dim / 2]
    layers: tuple[Esm2Layer, ...]
    final_norm: Affine


def place_esm2(read: Read, shape: Esm2Shape, precision: Resolved, device: torch.device) -> Esm2Weights:
    """Read the weights to `device`, one tensor at a time; a misshapen one raises `WeightsError` with its name."""
    weights = WeightReader(read, precision, device)
    embed = weights.wide("embed.weight")
    if shape.token_dropout:
        embed = embed * TOKEN_DROPOUT_SCALE
    embed[ESM2_PAD] = 0
    layers = tuple(
        Esm2Layer(
            attn_norm=weights.norm(f"layers.{i}.attn_norm"),
            qkv=weights.linear(f"layers.{i}.qkv"),
            out=weights.linear(f"layers.{i}.out"),
            ffn_norm=weights.norm(f"layers.{i}.ffn_norm"),
            fc1=weights.linear(f"layers.{i}.fc1"),
            fc2=weights.linear(f"layers.{i}.fc2"),
        )
        for i in range(shape.layers)
    )
    return Esm2Weights(embed.to(DTYPES[precision]), weights.wide("inv_freq"), layers, weights.norm("final_norm"))


class Esm2(Encoder):
    """The encoder: mean over each row's first 1,024 residues, start and end tokens left out."""

    def __init__(self, shape: Esm2Shape, weights: Esm2Weights, *, precision: Resolved, attention: Backend) -> None:
        super().__init__(shape, weights.embed.device, pad_id=ESM2_PAD, precision=precision, attention=attention)
        self.shape, self.weights = shape, weights
        self._tables = rotary_tables(weights.inv_freq, POOLED_RESIDUES + 2)
        self._shifts = _running_biases(weights) if self._adds_in_product else [None] * (2 * shape.layers + 1)

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Output of the last layer, after the final norm: [slots, width]."""
        with torch.inference_mode():
            x, rows = F.embedding(batch.tokens, self.weights.embed), self._rows(batch)
            return self._by_kernels(x, rows) if self.attention == "fused" else self._by_torch(x, rows)

    def pooled_spans(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """The residues, as far as they are averaged; a row without any has an empty span."""
        starts = torch.minimum(cu_seqlens[:-1] + 1, cu_seqlens[1:])
        return starts, torch.maximum(starts, torch.minimum(cu_seqlens[1:] - 1, starts + POOLED_RESIDUES))

    def _rows(self, batch: PackedBatch) -> Rows:
        if batch.max_seqlen > self._tables[0].shape[0]:
            self._tables = rotary_tables(self.weights.inv_freq, 1 << (batch.max_seqlen - 1).bit_length())
        cos, sin = self._tables
        rows = Rows(batch.cu_seqlens, batch.rows, batch.max_seqlen, self.shape.heads, cos_table=cos, sin_table=sin)
        if self.attention == "fused":  # looks the angles up by itself
            return rows
        place = positions(batch.cu_seqlens, batch.slots)
        return rows._replace(cos=cos[place], sin=sin[place])

    def _by_torch(self, x: Tensor, rows: Rows) -> Tensor:
        """The layers one by one: [slots, width] to the last hidden state."""
        width, eps = (self.width,), self.shape.norm_eps
        for layer in self.weights.layers:
            normed = F.layer_norm(x, width, *layer.attn_norm, eps)
            x = x + dense(self._attend(dense(normed, layer.qkv), rows), layer.out)
            normed = F.layer_norm(x, width, *layer.ffn_norm, eps)
            x = x + dense(F.gelu(dense(normed, layer.fc1)), layer.fc2)
        return F.layer_norm(x, width, *self.weights.final_norm, eps)

    def _by_kernels(self, stream: Tensor, rows: Rows) -> Tensor:
        """The same with one pass over memory between two products; `stream` is used up.

        What a layer adds to the stream is kept pending until the norm that follows reads it anyway; or the product
        adds onto the stream in place, and its bias, left out of the stream, is added up for the norms to see.
        """
        from virnuc_core.encoders.kernels import activation, norm  # triton is needed here only

        quantises, eps = self._quantises, self.shape.norm_eps

        def attention(x: Tensor, scale: Tensor | None, layer: Esm2Layer) -> tuple[Tensor, Tensor | None]:
            mixed = self._attend(product(x, scale, layer.qkv), rows)
            return activation(mixed, gelu=False, quantise=True) if quantises else (mixed, None)

        def feed_forward(x: Tensor, scale: Tensor | None, layer: Esm2Layer) -> tuple[Tensor, Tensor | None]:
            wide = product(x, scale, layer.fc1)
            return activation(wide, quantise=True) if quantises else (F.gelu(wide), None)

        def half(place: int, pending: Tensor | None, inner: Inner, affine: Affine, last: Dense) -> Tensor | None:
            """One half of a layer: what is pending after it, or None when the product has added it."""
            keep, shift = pending is not None, self._shifts[place]
            normed = norm(stream, affine, eps, delta=pending, keep=keep, shift=shift, quantise=quantises)
            ready = inner(*normed, self.weights.layers[place // 2])
            if not self._adds_in_product:
                return product(*ready, last)
            stream.addmm_(ready[0], last.weight.t())
            return None

        pending: Tensor | None = None
        for i, layer in enumerate(self.weights.layers):
            pending = half(2 * i, pending, attention, layer.attn_norm, layer.out)
            pending = half(2 * i + 1, pending, feed_forward, layer.ffn_norm, layer.fc2)
        return norm(stream, self.weights.final_norm, eps, delta=pending, shift=self._shifts[-1])[0]


Inner = Callable[[Tensor, Tensor | None, Esm2Layer], tuple[Tensor, Tensor | None]]


def _running_biases(weights: Esm2Weights) -> list[Tensor | None]:
    """What the stream lacks, float32 [width], before each norm when the products' biases are left out of it."""
    total = torch.zeros_like(weights.final_norm[0], dtype=torch.float32)
    shifts: list[Tensor | None] = [total]
    for layer in weights.layers:
        for one in (layer.out, layer.fc2):
            assert one.bias is not None
            total = total + one.bias.float()
            shifts.append(total)
    return shifts
