"""Triton kernels: attention straight from the fused QKV output, and what stands between the matrix products.

Imported only where a kernel is asked for: triton need not be installed elsewhere. Each kernel treats a row (of tokens,
or of a matrix) by itself, in blocks whose size does not depend on its neighbours, so its numbers do not either.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from virnuc_core.encoders.precision import FP8, FP8_MAX


def _jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, which has no types of its own."""
    return triton.jit(function)


@_jit
def _gelu(x: tl.tensor) -> tl.tensor:
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@_jit
def _turned(
    base: tl.tensor,  # first number of a head of the row's first token
    at: tl.tensor,  # positions [tokens]
    live: tl.tensor,  # which of them the row has
    c: tl.tensor,  # float32 [tokens, half]: cosines of their angles
    s: tl.tensor,  # and sines
    stride: tl.constexpr,
    half: tl.constexpr,
    factor: tl.constexpr,
) -> tl.tensor:
    """Both halves of one head of some tokens, scaled, then rotated by float32 angles: [tokens, half] each."""
    place = base + at[:, None] * stride + tl.arange(0, half)[None, :]
    low = tl.load(place, mask=live[:, None], other=0.0)
    high = tl.load(place + half, mask=live[:, None], other=0.0)
    low_wide, high_wide = low.to(tl.float32) * factor, high.to(tl.float32) * factor
    return (low_wide * c - high_wide * s).to(low.dtype), (high_wide * c + low_wide * s).to(low.dtype)


@_jit
def _angles(table: tl.tensor, at: tl.tensor, live: tl.tensor, half: tl.constexpr) -> tl.tensor:
    """Rows `at` of a float32 table [positions, half]."""
    return tl.load(table + at[:, None] * half + tl.arange(0, half)[None, :], mask=live[:, None], other=0.0)


@_jit
def _attention(  # noqa: PLR0915 - a kernel is compiled as one function
    qkv: tl.tensor,  # [slots, 3 * width]
    out: tl.tensor,  # [slots, width]
    cu_seqlens: tl.tensor,  # int32 [rows + 1]
    cos: tl.tensor,  # float32 [positions, head_dim / 2], rotary only
    sin: tl.tensor,
    slopes: tl.tensor,  # float32 [heads], ALiBi only
    slots: tl.tensor,
    width: tl.constexpr,
    head_dim: tl.constexpr,
    factor: tl.constexpr,
    rotary: tl.constexpr,
    block: tl.constexpr,
    one_block: tl.constexpr,
    product: tl.constexpr,
) -> None:
    """One head of one block of queries of one row: keys block by block, running maximum and sum in float32.

    The first block of the last row also clears the slots behind it, so that nothing undefined stands there.
    """
    head, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_seqlens + row)
    length = tl.load(cu_seqlens + row + 1) - start
    if part * block < length:
        stride: tl.constexpr = 3 * width
        half: tl.constexpr = head_dim // 2
        at_q = part * block + tl.arange(0, block)
        live_q = at_q < length
        column = tl.arange(0, head_dim)
        end = block if one_block else length  # the first is known when the kernel is compiled: no loop is left
        if rotary:  # the same for queries and keys where one block holds the row
            cos_q, sin_q = _angles(cos, at_q, live_q, half), _angles(sin, at_q, live_q, half)
        base = qkv + start.to(tl.int64) * stride + head * head_dim
        if rotary:
            q_low, q_high = _turned(base, at_q, live_q, cos_q, sin_q, stride, half, factor)
        else:
            q = tl.load(base + at_q[:, None] * stride + column[None, :], mask=live_q[:, None], other=0.0)
            q = (q.to(tl.float32) * factor).to(q.dtype)
            slope = tl.load(slopes + head)
        best = tl.full([block], -float("inf"), tl.float32)
        total = tl.zeros([block], tl.float32)
        mixed = tl.zeros([block, head_dim], tl.float32)
        for first in range(0, end, block):
            at_k = first + tl.arange(0, block)
            live_k = at_k < length
            if rotary:
                if one_block:
                    k_low, k_high = _turned(base + width, at_k, live_k, cos_q, sin_q, stride, half, 1.0)
                else:
                    cos_k, sin_k = _angles(cos, at_k, live_k, half), _angles(sin, at_k, live_k, half)
                    k_low, k_high = _turned(base + width, at_k, live_k, cos_k, sin_k, stride, half, 1.0)
                scores = tl.dot(q_low, tl.trans(k_low), input_precision=product)
                scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision=product)
            else:
                place_k = base + width + at_k[:, None] * stride + column[None, :]
                k = tl.load(place_k, mask=live_k[:, None], other=0.0)
                scores = tl.dot(q, tl.trans(k), input_precision=product)
                scores -= slope * tl.abs(at_q[:, None] - at_k[None, :]).to(tl.float32)
            scores = tl.where(live_k[None, :], scores, -float("inf"))
            better = tl.maximum(best, tl.max(scores, 1))
            weight = tl.exp(scores - better[:, None])
            fade = tl.exp(best - better)
            total = total * fade + tl.sum(weight, 1)
            place_v = base + 2 * width + at_k[:, None] * stride + column[None, :]
            v = tl.load(place_v, mask=live_k[:, None], other=0.0)
            mixed = tl.dot(weight.to(v.dtype), v, mixed * fade[:, None], input_precision=product)
            best = better
        place = out + (start + at_q).to(tl.int64)[:, None] * width + head * head_dim + column[None, :]
        tl.store(place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=live_q[:, None])
    if (part == 0) & (row == tl.num_programs(1) - 1):
        dead_column = tl.arange(0, head_dim)
        for dead in range(start + length, slots, block):
            slot = dead + tl.arange(0, block)
            place_dead = out + slot.to(tl.int64)[:, None] * width + head * head_dim + dead_column[None, :]
            nothing = tl.zeros([block, head_dim], out.dtype.element_ty)
            tl.store(place_dead, nothing, mask=(slot < slots)[:, None])


