"""Triton kernels beside the matrix products: norms, activations, float8 forms, means, and DNABERT-S's gated unit.

Imported only where a kernel is asked for: triton need not be installed elsewhere. Each kernel treats a row (of tokens,
or of a matrix) by itself, in blocks whose size does not depend on its neighbours, so its numbers do not either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

# blocks of the gated unit's product
GATED_ROWS: Final = 128
GATED_COLUMNS: Final = 128  # its halves are interleaved in turns of so many rows of the weight
GATED_DEPTH: Final = 64
GATED_STRETCH: Final = 8  # blocks of rows that share a stretch of columns, for the cache


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
    out, scale, sizes = _rows_out(x, x.shape[1], quantise)
    parts = {"has_delta": delta is not None, "keep": keep, "has_shift": shift is not None}
    _norm[(len(x),)](x, delta, shift, *affine, out, scale, eps, **parts, **sizes)
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
    out, scale, sizes = _rows_out(x, x.shape[1] // (2 if gated else 1), quantise)
    _activation[(len(x),)](x, out, scale, gated=gated, gelu=gelu, **sizes)
    return out, scale


def _rows_out(x: Tensor, width: int, quantise: bool) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Room for rows of `width`, and for their scales when they are quantised; and how a kernel treats them.

    Its warps hold a row in registers, 16 numbers or so a thread.
    """
    fp8 = torch.float8_e4m3fn
    out = torch.empty(x.shape[0], width, dtype=fp8 if quantise else x.dtype, device=x.device)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device) if quantise else None
    block = triton.next_power_of_2(width)
    sizes = {"width": width, "block": block, "num_warps": max(1, min(16, block // 512))}
    return out, scale, sizes | {"quantise": quantise, "top": torch.finfo(fp8).max}


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


@jit
def _gated_unit(
    x: tl.tensor,  # descriptor of [m, k], blocks [rows, depth]
    weight: tl.tensor,  # descriptor of [2 n, k], interleaved, blocks [2 * columns, depth]
    out: tl.tensor,  # descriptor of [m, n], blocks [rows, columns]
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    tall: tl.constexpr,
    programs: tl.constexpr,
) -> None:
    """Every `programs`-th block of gelu(first half) * second half of x @ weight.T."""
    blocks_m, blocks_n = tl.cdiv(m, rows), tl.cdiv(n, columns)
    for tile in tl.range(tl.program_id(0), blocks_m * blocks_n, programs, flatten=True):
        stretch = tile // (tall * blocks_n)
        height = tl.minimum(blocks_m - stretch * tall, tall)
        within = tile % (tall * blocks_n)
        at_m = (stretch * tall + within % height) * rows
        at_n = (within // height) * columns
        total = tl.zeros([rows, 2 * columns], tl.float32)
        for step in range(tl.cdiv(k, depth)):
            total = tl.dot(x.load([at_m, step * depth]), weight.load([2 * at_n, step * depth]).T, total)
        first, second = tl.split(tl.permute(tl.reshape(total, (rows, 2, columns)), (0, 2, 1)))
        out.store([at_m, at_n], (exact_gelu(first) * second).to(out.dtype))


def can_gate(width: int, device: torch.device) -> bool:
    """Whether the gated unit's kernel runs on `device` for units of `width`; Triton's interpreter runs it on a CPU."""
    able = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)
    return able and width % GATED_COLUMNS == 0


def interleave(weight: Tensor) -> Tensor:
    """The halves of a gated unit's weight [2 n, k], in turns of `GATED_COLUMNS` rows; n a multiple of that."""
    first, second = (half.unflatten(0, (-1, GATED_COLUMNS)) for half in weight.chunk(2))
    return torch.stack((first, second), 1).flatten(0, 2).contiguous()


def gated_unit(x: Tensor, interleaved: Tensor) -> Tensor:
    """Exact GELU of the first half of `x @ weight.T` times its second: [m, k] and [2 n, k] to [m, n]; fp16 and bf16.

    `interleaved` is what `interleave` makes of the weight: each block reads its rows once and finds both halves of a
    column in the same registers.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    (m, k), n = x.shape, interleaved.shape[0] // 2
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    # as many as run at once; in Triton's interpreter any small number will do
    most = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
    programs = min(most, triton.cdiv(m, GATED_ROWS) * triton.cdiv(n, GATED_COLUMNS))
    tensors = (
        TensorDescriptor.from_tensor(x, [GATED_ROWS, GATED_DEPTH]),
        TensorDescriptor.from_tensor(interleaved, [2 * GATED_COLUMNS, GATED_DEPTH]),
        TensorDescriptor.from_tensor(out, [GATED_ROWS, GATED_COLUMNS]),
    )
    blocks = {"rows": GATED_ROWS, "columns": GATED_COLUMNS, "depth": GATED_DEPTH, "tall": GATED_STRETCH}
    _gated_unit[(programs,)](*tensors, m, n, k, **blocks, programs=programs, num_warps=8, num_stages=3)
    return out
