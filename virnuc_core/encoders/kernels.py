"""Triton kernels beside attention: norms, means, products of int8, and DNABERT-S's gated unit.

Imported only where a kernel is asked for: triton need not be installed elsewhere. Each kernel treats a row (of tokens,
or of a matrix) by itself, in blocks whose size does not depend on its neighbours, so its numbers do not either."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

# blocks of the gated unit's product, and of a product of int8: `tall` blocks of rows share columns, for the cache
GATED: Final = {
    "rows": 128,
    "columns": 128,
    "depth": 64,
    "tall": 8,
    "num_warps": 8,
    "num_stages": 3,
}
INT8: Final = {
    "rows": 128,
    "columns": 128,
    "depth": 128,
    "tall": 16,
    "num_warps": 4,
    "num_stages": 3,
}
INT8_SHARING: Final = 2  # programs of such a product that share a multiprocessor
Linear = tuple[
    Tensor, Tensor | None, Tensor | None
]  # weight, bias, and of an int8 weight the scales of its rows


@triton.jit
def quick_gelu(x: tl.tensor) -> tl.tensor:
    """Exact GELU without a branch, which keeps rows in registers: the logarithm of the normal distribution's tail by a
    polynomial, within 6e-7 and, where GELU is small, 4e-6 of itself: float32's own erf is no nearer there."""
    a = tl.abs(x)
    h = ((-1.7934565e-06 * a + 6.09042e-05) * a - 0.00092602923) * a + 0.008493758
    h = (((h * a - 0.05393785) * a - 0.4584805) * a - 1.1512468) * a - 0.99999547
    return tl.maximum(x, 0.0) - a * tl.exp2(h)