def fused_attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    cos_table: Tensor | None,
    sin_table: Tensor | None,
    slopes: Tensor | None,
    heads: int,
    max_seqlen: int,
    rows: int,
    block: int | None = None,
    warps: int = 4,
) -> Tensor:
    """Attention within the first `rows` rows: [slots, 3 * width] to [slots, width]; zero in dead slots.

    `cos_table` and `sin_table` (float32 [positions, head_dim / 2]) for rotary positions, or `slopes` (float32 [heads])
    for ALiBi. Rows of any length up to `max_seqlen`, which decides the block when none is given: 128 tokens where that
    holds every row whole and 64 does not, else 64. A row's numbers depend on the block, not on the bound itself.
    """
    slots, width = qkv.shape[0], qkv.shape[1] // 3
    if block is None:
        block = 128 if 64 < max_seqlen <= 128 else 64
    if qkv.dtype == torch.float32:
        block = min(block, 32)  # larger ones do not fit the registers
    out = torch.empty(slots, width, dtype=qkv.dtype, device=qkv.device)
    grid = (heads, max(1, rows), triton.cdiv(max_seqlen, block))
    _attention[grid](
        qkv,
        out,
        cu_seqlens,
        cos_table,
        sin_table,
        slopes,
        slots,
        width=width,
        head_dim=width // heads,
        factor=1 / math.sqrt(width // heads),
        rotary=slopes is None,
        block=block,
        one_block=max_seqlen <= block,
        product="ieee" if qkv.dtype == torch.float32 else "tf32",  # matters for float32 inputs only
        num_warps=warps,
        num_stages=2,
    )
    return out


@functools.cache
def attention_op() -> Callable[..., Tensor]:
    """`fused_attention` as an operator that a compiled block calls without looking inside."""
    schema = (
        "(Tensor qkv, Tensor cu_seqlens, Tensor? cos_table, Tensor? sin_table, Tensor? slopes, "
        "int heads, int max_seqlen, int rows, int? block, int warps) -> Tensor"
    )
    op = torch.library.custom_op("virnuc::fused_attention", fused_attention, mutates_args=(), schema=schema)

    @op.register_fake
    def _(qkv: Tensor, *_args: object) -> Tensor:
        return qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3)

    return op


