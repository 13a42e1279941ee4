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
MAX_ROTATION_SIZE: Final = 64
INT8_MAX: Final = 127  # the largest number used, on both sides of 0


def resolve_precision(asked: Precision, device: torch.device) -> Resolved:
    """Return the precision that runs: `auto` is fp16 on CUDA and fp32 elsewhere.

    Raises:
        IncapableError: The device cannot run the precision that was asked for.
    """
    if asked == "auto":
        return "fp16" if device.type == "cuda" else "fp32"
    if asked != "fp32" and device.type != "cuda":
        raise IncapableError(f"precision {asked} needs a CUDA device, this is {device}; use fp32")
    if asked == "int8" and torch.cuda.get_device_capability(device) < INT8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise IncapableError(
            f"precision int8 needs compute capability 9.0 or later, {name} is older; use fp16"
        )
    return asked


@functools.cache
def hadamard_rotation(width: int, device: torch.device) -> Tensor:
    """Return the orthogonal matrix that stretches of rows of `width` are multiplied with.

    It is Hadamard's matrix, scaled. It turns large and small numbers into many of middling size,
    and rounding those in equal steps loses less.

    Args:
        width: Numbers in a row; the matrix has the largest power of two that divides it, at most
            `MAX_ROTATION_SIZE`, as its size.
        device: Where the matrix is put.

    Returns:
        fp16 [rotation_size, rotation_size].
    """
    rotation_size = math.gcd(width, MAX_ROTATION_SIZE)
    doubling = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    matrix = torch.ones(1, 1)
    while len(matrix) < rotation_size:
        matrix = torch.kron(doubling, matrix)
    return (matrix / math.sqrt(len(matrix))).to(device, torch.float16)


def rotated(x: Tensor) -> Tensor:
    """Rotate rows stretch by stretch. Rotating both factors of a product keeps the product.

    Args:
        x: float32 [rows, width].

    Returns:
        float32 [rows, width].
    """
    rotation = hadamard_rotation(x.shape[1], x.device).float()
    stretches = x.reshape(len(x), -1, len(rotation))
    return (stretches @ rotation).flatten(1)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to int8 in equal steps; halves to even, as the kernels do.

    Args:
        x: float32 [rows, width].

    Returns:
        The rows in int8 [rows, width], and the steps [rows, 1]: their product is about `x`.
    """
    largest = x.abs().amax(dim=-1, keepdim=True)
    step = largest.clamp_min(1e-12) / INT8_MAX
    return (x / step).round().to(torch.int8), step
