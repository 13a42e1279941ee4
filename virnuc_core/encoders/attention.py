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
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.config import Attention
from virnuc_core.encoders.packed import PackedBatch
from virnuc_core.encoders.precision import Resolved
from virnuc_core.errors import ConfigError, DeviceError

Backend = Literal["varlen", "fused", "reference"]
Bias = Literal["rotary", "alibi"]

REFERENCE_STEP = 16  # rows are padded to the next multiple of this, a function of the row alone
REFERENCE_SCORES = 1 << 24  # scores held at once: 64 MiB of float32


class Rows(NamedTuple):
    """Where the rows lie, and what tells the tokens of one apart; made once a batch, used by every layer."""

    cu_seqlens: Tensor  # int32 [row_capacity + 1]
    max_seqlen: int
    launched: int  # rows to attend to: the real ones, or as many as fit where the number must not change
    heads: int
    cos_table: Tensor | None = None  # float32 [positions, head_dim / 2], with rotary positions
    sin_table: Tensor | None = None
    cos: Tensor | None = None  # the same at each token's position, float32 [slots, head_dim / 2]
    sin: Tensor | None = None
    slopes: Tensor | None = None  # float32 [heads], with ALiBi


Attend = Callable[[Tensor, Rows], Tensor]  # [slots, 3 * width] (all q heads, all k, all v) to [slots, width]
Layers = Callable[[Tensor, Rows, Attend], Tensor]  # an encoder's layers: [slots, width] to the last hidden state


def choose_backend(
    asked: Attention, *, bias: Bias, head_dim: int, precision: Resolved, device: torch.device
) -> Backend:
    """The backend that runs. Raises `ConfigError` or `DeviceError`, in one line, when the one asked for cannot."""
    if asked == "auto":
        for candidate in ("fused", "varlen"):
            if _obstacle(candidate, bias=bias, head_dim=head_dim, precision=precision, device=device) is None:
                return candidate
        return "reference"
    obstacle = _obstacle(asked, bias=bias, head_dim=head_dim, precision=precision, device=device)
    if obstacle is not None:
        raise obstacle
    return asked


def _obstacle(
    backend: Backend, *, bias: Bias, head_dim: int, precision: Resolved, device: torch.device
) -> ConfigError | DeviceError | None:
    """Why `backend` cannot run here, if it cannot."""
    if backend == "reference":
        return None
    if device.type != "cuda":
        return DeviceError(f"attention '{backend}' needs a CUDA device, this is {device}; use reference or auto")
    if backend == "varlen":
        if bias == "alibi":
            return ConfigError("attention 'varlen' takes no ALiBi bias, which DNABERT-S needs; use fused or auto")
        if precision == "fp32":
            return ConfigError("attention 'varlen' computes in fp16 or bf16 only, precision is fp32; use fused or auto")
        if head_dim % 8 or head_dim > 256:
            return ConfigError(f"attention 'varlen' wants heads of a multiple of 8 up to 256, not {head_dim}; use auto")
        return None
    if head_dim not in (32, 64, 128):
        return ConfigError(
            f"attention 'fused' is made for heads of 32, 64 or 128, not {head_dim}; use reference or auto"
        )
    if importlib.util.find_spec("triton") is None:
        return DeviceError("attention 'fused' needs triton, which is not installed; use varlen, reference or auto")
    return None


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


def bind(backend: Backend, *, compiled: bool) -> Attend:
    """The call of one backend; for a compiled block, as an operator that the compiler does not look into."""
    match backend:
        case "varlen":
            unsplit = _unsplit()
            return lambda qkv, rows: varlen(qkv, rows, unsplit)
        case "reference":
            plain = reference_op() if compiled else reference
            return lambda qkv, r: plain(qkv, r.cu_seqlens, r.cos, r.sin, r.slopes, r.heads, r.max_seqlen)
        case "fused":
            from virnuc_core.encoders.attention_kernels import attention_op, fused_attention

            fused = attention_op() if compiled else fused_attention
            return lambda qkv, r: fused(
                qkv,
                r.cu_seqlens,
                r.cos_table,
                r.sin_table,
                r.slopes,
                r.heads,
                r.max_seqlen,
                r.launched,
            )


def rows_to_launch(batch: PackedBatch, *, compiled: bool) -> int:
    """How many rows a kernel is launched for: the real ones, or all that fit when the launch is recorded for later."""
    recorded = compiled or (batch.tokens.is_cuda and torch.cuda.is_current_stream_capturing())
    return batch.row_capacity if recorded else batch.rows


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views [slots, heads, head_dim] of the queries, keys and values."""
    q, k, v = qkv.unflatten(1, (3, heads, -1)).unbind(1)
    return q, k, v


def varlen(qkv: Tensor, rows: Rows, options: dict[str, Any]) -> Tensor:
    """torch's packed flash attention, with rotary positions applied before it."""
    from torch.nn.attention.varlen import varlen_attn

    assert rows.cos is not None
    assert rows.sin is not None
    q, k, v = split_heads(qkv, rows.heads)
    scale = 1 / math.sqrt(q.shape[-1])
    q = rotate(q * scale, rows.cos, rows.sin).to(qkv.dtype)  # scaled before rotation, as the model was trained
    k = rotate(k, rows.cos, rows.sin).to(qkv.dtype)
    longest = rows.max_seqlen
    out = varlen_attn(q, k, v, rows.cu_seqlens, rows.cu_seqlens, longest, longest, scale=1.0, **options)
    assert isinstance(out, Tensor)  # a pair is returned only when asked for
    return out.flatten(1)


