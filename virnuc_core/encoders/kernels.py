"""Triton kernels beside attention: norms, means, products of int8, and DNABERT-S's gated unit.

This module is imported only where a kernel is used, so that other machines do not need Triton. Each
kernel treats a row (of tokens, or of a matrix) by itself, in blocks of a size that does not depend
on the neighbouring rows. So the result of a row does not depend on them either.

A function with `@triton.jit` is a kernel. It runs on the GPU as many copies ("programs") at the
same time, and `tl.program_id` tells each copy which rows or blocks it computes. Tensor arguments
arrive as the address of their first number. The plain function below each kernel launches it.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from virnuc_core.encoders.hopper import HopperLibrary, find_library, fits, rounds

Linear = tuple[Tensor, Tensor | None, Tensor | None]  # weight, bias, and the scales of int8 rows


@dataclass(frozen=True, slots=True)
class ProductBlocks:
    """Sizes of the blocks of a matrix product, and how they run."""

    rows: int
    columns: int
    depth: int
    group_rows: int  # neighbouring blocks of rows that are computed together, for the cache
    num_warps: int
    num_stages: int  # blocks that are loaded ahead while others are multiplied
    programs_per_sm: int  # programs that share a multiprocessor of the GPU


GATED_BLOCKS: Final = ProductBlocks(
    rows=128, columns=128, depth=64, group_rows=8, num_warps=8, num_stages=3, programs_per_sm=1
)
INT8_BLOCKS: Final = ProductBlocks(
    rows=128, columns=128, depth=128, group_rows=16, num_warps=4, num_stages=3, programs_per_sm=2
)
GATED_CAPABILITY: Final = (9, 0)  # compute capability from which the gated unit's kernel runs
MEAN_TOKENS: Final = 16  # tokens of a span that are loaded and summed in one step
MEAN_COLUMNS: Final = 256  # columns that one program averages
MAX_NORM_WARPS: Final = 16
COLUMNS_PER_NORM_WARP: Final = 512  # about 16 numbers for each thread
SMALLEST_LARGEST_BITS: Final = tl.constexpr(786163455)  # of the float32 1e-10
INTERPRETER_PROGRAMS: Final = 4  # on a CPU programs run one after the other: any number works


@triton.jit
def branchless_gelu(x: tl.tensor) -> tl.tensor:
    """Compute exact GELU, x * Phi(x), where Phi is the cumulative normal distribution.

    It is called exact in contrast to GELU's usual approximation by tanh. It has no branch,
    unlike the usual `erf`, so that the rows of the calling kernel stay in registers.

    Phi(x) is 1 - Phi(-x). So GELU(x) is x - x * Phi(-x) for positive x, and -|x| * Phi(-|x|) for
    negative x. One formula covers both: max(x, 0) - |x| * Phi(-|x|). The base-2 logarithm of
    Phi(-|x|), the tail of the distribution, is approximated by a polynomial of |x|.
    The absolute error is at most 6e-7. Where GELU is small, its relative error is at most 4e-6, as
    with float32's own erf.
    """
    size = tl.abs(x)
    # The polynomial has the degree 7. It is written as a chain of products and sums (Horner).
    log2_tail = ((-1.7934565e-06 * size + 6.09042e-05) * size - 0.00092602923) * size + 0.008493758
    log2_tail = (log2_tail * size - 0.05393785) * size - 0.4584805
    log2_tail = (log2_tail * size - 1.1512468) * size - 0.99999547
    return tl.maximum(x, 0.0) - size * tl.exp2(log2_tail)


@triton.jit
def round_to_int8(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Round `x * scale` to int8, halves to even. The product must lie between -127 and 127.

    After 1.5 * 2 ** 23 (12,582,912) is added, a float32 has no bits left for fractions. So the
    addition rounds, and the lowest byte of the float32 is the rounded number as int8.
    """
    return (x * scale + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _norm(
    x: tl.tensor,  # [rows, width]
    shift: tl.tensor,  # float32 [width], added to the row before it is normalised; or None
    weight: tl.tensor,  # [width]
    bias: tl.tensor,  # [width]
    out: tl.tensor,  # [rows, width]
    eps: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Apply layer norm to one row, in float32. Each program computes one row.

    The result is (row - mean) / sqrt(variance + eps) * weight + bias. `block` is the smallest power
    of two that is not below `width`, because Triton's ranges have such lengths. The mask leaves out
    the columns behind the row.
    """
    row = tl.program_id(0)
    column = tl.arange(0, block)
    mask = column < width
    offset = row.to(tl.int64) * width + column
    values = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)  # [block]
    if shift is not None:
        values += tl.load(shift + column, mask=mask, other=0.0)
    mean = tl.sum(values, 0) / width
    centred_values = tl.where(mask, values - mean, 0.0)
    variance = tl.sum(centred_values * centred_values, 0) / width
    result = centred_values * tl.rsqrt(variance + eps)
    result = result * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    result += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=mask)


def norm(
    x: Tensor, affine: tuple[Tensor, Tensor], eps: float, shift: Tensor | None = None
) -> Tensor:
    """Apply layer norm to each row of `x + shift`.

    Args:
        x: [rows, width]. It is not changed.
        affine: Weight and bias of the norm, [width] each.
        eps: A small number that is added to the variance.
        shift: float32 [width], added to every row first: biases that linear layers have left out.
            None: nothing is added.

    Returns:
        A new tensor [rows, width] in the format of `x`.
    """
    weight, bias = affine
    rows, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)  # a program holds its whole row in registers
    num_warps = max(1, min(MAX_NORM_WARPS, block // COLUMNS_PER_NORM_WARP))
    _norm[(rows,)](x, shift, weight, bias, out, eps, width=width, block=block, num_warps=num_warps)
    return out


@triton.jit
def _round_rows(
    x: tl.tensor,  # [rows, width]
    weight: tl.tensor,  # of a norm, [width]
    bias: tl.tensor,  # of a norm, [width]
    rotation: tl.tensor,  # fp16 [rotation_size, rotation_size]
    out: tl.tensor,  # int8 [rows, width]
    out_scale: tl.tensor,  # float32 [rows]: what undoes the rounding
    rows: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    first_width: tl.constexpr,  # columns of a row's first part, a power of two
    rest_width: tl.constexpr,  # columns of its second part; some of them may lie behind the row
    rotation_size: tl.constexpr,
    programs: tl.constexpr,
    preparation: tl.constexpr,
) -> None:
    """Prepare, rotate and round rows to int8. Each program does every `programs`-th row.

    The preparation is a layer norm ("norm"), exact GELU ("gelu") or nothing (""). Then each
    `rotation_size` neighbouring numbers of the row are multiplied with the rotation matrix, and the
    row is rounded in equal steps.

    Triton holds ranges of powers of two only. So a row is treated in two parts, `first` and `rest`,
    each as a matrix [width of the part / rotation_size, rotation_size].
    """
    lane = tl.arange(0, rotation_size)  # the place of a number within its block of the row
    matrix = tl.load(rotation + lane[:, None] * rotation_size + lane[None, :])
    first_blocks = tl.arange(0, first_width // rotation_size)[:, None]
    first_columns = first_blocks * rotation_size + lane[None, :]
    rest_blocks = tl.arange(0, rest_width // rotation_size)[:, None]
    rest_columns = first_width + rest_blocks * rotation_size + lane[None, :]
    mask = rest_columns < width
    for row in tl.range(tl.program_id(0), rows, programs, num_stages=2):
        # int64, because offsets can exceed 2 ** 31. `tl.full` because `row` is a plain Python
        # number in the interpreter, which has no method `to`.
        start = tl.full((), row, tl.int64) * width
        first = tl.load(x + start + first_columns).to(tl.float32)
        rest = tl.load(x + start + rest_columns, mask=mask, other=0.0).to(tl.float32)
        if preparation == "norm":
            # (row - mean) / sqrt(variance + eps) * weight + bias, over both parts together
            first_sum = tl.sum(tl.sum(first, 1), 0)
            rest_sum = tl.sum(tl.sum(rest, 1), 0)
            mean = (first_sum + rest_sum) / width
            first = first - mean
            rest = tl.where(mask, rest - mean, 0.0)
            first_squares = tl.sum(tl.sum(first * first, 1), 0)
            rest_squares = tl.sum(tl.sum(rest * rest, 1), 0)
            variance = (first_squares + rest_squares) / width
            factor = tl.rsqrt(variance + eps)
            first = first * factor * tl.load(weight + first_columns).to(tl.float32)
            first += tl.load(bias + first_columns).to(tl.float32)
            rest_weight = tl.load(weight + rest_columns, mask=mask, other=0.0).to(tl.float32)
            rest = rest * factor * rest_weight
            rest += tl.load(bias + rest_columns, mask=mask, other=0.0).to(tl.float32)
        if preparation == "gelu":
            first = branchless_gelu(first)
            rest = branchless_gelu(rest)
        # The matrix is symmetric, so matrix @ first.T is (first @ matrix).T. It is the left factor,
        # because each warp holds its own copy of the left factor: one of `first` would be costly.
        first = tl.dot(matrix, first.to(tl.float16).T)  # [rotation_size, blocks of the part]
        rest = tl.dot(matrix, rest.to(tl.float16).T)
        # The bits of numbers that are not negative have the same order as the numbers, and those of
        # NaN are the largest. So a NaN makes the scale NaN. A maximum of numbers would ignore it.
        first_bits = tl.abs(first).to(tl.int32, bitcast=True)
        rest_bits = tl.abs(rest).to(tl.int32, bitcast=True)
        first_largest = tl.max(tl.max(first_bits, 1), 0)
        rest_largest = tl.max(tl.max(rest_bits, 1), 0)
        largest_bits = tl.maximum(first_largest, rest_largest)
        # A row of zeros must not divide by zero.
        largest_bits = tl.maximum(largest_bits, SMALLEST_LARGEST_BITS)
        largest = largest_bits.to(tl.float32, bitcast=True)
        tl.store(out_scale + row, largest / 127.0)
        tl.store(out + start + first_columns, round_to_int8(first, 127.0 / largest).T)
        tl.store(out + start + rest_columns, round_to_int8(rest, 127.0 / largest).T, mask=mask)


@dataclass(frozen=True, slots=True)
class RowLaunch:
    """How the kernel that rounds rows is launched. It treats a row in two parts."""

    first_width: int  # columns of the first part, a power of two
    rest_width: int  # columns of the second part, which may reach beyond the row
    num_warps: int


def _row_launch(width: int, rotation_size: int) -> RowLaunch:
    """Choose how rows are cut into two parts for `_round_rows`, and how many warps treat a row.

    Both parts are powers of two, because Triton holds such sizes only. The first is the largest
    that fits into the row, the second covers the remaining columns. One warp treats about 1,024
    columns.
    """
    first_width = 1 << (width.bit_length() - 1)
    # The second part has at least one block of the rotation, even if the first covers the row.
    rest_width = max(rotation_size, triton.next_power_of_2(width - first_width))
    num_warps = max(1, min(4, first_width // 1024))
    return RowLaunch(first_width, rest_width, num_warps)


def int8_rows(
    x: Tensor,
    rotation: Tensor,
    library: HopperLibrary | None = None,
    *,
    norm: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    gelu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate rows and round them to int8. Optionally apply a layer norm or exact GELU before.

    The rotation mixes neighbouring numbers of a row, so that no single large number makes the steps
    of its row too wide.

    The library and Triton add in different orders, so a few numbers differ by one step. A row with
    NaN or infinity gets a scale that is NaN or infinite.

    Args:
        x: [rows, width]. It is not changed.
        rotation: The matrix that `precision.hadamard_rotation` makes for this width,
            fp16 [rotation_size, rotation_size].
        library: The library for Hopper GPUs, which does it for the widths that it has kernels for;
            None: Triton does it.
        norm: Weight and bias of a layer norm, [width] each; None: no norm.
        eps: A small number that is added to the norm's variance.
        gelu: Apply exact GELU; only without a norm.

    Returns:
        The rows in int8 [rows, width], and the scales that undo the rounding, float32 [rows, 1].
    """
    rows, width = x.shape
    if library is not None and rounds(width, has_norm=norm is not None, gelu=gelu):
        return library.round_rows(x, norm=norm, eps=eps, gelu=gelu)
    rotation_size = len(rotation)
    launch = _row_launch(width, rotation_size)
    # The registers limit how many warps run on a multiprocessor at the same time: with a norm a
    # thread takes 168 registers, otherwise at most 126.
    if norm:
        preparation = "norm"
        warps_per_sm = 12
        weight, bias = norm
    else:
        preparation = "gelu" if gelu else ""
        warps_per_sm = 16
        weight, bias = x, x  # any tensor: without a norm the kernel does not load them
    programs = _n_programs(x.device, rows, warps_per_sm // launch.num_warps)
    out = torch.empty_like(x, dtype=torch.int8)
    scale = x.new_empty(rows, 1, dtype=torch.float32)
    _round_rows[(programs,)](
        x,
        weight,
        bias,
        rotation,
        out,
        scale,
        rows,
        eps,
        width,
        first_width=launch.first_width,
        rest_width=launch.rest_width,
        rotation_size=rotation_size,
        preparation=preparation,
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
    token_block: tl.constexpr,
    column_block: tl.constexpr,
) -> None:
    """Average `column_block` columns over the tokens of one span. This is the work of one program.

    A span is a stretch of neighbouring tokens, from `starts` to before `ends`.

    Tokens are summed in float32, in blocks of `token_block` tokens that begin at the start of the
    span. So the order of the sums, and with it the result, depends on the span alone.
    """
    span = tl.program_id(0)
    column = tl.program_id(1) * column_block + tl.arange(0, column_block)
    is_column = column < width  # the last program may reach beyond the width
    start = tl.load(starts + span)
    end = tl.load(ends + span)
    total = tl.zeros([column_block], tl.float32)
    for first in range(start, end, token_block):
        token = first + tl.arange(0, token_block)
        address = x + token.to(tl.int64)[:, None] * width + column[None, :]
        mask = (token < end)[:, None] & is_column[None, :]
        values = tl.load(address, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(values, 0)  # `values` is [token_block, column_block]
    n_tokens = tl.maximum(end - start, 1).to(tl.float32)  # an empty span has the mean 0
    tl.store(out + span.to(tl.int64) * width + column, total / n_tokens, mask=is_column)


def span_means(x: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Average `x` over each span of neighbouring tokens.

    The mean of a span does not depend on the tokens outside it.

    Args:
        x: [tokens, width].
        starts: First token of each span, int32 [spans].
        ends: Token after the last of each span, int32 [spans].

    Returns:
        float32 [spans, width]; zeros where a span is empty.
    """
    spans = len(starts)
    width = x.shape[1]
    out = torch.empty(spans, width, dtype=torch.float32, device=x.device)
    grid = (spans, triton.cdiv(width, MEAN_COLUMNS))
    _span_means[grid](
        x,
        starts.contiguous(),
        ends.contiguous(),
        out,
        width=width,
        token_block=MEAN_TOKENS,
        column_block=MEAN_COLUMNS,
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
    group_rows: tl.constexpr,
    programs: tl.constexpr,
    epilogue: tl.constexpr,
) -> None:
    """Compute x @ weight.T in blocks. Each program computes every `programs`-th block.

    A tensor argument that is called a descriptor is Triton's description of a tensor and of the
    blocks in which it is loaded. The factors are [m, k] and [n, k].T, the product is [m, n].

    The epilogue is what happens with the sums of a block:

    - "store": for int8 factors. The sums, exact integers, are scaled in float32 and written.
    - "add": the same, but they are added to `out`.
    - "gate": for 16-bit factors. gelu(first half) * second half is written. Each block has the
      columns of both halves, because `interleave` has put the rows of the weight in this order.
    """
    blocks_m = tl.cdiv(m, rows)
    blocks_n = tl.cdiv(n, columns)
    halves: tl.constexpr = 2 if epilogue == "gate" else 1
    sum_type: tl.constexpr = tl.float32 if epilogue == "gate" else tl.int32
    for block in tl.range(tl.program_id(0), blocks_m * blocks_n, programs, flatten=True):
        # `group_rows` blocks of rows form a group. A group is computed column by column, so that
        # the programs that run at the same time load the same parts of the weight from the cache.
        group = block // (group_rows * blocks_n)
        index_in_group = block % (group_rows * blocks_n)
        # The last group may have fewer blocks of rows.
        group_height = tl.minimum(blocks_m - group * group_rows, group_rows)
        first_row = (group * group_rows + index_in_group % group_height) * rows
        first_column = index_in_group // group_height * columns
        total = tl.zeros([rows, halves * columns], sum_type)
        for step in range(tl.cdiv(k, depth)):
            x_block = x.load([first_row, step * depth])
            weight_block = weight.load([halves * first_column, step * depth]).T
            total = tl.dot(x_block, weight_block, total, out_dtype=sum_type)
        if epilogue == "gate":
            # [rows, 2 * columns] becomes [rows, columns, 2], which is split into the halves.
            half_by_half = tl.reshape(total, (rows, 2, columns))
            first, second = tl.split(tl.permute(half_by_half, (0, 2, 1)))  # [rows, columns] each
            # Exact GELU: x / 2 * (1 + erf(x / sqrt(2)))
            first = 0.5 * first * (1.0 + tl.erf(first * 0.7071067811865476))
            out.store([first_row, first_column], (first * second).to(out.dtype))
        else:
            row = first_row + tl.arange(0, rows)
            column = first_column + tl.arange(0, columns)
            # The last blocks may reach beyond the product.
            is_column = column < n
            sums = total.to(tl.float32)
            result = sums * tl.load(row_scale + row, mask=row < m, other=0.0)[:, None]
            result = result * tl.load(scale + column, mask=is_column, other=0.0)[None, :]
            result += tl.load(bias + column, mask=is_column, other=0.0)[None, :]
            address = out + row.to(tl.int64)[:, None] * n + column[None, :]
            mask = (row < m)[:, None] & is_column[None, :]
            if epilogue == "add":
                result += tl.load(address, mask=mask, other=0.0).to(tl.float32)
            tl.store(address, result.to(out.dtype.element_ty), mask=mask)


def can_gate(width: int, device: torch.device) -> bool:
    """Return whether the kernel for DNABERT-S's gated unit runs on a device.

    The width must be a multiple of the kernel's blocks, and the GPU must be new enough (Hopper or
    later). On a CPU the kernel runs in Triton's interpreter, in tests.

    Args:
        width: Columns of the unit's result.
        device: Where the unit would run.
    """
    if width % GATED_BLOCKS.columns != 0:
        return False
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) >= GATED_CAPABILITY


def interleave(weight: Tensor) -> Tensor:
    """Reorder the rows of a gated unit's weight for the kernel behind `gated_unit`.

    The unit multiplies column i of the first half of a product by column i of the second half. In
    the new order, blocks of rows of the first half alternate with blocks of the second half. So the
    kernel computes both columns in the same program, without a pass over memory between them.

    Args:
        weight: [2 n, k], where n is the width of the unit's result, a multiple of the columns of a
            block, and k the width of its input.

    Returns:
        A new tensor [2 n, k].
    """
    first_half, second_half = weight.chunk(2)  # [n, k] each
    blocks = (-1, GATED_BLOCKS.columns)  # [blocks, columns of a block, k]
    halves = (first_half.unflatten(0, blocks), second_half.unflatten(0, blocks))
    alternating = torch.stack(halves, 1)  # [blocks, 2, columns of a block, k]
    return alternating.flatten(0, 2).contiguous()


def gated_unit(x: Tensor, interleaved: Tensor) -> Tensor:
    """Compute a gated linear unit: exact GELU of one half of `x @ weight.T`, times the other half.

    Args:
        x: fp16 or bf16 [m, k], m rows of the width k.
        interleaved: The weight [2 n, k], in the order that `interleave` makes, where the rows of
            both halves alternate block by block.

    Returns:
        [m, n], in the format of `x`.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    m, k = x.shape
    n = len(interleaved) // 2
    blocks = GATED_BLOCKS
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    _launch_product(
        "gate",
        blocks,
        x=TensorDescriptor.from_tensor(x, [blocks.rows, blocks.depth]),
        weight=TensorDescriptor.from_tensor(interleaved, [2 * blocks.columns, blocks.depth]),
        scales=(None, None, None),  # 16-bit factors have neither scales nor a bias
        out=TensorDescriptor.from_tensor(out, [blocks.rows, blocks.columns]),
        sizes=(m, n, k),
        device=x.device,
    )
    return out


def int8_product(
    x: Tensor, row_scale: Tensor, layer: Linear, add_to: Tensor | None = None
) -> Tensor:
    """Compute `x @ weight.T + bias` for an int8 matrix and an int8 weight.

    Sums of int8 products are exact integers, so the sizes of a kernel's blocks change no bit. On a
    Hopper GPU a library with larger blocks computes the same bits faster than Triton.

    Args:
        x: int8 [m, k].
        row_scale: What each row of `x` is multiplied with to undo its rounding, float32 [m, 1].
        layer: Weight int8 [n, k], bias [n], and the scales of the weight's rows, float32 [n].
        add_to: A tensor [m, n] to which the product is added in place; None: return a new tensor.

    Returns:
        `add_to`, or a new tensor, fp16 [m, n].
    """
    out = add_to
    if out is None:
        out = torch.empty(len(x), len(layer[0]), dtype=torch.float16, device=x.device)
    library = find_library(x.device)
    if library is not None and fits(layer[0]):
        library.multiply(x, row_scale, layer, out, adds=add_to is not None)
    else:
        triton_int8_product(x, row_scale, layer, out, adds=add_to is not None)
    return out


def triton_int8_product(
    x: Tensor, row_scale: Tensor, layer: Linear, out: Tensor, *, adds: bool
) -> None:
    """Compute `x @ weight.T + bias` for int8 factors by the Triton kernel, on any GPU.

    Args:
        x: int8 [m, k].
        row_scale: What each row of `x` is multiplied with to undo its rounding, float32 [m, 1].
        layer: Weight int8 [n, k], bias [n], and the scales of the weight's rows, float32 [n].
        out: fp16 [m, n]; receives the product.
        adds: Add the product to `out` in place of overwriting it.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    weight, bias, scale = layer
    m, k = x.shape
    blocks = INT8_BLOCKS
    _launch_product(
        "add" if adds else "store",
        blocks,
        x=TensorDescriptor.from_tensor(x, [blocks.rows, blocks.depth]),
        weight=TensorDescriptor.from_tensor(weight, [blocks.columns, blocks.depth]),
        scales=(row_scale, scale, bias),
        out=out,
        sizes=(m, len(weight), k),
        device=x.device,
    )


def _launch_product(
    epilogue: str,
    blocks: ProductBlocks,
    *,
    x: object,
    weight: object,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
    out: object,
    sizes: tuple[int, int, int],
    device: torch.device,
) -> None:
    """Launch the kernel `_product`, which writes the product to `out`.

    A descriptor is Triton's description of a tensor and of the blocks in which it is loaded.

    Args:
        epilogue: What is done with the sums of a block: "store" writes them, "add" adds them to
            `out`, "gate" multiplies GELU of one half by the other half.
        blocks: Sizes of the blocks.
        x: Descriptor of the first factor.
        weight: Descriptor of the second factor.
        scales: Scales of the rows of `x` and of `weight`, and the bias; None for 16-bit factors.
        out: The tensor for the result, or its descriptor.
        sizes: m, n and k of the product [m, k] x [n, k].T.
        device: Where the kernel runs.
    """
    m, n, k = sizes
    n_blocks = triton.cdiv(m, blocks.rows) * triton.cdiv(n, blocks.columns)
    programs = _n_programs(device, n_blocks, blocks.programs_per_sm)
    _product[(programs,)](
        x,
        weight,
        *scales,
        out,
        m,
        n,
        k,
        programs=programs,
        epilogue=epilogue,
        rows=blocks.rows,
        columns=blocks.columns,
        depth=blocks.depth,
        group_rows=blocks.group_rows,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def _n_programs(device: torch.device, blocks: int, programs_per_sm: int) -> int:
    """Return how many programs to launch for a kernel. With n programs, each does every n-th block.

    As many are launched as run at the same time, so that a program starts once and goes on with its
    next block.

    Args:
        device: Where they run.
        blocks: Number of blocks to compute.
        programs_per_sm: Programs that share a multiprocessor of the GPU.
    """
    if device.type != "cuda":
        return min(INTERPRETER_PROGRAMS, blocks)
    properties = torch.cuda.get_device_properties(device)
    return min(programs_per_sm * properties.multi_processor_count, blocks)
