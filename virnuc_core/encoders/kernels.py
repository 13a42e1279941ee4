"""Triton kernels for what stands between and behind the matrix products: norms, activations, float8 forms, means.

Imported only where a kernel is asked for: triton need not be installed elsewhere. Each kernel treats a row (of tokens,
or of a matrix) by itself, in blocks whose size does not depend on its neighbours, so its numbers do not either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from virnuc_core.encoders.precision import FP8, FP8_MAX


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, which has no types of its own."""
    return triton.jit(function)


@jit
def exact_gelu(x: tl.tensor) -> tl.tensor:
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@jit
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


@jit
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


@jit
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
        y = exact_gelu(y)
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


@jit
def _span_means(
    x: tl.tensor,  # [tokens, width]
    starts: tl.tensor,
    ends: tl.tensor,
    out: tl.tensor,  # float32 [spans, width]
    width: tl.constexpr,
    tokens: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Some columns of the mean of one span, its tokens summed in float32 by blocks counted from its start."""
    span = tl.program_id(0)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < width
    start, end = tl.load(starts + span), tl.load(ends + span)
    total = tl.zeros([columns], tl.float32)
    for first in range(start, end, tokens):
        at = first + tl.arange(0, tokens)
        place = x + at.to(tl.int64)[:, None] * width + column[None, :]
        total += tl.sum(tl.load(place, mask=(at < end)[:, None] & inside[None, :], other=0.0).to(tl.float32), 0)
    count = tl.maximum(end - start, 1).to(tl.float32)
    tl.store(out + span.to(tl.int64) * width + column, total / count, mask=inside)


def span_means(x: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Mean of `x` [tokens, width] over each span [start, end), float32 [spans, width]; zero where a span is empty.

    A span's mean does not depend on what else is in the batch, nor on dead slots.
    """
    width, columns = x.shape[1], 256
    out = torch.empty(starts.shape[0], width, dtype=torch.float32, device=x.device)
    grid = (starts.shape[0], triton.cdiv(width, columns))
    _span_means[grid](
        x, starts.contiguous(), ends.contiguous(), out, width=width, tokens=16, columns=columns, num_warps=4
    )
    return out
