"""The layers of both encoders through our own kernels: one pass over memory between two matrix products.

The same mathematics as `esm2_block` and `dnabert_block`, cut differently. What a layer adds to the residual stream is
kept pending until the norm that follows reads it anyway; or, with `residual_product`, the matrix product adds onto the
stream in place, and the biases of those products are left out of the stream and added up once, for the norms to see.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.encoders.attention import Attend, Rows
from virnuc_core.encoders.dnabert_s import DnabertWeights
from virnuc_core.encoders.esm2 import Esm2Layer, Esm2Weights
from virnuc_core.encoders.kernels import activation, norm
from virnuc_core.encoders.precision import Dense, scaled_dense
from virnuc_core.encoders.product_kernels import gated_unit, interleave
from virnuc_core.encoders.tuning import Tuning
from virnuc_core.errors import ConfigError


def _product(x: Tensor, scale: Tensor | None, layer: Dense) -> Tensor:
    """A linear layer on rows that are already quantised, or plain."""
    return F.linear(x, layer.weight, layer.bias) if scale is None else scaled_dense(x, scale, layer)


def _add_product(stream: Tensor, x: Tensor, layer: Dense) -> None:
    """`stream += x @ weight.T`, inside the product, rounded once."""
    stream.addmm_(x, layer.weight.t())


class Esm2Stack:
    """The layers of ESM-2 and the norm behind them."""

    def __init__(self, weights: Esm2Weights, eps: float, tuning: Tuning) -> None:
        if tuning.gated_product:
            raise ConfigError("tuning: gated_product is for DNABERT-S, ESM-2 has no gated unit; leave it off")
        self._weights, self._eps, self._tuning = weights, eps, tuning
        self._quantise = weights.layers[0].qkv.scale is not None
        self._shifts = _running_biases(weights) if tuning.residual_product else None

    def __call__(self, stream: Tensor, rows: Rows, attend: Attend) -> Tensor:
        """Last hidden state [slots, width]; `stream` [slots, width] is used up."""
        pending: Tensor | None = None
        for i, layer in enumerate(self._weights.layers):
            pending = self._attention(2 * i, stream, pending, layer, rows, attend)
            pending = self._feed_forward(2 * i + 1, stream, pending, layer)
        last = self._shift(2 * len(self._weights.layers))
        return norm(stream, self._weights.final_norm, self._eps, delta=pending, shift=last)[0]

    def _shift(self, place: int) -> Tensor | None:
        return None if self._shifts is None else self._shifts[place]

    def _attention(
        self, place: int, stream: Tensor, pending: Tensor | None, layer: Esm2Layer, rows: Rows, attend: Attend
    ) -> Tensor | None:
        normed = norm(
            stream,
            layer.attn_norm,
            self._eps,
            delta=pending,
            keep=pending is not None,
            shift=self._shift(place),
            quantise=self._quantise,
        )
        mixed = attend(_product(*normed, layer.qkv), rows)
        if self._tuning.residual_product:
            _add_product(stream, mixed, layer.out)
            return None
        ready = activation(mixed, gelu=False, quantise=True) if self._quantise else (mixed, None)
        return _product(*ready, layer.out)

    def _feed_forward(self, place: int, stream: Tensor, pending: Tensor | None, layer: Esm2Layer) -> Tensor | None:
        normed, scale = norm(
            stream,
            layer.ffn_norm,
            self._eps,
            delta=pending,
            keep=pending is not None,
            shift=self._shift(place),
            quantise=self._quantise,
        )
        if self._quantise:
            ready = activation(_product(normed, scale, layer.fc1), quantise=True)
        else:
            ready = F.gelu(_product(normed, scale, layer.fc1)), None
        if self._tuning.residual_product:
            _add_product(stream, ready[0], layer.fc2)
            return None
        return _product(*ready, layer.fc2)


def _running_biases(weights: Esm2Weights) -> list[Tensor]:
    """What the stream lacks, float32 [width], before each norm when the products' biases are left out of it."""
    total = torch.zeros_like(weights.final_norm[0], dtype=torch.float32)
    shifts = [total]
    for layer in weights.layers:
        for product in (layer.out, layer.fc2):
            total = total + _wide_bias(product)
            shifts.append(total)
    return shifts


def _wide_bias(layer: Dense) -> Tensor:
    """The bias of a product in float32, for the norm behind it to add."""
    assert layer.bias is not None
    return layer.bias.float()


class DnabertStack:
    """The layers of DNABERT-S."""

    def __init__(self, weights: DnabertWeights, eps: float, tuning: Tuning) -> None:
        self._layers, self._eps, self._tuning = weights.layers, eps, tuning
        self._quantise = weights.layers[0].qkv.scale is not None
        self._interleaved = [interleave(layer.gated.weight) for layer in weights.layers] if tuning.gated_product else []
        self._shifts = [(_wide_bias(layer.out), _wide_bias(layer.wo)) for layer in weights.layers]

    def __call__(self, x: Tensor, rows: Rows, attend: Attend) -> Tensor:
        """Last hidden state [slots, width]; `x` [slots, width] is used up."""
        for i, layer in enumerate(self._layers):
            mixed = attend(_product(*self._ready(x), layer.qkv), rows)
            after_mix, after_unit = self._shifts[i]
            x = self._add_and_norm(x, self._ready(mixed), layer.out, after_mix, layer.attn_norm)
            x = self._add_and_norm(x, self._gated(x, i), layer.wo, after_unit, layer.ffn_norm)
        return x

    def _ready(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return activation(x, gelu=False, quantise=True) if self._quantise else (x, None)

    def _gated(self, x: Tensor, place: int) -> tuple[Tensor, Tensor | None]:
        if self._tuning.gated_product:
            return gated_unit(x, self._interleaved[place]), None
        return activation(_product(*self._ready(x), self._layers[place].gated), gated=True, quantise=self._quantise)

    def _add_and_norm(
        self,
        x: Tensor,
        ready: tuple[Tensor, Tensor | None],
        layer: Dense,
        shift: Tensor,
        affine: tuple[Tensor, Tensor],
    ) -> Tensor:
        if self._tuning.residual_product:
            _add_product(x, ready[0], layer)
            return norm(x, affine, self._eps, shift=shift)[0]
        return norm(x, affine, self._eps, delta=_product(*ready, layer))[0]
