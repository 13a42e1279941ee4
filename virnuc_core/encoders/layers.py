"""What the models are made of: number formats, linear layers, attention within rows, weights on a device, means.

The layers run by our own Triton kernels (`fused`: `kernels`, `attention_kernels`; CUDA) or by plain torch operations
(`reference`; anywhere). What is asked for runs or raises; `auto` decides once, when the encoder is loaded."""

import functools
import itertools
import math
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from virnuc_core.config import Attention, Precision
from virnuc_core.encoders.model_config import PRODUCTS, DnabertShape, Esm2Shape
from virnuc_core.encoders.registry import EncoderInfo
from virnuc_core.encoders.tokenize import PackedBatch, Rows
from virnuc_core.errors import ConfigError, IncapableError

Backend = Literal["fused", "reference"]
Resolved = Literal["fp32", "fp16", "bf16", "int8"]
Read = Callable[[str], Tensor]  # a tensor of a model by our name for it
Affine = tuple[Tensor, Tensor]  # weight and bias of a norm, [width] each

# Activations between the linear layers; int8 rounds what enters these
DTYPES: Final[dict[Resolved, torch.dtype]] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.float16,
}
LONGEST_TURN: Final = 64
SMOOTHING: Final = 0.65  # share of the inputs' unevenness that moves to the weights
TOP: Final = 127  # of int8, on both sides of 0
FUSED_HEADS: Final = (32, 64, 128)  # head sizes that the attention kernel is written for
REFERENCE_STEP = 16  # rows are padded to the next multiple of this, a function of the row alone
REFERENCE_SCORES = 1 << 24  # scores held at once: 64 MiB of float32


def resolve_precision(asked: Precision, device: torch.device) -> Resolved:
    """The precision that runs; `auto` is fp16 on CUDA, fp32 elsewhere. Raises `IncapableError` for what cannot run."""
    if asked == "auto":
        return "fp16" if device.type == "cuda" else "fp32"
    if asked != "fp32" and device.type != "cuda":
        raise IncapableError(f"precision {asked} needs a CUDA device, this is {device}; use fp32")
    if asked == "int8" and torch.cuda.get_device_capability(device) < (9, 0):
        name = torch.cuda.get_device_name(device)
        raise IncapableError(
            f"precision int8 needs compute capability 9.0 or later, {name} is older; use fp16"
        )
    return asked


def choose_backend(asked: Attention, head_dim: int, device: torch.device) -> Backend:
    """What runs the layers. Raises `ConfigError` or `IncapableError`, in one line, when what is asked for cannot."""
    kind: type[ConfigError | IncapableError] = IncapableError
    obstacle = ""
    if device.type != "cuda":
        obstacle = f"needs a CUDA device, this is {device}"
    elif head_dim not in FUSED_HEADS:
        obstacle, kind = f"wants heads of 32, 64 or 128, not {head_dim}", ConfigError
    elif (
        asked != "reference" and torch.cuda.is_available() and (missing := without_triton())
    ):  # else torch says it
        # `auto` must not choose by the machine: a run that goes on elsewhere would mix both
        raise IncapableError(
            f"our kernels need Triton, {missing}; or use --attention reference, several times slower"
        )
    if asked == "fused" and obstacle:
        raise kind(f"attention 'fused' {obstacle}; use reference or auto")
    return "reference" if asked == "reference" or obstacle else "fused"


@functools.cache
def without_triton() -> str:
    """Why Triton cannot run here, and what to do; "" where it can. On a new machine it builds a module of its own."""
    try:
        from triton.runtime import driver

        assert driver.active is not None  # made when it is asked for
    except ModuleNotFoundError:
        return "which is not installed: pip install triton"
    except (
        RuntimeError,
        AssertionError,
        ImportError,
        OSError,
        subprocess.SubprocessError,
    ) as error:
        told = " ".join(str(error).split())
        if isinstance(error, subprocess.CalledProcessError):
            told = f"{error.cmd[0]} ended with status {error.returncode}, as it says above"
        return f"which cannot start ({told}); it wants a C compiler and Python's headers: install gcc and python3-dev"
    return ""


class Inputs(NamedTuple):
    """What a linear layer was given for some rows of reads, float32 [in]."""

    largest: Tensor  # absolute
    mean: Tensor


Calibration = Sequence[Mapping[str, Inputs]]  # of each layer, by the names of its products


def as_tensors(seen: Sequence[Mapping[str, NDArray[np.float32]]]) -> Calibration:
    """What `checkpoint.calibration` read."""
    return [
        {name: Inputs(*torch.from_numpy(values)) for name, values in layer.items()}
        for layer in seen
    ]


