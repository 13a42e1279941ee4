"""What numbers an encoder computes with, and the one linear layer all of them use."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.config import Precision
from virnuc_core.errors import DeviceError

Resolved = Literal["fp32", "fp16", "bf16", "fp8"]

# Activations between the layers. FP8 quantises at the entry of each linear layer and is bf16 elsewhere: the row-wise
# scaled product of torch gives bf16.
DTYPES: Final[dict[Resolved, torch.dtype]] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
}
FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0


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


def make_dense(weight: Tensor, bias: Tensor | None, precision: Resolved) -> Dense:
    """Put a float32, float16 or bfloat16 weight into the form `precision` runs on, on the weight's own device."""
    dtype = DTYPES[precision]
    ready_bias = None if bias is None else bias.to(dtype)
    if precision != "fp8":
        return Dense(weight.to(dtype).contiguous(), ready_bias, None)
    quantised, scale = quantise_rows(weight)
    return Dense(quantised, ready_bias, scale.t().contiguous())


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of `x` [n, k] scaled to the range of float8, and the float32 scales [n, 1] that undo it."""
    wide = x.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / FP8_MAX
    return (wide / scale).to(FP8), scale


def dense(x: Tensor, layer: Dense) -> Tensor:
    """`x @ weight.T + bias`, [n, in] to [n, out]; rows are quantised first where the layer is FP8."""
    rows, scale = (x, None) if layer.scale is None else quantise_rows(x)
    return product(rows, scale, layer)


def product(x: Tensor, scale: Tensor | None, layer: Dense) -> Tensor:
    """The same on rows that are in the layer's form: plain, or quantised, with their scales [n, 1], giving bfloat16."""
    if scale is None or layer.scale is None:
        return F.linear(x, layer.weight, layer.bias)
    found: Tensor = torch._scaled_mm(
        x,
        layer.weight.t(),
        scale_a=scale,
        scale_b=layer.scale,
        bias=layer.bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return found
