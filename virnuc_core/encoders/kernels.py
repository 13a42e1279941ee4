"""Triton kernels beside attention: norms, means, products of int8, and DNABERT-S's gated unit.

Imported only where a kernel is asked for, so Triton need not be installed elsewhere. Each kernel
treats a row (of tokens, or of a matrix) by itself, in blocks whose size does not depend on its
neighbours, so neither do its numbers. The kernels are written compactly, because each line costs
time on the device; the functions that launch them say what they compute.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ProductBlocks:
    """Sizes of the blocks of a matrix product, and how they run."""

    rows: int
    columns: int
    depth: int
    tall: int  # blocks of rows that are computed one after the other and share columns in the cache
    num_warps: int
    num_stages: int
    sharing: int  # programs that share a multiprocessor


GATED_BLOCKS: Final = ProductBlocks(
    rows=128, columns=128, depth=64, tall=8, num_warps=8, num_stages=3, sharing=1
)
INT8_BLOCKS: Final = ProductBlocks(
    rows=128, columns=128, depth=128, tall=16, num_warps=4, num_stages=3, sharing=2
)
GATED_CAPABILITY: Final = (9, 0)  # compute capability from which the gated unit's kernel runs
MEAN_TOKENS: Final = 16  # of a span, summed at once
MEAN_COLUMNS: Final = 256
MAX_NORM_WARPS: Final = 16
COLUMNS_PER_NORM_WARP: Final = 512  # about 16 numbers for each thread
INTERPRETER_PROGRAMS: Final = 4  # any small number will do there
Linear = tuple[Tensor, Tensor | None, Tensor | None]  # weight, bias, and the scales of int8 rows


@triton.jit
def quick_gelu(x: tl.tensor) -> tl.tensor:
    """Compute exact GELU without a branch, so that rows stay in registers.

    The logarithm of the normal distribution's tail is a polynomial here. The result is within 6e-7,
    and where GELU is small within 4e-6 of itself; float32's own erf is no nearer there.
    """
    a = tl.abs(x)
    h = ((-1.7934565e-06 * a + 6.09042e-05) * a - 0.00092602923) * a + 0.008493758
    h = (((h * a - 0.05393785) * a - 0.4584805) * a - 1.1512468) * a - 0.99999547
    return tl.maximum(x, 0.0) - a * tl.exp2(h)


@triton.jit
def round_to_int8(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Round `x * scale` to int8, halves to even. It must be at most 127 on both sides of 0.

    Adding 1.5 * 2 ** 23 leaves a float32 no room for fractions: its last byte is the number.
    """
    return (x * scale + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _norm(
    x: tl.tensor,  # [rows, width]
    shift: tl.tensor,  # float32 [width], seen by the norm only; or None
    weight: tl.tensor,  # [width]
    bias: tl.tensor,  # [width]
    out: tl.tensor,  # [rows, width]
    eps: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Normalise one row, in float32."""
    row = tl.program_id(0)
    column = tl.arange(0, block)
    mask = column < width
    offset = row.to(tl.int64) * width + column
    y = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if shift is not None:
        y += tl.load(shift + column, mask=mask, other=0.0)
    mean = tl.sum(y, 0) / width
    centred = tl.where(mask, y - mean, 0.0)
    variance = tl.sum(centred * centred, 0) / width
    y = centred * tl.rsqrt(variance + eps)
    y = y * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    y += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=mask)


def norm(
    x: Tensor, affine: tuple[Tensor, Tensor], eps: float, shift: Tensor | None = None
) -> Tensor:
    """Normalise each row of `x + shift`.

    Args:
        x: [rows, width].
        affine: Weight and bias of the norm, [width] each.
        eps: Added to the variance.
        shift: float32 [width].

    Returns:
        [rows, width].
    """
    weight, bias = affine
    rows, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)  # a program holds its row in registers
    num_warps = max(1, min(MAX_NORM_WARPS, block // COLUMNS_PER_NORM_WARP))
    _norm[(rows,)](x, shift, weight, bias, out, eps, width=width, block=block, num_warps=num_warps)
    return out


@triton.jit
def _int8(
    x: tl.tensor,  # [rows, width]
    weight: tl.tensor,  # of a norm, [width]
    bias: tl.tensor,  # of a norm, [width]
    rotation: tl.tensor,  # fp16 [rotation_size, rotation_size]
    out: tl.tensor,  # int8 [rows, width]
    out_scale: tl.tensor,  # float32 [rows]: what undoes the rounding
    rows: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    near: tl.constexpr,  # columns of a row's first part, a power of two
    far: tl.constexpr,  # columns of its second part, some of which may lie behind the row
    rotation_size: tl.constexpr,
    programs: tl.constexpr,
    first: tl.constexpr,
) -> None:
    """Round every `programs`-th row to int8, each in two parts, y and z.

    What is done first is a "norm", "gelu" (exact), or nothing (""). Then the row is rotated by
    stretches of `rotation_size`, and then rounded.
    """
    within = tl.arange(0, rotation_size)
    matrix = tl.load(rotation + within[:, None] * rotation_size + within[None, :])
    at_y = tl.arange(0, near // rotation_size)[:, None] * rotation_size + within[None, :]
    at_z = near + tl.arange(0, far // rotation_size)[:, None] * rotation_size + within[None, :]
    mask = at_z < width
    for row in tl.range(tl.program_id(0), rows, programs, num_stages=2):
        start = tl.full((), row, tl.int64) * width  # a plain number in the interpreter
        y = tl.load(x + start + at_y).to(tl.float32)
        z = tl.load(x + start + at_z, mask=mask, other=0.0).to(tl.float32)
        if first == "norm":
            mean = (tl.sum(tl.sum(y, 1), 0) + tl.sum(tl.sum(z, 1), 0)) / width
            y, z = y - mean, tl.where(mask, z - mean, 0.0)
            factor = tl.rsqrt(
                (tl.sum(tl.sum(y * y, 1), 0) + tl.sum(tl.sum(z * z, 1), 0)) / width + eps
            )
            y = y * factor * tl.load(weight + at_y).to(tl.float32)
            y += tl.load(bias + at_y).to(tl.float32)
            z = z * factor * tl.load(weight + at_z, mask=mask, other=0.0).to(tl.float32)
            z += tl.load(bias + at_z, mask=mask, other=0.0).to(tl.float32)
        if first == "gelu":
            y, z = quick_gelu(y), quick_gelu(z)
        # The matrix stands first: each warp works out all of the first factor that it needs, but
        # the second factor only once.
        y, z = tl.dot(matrix, y.to(tl.float16).T), tl.dot(matrix, z.to(tl.float16).T)
        top = tl.maximum(tl.max(tl.max(tl.abs(y), 1), 0), tl.max(tl.max(tl.abs(z), 1), 0))
        top = tl.maximum(top, 1e-10)
        tl.store(out_scale + row, top / 127.0)
        tl.store(out + start + at_y, round_to_int8(y, 127.0 / top).T)
        tl.store(out + start + at_z, round_to_int8(z, 127.0 / top).T, mask=mask)


@dataclass(frozen=True, slots=True)
class RowLaunch:
    """How the kernel that rounds rows is launched."""

    near: int  # columns of a row's first part
    far: int  # columns of its second part
    num_warps: int


def _launch_config(width: int, rotation_size: int) -> RowLaunch:
    """Cut rows of `width` into two parts of sizes that Triton can hold, and choose the warps."""
    near = 1 << (width.bit_length() - 1)  # the largest power of two that fits
    far = max(rotation_size, triton.next_power_of_2(width - near))
    return RowLaunch(near, far, num_warps=max(1, min(4, near // 1024)))


def int8_rows(
    x: Tensor,
    rotation: Tensor,
    *,
    norm: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    gelu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate rows and round them to int8, after a norm or exact GELU if one is asked for.

    Args:
        x: [rows, width].
        rotation: fp16 [rotation_size, rotation_size], see `precision.hadamard_rotation`.
        norm: Weight and bias of a layer norm, [width] each.
        eps: Added to the norm's variance.
        gelu: Apply exact GELU.

    Returns:
        The rows in int8 [rows, width], and the scales that undo the rounding, float32 [rows, 1].
    """
    rows, width = x.shape
    rotation_size = len(rotation)
    launch = _launch_config(width, rotation_size)
    # Warps that run on a multiprocessor at once: a norm takes 168 registers a thread, the others
    # 126 at most.
    first, warps_at_once, weight, bias = "", 16, x, x  # without a norm its weights are not read
    if norm:
        first, warps_at_once = "norm", 12
        weight, bias = norm
    elif gelu:
        first = "gelu"
    programs = _programs(x.device, rows, warps_at_once // launch.num_warps)
    out = torch.empty_like(x, dtype=torch.int8)
    scale = x.new_empty(rows, 1, dtype=torch.float32)
    _int8[(programs,)](
        x,
        weight,
        bias,
        rotation,
        out,
        scale,
        rows,
        eps,
        width,
        near=launch.near,
        far=launch.far,
        rotation_size=rotation_size,
        first=first,
        programs=programs,
        num_warps=launch.num_warps,
    )
    return out, scale


@triton.jit
def _span_means(
    x: tl.tensor,  # [tokens, width]
    starts: tl.tensor,  # int32 [spans]
    ends: tl.tensor,  # int32 [spans]
    out: tl.tensor,  # float32 [spans, width]
    width: tl.constexpr,
    tokens: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Average some columns of one span, its tokens summed in float32 by blocks from its start."""
    span = tl.program_id(0)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_column = column < width
    start, end = tl.load(starts + span), tl.load(ends + span)
    total = tl.zeros([columns], tl.float32)
    for first in range(start, end, tokens):
        token = first + tl.arange(0, tokens)
        address = x + token.to(tl.int64)[:, None] * width + column[None, :]
        mask = (token < end)[:, None] & is_column[None, :]
        total += tl.sum(tl.load(address, mask=mask, other=0.0).to(tl.float32), 0)
    count = tl.maximum(end - start, 1).to(tl.float32)
    tl.store(out + span.to(tl.int64) * width + column, total / count, mask=is_column)


def span_means(x: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Average `x` over each span of tokens.

    The mean of a span depends neither on the rest of the batch nor on dead slots.

    Args:
        x: [tokens, width].
        starts: First token of each span, int32 [spans].
        ends: Token after the last of each span, int32 [spans].

    Returns:
        float32 [spans, width]; zeros where a span is empty.
    """
    spans, width = len(starts), x.shape[1]
    out = torch.empty(spans, width, dtype=torch.float32, device=x.device)
    grid = (spans, triton.cdiv(width, MEAN_COLUMNS))
    _span_means[grid](
        x,
        starts.contiguous(),
        ends.contiguous(),
        out,
        width=width,
        tokens=MEAN_TOKENS,
        columns=MEAN_COLUMNS,
        num_warps=4,
    )
    return out


@triton.jit
def _product(
    x: tl.tensor,  # descriptor of [m, k], blocks [rows, depth]
    weight: tl.tensor,  # descriptor of [n, k], blocks [columns, depth]; for a gated unit
    # of [2 n, k], blocks [2 * columns, depth]
    row_scale: tl.tensor,  # float32 [m], or None
    scale: tl.tensor,  # float32 [n], or None
    bias: tl.tensor,  # float32 [n], or None
    out: tl.tensor,  # [m, n]; for a gated unit its descriptor, blocks [rows, columns]
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
    """Compute every `programs`-th block of x @ weight.T.

    At the `end` of a block its sums are to "store", to "add" to what is there, or to "gate". Sums
    of int8 are exact and scaled in float32. To gate is gelu(first half) * second half, where the
    rows of the weight are interleaved.
    """
    blocks_m, blocks_n = tl.cdiv(m, rows), tl.cdiv(n, columns)
    halves: tl.constexpr = 2 if end == "gate" else 1
    sum_type: tl.constexpr = tl.float32 if end == "gate" else tl.int32
    for tile in tl.range(tl.program_id(0), blocks_m * blocks_n, programs, flatten=True):
        # `tall` blocks of rows form a stretch, which is computed column by column
        stretch, within = tile // (tall * blocks_n), tile % (tall * blocks_n)
        height = tl.minimum(blocks_m - stretch * tall, tall)
        at_m, at_n = (stretch * tall + within % height) * rows, within // height * columns
        total = tl.zeros([rows, halves * columns], sum_type)
        for step in range(tl.cdiv(k, depth)):
            x_block = x.load([at_m, step * depth])
            weight_block = weight.load([halves * at_n, step * depth]).T
            total = tl.dot(x_block, weight_block, total, out_dtype=sum_type)
        if end == "gate":
            first, second = tl.split(tl.permute(tl.reshape(total, (rows, 2, columns)), (0, 2, 1)))
            first = 0.5 * first * (1.0 + tl.erf(first * 0.7071067811865476))  # exact GELU
            out.store([at_m, at_n], (first * second).to(out.dtype))
        else:
            row, column = at_m + tl.arange(0, rows), at_n + tl.arange(0, columns)
            is_column = column < n
            y = total.to(tl.float32) * tl.load(row_scale + row, mask=row < m, other=0.0)[:, None]
            y = y * tl.load(scale + column, mask=is_column, other=0.0)[None, :]
            y += tl.load(bias + column, mask=is_column, other=0.0)[None, :]
            address = out + row.to(tl.int64)[:, None] * n + column[None, :]
            mask = (row < m)[:, None] & is_column[None, :]
            if end == "add":
                y += tl.load(address, mask=mask, other=0.0).to(tl.float32)
            tl.store(address, y.to(out.dtype.element_ty), mask=mask)


def can_gate(width: int, device: torch.device) -> bool:
    """Return whether the gated unit's kernel runs on a device for units of `width`.

    On a CPU, Triton's interpreter runs it.
    """
    if width % GATED_BLOCKS.columns != 0:
        return False
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) >= GATED_CAPABILITY


def interleave(weight: Tensor) -> Tensor:
    """Reorder the rows of a gated unit's weight as `gated_unit` takes them.

    A block's columns of the first half alternate with those of the second half. So a block reads
    its rows once and finds both halves of a column in the same registers.

    Args:
        weight: [2 n, k], where n is a multiple of a block's columns.

    Returns:
        [2 n, k].
    """
    first, second = (half.unflatten(0, (-1, GATED_BLOCKS.columns)) for half in weight.chunk(2))
    return torch.stack((first, second), 1).flatten(0, 2).contiguous()


def gated_unit(x: Tensor, interleaved: Tensor) -> Tensor:
    """Multiply exact GELU of the first half of `x @ weight.T` by its second half.

    Args:
        x: fp16 or bf16 [m, k].
        interleaved: The weight [2 n, k], as `interleave` returns it.

    Returns:
        [m, n], in the format of `x`.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    (m, k), n = x.shape, len(interleaved) // 2
    blocks = GATED_BLOCKS
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    _launch_product(
        "gate",
        blocks,
        x=TensorDescriptor.from_tensor(x, [blocks.rows, blocks.depth]),
        weight=TensorDescriptor.from_tensor(interleaved, [2 * blocks.columns, blocks.depth]),
        scales=(None, None, None),
        out=TensorDescriptor.from_tensor(out, [blocks.rows, blocks.columns]),
        sizes=(m, n, k),
        device=x.device,
    )
    return out


def int8_product(
    x: Tensor, row_scale: Tensor, layer: Linear, add_to: Tensor | None = None
) -> Tensor:
    """Compute `x @ weight.T + bias` of int8 rows. Sums are exact, so block sizes change no bit.

    Args:
        x: int8 [m, k].
        row_scale: Scales that undo the rounding of `x`, float32 [m, 1].
        layer: Weight int8 [n, k], bias [n], and the scales of the weight's rows, float32 [n].
        add_to: Add the product to this tensor [m, n], in place.

    Returns:
        `add_to`, or a new tensor, fp16 [m, n].
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    weight, bias, scale = layer
    (m, k), n = x.shape, len(weight)
    blocks = INT8_BLOCKS
    if add_to is None:
        end, out = "store", torch.empty(m, n, dtype=torch.float16, device=x.device)
    else:
        end, out = "add", add_to
    _launch_product(
        end,
        blocks,
        x=TensorDescriptor.from_tensor(x, [blocks.rows, blocks.depth]),
        weight=TensorDescriptor.from_tensor(weight, [blocks.columns, blocks.depth]),
        scales=(row_scale, scale, bias),
        out=out,
        sizes=(m, n, k),
        device=x.device,
    )
    return out


def _launch_product(
    end: str,
    blocks: ProductBlocks,
    *,
    x: object,
    weight: object,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
    out: object,
    sizes: tuple[int, int, int],
    device: torch.device,
) -> None:
    """Launch the kernel of a product.

    Args:
        end: What is done with the sums of a block, see `_product`.
        blocks: Sizes of its blocks.
        x: Descriptor of the first factor.
        weight: Descriptor of the second factor.
        scales: Scales of the rows of `x` and of `weight`, and the bias.
        out: The result, or its descriptor.
        sizes: m, n and k of the product.
        device: Where it runs.
    """
    m, n, k = sizes
    n_blocks = triton.cdiv(m, blocks.rows) * triton.cdiv(n, blocks.columns)
    programs = _programs(device, n_blocks, blocks.sharing)
    _product[(programs,)](
        x,
        weight,
        *scales,
        out,
        m,
        n,
        k,
        programs=programs,
        end=end,
        rows=blocks.rows,
        columns=blocks.columns,
        depth=blocks.depth,
        tall=blocks.tall,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def _programs(device: torch.device, blocks: int, sharing: int) -> int:
    """Return how many programs to launch for `blocks` blocks: at most as many as run at once.

    Args:
        device: Where they run.
        blocks: Blocks to compute; each program computes every n-th.
        sharing: Programs that share a multiprocessor.
    """
    if device.type != "cuda":
        return min(INTERPRETER_PROGRAMS, blocks)
    properties = torch.cuda.get_device_properties(device)
    return min(sharing * properties.multi_processor_count, blocks)