class Dense(NamedTuple):
    """A linear layer ready to run."""

    weight: Tensor  # [out, in]; int8 when `scale` is set
    bias: Tensor | None  # [out]
    scale: Tensor | None = None  # float32 [out]: what a row of `weight` was divided by

    @property
    def wide_bias(self) -> Tensor:
        """The bias in float32, for the norm behind a product to add; of a layer that has one."""
        assert self.bias is not None
        return self.bias.float()


@functools.cache
def hadamard(width: int, device: torch.device) -> Tensor:
    """What stretches of rows of `width` are multiplied with: Hadamard's matrix, orthogonal, fp16 [turn, turn].
    Large and small numbers become many of middling size, of which rounding in equal steps takes less."""
    matrix = torch.ones(1, 1)
    while len(matrix) < math.gcd(width, LONGEST_TURN):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return (matrix / math.sqrt(len(matrix))).to(device, torch.float16)


def turned(x: Tensor) -> Tensor:
    """Float32 `x` [n, k], its stretches multiplied by Hadamard's matrix; done to both factors it keeps a product."""
    matrix = hadamard(x.shape[1], x.device).float()
    return (x.reshape(len(x), -1, len(matrix)) @ matrix).flatten(1)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each float32 row of `x` [n, k] in int8, and the scales [n, 1] that undo it; halves to even, as in the kernels."""
    scale = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / TOP
    return (x / scale).round().to(torch.int8), scale


def dense(x: Tensor, layer: Dense) -> Tensor:
    """`x @ weight.T + bias`, [n, in] to [n, out], by plain torch; for an int8 layer `x` is turned and rounded first."""
    if layer.scale is None or layer.bias is None:
        return F.linear(x, layer.weight, layer.bias)
    rows, scale = quantise_rows(turned(x.half().float()))
    total = (rows.double() @ layer.weight.double().t()).float()  # exact
    return (total * scale * layer.scale + layer.bias).to(x.dtype)


def positions(cu_seqlens: Tensor, slots: int) -> Tensor:
    """Position of each token within its row, int64 [slots]; 0 in dead slots. Reads no device value on the host."""
    slot = torch.arange(slots, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    row = torch.searchsorted(cu_seqlens, slot, right=True) - 1
    within = slot - cu_seqlens[row]
    return torch.where(slot < cu_seqlens[-1], within, 0).long()


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi's slope of each head: a geometric series; heads beyond a power of two take every other one of the next."""
    whole = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
    return slopes + [
        2.0 ** (-8.0 * (i + 1) / (2 * whole)) for i in range(0, 2 * (heads - whole), 2)
    ]


def inv_freq(head_dim: int) -> Tensor:
    """Rotary frequencies in base 10,000, float32 [head_dim / 2]."""
    return 1.0 / (10_000 ** (torch.arange(0, head_dim, 2).float() / head_dim))


