"""Attention within each row of a packed batch, behind one call with named backends.

`varlen`     torch's flash attention over packed rows; CUDA, fp16 or bf16, rotary positions only (it takes no bias)
`fused`      one Triton kernel that turns the fused QKV output into the attention output; CUDA, rotary or ALiBi
`reference`  plain torch operations; runs anywhere

What is asked for runs or raises. `auto` decides once, when the encoder is loaded.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.config import Attention
from virnuc_core.encoders.precision import Resolved
from virnuc_core.errors import ConfigError, DeviceError

Backend = Literal["varlen", "fused", "reference"]
Bias = Literal["rotary", "alibi"]

REFERENCE_STEP = 16  # rows are padded to the next multiple of this, a function of the row alone
REFERENCE_SCORES = 1 << 24  # scores held at once: 64 MiB of float32


class Rows(NamedTuple):
    """Where the rows lie, and what tells the tokens of one apart; made once a batch, used by every layer."""

    cu_seqlens: Tensor  # int32 [row_capacity + 1]
    rows: int  # the real ones: the first so many
    max_seqlen: int
    heads: int
    cos_table: Tensor | None = None  # float32 [positions, head_dim / 2], with rotary positions
    sin_table: Tensor | None = None
    cos: Tensor | None = None  # the same at each token's position, float32 [slots, head_dim / 2]
    sin: Tensor | None = None
    slopes: Tensor | None = None  # float32 [heads], with ALiBi


Attend = Callable[[Tensor, Rows], Tensor]  # [slots, 3 * width] (all q heads, all k, all v) to [slots, width]


def choose_backend(
    asked: Attention, *, bias: Bias, head_dim: int, precision: Resolved, device: torch.device
) -> Backend:
    """The backend that runs. Raises `ConfigError` or `DeviceError`, in one line, when the one asked for cannot."""

    def obstacle(backend: Backend) -> ConfigError | DeviceError | None:
        """Why `backend` cannot run here, if it cannot."""
        name = f"attention '{backend}'"
        if backend == "reference":
            return None
        if device.type != "cuda":
            return DeviceError(f"{name} needs a CUDA device, this is {device}; use reference or auto")
        if backend == "fused" and head_dim not in (32, 64, 128):
            return ConfigError(f"{name} wants heads of 32, 64 or 128, not {head_dim}; use reference or auto")
        if backend == "fused" and not has_triton():
            return DeviceError(f"{name} needs triton, which is not installed; use varlen, reference or auto")
        if backend == "varlen" and bias == "alibi":
            return ConfigError(f"{name} takes no ALiBi bias, which DNABERT-S needs; use fused or auto")
        if backend == "varlen" and precision == "fp32":
            return ConfigError(f"{name} computes in fp16 or bf16 only, precision is fp32; use fused or auto")
        if backend == "varlen" and (head_dim % 8 or head_dim > 256):
            return ConfigError(f"{name} wants heads of a multiple of 8 up to 256, not {head_dim}; use auto")
        return None

    if asked == "auto":
        candidates: tuple[Backend, ...] = ("fused", "varlen", "reference")
        return next(backend for backend in candidates if obstacle(backend) is None)
    found = obstacle(asked)
    if found is not None:
        raise found
    return asked


def has_triton() -> bool:
    """Whether our own kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None


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
    return slopes + [2.0 ** (-8.0 * (i + 1) / (2 * whole)) for i in range(0, 2 * (heads - whole), 2)]