@_jit
def _store_row(
    y: tl.tensor,  # float32 [block]
    out: tl.tensor,
    out_scale: tl.tensor,
    row: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    width: tl.constexpr,
    quantise: tl.constexpr,
    top: tl.constexpr,
) -> None:
    """Write a row, or its float8 form and the scale that undoes it."""
    if quantise:
        scale = tl.maximum(tl.max(tl.where(mask, tl.abs(y), 0.0), 0), 1e-12) / top
        tl.store(out_scale + row, scale)
        y = tl.clamp(y / scale, -top, top)
    tl.store(out + row.to(tl.int64) * width + at, y.to(out.dtype.element_ty), mask=mask)


@_jit
def _norm(
    x: tl.tensor,  # [rows, width]
    delta: tl.tensor,  # [rows, width], added to x
    shift: tl.tensor,  # float32 [width], seen by the norm only
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,  # [rows, width]
    out_scale: tl.tensor,  # float32 [rows]
    eps: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    has_delta: tl.constexpr,
    keep: tl.constexpr,
    has_shift: tl.constexpr,
    quantise: tl.constexpr,
    top: tl.constexpr,
) -> None:
    """Layer norm of one row, in float32; the sum of x and delta may replace x."""
    row = tl.program_id(0)
    at = tl.arange(0, block)
    mask = at < width
    place = row.to(tl.int64) * width + at
    y = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if has_delta:
        y += tl.load(delta + place, mask=mask, other=0.0).to(tl.float32)
        if keep:
            tl.store(x + place, y.to(x.dtype.element_ty), mask=mask)
        y = y.to(x.dtype.element_ty).to(tl.float32)  # rounded as the plain sum of the two would be
    if has_shift:
        y += tl.load(shift + at, mask=mask, other=0.0)
    mean = tl.sum(y, 0) / width
    centred = tl.where(mask, y - mean, 0.0)
    spread = tl.sum(centred * centred, 0) / width
    y = centred * tl.rsqrt(spread + eps)
    y = y * tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    y += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    _store_row(y, out, out_scale, row, at, mask, width, quantise, top)


def norm(
    x: Tensor,
    affine: tuple[Tensor, Tensor],
    eps: float,
    *,
    delta: Tensor | None = None,
    keep: bool = False,
    shift: Tensor | None = None,
    quantise: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Layer norm of `x + delta + shift` [rows, width]; with `quantise` its float8 rows and their scales [rows, 1].

    With `keep`, `x + delta` takes the place of `x`.
    """
    rows, width = x.shape
    out, scale = _row_outputs(x, width, quantise)
    block = triton.next_power_of_2(width)
    _norm[(rows,)](
        x,
        delta,
        shift,
        *affine,
        out,
        scale,
        eps,
        width=width,
        block=block,
        has_delta=delta is not None,
        keep=keep,
        has_shift=shift is not None,
        quantise=quantise,
        top=FP8_MAX,
        num_warps=_row_warps(block),
    )
    return out, scale


@_jit
def _activation(
    x: tl.tensor,  # [rows, width], or [rows, 2 * width] when gated
    out: tl.tensor,  # [rows, width]
    out_scale: tl.tensor,  # float32 [rows]
    width: tl.constexpr,
    block: tl.constexpr,
    gated: tl.constexpr,
    gelu: tl.constexpr,
    quantise: tl.constexpr,
    top: tl.constexpr,
) -> None:
    """Exact GELU of one row, times its second half when gated."""
    row = tl.program_id(0)
    at = tl.arange(0, block)
    mask = at < width
    stride: tl.constexpr = 2 * width if gated else width
    place = x + row.to(tl.int64) * stride + at
    y = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if gelu:
        y = _gelu(y)
    if gated:
        y *= tl.load(place + width, mask=mask, other=0.0).to(tl.float32)
    _store_row(y, out, out_scale, row, at, mask, width, quantise, top)


def activation(
    x: Tensor, *, gated: bool = False, gelu: bool = True, quantise: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Exact GELU of `x` [rows, width], or of its first half times its second, plain or quantised."""
    rows, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    out, scale = _row_outputs(x, width, quantise)
    block = triton.next_power_of_2(width)
    _activation[(rows,)](
        x,
        out,
        scale,
        width=width,
        block=block,
        gated=gated,
        gelu=gelu,
        quantise=quantise,
        top=FP8_MAX,
        num_warps=_row_warps(block),
    )
    return out, scale


def _row_outputs(x: Tensor, width: int, quantise: bool) -> tuple[Tensor, Tensor | None]:
    """Room for rows of `width`, and for their scales when they are quantised."""
    out = torch.empty(x.shape[0], width, dtype=FP8 if quantise else x.dtype, device=x.device)
    return out, torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device) if quantise else None


