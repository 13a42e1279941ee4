"""The backend `reference`: attention, norm and means by plain torch operations, on any device."""

import itertools
import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.encoders.positions import RowLayout, alibi_bias, rotate, token_positions

PADDING_STEP: Final = 16  # rows are padded to the next multiple of this, by the row alone
MAX_SCORES: Final = 1 << 24  # attention scores held at once: 64 MiB of float32


def reference_attention(qkv: Tensor, layout: RowLayout) -> Tensor:
    """Attend within rows, with scores and softmax in float32.

    Args:
        qkv: Queries of all heads, keys of all heads, values of all heads: [slots, 3 * width].
        layout: Where the rows lie.

    Returns:
        [slots, width]; zeros in dead slots.
    """
    q, k, v = qkv.unflatten(1, (3, layout.heads, -1)).unbind(1)  # [slots, heads, head_dim] each
    q = q * (1 / math.sqrt(q.shape[-1]))  # scaled before it is rotated, as in training
    if layout.cos is not None and layout.sin is not None:
        positions = token_positions(layout.cu_seqlens, len(qkv))
        cos, sin = layout.cos[positions], layout.sin[positions]
        q = rotate(q, cos, sin).to(qkv.dtype)
        k = rotate(k, cos, sin).to(qkv.dtype)
    if qkv.device.type == "cpu":
        mixed = _attend_by_runs(q, k, v, layout)
    else:
        mixed = _attend_padded(q, k, v, layout)
    return mixed.flatten(1)


def _attend_by_runs(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout) -> Tensor:
    """Attend to neighbouring rows of one length together, without padding.

    For CPUs, where the lengths can be read at no cost. Packed batches have their longest rows
    first, so runs of one length are long, and they are views of the batch. Each row and head is a
    matrix product of its own, so the length of a run does not change results.

    Args:
        q, k, v: [slots, heads, head_dim] each.
        layout: Where the rows lie.

    Returns:
        [slots, heads, head_dim]; zeros in dead slots.
    """
    out = torch.zeros(v.shape, dtype=v.dtype)
    start = 0
    for length, run in itertools.groupby(layout.cu_seqlens.diff().tolist()):
        n_rows = len(list(run))
        span = slice(start, start + n_rows * length)
        start = span.stop
        if length == 0:
            continue
        queries, keys, values = (
            part[span].unflatten(0, (n_rows, length)).transpose(1, 2) for part in (q, k, v)
        )  # [rows, heads, length, head_dim]
        bias = None
        if layout.slopes is not None:
            bias = alibi_bias(layout.slopes, length)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=1.0)
        out[span] = mixed.transpose(1, 2).flatten(0, 1)
    return out


def _attend_padded(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout) -> Tensor:
    """Attend with all rows padded to the longest one that is possible.

    For GPUs, where reading the lengths would stop the queue of launched kernels: every shape is
    fixed and no device value is read. Rows are processed in portions that keep the scores small.

    Args:
        q, k, v: [slots, heads, head_dim] each.
        layout: Where the rows lie.

    Returns:
        [slots, heads, head_dim]; zeros in dead slots.
    """
    padded = math.ceil(layout.max_seqlen / PADDING_STEP) * PADDING_STEP
    rows_per_portion = max(1, MAX_SCORES // (layout.heads * padded * padded))
    slots = len(v)
    step = torch.arange(padded, device=v.device)
    out = v.new_zeros(slots + 1, *v.shape[1:])  # the last slot takes the results of padding
    starts = layout.cu_seqlens[:-1].long().split(rows_per_portion)
    lengths = layout.cu_seqlens.diff().long().split(rows_per_portion)
    for start, length in zip(starts, lengths, strict=True):
        is_real = step < length.unsqueeze(1)  # [rows, padded]
        # Padding repeats the row's first token, so no value of another row or a dead slot is read.
        first_slot = start.unsqueeze(1)
        slot = torch.where(is_real, first_slot + step, first_slot.clamp_max(slots - 1))
        queries, keys, values = (
            part[slot].transpose(1, 2) for part in (q, k, v)
        )  # [rows, heads, padded, head_dim]
        scores = (queries @ keys.transpose(2, 3)).float()  # [rows, heads, padded, padded]
        if layout.slopes is not None:
            scores += alibi_bias(layout.slopes, padded)
        scores.masked_fill_(~is_real[:, None, None, :], -math.inf)
        # An empty row has no key: its scores are kept finite, and nothing of it is written.
        scores.masked_fill_((length == 0)[:, None, None, None], 0.0)
        mixed = (scores.softmax(-1).to(values.dtype) @ values).transpose(1, 2)
        out[torch.where(is_real, slot, slots)] = mixed
    return out[:-1]


def layer_norm(
    x: Tensor, affine: tuple[Tensor, Tensor], eps: float, _shift: Tensor | None = None
) -> Tensor:
    """Normalise each row of `x` [rows, width]; products have added their biases already."""
    weight, bias = affine
    return F.layer_norm(x, x.shape[1:], weight, bias, eps)


def segment_mean(x: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Average `x` over each span of tokens.

    Every span is summed on its own, first token to last, in float32. So its mean depends neither on
    the rest of the batch nor on dead slots (a difference of running sums would depend on both).

    Args:
        x: [tokens, width].
        starts: First token of each span; spans ascend and do not overlap.
        ends: Token after the last of each span.

    Returns:
        float32 [spans, width]; zeros where a span is empty.
    """
    # The bounds of a span, then those of the gap behind it, then the next span, ...
    bounds = torch.stack((starts, ends), dim=1).flatten().long()
    offsets = torch.cat((bounds, bounds[-1:]))
    sums = torch.segment_reduce(x.float(), "sum", offsets=offsets, axis=0, unsafe=True, initial=0)
    span_sums = sums[::2]
    counts = (ends - starts).clamp_min(1).unsqueeze(1)
    return span_sums / counts
