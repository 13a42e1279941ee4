"""A Triton kernel for DNABERT-S's gated unit: the product and what is done with its two halves, in one; fp16 and bf16.

The halves are one product over weights that lie interleaved, so that each block reads its rows once and finds both
halves of a column in the same registers.
"""

from __future__ import annotations

import functools
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from virnuc_core.encoders.kernels import exact_gelu, jit
from virnuc_core.encoders.tuning import GATED_COLUMNS

ROWS: Final = 128
DEPTH: Final = 64
STRETCH: Final = 8  # blocks of rows that share a stretch of columns, for the cache


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


def interleave(weight: Tensor) -> Tensor:
    """The halves of a gated unit's weight [2 n, k], in turns of `GATED_COLUMNS` rows; n a multiple of that."""
    first, second = (half.unflatten(0, (-1, GATED_COLUMNS)) for half in weight.chunk(2))
    return torch.stack((first, second), 1).flatten(0, 2).contiguous()


def gated_unit(x: Tensor, interleaved: Tensor) -> Tensor:
    """Exact GELU of the first half of `x @ weight.T` times its second: [m, k] and [2 n, k] to [m, n].

    `interleaved` is what `interleave` makes of the weight.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    (m, k), n = x.shape, interleaved.shape[0] // 2
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    programs = min(_multiprocessors(x.device), triton.cdiv(m, ROWS) * triton.cdiv(n, GATED_COLUMNS))
    _gated_unit[(programs,)](
        TensorDescriptor.from_tensor(x, [ROWS, DEPTH]),
        TensorDescriptor.from_tensor(interleaved, [2 * GATED_COLUMNS, DEPTH]),
        TensorDescriptor.from_tensor(out, [ROWS, GATED_COLUMNS]),
        m,
        n,
        k,
        rows=ROWS,
        columns=GATED_COLUMNS,
        depth=DEPTH,
        tall=STRETCH,
        programs=programs,
        num_warps=8,
        num_stages=3,
    )
    return out


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Programs that run at once on the device; in Triton's interpreter any small number will do."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
