"""Attention within each row of a packed batch by plain torch operations, and the choice between them and our kernels.

`fused`      our own Triton kernels, attention's among them (`attention_kernels`); CUDA
`reference`  plain torch operations; runs anywhere

What is asked for runs or raises. `auto` decides once, when the encoder is loaded.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from typing import Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.config import Attention
from virnuc_core.errors import ConfigError, DeviceError

Backend = Literal["fused", "reference"]

FUSED_HEADS: Final = (32, 64, 128)  # head sizes that the attention kernel is written for
REFERENCE_STEP = 16  # rows are padded to the next multiple of this, a function of the row alone
REFERENCE_SCORES = 1 << 24  # scores held at once: 64 MiB of float32


class Rows(NamedTuple):
    """Where the rows lie, and what tells the tokens of one apart; made once a batch, used by every layer."""

    cu_seqlens: Tensor  # int32 [row_capacity + 1]
    rows: int  # the real ones: the first so many
    max_seqlen: int
    heads: int
    cos: Tensor | None = None  # of each position, float32 [positions, head_dim / 2], with rotary positions
    sin: Tensor | None = None
    slopes: Tensor | None = None  # float32 [heads], with ALiBi


def choose_backend(asked: Attention, head_dim: int, device: torch.device) -> Backend:
    """What runs the layers. Raises `ConfigError` or `DeviceError`, in one line, when what is asked for cannot."""
    obstacle: ConfigError | DeviceError | None = None
    if device.type != "cuda":
        obstacle = DeviceError(f"attention 'fused' needs a CUDA device, this is {device}; use reference or auto")
    elif head_dim not in FUSED_HEADS:
        sizes = "32, 64 or 128"
        obstacle = ConfigError(f"attention 'fused' wants heads of {sizes}, not {head_dim}; use reference or auto")
    elif importlib.util.find_spec("triton") is None:
        obstacle = DeviceError("attention 'fused' needs triton, which is not installed; use reference or auto")
    if asked == "fused" and obstacle is not None:
        raise obstacle
    return "reference" if asked == "reference" or obstacle is not None else "fused"


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


def inv_freq(head_dim: int) -> Tensor:
    """Rotary frequencies in base 10,000, float32 [head_dim / 2]."""
    return 1.0 / (10_000 ** (torch.arange(0, head_dim, 2).float() / head_dim))


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


def reference(qkv: Tensor, rows: Rows) -> Tensor:
    """Attention by plain torch operations, scores and softmax in float32; zero in dead slots.

    `qkv` [slots, 3 * width] (all q heads, all k, all v) to [slots, width].
    """
    q, k, v = qkv.unflatten(1, (3, rows.heads, -1)).unbind(1)
    q = q * (1 / math.sqrt(q.shape[-1]))  # scaled, then rotated, as the model was trained
    if rows.cos is not None and rows.sin is not None:
        place = positions(rows.cu_seqlens, len(qkv))
        q, k = (rotate(x, rows.cos[place], rows.sin[place]).to(qkv.dtype) for x in (q, k))
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
    slots, step = len(v), torch.arange(padded, device=v.device)
    out = v.new_zeros(slots + 1, *v.shape[1:])  # the last slot takes what is padded
    starts, lengths = rows.cu_seqlens[:-1].long(), rows.cu_seqlens.diff().long()
    for start, length in zip(starts.split(portion), lengths.split(portion), strict=True):
        real = step < length.unsqueeze(1)  # [n, padded]
        # a padded place repeats the row's first token, so that no value of another row or a dead slot is ever read
        slot = torch.where(real, start.unsqueeze(1) + step, start.unsqueeze(1).clamp_max(slots - 1))
        queries, keys, values = (t[slot].transpose(1, 2) for t in (q, k, v))  # [n, heads, padded, head_dim]
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
