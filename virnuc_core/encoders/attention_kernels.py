"""Triton kernels for attention within rows, straight from the packed queries, keys and values.

A batch is a sequence of token slots. A row is one DNA or protein sequence in it: the tokens from
`cu_seqlens[row]` to `cu_seqlens[row + 1]`. Slots behind the last row are dead.

A kernel runs on the GPU as many copies ("programs") at the same time. Each computes one attention
head of one row: rotary positions or ALiBi, softmax, and the weighted mean of the values. There are
two kernels:

- `_whole_rows`, for rows of up to `MAX_WHOLE_ROW` tokens: a program loads all keys and values of
  the row, and rotates each key a single time.
- `_long_rows`, for longer rows: a program computes one block of queries, and passes over the keys
  in blocks with a running maximum (FlashAttention, Dao et al. 2022).

The kernel and the sizes of its blocks follow from the power of two above the longest row that the
batch may hold. Rows are packed with others of the same power of two, so the result of a row depends
on the row alone.

Names in the kernels: `qkv` has the queries of all heads, then all keys, then all values of a token.
`base` is the address of the first query of a head, at the row's first token. Its key lies `width`
numbers behind it, and its value `2 * width`. `low` and `high` are the two halves of a head, which
rotary positions rotate together; `half` is the width of a half.
"""

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from virnuc_core.encoders.positions import RowLayout

MAX_WHOLE_ROW: Final = 256  # tokens of the longest row whose keys fit into a program's registers
QUERIES_PER_STEP: Final = 64  # queries that a program treats together
QUERIES_PER_STEP_FP32: Final = 32  # the same in float32: larger blocks do not fit the registers


@triton.jit
def _halves(
    base: tl.tensor,  # address of the head's queries or keys, at the row's first token
    positions: tl.tensor,  # which tokens of the row to load, [tokens]
    is_live: tl.tensor,  # false for positions behind the row's end, [tokens]
    cos: tl.tensor,  # float32 [positions, head_dim / 2]; None with ALiBi
    sin: tl.tensor,
    stride: tl.constexpr,  # numbers from one token to the next
    half: tl.constexpr,  # head_dim / 2
    factor: tl.constexpr,  # 1 / sqrt(head_dim) for queries, 1 for keys
) -> tl.tensor:
    """Load the queries or keys of some tokens, multiplied by `factor` and rotated.

    The rotation encodes each token's position (rotary positions). With ALiBi nothing is rotated.
    The arithmetic is float32. Returned are the two halves of the head, [tokens, half] each, in the
    format of the input.
    """
    column = tl.arange(0, half)[None, :]
    address = base + positions[:, None] * stride + column
    low = tl.load(address, mask=is_live[:, None], other=0.0)
    high = tl.load(address + half, mask=is_live[:, None], other=0.0)
    dtype = low.dtype
    if cos is not None:
        cos_address = cos + positions[:, None] * half + column
        row_cos = tl.load(cos_address, mask=is_live[:, None], other=0.0)
        sin_address = sin + positions[:, None] * half + column
        row_sin = tl.load(sin_address, mask=is_live[:, None], other=0.0)
        low_float32 = low.to(tl.float32) * factor
        high_float32 = high.to(tl.float32) * factor
        # Column i of both halves is a point that is rotated by the angle of its token.
        low = (low_float32 * row_cos - high_float32 * row_sin).to(dtype)
        high = (high_float32 * row_cos + low_float32 * row_sin).to(dtype)
    elif factor != 1.0:
        low = (low.to(tl.float32) * factor).to(dtype)
        high = (high.to(tl.float32) * factor).to(dtype)
    return low, high


@triton.jit
def _scores(
    q_low: tl.tensor,  # [queries, half]
    q_high: tl.tensor,
    k_low: tl.tensor,  # [keys, half]
    k_high: tl.tensor,
    query_positions: tl.tensor,  # [queries]
    key_positions: tl.tensor,  # [keys]
    length: tl.tensor,  # tokens of the row
    slope: tl.tensor,  # of ALiBi; None with rotary positions
    dot_precision: tl.constexpr,  # how exactly Triton multiplies float32
) -> tl.tensor:
    """Compute the attention scores of some queries and keys, float32 [queries, keys].

    A score is the product of query and key over both halves of the head. With ALiBi, the slope
    times the distance of query and key is subtracted. Keys behind the row's end get minus infinity,
    so that their weight after softmax is 0.
    """
    scores = tl.dot(q_low, tl.trans(k_low), input_precision=dot_precision)
    scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision=dot_precision)
    if slope is not None:
        distances = tl.abs(query_positions[:, None] - key_positions[None, :])  # [queries, keys]
        scores -= slope * distances.to(tl.float32)
    is_live_key = key_positions < length
    return tl.where(is_live_key[None, :], scores, -float("inf"))