def rotary_tables(inv_freq: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of positions 0 … length-1, float32 [length, head_dim / 2] each."""
    angles = torch.outer(torch.arange(length, device=inv_freq.device, dtype=torch.float32), inv_freq.float())
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on `x` [slots, heads, head_dim], in float32, rotate-half form."""
    half = x.shape[-1] // 2
    low, high = x[..., :half].float(), x[..., half:].float()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _split_and_rotate(qkv: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [slots, heads, head_dim]; scaled, then rotated, as the model was trained."""
    q, k, v = qkv.unflatten(1, (3, rows.heads, -1)).unbind(1)
    q = q * (1 / math.sqrt(q.shape[-1]))
    if rows.cos is not None and rows.sin is not None:
        q, k = rotate(q, rows.cos, rows.sin).to(qkv.dtype), rotate(k, rows.cos, rows.sin).to(qkv.dtype)
    return q, k, v


def varlen(qkv: Tensor, rows: Rows) -> Tensor:
    """torch's packed flash attention, with rotary positions applied before it."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = _split_and_rotate(qkv, rows)
    longest = rows.max_seqlen
    out = varlen_attn(q, k, v, rows.cu_seqlens, rows.cu_seqlens, longest, longest, scale=1.0, **_unsplit())
    assert isinstance(out, Tensor)  # a pair is returned only when asked for
    return out.flatten(1)


@functools.cache
def _unsplit() -> dict[str, Any]:
    """Newer torch may split a row's keys by what else is in the batch, unless told not to; older torch never does."""
    from torch.nn.attention.varlen import varlen_attn

    return {"num_splits": 1} if "num_splits" in inspect.signature(varlen_attn).parameters else {}


def reference(qkv: Tensor, rows: Rows) -> Tensor:
    """Attention by plain torch operations, scores and softmax in float32; zero in dead slots."""
    q, k, v = _split_and_rotate(qkv, rows)
    return (_by_runs if qkv.device.type == "cpu" else _by_padding)(q, k, v, rows).flatten(1)


def _by_runs(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """On a CPU the lengths can be looked at: neighbouring rows of one length are attended to together, without padding.

    Packed batches lie longest row first, so such runs are long and are views of what is there. Each row and head is a
    product of its own inside, so a run's length changes no bit.
    """
    out = torch.zeros(v.shape, dtype=v.dtype)  # dead slots stay zero
    start = 0
    for length, run in itertools.groupby(rows.cu_seqlens.diff().tolist()):
        count = len(list(run))
        span = slice(start, start + count * length)
        start = span.stop
        if length:
            queries, keys, values = (t[span].unflatten(0, (count, length)).transpose(1, 2) for t in (q, k, v))
            bias = None if rows.slopes is None else _alibi(rows.slopes, length)
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=1.0)
            out[span] = mixed.transpose(1, 2).flatten(0, 1)
    return out


def _by_padding(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Where looking at the lengths would stop the launch queue: all rows padded to the longest there may be.

    They are attended to in portions that keep the scores small.
    """
    padded = -(-rows.max_seqlen // REFERENCE_STEP) * REFERENCE_STEP
    portion = max(1, REFERENCE_SCORES // (rows.heads * padded * padded))
    out = v.new_zeros(v.shape[0] + 1, *v.shape[1:])  # the last slot takes what is padded
    starts, lengths = rows.cu_seqlens[:-1].long(), rows.cu_seqlens.diff().long()
    for start, length in zip(starts.split(portion), lengths.split(portion), strict=True):
        _attend_padded(out, (q, k, v), start, length, padded, rows.slopes)
    return out[:-1]


def _alibi(slopes: Tensor, length: int) -> Tensor:
    """What ALiBi adds to the scores of a row, float32 [heads, length, length]."""
    step = torch.arange(length, device=slopes.device)
    return -slopes.view(-1, 1, 1) * (step.unsqueeze(0) - step.unsqueeze(1)).abs()


def _attend_padded(
    out: Tensor, qkv: tuple[Tensor, Tensor, Tensor], start: Tensor, length: Tensor, padded: int, slopes: Tensor | None
) -> None:
    """Attention of rows padded to one length; writes their slots of `out` [slots + 1, heads, head_dim]."""
    step = torch.arange(padded, device=out.device)
    real = step < length.unsqueeze(1)  # [n, padded]
    # a padded place repeats the row's first token, so that no value of another row or a dead slot is ever read
    slot = torch.where(real, start.unsqueeze(1) + step, start.unsqueeze(1).clamp_max(out.shape[0] - 2))
    queries, keys, values = (t[slot].transpose(1, 2) for t in qkv)  # [n, heads, padded, head_dim]
    scores = (queries @ keys.transpose(2, 3)).float()
    if slopes is not None:
        scores += _alibi(slopes, padded)
    scores.masked_fill_(~real[:, None, None, :], -math.inf)
    # an empty row has no key: keep it finite, write nothing
    scores.masked_fill_((length == 0)[:, None, None, None], 0.0)
    mixed = (scores.softmax(-1).to(values.dtype) @ values).transpose(1, 2)
    # what stands past the end of a row goes to the spare slot: every shape is fixed, no device value is looked at
    out[torch.where(real, slot, out.shape[0] - 1)] = mixed