def _row_warps(block: int) -> int:
    """Warps that hold a row of `block` numbers in registers, 16 or so a thread."""
    return max(1, min(16, block // 512))


@_jit
def _linear_gelu(
    x: tl.tensor,  # descriptor of [m, k], blocks [block_m, block_k]
    weight: tl.tensor,  # descriptor of [n, k], or [2 n, k] when gated; blocks [block_n, block_k]
    bias: tl.tensor,  # [n]
    out: tl.tensor,  # descriptor of [m, n], blocks [block_m, block_n]
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    tall: tl.constexpr,  # blocks of rows that share a stretch of columns, for the cache
    programs: tl.constexpr,
    gated: tl.constexpr,
    has_bias: tl.constexpr,
) -> None:
    """Blocks of gelu(x @ weight.T + bias), or of gelu(first half) * second half; every `programs`-th one."""
    blocks_m, blocks_n = tl.cdiv(m, block_m), tl.cdiv(n, block_n)
    for tile in tl.range(tl.program_id(0), blocks_m * blocks_n, programs, flatten=True):
        stretch = tile // (tall * blocks_n)
        height = tl.minimum(blocks_m - stretch * tall, tall)
        within = tile % (tall * blocks_n)
        at_m = (stretch * tall + within % height) * block_m
        at_n = (within // height) * block_n
        first = tl.zeros([block_m, block_n], tl.float32)
        if gated:
            second = tl.zeros([block_m, block_n], tl.float32)
        for step in range(tl.cdiv(k, block_k)):
            rows = x.load([at_m, step * block_k])
            first = tl.dot(rows, weight.load([at_n, step * block_k]).T, first)
            if gated:
                second = tl.dot(rows, weight.load([n + at_n, step * block_k]).T, second)
        if has_bias:
            column = at_n + tl.arange(0, block_n)
            first += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
        first = _gelu(first)
        if gated:
            first *= second
        out.store([at_m, at_n], first.to(out.dtype))


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> Tensor:
    """Exact GELU of `x @ weight.T + bias` in one kernel, or of its first half times its second; fp16 and bf16."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    m, k = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    block_m, block_n, block_k = 128, 128 if gated else 256, 64
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    programs = _multiprocessors(x.device)
    _linear_gelu[(min(programs, triton.cdiv(m, block_m) * triton.cdiv(n, block_n)),)](
        TensorDescriptor.from_tensor(x, [block_m, block_k]),
        TensorDescriptor.from_tensor(weight, [block_n, block_k]),
        bias,
        TensorDescriptor.from_tensor(out, [block_m, block_n]),
        m,
        n,
        k,
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        tall=8,
        programs=programs,
        gated=gated,
        has_bias=bias is not None,
        num_warps=8,
        num_stages=3,
    )
    return out


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Programs that run at once on the device; in Triton's interpreter any small number will do."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