@triton.jit
def _values(
    base: tl.tensor,  # address of the head's values, at the row's first token
    positions: tl.tensor,  # which tokens of the row to load, [tokens]
    length: tl.tensor,  # tokens of the row
    stride: tl.constexpr,  # numbers from one token to the next
    head_dim: tl.constexpr,
) -> tl.tensor:
    """Load the values of some tokens of one head, [tokens, head_dim]; zeros behind the row."""
    address = base + positions[:, None] * stride + tl.arange(0, head_dim)[None, :]
    return tl.load(address, mask=(positions < length)[:, None], other=0.0)


@triton.jit
def _clear_dead_slots(
    out: tl.tensor,  # address of the head, at slot 0
    end: tl.tensor,  # the slot after the last row
    slots: tl.tensor,
    width: tl.constexpr,
    head_dim: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write zeros to one head's part of the dead slots, `block` slots at a time.

    Dead slots are the places for tokens behind the last row. The output tensor was allocated
    without initial values, and no row covers these slots.
    """
    for first in range(end, slots, block):
        slot = first + tl.arange(0, block)
        address = out + slot.to(tl.int64)[:, None] * width + tl.arange(0, head_dim)[None, :]
        zeros = tl.zeros([block, head_dim], out.dtype.element_ty)
        tl.store(address, zeros, mask=(slot < slots)[:, None])


@triton.jit
def _whole_row(
    base: tl.tensor,  # address of the head's queries, at the row's first token
    out: tl.tensor,  # address of the head's output, at the row's first token
    length: tl.tensor,  # tokens of the row
    cos: tl.tensor,  # float32 [positions, head_dim / 2]; None with ALiBi
    sin: tl.tensor,
    slope: tl.tensor,  # of ALiBi; None with rotary positions
    width: tl.constexpr,
    head_dim: tl.constexpr,
    factor: tl.constexpr,  # 1 / sqrt(head_dim), with which queries are multiplied
    queries: tl.constexpr,  # queries that are treated together
    near: tl.constexpr,  # keys of the first part
    far: tl.constexpr,  # keys of the second part
    dot_precision: tl.constexpr,  # how exactly Triton multiplies float32
) -> None:
    """Compute one head of one row of up to `near + far` tokens.

    All keys and values of the row are loaded once: the first `near` tokens, then `far` further ones
    (0 for short rows), because Triton holds blocks of powers of two only. Then the queries are
    treated, `queries` at a time: scores, softmax in float32, and the weighted mean of the values.

    A token has its queries, keys and values of all heads side by side, `width` numbers each.
    """
    stride: tl.constexpr = 3 * width
    half: tl.constexpr = head_dim // 2
    near_positions = tl.arange(0, near)
    # The keys of a token lie `width` numbers behind its queries, the values again as far.
    low_near, high_near = _halves(
        base + width, near_positions, near_positions < length, cos, sin, stride, half, 1.0
    )
    v_near = _values(base + 2 * width, near_positions, length, stride, head_dim)
    if far > 0:
        far_positions = near + tl.arange(0, far)
        low_far, high_far = _halves(
            base + width, far_positions, far_positions < length, cos, sin, stride, half, 1.0
        )
        v_far = _values(base + 2 * width, far_positions, length, stride, head_dim)
    end = length
    if near == queries and far == 0:
        # The row fits into one step. The end is known when the kernel is compiled, so the compiler
        # removes the loop.
        end = queries
    for first in range(0, end, queries):
        query_positions = first + tl.arange(0, queries)
        is_live = query_positions < length
        q_low, q_high = _halves(base, query_positions, is_live, cos, sin, stride, half, factor)
        near_scores = _scores(
            q_low,
            q_high,
            low_near,
            high_near,
            query_positions,
            near_positions,
            length,
            slope,
            dot_precision,
        )
        # Softmax subtracts the largest score of a query, so that no exponential is infinite.
        row_max = tl.max(near_scores, 1)  # [queries]
        if far > 0:
            far_scores = _scores(
                q_low,
                q_high,
                low_far,
                high_far,
                query_positions,
                far_positions,
                length,
                slope,
                dot_precision,
            )
            row_max = tl.maximum(row_max, tl.max(far_scores, 1))
        weight = tl.exp(near_scores - row_max[:, None])  # [queries, near]
        weight_sum = tl.sum(weight, 1)  # [queries]
        value_sum = tl.dot(  # [queries, head_dim]
            weight.to(v_near.dtype), v_near, input_precision=dot_precision
        )
        if far > 0:
            weight = tl.exp(far_scores - row_max[:, None])  # [queries, far]
            weight_sum += tl.sum(weight, 1)
            value_sum = tl.dot(
                weight.to(v_near.dtype), v_far, value_sum, input_precision=dot_precision
            )
        address = out + query_positions[:, None] * width + tl.arange(0, head_dim)[None, :]
        mean_value = value_sum / weight_sum[:, None]
        tl.store(address, mean_value.to(v_near.dtype), mask=is_live[:, None])


@triton.jit
def _whole_rows(
    qkv: tl.tensor,  # [slots, 3 * width]
    out: tl.tensor,  # [slots, width]
    cu_seqlens: tl.tensor,  # int32 [rows + 1]: the first slot of each row, then the end
    cos: tl.tensor,  # float32 [positions, head_dim / 2]; None with ALiBi
    sin: tl.tensor,
    slopes: tl.tensor,  # float32 [heads]; None with rotary positions
    slots: tl.tensor,
    width: tl.constexpr,
    head_dim: tl.constexpr,
    factor: tl.constexpr,  # 1 / sqrt(head_dim), with which queries are multiplied
    queries: tl.constexpr,  # queries that are treated together
    near: tl.constexpr,  # keys of the first part in which a row's keys are loaded
    far: tl.constexpr,  # keys of the second part; 0 if the batch has short rows only
    dot_precision: tl.constexpr,  # how exactly Triton multiplies float32
) -> None:
    """Compute attention for one head of one row: one program for each head and row.

    The keys of a row are loaded in two parts, `near` and `far`, and the batch may hold rows of up
    to `near + far` tokens. To save work, `far` is halved for a row that needs no more than half of
    it. The program of the last row also clears the dead slots, which lie behind it.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
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
        _clear_dead_slots(head_out, start + length, slots, width, head_dim, queries)


@triton.jit
def _long_rows(
    qkv: tl.tensor,  # [slots, 3 * width]
    out: tl.tensor,  # [slots, width]
    cu_seqlens: tl.tensor,  # int32 [rows + 1]: the first slot of each row, then the end
    cos: tl.tensor,  # float32 [positions, head_dim / 2]; None with ALiBi
    sin: tl.tensor,
    slopes: tl.tensor,  # float32 [heads]; None with rotary positions
    slots: tl.tensor,
    width: tl.constexpr,
    head_dim: tl.constexpr,
    factor: tl.constexpr,  # 1 / sqrt(head_dim), with which queries are multiplied
    block: tl.constexpr,  # queries of a program, and keys that are treated together
    dot_precision: tl.constexpr,  # how exactly Triton multiplies float32
) -> None:
    """Compute attention for one head and one block of queries of a row: one program for each.

    Queries, keys and values of all heads are side by side in `qkv`. A batch has `slots` places for
    tokens; those after the last row are dead slots.

    The keys are treated block by block (FlashAttention). `row_max`, `weight_sum` and `value_sum`
    are the largest score, the sum of weights and the weighted sum of values so far, in float32.
    When a new block has a larger score, the sums so far are multiplied with `rescale`. The first
    program of the last row clears the dead slots.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    # There are as many blocks of queries as the longest possible row needs, so for shorter rows
    # some programs have nothing to do.
    query_block = tl.program_id(2)
    start = tl.load(cu_seqlens + row)
    length = tl.load(cu_seqlens + row + 1) - start
    head_out = out + head * head_dim
    if query_block * block < length:
        stride: tl.constexpr = 3 * width
        half: tl.constexpr = head_dim // 2
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + head)
        base = qkv + start.to(tl.int64) * stride + head * head_dim
        query_positions = query_block * block + tl.arange(0, block)
        is_live = query_positions < length
        q_low, q_high = _halves(base, query_positions, is_live, cos, sin, stride, half, factor)
        row_max = tl.full([block], -float("inf"), tl.float32)
        weight_sum = tl.zeros([block], tl.float32)
        value_sum = tl.zeros([block, head_dim], tl.float32)
        for first in range(0, length, block):
            key_positions = first + tl.arange(0, block)
            # The keys of a token lie `width` numbers behind its queries, the values again as far.
            k_low, k_high = _halves(
                base + width, key_positions, key_positions < length, cos, sin, stride, half, 1.0
            )
            scores = _scores(
                q_low,
                q_high,
                k_low,
                k_high,
                query_positions,
                key_positions,
                length,
                slope,
                dot_precision,
            )
            new_max = tl.maximum(row_max, tl.max(scores, 1))  # [queries]
            weight = tl.exp(scores - new_max[:, None])  # [queries, keys]
            rescale = tl.exp(row_max - new_max)  # [queries]
            weight_sum = weight_sum * rescale + tl.sum(weight, 1)
            v = _values(base + 2 * width, key_positions, length, stride, head_dim)
            value_sum = tl.dot(
                weight.to(v.dtype), v, value_sum * rescale[:, None], input_precision=dot_precision
            )
            row_max = new_max
        slot = (start + query_positions).to(tl.int64)
        address = head_out + slot[:, None] * width + tl.arange(0, head_dim)[None, :]
        mean_value = value_sum / weight_sum[:, None]
        tl.store(address, mean_value.to(out.dtype.element_ty), mask=is_live[:, None])
    if (query_block == 0) & (row == tl.num_programs(1) - 1):
        _clear_dead_slots(head_out, start + length, slots, width, head_dim, block)


def fused_attention(qkv: Tensor, layout: RowLayout) -> Tensor:
    """Compute attention within each row of a packed batch by the Triton kernels of this module.

    Positions enter by ALiBi if the layout has slopes, else by rotary embeddings.

    Args:
        qkv: Queries of all heads, keys of all heads, values of all heads: [slots, 3 * width].
        layout: Where the rows lie, and the length of the longest row that is possible. Only the
            power of two above this length changes results, because it decides about the blocks.

    Returns:
        A new tensor [slots, width] in the format of `qkv`; zeros in slots behind the last row.
    """
    slots = qkv.shape[0]
    width = qkv.shape[1] // 3
    head_dim = width // layout.heads
    is_float32 = qkv.dtype == torch.float32
    out = torch.empty(slots, width, dtype=qkv.dtype, device=qkv.device)
    tensors = (qkv, out, layout.cu_seqlens, layout.cos, layout.sin, layout.slopes, slots)
    constants: dict[str, object] = {
        "width": width,
        "head_dim": head_dim,
        "factor": 1 / math.sqrt(head_dim),
        # Products of float32 are computed exactly. In 16-bit formats the setting has no effect.
        "dot_precision": "ieee" if is_float32 else "tf32",
        "num_warps": 4,
        "num_stages": 2,
    }
    heads = layout.heads
    rows = max(1, layout.rows)  # an empty batch still needs one program: it clears the dead slots

    # Long rows, and all rows in float32, whose keys do not fit into the registers
    if is_float32 or layout.max_seqlen > MAX_WHOLE_ROW:
        block = QUERIES_PER_STEP_FP32 if is_float32 else QUERIES_PER_STEP
        n_blocks = triton.cdiv(layout.max_seqlen, block)
        _long_rows[(heads, rows, n_blocks)](*tensors, **constants, block=block)
        return out

    # Short rows: choose how many keys are loaded in the first part (`near`) and in the second part
    # (`far`). Together they hold the longest row.
    if layout.max_seqlen <= QUERIES_PER_STEP:
        near, far = QUERIES_PER_STEP, 0
    elif layout.max_seqlen <= MAX_WHOLE_ROW // 2:
        near, far = MAX_WHOLE_ROW // 2, 0
    else:
        near, far = MAX_WHOLE_ROW // 2, MAX_WHOLE_ROW // 2
    _whole_rows[(heads, rows)](*tensors, **constants, queries=QUERIES_PER_STEP, near=near, far=far)
    return out
