"""What the models are made of: number formats, linear layers, weights on a device, means over rows, way in and out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.config import Precision
from virnuc_core.encoders.attention import Backend, Rows, reference
from virnuc_core.encoders.model_config import DnabertShape, Esm2Shape
from virnuc_core.encoders.tokenize import PackedBatch
from virnuc_core.errors import DeviceError

Resolved = Literal["fp32", "fp16", "bf16", "fp8"]
Read = Callable[[str], Tensor]  # a tensor of a model by our name for it
Affine = tuple[Tensor, Tensor]  # weight and bias of a norm, [width] each

# Activations between the layers. FP8 quantises at the entry of each linear layer and is bf16 elsewhere: the row-wise
# scaled product of torch gives bf16.
DTYPES: Final[dict[Resolved, torch.dtype]] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
}
FP8: Final = torch.float8_e4m3fn


def resolve_precision(asked: Precision, device: torch.device) -> Resolved:
    """The precision that runs; `auto` is fp16 on CUDA and fp32 elsewhere. Raises `DeviceError` for what cannot run."""
    if asked == "auto":
        return "fp16" if device.type == "cuda" else "fp32"
    if asked == "fp32":
        return "fp32"
    if device.type != "cuda":
        raise DeviceError(f"precision {asked} needs a CUDA device, this is {device}; use fp32")
    if asked == "fp8" and torch.cuda.get_device_capability(device) < (9, 0):
        name = torch.cuda.get_device_name(device)
        raise DeviceError(f"precision fp8 needs compute capability 9.0 or later, {name} is older; use fp16")
    return asked


class Dense(NamedTuple):
    """A linear layer ready to run."""

    weight: Tensor  # [out, in]; float8 when `scale` is set
    bias: Tensor | None  # [out]
    scale: Tensor | None  # float32 [1, out]: what a row of `weight` was divided by

    @property
    def wide_bias(self) -> Tensor:
        """The bias in float32, for the norm behind a product to add; of a layer that has one."""
        assert self.bias is not None
        return self.bias.float()


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of `x` [n, k] scaled to the range of float8, and the float32 scales [n, 1] that undo it."""
    wide = x.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / torch.finfo(FP8).max
    return (wide / scale).to(FP8), scale


def dense(x: Tensor, layer: Dense) -> Tensor:
    """`x @ weight.T + bias`, [n, in] to [n, out]; rows are quantised first where the layer is FP8."""
    rows, scale = (x, None) if layer.scale is None else quantise_rows(x)
    return product(rows, scale, layer)


def product(x: Tensor, scale: Tensor | None, layer: Dense) -> Tensor:
    """The same on rows that are in the layer's form: plain, or quantised, with their scales [n, 1], giving bfloat16."""
    if scale is None or layer.scale is None:
        return F.linear(x, layer.weight, layer.bias)
    weight, bias, kind = layer.weight.t(), layer.bias, torch.bfloat16
    return torch._scaled_mm(
        x, weight, scale_a=scale, scale_b=layer.scale, bias=bias, out_dtype=kind, use_fast_accum=True
    )


class Layer(NamedTuple):
    """Weights of one layer of an encoder."""

    attn_norm: Affine
    qkv: Dense
    out: Dense
    ffn_norm: Affine
    up: Dense  # of DNABERT-S: the first half of its output is activated, the second half multiplied in
    down: Dense

    @property
    def products(self) -> tuple[Dense, ...]:
        """The linear layers."""
        return self.qkv, self.out, self.up, self.down


class WeightReader:
    """Reads weights to `device`, one tensor at a time, in the form that `precision` runs on."""

    def __init__(self, read: Read, precision: Resolved, device: torch.device) -> None:
        self._stored, self._precision, self._device = read, precision, device
        self.dtype = DTYPES[precision]

    def wide(self, name: str) -> Tensor:
        """One tensor in float32."""
        return self._stored(name).to(self._device).float()

    def norm(self, name: str) -> Affine:
        """Weight and bias of a layer norm."""
        return self._ready(f"{name}.weight"), self._ready(f"{name}.bias")

    def linear(self, name: str, *, bias: bool = True) -> Dense:
        """A linear layer."""
        ready_bias = self._ready(f"{name}.bias") if bias else None
        if self._precision != "fp8":
            return Dense(self._ready(f"{name}.weight").contiguous(), ready_bias, None)
        quantised, scale = quantise_rows(self._stored(f"{name}.weight").to(self._device))
        return Dense(quantised, ready_bias, scale.t().contiguous())

    def layers(self, count: int, up: str, down: str, *, up_bias: bool) -> tuple[Layer, ...]:
        """All layers; `up` and `down` are the names of the products around the activation."""
        return tuple(
            Layer(
                attn_norm=self.norm(f"layers.{i}.attn_norm"),
                qkv=self.linear(f"layers.{i}.qkv"),
                out=self.linear(f"layers.{i}.out"),
                ffn_norm=self.norm(f"layers.{i}.ffn_norm"),
                up=self.linear(f"layers.{i}.{up}", bias=up_bias),
                down=self.linear(f"layers.{i}.{down}"),
            )
            for i in range(count)
        )

    def _ready(self, name: str) -> Tensor:
        return self._stored(name).to(self._device).to(self.dtype)


class Encoder:
    """Packed tokens to one vector a row, on one device: by our own Triton kernels, or by plain torch operations."""

    def __init__(
        self,
        shape: Esm2Shape | DnabertShape,
        layers: tuple[Layer, ...],
        *,
        pad_id: int,
        precision: Resolved,
        attention: Backend,
    ) -> None:
        self.shape, self.layers, self.width, self.pad_id = shape, layers, shape.width, pad_id
        self.precision: Resolved = precision
        self.attention: Backend = attention
        self._quantises = precision == "fp8"
        # a product can add its result onto the stream, but not one of float8 rows; in float32 nothing is gained
        self._adds_in_product = attention == "fused" and precision in ("fp16", "bf16")
        self._attend: Callable[[Tensor, Rows], Tensor] = reference
        self._mean: Callable[[Tensor, Tensor, Tensor], Tensor] = segment_mean
        if attention == "fused":  # triton is needed here only
            from virnuc_core.encoders.attention_kernels import fused_attention
            from virnuc_core.encoders.kernels import span_means

            self._attend, self._mean = fused_attention, span_means

    def embed(self, batch: PackedBatch) -> Tensor:
        """Mean-pooled embeddings, float32 [row_capacity, width]; rows past `batch.rows` are zero.

        A row's values depend on its own tokens, the weights, the precision and the number of slots only.
        Never synchronises the device.
        """
        with torch.inference_mode():
            return self._mean(self.hidden(batch), *self.pooled_spans(batch.cu_seqlens))

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Output of the last layer: [slots, width]."""
        raise NotImplementedError

    def pooled_spans(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """First and last-but-one slot of what is averaged of each row, int32 [row_capacity] each."""
        raise NotImplementedError


def segment_mean(x: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Mean of `x` [tokens, width] over each span [start, end), float32 [spans, width]; zero where a span is empty.

    Spans ascend and do not overlap. Every span is summed on its own, first token to last, in float32: its mean does not
    depend on what else is in the batch, nor on dead slots (a difference of running sums would depend on both).
    """
    bounds = torch.stack((starts, ends), dim=1).flatten().long()  # a span, the gap after it, the next span, ...
    ends_and_tail = torch.cat((bounds, bounds[-1:]))
    sums = torch.segment_reduce(x.float(), "sum", offsets=ends_and_tail, axis=0, unsafe=True, initial=0)[::2]
    return sums / (ends - starts).clamp_min(1).unsqueeze(1)
