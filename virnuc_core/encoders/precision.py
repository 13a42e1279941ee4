"""Number formats that encoders compute in, and the rounding of int8.

int8 products follow SmoothQuant (Xiao et al. 2022) and QuaRot (Ashkboos et al. 2024): rows are
rotated by a Hadamard matrix before they are rounded, weights and inputs alike.
"""

import functools
import math
from typing import Final, Literal

import torch
from torch import Tensor

from virnuc_core.config import Precision
from virnuc_core.errors import IncapableError

Resolved = Literal["fp32", "fp16", "bf16", "int8"]

# Formats of the activations between linear layers. int8 rounds only what enters the layers.
DTYPES: Final[dict[Resolved, torch.dtype]] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.float16,
}
INT8_CAPABILITY: Final = (9, 0)  # compute capability from which the int8 kernels run
MAX_ROTATION_SIZE: Final = 64  # a matrix of this size fits into the kernel's registers
INT8_MAX: Final = 127  # numbers from -127 to 127 are used, so that both signs are treated alike
MIN_LARGEST: Final = 1e-12  # stands for the largest number of a row of zeros in a division


def resolve_precision(requested: Precision, device: torch.device) -> Resolved:
    """Return the number format that runs on a device. `auto` is fp16 on CUDA and fp32 elsewhere.

    Raises:
        IncapableError: The device cannot run the requested precision.
    """
    if requested == "auto":
        return "fp16" if device.type == "cuda" else "fp32"
    if requested != "fp32" and device.type != "cuda":
        raise IncapableError(
            f"precision {requested} needs a CUDA device, this is {device}; use fp32"
        )
    if requested == "int8" and torch.cuda.get_device_capability(device) < INT8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise IncapableError(
            f"precision int8 needs compute capability 9.0 or later, {name} is older; use fp16"
        )
    return requested


@functools.cache
def hadamard_rotation(width: int, device: torch.device) -> Tensor:
    """Return the matrix that rotates rows before they are rounded to int8.

    It is Hadamard's matrix, scaled to be orthogonal. A row with a few very large numbers becomes a
    row of numbers of similar size, which lose less when they are rounded in equal steps. The matrix
    is applied to each `rotation_size` neighbouring numbers of a row. It is computed once for each
    width and device.

    Args:
        width: Numbers in a row. `rotation_size` is the largest power of two that divides it, but at
            most `MAX_ROTATION_SIZE`, which is a power of two itself.
        device: Where the matrix is stored.

    Returns:
        fp16 [rotation_size, rotation_size].
    """
    rotation_size = math.gcd(width, MAX_ROTATION_SIZE)
    # Sylvester's construction: each step doubles the size of the matrix.
    doubling = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    matrix = torch.ones(1, 1)
    while len(matrix) < rotation_size:
        matrix = torch.kron(doubling, matrix)
    return (matrix / math.sqrt(len(matrix))).to(device, torch.float16)


def rotated(x: Tensor) -> Tensor:
    """Return rows multiplied with the rotation matrix, one block of columns after the other.

    The rotation makes the numbers of a row similar in size, so that they lose less when the row is
    rounded to int8. If both factors of a matrix product are rotated, the product stays the same.

    Args:
        x: float32 [rows, width].

    Returns:
        float32 [rows, width].
    """
    rotation = hadamard_rotation(x.shape[1], x.device).float()
    blocks = x.reshape(len(x), -1, len(rotation))  # [rows, blocks, rotation_size]
    return (blocks @ rotation).flatten(1)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to int8 in equal steps, so that its largest number becomes 127 or -127.

    Halves are rounded to even, as in the kernels.

    Args:
        x: float32 [rows, width].

    Returns:
        The rows in int8 [rows, width], and the step of each row, float32 [rows, 1]. The int8
        numbers times the step are about `x`.
    """
    largest = x.abs().amax(dim=-1, keepdim=True)
    step = largest.clamp_min(MIN_LARGEST) / INT8_MAX
    return (x / step).round().to(torch.int8), step
