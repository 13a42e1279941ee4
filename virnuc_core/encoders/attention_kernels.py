"""Triton kernels for attention within rows, straight from the packed queries, keys and values.

A program computes one head of one row: rotary positions or ALiBi, softmax, and the mix of values.
Rows of up to `WHOLE` tokens have all their keys and values at hand at once, and each key is rotated
a single time. Longer rows pass over blocks of keys with a running maximum (FlashAttention, Dao et
al. 2022). Which of the two it is, and the size of the blocks, follows from the power of two above
the bound that a batch was packed under, so from the row alone.

Names in the kernels: `base` is the address of the first query of a head, at the row's first token;
keys lie `width` numbers behind the queries, values another `width` behind the keys. `at_q` and
`at_k` are positions of queries and keys in the row. `low` and `high` are the halves of a head that
are rotated together. The code is compact, because each line costs time on the device.
"""

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from virnuc_core.encoders.positions import RowLayout

WHOLE: Final = 256  # longest row whose keys are held at once
QUERIES: Final = 64  # queries a program treats together
WIDE_QUERIES: Final = 32  # the same in float32: larger blocks do not fit the registers


@triton.jit
def _halves(
    base: tl.tensor,  # address of the head's queries or keys, at the row's first token
    at: tl.tensor,  # positions [tokens]
    is_live: tl.tensor,  # which of them the row has
    cos: tl.tensor,  # float32 [positions, head_dim / 2]; None with ALiBi
    sin: tl.tensor,
    stride: tl.constexpr,
    half: tl.constexpr,
    factor: tl.constexpr,
) -> tl.tensor:
    """Load both halves of some tokens' queries or keys, [tokens, half] each.

    They are scaled by `factor`, then rotated by float32 angles.
    """
    column = tl.arange(0, half)[None, :]
    address = base + at[:, None] * stride + column
    low = tl.load(address, mask=is_live[:, None], other=0.0)
    high = tl.load(address + half, mask=is_live[:, None], other=0.0)
    dtype = low.dtype
    if cos is not None:
        c = tl.load(cos + at[:, None] * half + column, mask=is_live[:, None], other=0.0)
        s = tl.load(sin + at[:, None] * half + column, mask=is_live[:, None], other=0.0)
        low_wide, high_wide = low.to(tl.float32) * factor, high.to(tl.float32) * factor
        low, high = (
            (low_wide * c - high_wide * s).to(dtype),
            (high_wide * c + low_wide * s).to(dtype),
        )
    elif factor != 1.0:
        low, high = (
            (low.to(tl.float32) * factor).to(dtype),
            (high.to(tl.float32) * factor).to(dtype),
        )
    return low, high


@triton.jit
def _scores(
    q_low: tl.tensor,  # [queries, half]
    q_high: tl.tensor,
    k_low: tl.tensor,  # [keys, half]
    k_high: tl.tensor,
    at_q: tl.tensor,
    at_k: tl.tensor,
    length: tl.tensor,
    slope: tl.tensor,
    dot_precision: tl.constexpr,
) -> tl.tensor:
    """Compute scores, float32 [queries, keys]; minus infinity for keys behind the row's end."""
    scores = tl.dot(q_low, tl.trans(k_low), input_precision=dot_precision)
    scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision=dot_precision)
    if slope is not None:
        scores -= slope * tl.abs(at_q[:, None] - at_k[None, :]).to(tl.float32)
    return tl.where((at_k < length)[None, :], scores, -float("inf"))


@triton.jit
def _values(
    base: tl.tensor, at: tl.tensor, length: tl.tensor, stride: tl.constexpr, head_dim: tl.constexpr
) -> tl.tensor:
    """Load the values of some tokens of one head, [tokens, head_dim]."""
    address = base + at[:, None] * stride + tl.arange(0, head_dim)[None, :]
    return tl.load(address, mask=(at < length)[:, None], other=0.0)