@triton.jit
def whole(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """`x * scale`, at most 127 on both sides of 0, in int8, halves to even: beside 1.5 * 2 ** 23 there is no room for
    parts of 1 in a float32."""
    return (x * scale + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _norm(
    x: tl.tensor,  # [rows, width]
    shift: tl.tensor,  # float32 [width], seen by the norm only; or None
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,  # [rows, width]
    eps: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Layer norm of one row, in float32."""
    row = tl.program_id(0)
    at = tl.arange(0, block)
    mask = at < width
    place = row.to(tl.int64) * width + at
    y = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if shift is not None:
        y += tl.load(shift + at, mask=mask, other=0.0)
    mean = tl.sum(y, 0) / width
    centred = tl.where(mask, y - mean, 0.0)
    spread = tl.sum(centred * centred, 0) / width
    y = centred * tl.rsqrt(spread + eps)
    y = y * tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    y += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


def norm(
    x: Tensor, affine: tuple[Tensor, Tensor], eps: float, shift: Tensor | None = None
) -> Tensor:
    """Layer norm of `x + shift` [rows, width]; its warps hold a row in registers, 16 numbers or so a thread."""
    out, block = torch.empty_like(x), triton.next_power_of_2(x.shape[1])
    sizes = {"width": x.shape[1], "block": block, "num_warps": max(1, min(16, block // 512))}
    _norm[(len(x),)](x, shift, *affine, out, eps, **sizes)
    return out


@triton.jit
def _int8(
    x: tl.tensor,  # [rows, width]
    weight: tl.tensor,  # of a norm
    bias: tl.tensor,
    hadamard: tl.tensor,  # fp16 [turn, turn]
    out: tl.tensor,  # int8 [rows, width]
    out_scale: tl.tensor,  # float32 [rows]: what undoes the rounding
    rows: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    near: tl.constexpr,
    far: tl.constexpr,
    turn: tl.constexpr,
    programs: tl.constexpr,
    first: tl.constexpr,
) -> None:
    """Every `programs`-th row in two parts: first a norm, exact GELU or nothing; turned by stretches; then rounded."""
    within = tl.arange(0, turn)
    turning = tl.load(hadamard + within[:, None] * turn + within[None, :])
    at = tl.arange(0, near // turn)[:, None] * turn + within[None, :]
    more = near + tl.arange(0, far // turn)[:, None] * turn + within[None, :]
    real = more < width
    for row in tl.range(tl.program_id(0), rows, programs, num_stages=2):
        start = tl.full((), row, tl.int64) * width  # a plain number in the interpreter
        y = tl.load(x + start + at).to(tl.float32)
        z = tl.load(x + start + more, mask=real, other=0.0).to(tl.float32)
        if first == "norm":
            mean = (tl.sum(tl.sum(y, 1), 0) + tl.sum(tl.sum(z, 1), 0)) / width
            y, z = y - mean, tl.where(real, z - mean, 0.0)
            factor = tl.rsqrt(
                (tl.sum(tl.sum(y * y, 1), 0) + tl.sum(tl.sum(z * z, 1), 0)) / width + eps
            )
            y = y * factor * tl.load(weight + at).to(tl.float32) + tl.load(bias + at).to(tl.float32)
            z = z * factor * tl.load(weight + more, mask=real, other=0.0).to(tl.float32)
            z += tl.load(bias + more, mask=real, other=0.0).to(tl.float32)
        if first == "gelu":
            y, z = quick_gelu(y), quick_gelu(z)
        # the matrix stands first: each warp works out all of the first factor that it needs, but the second only once
        y, z = tl.dot(turning, y.to(tl.float16).T), tl.dot(turning, z.to(tl.float16).T)
        top = tl.maximum(tl.max(tl.max(tl.abs(y), 1), 0), tl.max(tl.max(tl.abs(z), 1), 0))
        top = tl.maximum(top, 1e-10)
        tl.store(out_scale + row, top / 127.0)
        tl.store(out + start + at, whole(y, 127.0 / top).T)
        tl.store(out + start + more, whole(z, 127.0 / top).T, mask=real)


def int8_rows(
    x: Tensor,
    turning: Tensor,
    *,
    norm: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    gelu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rows of `x` [rows, width], after a norm or exact GELU, turned and in int8; and what undoes it, [rows, 1]."""
    (rows, width), turn = x.shape, len(turning)
    out, scale = torch.empty_like(x, dtype=torch.int8), x.new_empty(rows, 1, dtype=torch.float32)
    near = 1 << (width.bit_length() - 1)
    parts = {"near": near, "far": max(turn, triton.next_power_of_2(width - near)), "turn": turn}
    warps = max(1, min(4, near // 1024))
    # so many warps run on a multiprocessor at once: a norm takes 168 registers a thread, the others 126 at most
    programs = _programs(x, rows, (12 if norm else 16) // warps)
    kind = {
        "first": "norm" if norm else "gelu" if gelu else "",
        "programs": programs,
        "num_warps": warps,
    }
    _int8[(programs,)](x, *(norm or (x, x)), turning, out, scale, rows, eps, width, **parts, **kind)
    return out, scale


@triton.jit
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
        total += tl.sum(
            tl.load(place, mask=(at < end)[:, None] & inside[None, :], other=0.0).to(tl.float32), 0
        )
    count = tl.maximum(end - start, 1).to(tl.float32)
    tl.store(out + span.to(tl.int64) * width + column, total / count, mask=inside)


def span_means(x: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Mean of `x` [tokens, width] over each span [start, end), float32 [spans, width]; zero where a span is empty.
    A span's mean does not depend on what else is in the batch, nor on dead slots."""
    width, columns = x.shape[1], 256
    out = torch.empty(starts.shape[0], width, dtype=torch.float32, device=x.device)
    sizes = {"width": width, "tokens": 16, "columns": columns, "num_warps": 4}
    grid = (starts.shape[0], triton.cdiv(width, columns))
    _span_means[grid](x, starts.contiguous(), ends.contiguous(), out, **sizes)
    return out


@triton.jit
def _product(
    x: tl.tensor,  # descriptor of [m, k], blocks [rows, depth]
    weight: tl.tensor,  # descriptor of [n, k], blocks [columns, depth]; of a gated unit [2 n, k], [2 * columns, depth]
    row_scale: tl.tensor,  # float32 [m], or None
    scale: tl.tensor,  # float32 [n], or None
    bias: tl.tensor,  # float32 [n], or None
    out: tl.tensor,  # [m, n]; of a gated unit its descriptor, blocks [rows, columns]
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    tall: tl.constexpr,
    programs: tl.constexpr,
    end: tl.constexpr,
) -> None:
    """Every `programs`-th block of x @ weight.T. To "gate" is to take gelu(first half) * second half, of interleaved
    rows of the weight; sums of int8 are exact, scaled in float32, and are to "store" or to "add" to what is there."""
    blocks_m, blocks_n = tl.cdiv(m, rows), tl.cdiv(n, columns)
    each: tl.constexpr = 2 if end == "gate" else 1
    kind: tl.constexpr = tl.float32 if end == "gate" else tl.int32
    for tile in tl.range(tl.program_id(0), blocks_m * blocks_n, programs, flatten=True):
        stretch, within = tile // (tall * blocks_n), tile % (tall * blocks_n)
        height = tl.minimum(blocks_m - stretch * tall, tall)
        at_m, at_n = (stretch * tall + within % height) * rows, within // height * columns
        total = tl.zeros([rows, each * columns], kind)
        for step in range(tl.cdiv(k, depth)):
            some, others = x.load([at_m, step * depth]), weight.load([each * at_n, step * depth]).T
            total = tl.dot(some, others, total, out_dtype=kind)
        if end == "gate":
            first, second = tl.split(tl.permute(tl.reshape(total, (rows, 2, columns)), (0, 2, 1)))
            first = 0.5 * first * (1.0 + tl.erf(first * 0.7071067811865476))  # exact GELU
            out.store([at_m, at_n], (first * second).to(out.dtype))
        else:
            row, column = at_m + tl.arange(0, rows), at_n + tl.arange(0, columns)
            real = column < n
            y = total.to(tl.float32) * tl.load(row_scale + row, mask=row < m, other=0.0)[:, None]
            y = y * tl.load(scale + column, mask=real, other=0.0)[None, :]
            y += tl.load(bias + column, mask=real, other=0.0)[None, :]
            place, inside = (
                out + row.to(tl.int64)[:, None] * n + column[None, :],
                (row < m)[:, None] & real[None, :],
            )
            if end == "add":
                y += tl.load(place, mask=inside, other=0.0).to(tl.float32)
            tl.store(place, y.to(out.dtype.element_ty), mask=inside)


def can_gate(width: int, device: torch.device) -> bool:
    """Whether the gated unit's kernel runs on `device` for units of `width`; Triton's interpreter runs it on a CPU."""
    able = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)
    return able and width % GATED["columns"] == 0


def interleave(weight: Tensor) -> Tensor:
    """The halves of a gated unit's weight [2 n, k], in turns of a block's columns; n a multiple of them."""
    first, second = (half.unflatten(0, (-1, GATED["columns"])) for half in weight.chunk(2))
    return torch.stack((first, second), 1).flatten(0, 2).contiguous()


def gated_unit(x: Tensor, interleaved: Tensor) -> Tensor:
    """Exact GELU of the first half of `x @ weight.T` times its second: [m, k] and [2 n, k] to [m, n]; fp16 and bf16.
    `interleaved` is what `interleave` makes of the weight: each block reads its rows once and finds both halves of a
    column in the same registers."""
    out = torch.empty(len(x), len(interleaved) // 2, dtype=x.dtype, device=x.device)
    return _multiplied("gate", out, x, interleaved)


def int8_product(x: Tensor, row_scale: Tensor, layer: Linear, onto: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` of int8 rows [m, k] and their scales [m, 1]: fp16 [m, n], or added `onto` what is given.
    Sums are exact: the sizes of blocks change no bit."""
    weight, bias, scale = layer
    out = (
        torch.empty(len(x), len(weight), dtype=torch.float16, device=x.device)
        if onto is None
        else onto
    )
    return _multiplied("store" if onto is None else "add", out, x, weight, row_scale, scale, bias)


def _multiplied(end: str, out: Tensor, x: Tensor, weight: Tensor, *scales: Tensor | None) -> Tensor:
    """`out` with the product in it."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    of, (m, k), n = TensorDescriptor.from_tensor, x.shape, out.shape[1]
    blocks, halves, sharing = (GATED, 2, 1) if end == "gate" else (INT8, 1, INT8_SHARING)
    rows, columns, depth = blocks["rows"], blocks["columns"], blocks["depth"]
    factors, target = (of(x, [rows, depth]), of(weight, [halves * columns, depth])), out
    if end == "gate":
        scales, target = (None, None, None), of(out, [rows, columns])
    programs = _programs(x, triton.cdiv(m, rows) * triton.cdiv(n, columns), sharing)
    _product[(programs,)](*factors, *scales, target, m, n, k, programs=programs, end=end, **blocks)
    return out


def _programs(x: Tensor, blocks: int, sharing: int = 1) -> int:
    """Of so many blocks as many as run at once; in Triton's interpreter any small number will do."""
    return min(
        sharing * torch.cuda.get_device_properties(x.device).multi_processor_count
        if x.is_cuda
        else 4,
        blocks,
    )