def rotary_tables(inv_freq: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of positions 0 … length-1, float32 [length, head_dim / 2] each."""
    angles = torch.outer(
        torch.arange(length, device=inv_freq.device, dtype=torch.float32), inv_freq.float()
    )
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on `x` [slots, heads, head_dim], in float32, rotate-half form."""
    half = x.shape[-1] // 2
    low, high = x[..., :half].float(), x[..., half:].float()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def reference(qkv: Tensor, rows: Rows) -> Tensor:
    """Attention by plain torch operations, scores and softmax in float32; zero in dead slots.
    `qkv` [slots, 3 * width] (all q heads, all k, all v) to [slots, width]."""
    q, k, v = qkv.unflatten(1, (3, rows.heads, -1)).unbind(1)
    q = q * (1 / math.sqrt(q.shape[-1]))  # scaled, then rotated, as the model was trained
    if rows.cos is not None and rows.sin is not None:
        place = positions(rows.cu_seqlens, len(qkv))
        q, k = (rotate(x, rows.cos[place], rows.sin[place]).to(qkv.dtype) for x in (q, k))
    return (_by_runs if qkv.device.type == "cpu" else _by_padding)(q, k, v, rows).flatten(1)


def _by_runs(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """On a CPU the lengths can be looked at: neighbouring rows of one length are attended to together, without padding.
    Packed batches lie longest row first, so such runs are long and are views of what is there. Each row and head is a
    product of its own inside, so a run's length changes no bit."""
    out = torch.zeros(v.shape, dtype=v.dtype)  # dead slots stay zero
    start = 0
    for length, run in itertools.groupby(rows.cu_seqlens.diff().tolist()):
        count = len(list(run))
        span = slice(start, start + count * length)
        start = span.stop
        if length:
            queries, keys, values = (
                t[span].unflatten(0, (count, length)).transpose(1, 2) for t in (q, k, v)
            )
            bias = None if rows.slopes is None else _alibi(rows.slopes, length)
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=1.0)
            out[span] = mixed.transpose(1, 2).flatten(0, 1)
    return out


def _by_padding(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Where looking at the lengths would stop the launch queue: all rows padded to the longest there may be.
    They are attended to in portions that keep the scores small."""
    padded = -(-rows.max_seqlen // REFERENCE_STEP) * REFERENCE_STEP
    portion = max(1, REFERENCE_SCORES // (rows.heads * padded * padded))
    slots, step = len(v), torch.arange(padded, device=v.device)
    out = v.new_zeros(slots + 1, *v.shape[1:])  # the last slot takes what is padded
    starts, lengths = rows.cu_seqlens[:-1].long(), rows.cu_seqlens.diff().long()
    for start, length in zip(starts.split(portion), lengths.split(portion), strict=True):
        real = step < length.unsqueeze(1)  # [n, padded]
        # a padded place repeats the row's first token, so that no value of another row or a dead slot is ever read
        slot = torch.where(real, start.unsqueeze(1) + step, start.unsqueeze(1).clamp_max(slots - 1))
        queries, keys, values = (
            t[slot].transpose(1, 2) for t in (q, k, v)
        )  # [n, heads, padded, head_dim]
        scores = (queries @ keys.transpose(2, 3)).float()
        if rows.slopes is not None:
            scores += _alibi(rows.slopes, padded)
        scores.masked_fill_(~real[:, None, None, :], -math.inf)
        # an empty row has no key: keep it finite, write nothing
        scores.masked_fill_((length == 0)[:, None, None, None], 0.0)
        mixed = (scores.softmax(-1).to(values.dtype) @ values).transpose(1, 2)
        # what stands past the end of a row goes to the spare slot: every shape is fixed, no device value is looked at
        out[torch.where(real, slot, slots)] = mixed
    return out[:-1]


def _alibi(slopes: Tensor, length: int) -> Tensor:
    """What ALiBi adds to the scores of a row, float32 [heads, length, length]."""
    step = torch.arange(length, device=slopes.device)
    return -slopes.view(-1, 1, 1) * (step.unsqueeze(0) - step.unsqueeze(1)).abs()


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
        return tuple(getattr(self, name) for name in PRODUCTS)


def in_int8(layer: Layer, seen: Mapping[str, Inputs], dtype: torch.dtype) -> Layer:
    """A layer in float32 made ready to run in int8, given what its products were seen to take.
    Inputs behind a norm are smoothed: the norm divides by column, and weights are multiplied, so that neither has
    columns far larger than others. What the rounding of weights makes of the mean input is taken off the bias."""

    def rounded(one: Dense, mean: Tensor) -> Dense:
        if one.weight.shape[1] % 16:
            raise ConfigError(
                f"precision int8 wants rows of a multiple of 16, not {one.weight.shape[1]}; use fp16"
            )
        plain = turned(one.weight)
        weight, scale = quantise_rows(plain)
        bias = one.wide_bias + (plain - weight * scale) @ turned(mean.to(plain.device)[None])[0]
        return Dense(weight, bias, scale.squeeze(1))

    def smoothed(norm: Affine, one: Dense, seen: Inputs) -> tuple[Affine, Dense]:
        largest, by_weight = seen.largest.to(one.weight.device), one.weight.abs().amax(0)
        step = largest.clamp_min(1e-5) ** SMOOTHING / by_weight.clamp_min(1e-5) ** (1 - SMOOTHING)
        made = rounded(one._replace(weight=one.weight * step), seen.mean.to(step.device) / step)
        return ((norm[0] / step).to(dtype), (norm[1] / step).to(dtype)), made

    attn_norm, qkv = smoothed(layer.attn_norm, layer.qkv, seen["qkv"])
    ffn_norm, up = smoothed(layer.ffn_norm, layer.up, seen["up"])
    out, down = (
        rounded(one, seen[name].mean) for name, one in (("out", layer.out), ("down", layer.down))
    )
    return Layer(attn_norm, qkv, out, ffn_norm, up, down)


def affine(read: Read, name: str) -> Affine:
    """Weight and bias of a linear layer or a norm."""
    return read(f"{name}.weight").contiguous(), read(f"{name}.bias")


def read_layer(read: Read, i: int, up: str, down: str, up_bias: bool) -> Layer:
    """Layer `i`; `up` and `down` are the names of the products around the activation."""
    p = f"layers.{i}"
    first = (
        Dense(*affine(read, f"{p}.{up}"))
        if up_bias
        else Dense(read(f"{p}.{up}.weight").contiguous(), None)
    )
    qkv, out, last = (Dense(*affine(read, f"{p}.{name}")) for name in ("qkv", "out", down))
    return Layer(
        affine(read, f"{p}.attn_norm"), qkv, out, affine(read, f"{p}.ffn_norm"), first, last
    )


class Encoder(ABC):
    """Packed tokens to one vector a row, on one device: by our own Triton kernels, or by plain torch operations."""

    INFO: ClassVar[EncoderInfo]  # its entry in the registry
    FEED_FORWARD: ClassVar[
        tuple[str, str, bool]
    ]  # names of both products; whether the first has a bias

    def __init__(
        self,
        shape: Esm2Shape | DnabertShape,
        read: Read,
        device: torch.device,
        *,
        precision: Resolved,
        attention: Backend,
        calibration: Calibration | None = None,
    ) -> None:
        self.shape, self.width = shape, shape.width
        self.precision: Resolved = precision
        self.attention: Backend = attention
        self.dense = dense  # another takes its place to see what products take
        self._attend: Callable[[Tensor, Rows], Tensor] = reference
        self._mean: Callable[[Tensor, Tensor, Tensor], Tensor] = segment_mean
        self._norm: Callable[[Tensor, Affine, float, Tensor | None], Tensor] = (
            lambda x, affine, eps, _: F.layer_norm(
                x, x.shape[1:], *affine, eps
            )  # products have added their biases
        )
        if attention == "fused":  # triton is needed here only
            from virnuc_core.encoders.attention_kernels import fused_attention
            from virnuc_core.encoders.kernels import norm, span_means

            self._attend, self._mean, self._norm = fused_attention, span_means, norm

        def placed(name: str) -> Tensor:
            tensor = read(name)  # from page-locked memory the way to a GPU is several times as fast
            return (
                tensor.pin_memory().to(device, non_blocking=True)
                if device.type == "cuda"
                else tensor.to(device)
            )

        def wide(name: str) -> Tensor:
            return placed(name).float()

        def ready(name: str) -> Tensor:
            return placed(name).to(dtype)

        dtype, full = DTYPES[precision], ready if calibration is None else wide
        layers = (read_layer(full, i, *self.FEED_FORWARD) for i in range(shape.layers))
        if calibration is not None:
            layers = (
                in_int8(layer, seen, dtype) for layer, seen in zip(layers, calibration, strict=True)
            )
        self.layers = tuple(layers)
        self._take(wide, ready)

    @abstractmethod
    def _take(self, wide: Read, ready: Read) -> None:
        """Read what stands outside the layers, in float32 or as it runs."""

    def embed(self, batch: PackedBatch) -> Tensor:
        """Mean-pooled embeddings, float32 [row_capacity, width]; rows past `batch.rows` are zero.
        A row's values depend on its own tokens, the weights, the precision and the number of slots only.
        Never synchronises the device."""
        with torch.inference_mode():
            return self._mean(self.hidden(batch), *self.pooled_spans(batch.cu_seqlens))

    def _onto(self, stream: Tensor, x: Tensor, layer: Dense) -> Tensor:
        """`stream` with a product of `x` added. By kernels it is used up, one pass over memory less, and the product's
        bias is left to the norms behind it."""
        return (
            stream.addmm_(x, layer.weight.t())
            if self.attention == "fused"
            else stream + self.dense(x, layer)
        )

    @abstractmethod
    def hidden(self, batch: PackedBatch) -> Tensor:
        """Output of the last layer: [slots, width]."""

    @abstractmethod
    def pooled_spans(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """First and last-but-one slot of what is averaged of each row, int32 [row_capacity] each."""


def segment_mean(x: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Mean of `x` [tokens, width] over each span [start, end), float32 [spans, width]; zero where a span is empty.
    Spans ascend and do not overlap. Every span is summed on its own, first token to last, in float32: its mean does not
    depend on what else is in the batch, nor on dead slots (a difference of running sums would depend on both)."""
    bounds = (
        torch.stack((starts, ends), dim=1).flatten().long()
    )  # a span, the gap after it, the next span, ...
    ends_and_tail = torch.cat((bounds, bounds[-1:]))
    sums = torch.segment_reduce(
        x.float(), "sum", offsets=ends_and_tail, axis=0, unsafe=True, initial=0
    )[::2]
    return sums / (ends - starts).clamp_min(1).unsqueeze(1)