def _unsplit() -> dict[str, Any]:
    """Newer torch may split a row's keys by what else is in the batch, unless told not to; older torch never does."""
    from torch.nn.attention.varlen import varlen_attn

    return {"num_splits": 1} if "num_splits" in inspect.signature(varlen_attn).parameters else {}


def reference(
    qkv: Tensor,
    cu_seqlens: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    slopes: Tensor | None,
    heads: int,
    max_seqlen: int,
) -> Tensor:
    """Attention by plain torch operations, scores and softmax in float32; zero in dead slots."""
    q, k, v = split_heads(qkv, heads)
    q = q * (1 / math.sqrt(q.shape[-1]))
    if cos is not None and sin is not None:
        q, k = rotate(q, cos, sin).to(qkv.dtype), rotate(k, cos, sin).to(qkv.dtype)
    if qkv.device.type == "cpu":
        return _attend_runs(q, k, v, cu_seqlens, slopes)
    out = torch.zeros(
        (v.shape[0] + 1, *v.shape[1:]), dtype=v.dtype, device=v.device
    )  # the last slot takes what is padded
    for start, length, padded in _padded_groups(cu_seqlens, heads, max_seqlen):
        _attend_group(out, q, k, v, start, length, padded, slopes)
    return out[:-1].flatten(1)


@functools.cache
def reference_op() -> Callable[..., Tensor]:
    """`reference` as an operator that a compiled block calls without looking inside."""
    schema = (
        "(Tensor qkv, Tensor cu_seqlens, Tensor? cos, Tensor? sin, Tensor? slopes, int heads, int max_seqlen) -> Tensor"
    )
    op = torch.library.custom_op("virnuc::reference_attention", reference, mutates_args=(), schema=schema)

    @op.register_fake
    def _(qkv: Tensor, *_args: object) -> Tensor:
        return qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3)

    return op


def _attend_runs(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, slopes: Tensor | None) -> Tensor:
    """On a CPU the lengths can be looked at: neighbouring rows of one length are attended to together, without padding.

    Packed batches lie longest row first, so such runs are long and are views of what is there. Each row and head is a
    product of its own inside, so a run's length changes no bit.
    """
    out = torch.zeros(v.shape, dtype=v.dtype)  # dead slots stay zero
    lengths = cu_seqlens.diff()
    for length, rows, start in _runs(lengths.tolist(), cu_seqlens.tolist()):
        span = slice(start, start + rows * length)
        queries, keys, values = (t[span].unflatten(0, (rows, length)).transpose(1, 2) for t in (q, k, v))
        bias = None if slopes is None else _alibi(slopes, length)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=1.0)
        out[span] = mixed.transpose(1, 2).flatten(0, 1)
    return out.flatten(1)


def _runs(lengths: list[int], starts: list[int]) -> list[tuple[int, int, int]]:
    """Length, number and first slot of neighbouring rows of one length; empty rows left out."""
    runs: list[tuple[int, int, int]] = []
    for length, start in zip(lengths, starts[:-1], strict=True):
        if runs and runs[-1][0] == length:
            runs[-1] = (length, runs[-1][1] + 1, runs[-1][2])
        elif length:
            runs.append((length, 1, start))
    return runs


def _alibi(slopes: Tensor, length: int) -> Tensor:
    """What ALiBi adds to the scores of a row, float32 [heads, length, length]."""
    step = torch.arange(length, device=slopes.device)
    return -slopes.view(-1, 1, 1) * (step.unsqueeze(0) - step.unsqueeze(1)).abs()


def _padded_groups(cu_seqlens: Tensor, heads: int, max_seqlen: int) -> list[tuple[Tensor, Tensor, int]]:
    """Rows to attend to together: starts [n], lengths [n] and the length all are padded to.

    Looking at the lengths would stop the device's launch queue, so it is the longest there may be.
    """
    starts = cu_seqlens[:-1].long()
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    return _portions(starts, lengths, -(-max_seqlen // REFERENCE_STEP) * REFERENCE_STEP, heads)


def _portions(starts: Tensor, lengths: Tensor, padded: int, heads: int) -> list[tuple[Tensor, Tensor, int]]:
    """Rows of one padded length, in portions that keep the scores small."""
    step = max(1, REFERENCE_SCORES // (heads * padded * padded))
    return [(a, b, padded) for a, b in zip(starts.split(step), lengths.split(step), strict=True)]


def _attend_group(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, start: Tensor, length: Tensor, padded: int, slopes: Tensor | None
) -> None:
    """Attention of rows padded to one length; writes their slots of `out` [slots + 1, heads, head_dim]."""
    step = torch.arange(padded, device=out.device)
    real = step < length.unsqueeze(1)  # [n, padded]
    slot = torch.where(real, start.unsqueeze(1) + step, start.unsqueeze(1).clamp_max(q.shape[0] - 1))
    # a padded place repeats the row's first token, so that no value of another row or a dead slot is ever read
    queries, keys, values = (t[slot].transpose(1, 2) for t in (q, k, v))  # [n, heads, padded, head_dim]
    scores = (queries @ keys.transpose(2, 3)).float()
    if slopes is not None:
        scores += _alibi(slopes, padded)
    scores.masked_fill_(~real[:, None, None, :], -math.inf)
    scores.masked_fill_(
        (length == 0)[:, None, None, None], 0.0
    )  # an empty row has no key: keep it finite, write nothing
    mixed = (scores.softmax(-1).to(values.dtype) @ values).transpose(1, 2)
    # what stands past the end of a row goes to the spare slot: every shape is fixed, no device value is looked at
    out[torch.where(real, slot, out.shape[0] - 1)] = mixed