@triton.jit
def _clear_tail(
    out: tl.tensor,  # address of the head, at slot 0
    end: tl.tensor,
    slots: tl.tensor,
    width: tl.constexpr,
    head_dim: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write zeros to the slots behind the last row, so that nothing undefined stands there."""
    for first in range(end, slots, block):
        slot = first + tl.arange(0, block)
        address = out + slot.to(tl.int64)[:, None] * width + tl.arange(0, head_dim)[None, :]
        tl.store(
            address, tl.zeros([block, head_dim], out.dtype.element_ty), mask=(slot < slots)[:, None]
        )


@triton.jit
def _whole_row(
    base: tl.tensor,
    out: tl.tensor,
    length: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slope: tl.tensor,
    width: tl.constexpr,
    head_dim: tl.constexpr,
    factor: tl.constexpr,
    queries: tl.constexpr,
    near: tl.constexpr,
    far: tl.constexpr,
    dot_precision: tl.constexpr,
) -> None:
    """Compute one head of one row of up to `near` + `far` tokens.

    Keys and values are read and rotated once, in two parts; then every query meets them.
    """
    stride: tl.constexpr = 3 * width
    half: tl.constexpr = head_dim // 2
    at_near = tl.arange(0, near)
    low_near, high_near = _halves(
        base + width, at_near, at_near < length, cos, sin, stride, half, 1.0
    )
    v_near = _values(base + 2 * width, at_near, length, stride, head_dim)
    if far > 0:
        at_far = near + tl.arange(0, far)
        low_far, high_far = _halves(
            base + width, at_far, at_far < length, cos, sin, stride, half, 1.0
        )
        v_far = _values(base + 2 * width, at_far, length, stride, head_dim)
    end = length
    if near == queries and far == 0:
        end = queries  # known when compiled, so that no loop is left
    for first in range(0, end, queries):
        at_q = first + tl.arange(0, queries)
        is_live = at_q < length
        q_low, q_high = _halves(base, at_q, is_live, cos, sin, stride, half, factor)
        s = _scores(q_low, q_high, low_near, high_near, at_q, at_near, length, slope, dot_precision)
        best = tl.max(s, 1)
        if far > 0:
            t = _scores(
                q_low, q_high, low_far, high_far, at_q, at_far, length, slope, dot_precision
            )
            best = tl.maximum(best, tl.max(t, 1))
        weight = tl.exp(s - best[:, None])
        total = tl.sum(weight, 1)
        mixed = tl.dot(weight.to(v_near.dtype), v_near, input_precision=dot_precision)
        if far > 0:
            weight = tl.exp(t - best[:, None])
            total += tl.sum(weight, 1)
            mixed = tl.dot(weight.to(v_near.dtype), v_far, mixed, input_precision=dot_precision)
        address = out + at_q[:, None] * width + tl.arange(0, head_dim)[None, :]
        tl.store(address, (mixed / total[:, None]).to(v_near.dtype), mask=is_live[:, None])


@triton.jit
def _whole_rows(
    qkv: tl.tensor,  # [slots, 3 * width]
    out: tl.tensor,  # [slots, width]
    cu_seqlens: tl.tensor,  # int32 [rows + 1]
    cos: tl.tensor,
    sin: tl.tensor,
    slopes: tl.tensor,  # float32 [heads]; None with rotary positions
    slots: tl.tensor,
    width: tl.constexpr,
    head_dim: tl.constexpr,
    factor: tl.constexpr,
    queries: tl.constexpr,
    near: tl.constexpr,
    far: tl.constexpr,
    dot_precision: tl.constexpr,
) -> None:
    """Compute one head of one row; a row that fits into half of `far` is spared the other half."""
    head, row = tl.program_id(0), tl.program_id(1)
    start = tl.load(cu_seqlens + row)
    length = tl.load(cu_seqlens + row + 1) - start
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head)
    base = qkv + start.to(tl.int64) * (3 * width) + head * head_dim
    head_out = out + head * head_dim
    row_out = head_out + start.to(tl.int64) * width
    half: tl.constexpr = far // 2
    if far > 0:
        if length > near + half:
            _whole_row(
                base,
                row_out,
                length,
                cos,
                sin,
                slope,
                width,
                head_dim,
                factor,
                queries,
                near,
                far,
                dot_precision,
            )
        elif length > 0:
            _whole_row(
                base,
                row_out,
                length,
                cos,
                sin,
                slope,
                width,
                head_dim,
                factor,
                queries,
                near,
                half,
                dot_precision,
            )
    elif length > 0:
        _whole_row(
            base,
            row_out,
            length,
            cos,
            sin,
            slope,
            width,
            head_dim,
            factor,
            queries,
            near,
            0,
            dot_precision,
        )
    if row == tl.num_programs(1) - 1:
        _clear_tail(head_out, start + length, slots, width, head_dim, queries)


@triton.jit
def _long_rows(
    qkv: tl.tensor,
    out: tl.tensor,
    cu_seqlens: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slopes: tl.tensor,
    slots: tl.tensor,
    width: tl.constexpr,
    head_dim: tl.constexpr,
    factor: tl.constexpr,
    block: tl.constexpr,
    dot_precision: tl.constexpr,
) -> None:
    """Compute one head for one block of queries of a row.

    Keys are met block by block, with a running maximum and sum in float32.
    """
    head, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_seqlens + row)
    length = tl.load(cu_seqlens + row + 1) - start
    head_out = out + head * head_dim
    if part * block < length:
        stride: tl.constexpr = 3 * width
        half: tl.constexpr = head_dim // 2
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + head)
        base = qkv + start.to(tl.int64) * stride + head * head_dim
        at_q = part * block + tl.arange(0, block)
        is_live = at_q < length
        q_low, q_high = _halves(base, at_q, is_live, cos, sin, stride, half, factor)
        best = tl.full([block], -float("inf"), tl.float32)
        total = tl.zeros([block], tl.float32)
        mixed = tl.zeros([block, head_dim], tl.float32)
        for first in range(0, length, block):
            at_k = first + tl.arange(0, block)
            k_low, k_high = _halves(base + width, at_k, at_k < length, cos, sin, stride, half, 1.0)
            scores = _scores(q_low, q_high, k_low, k_high, at_q, at_k, length, slope, dot_precision)
            new_best = tl.maximum(best, tl.max(scores, 1))
            weight = tl.exp(scores - new_best[:, None])
            fade = tl.exp(best - new_best)
            total = total * fade + tl.sum(weight, 1)
            v = _values(base + 2 * width, at_k, length, stride, head_dim)
            mixed = tl.dot(
                weight.to(v.dtype), v, mixed * fade[:, None], input_precision=dot_precision
            )
            best = new_best
        address = (
            head_out
            + (start + at_q).to(tl.int64)[:, None] * width
            + tl.arange(0, head_dim)[None, :]
        )
        tl.store(address, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_live[:, None])
    if (part == 0) & (row == tl.num_programs(1) - 1):
        _clear_tail(head_out, start + length, slots, width, head_dim, block)


def fused_attention(qkv: Tensor, layout: RowLayout) -> Tensor:
    """Attend within the real rows, with ALiBi if the layout has slopes, else with rotary positions.

    `layout.max_seqlen` bounds the lengths of the rows. The results of a row depend on the power of
    two above it, and on nothing else of it.

    Args:
        qkv: Queries of all heads, keys of all heads, values of all heads: [slots, 3 * width].
        layout: Where the rows lie.

    Returns:
        [slots, width]; zeros in dead slots.
    """
    slots, width = qkv.shape[0], qkv.shape[1] // 3
    head_dim = width // layout.heads
    is_wide = qkv.dtype == torch.float32
    out = torch.empty(slots, width, dtype=qkv.dtype, device=qkv.device)
    tensors = (qkv, out, layout.cu_seqlens, layout.cos, layout.sin, layout.slopes, slots)
    constants: dict[str, object] = {
        "width": width,
        "head_dim": head_dim,
        "factor": 1 / math.sqrt(head_dim),
        "dot_precision": "ieee" if is_wide else "tf32",  # it matters for float32 only
        "num_warps": 4,
        "num_stages": 2,
    }
    heads, rows = layout.heads, max(1, layout.rows)
    if is_wide or layout.max_seqlen > WHOLE:
        block = WIDE_QUERIES if is_wide else QUERIES
        n_blocks = triton.cdiv(layout.max_seqlen, block)
        _long_rows[(heads, rows, n_blocks)](*tensors, **constants, block=block)
        return out
    if layout.max_seqlen <= QUERIES:
        near, far = QUERIES, 0
    elif layout.max_seqlen <= WHOLE // 2:
        near, far = WHOLE // 2, 0
    else:
        near, far = WHOLE // 2, WHOLE // 2
    _whole_rows[(heads, rows)](*tensors, **constants, queries=QUERIES, near=near, far=far)
    return out
