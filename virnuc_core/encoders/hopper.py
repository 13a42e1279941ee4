"""Products of int8 matrices by the prebuilt library for Hopper GPUs (H100, H200).

The library gives the same bits as the Triton kernel in `kernels`, and is faster. Its source is
`cuda/int8_product.cu`. Users need no compiler: the built library comes with the package.

`find_library` decides once per process and GPU whether the library is used. Where it cannot run,
the Triton kernel computes, and the run's record says why.
"""

import ctypes
import functools
import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

LIBRARY: Final = Path(__file__).parent / "cuda" / "hopper.so"
CAPABILITY: Final = (9, 0)  # the compute capability that the library is built for, and no other
WIDTH_MULTIPLE: Final = 16  # rows of both factors must be multiples of this many bytes
COLUMN_MULTIPLE: Final = 8  # and the rows of the product of this many numbers
# Addresses of the factors, the product, both scales and the bias; m, n, k and the number of
# multiprocessors; the CUDA stream
ARGUMENT_TYPES: Final = [ctypes.c_void_p] * 6 + [ctypes.c_int] * 4 + [ctypes.c_void_p]
Linear = tuple[Tensor, Tensor | None, Tensor | None]  # weight, bias, and the scales of int8 rows
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HopperLibrary:
    """The functions of the library, for one GPU."""

    store: Callable[..., int]  # writes a product
    add: Callable[..., int]  # adds a product to what is there
    multiprocessors: int  # of the GPU

    def multiply(
        self, x: Tensor, row_scale: Tensor, layer: Linear, out: Tensor, *, adds: bool
    ) -> None:
        """Compute `x @ weight.T + bias` for int8 factors. The call does not wait for the GPU.

        The rows of all tensors must lie one after the other in memory.

        Args:
            x: int8 [m, k].
            row_scale: What each row of `x` is multiplied with to undo its rounding, float32 [m, 1].
            layer: Weight int8 [n, k], bias float32 [n], and the scales of the weight's rows,
                float32 [n].
            out: fp16 [m, n]; receives the product.
            adds: Add the product to `out` in place of overwriting it.

        Raises:
            RuntimeError: The library could not start the kernel.
        """
        weight, bias, scale = layer
        assert bias is not None  # an int8 layer has a bias and scales
        assert scale is not None
        m, k = x.shape
        function = self.add if adds else self.store
        addresses = [tensor.data_ptr() for tensor in (x, weight, out, row_scale, scale, bias)]
        with torch.cuda.device(x.device):  # the library uses the current GPU
            stream = torch.cuda.current_stream().cuda_stream
            status = function(*addresses, m, len(weight), k, self.multiprocessors, stream)
        if status != 0:
            raise RuntimeError(f"int8 product [{m}, {k}] x [{len(weight)}, {k}]: status {status}")


def find_library(device: torch.device) -> HopperLibrary | None:
    """Return the library for a device, or None if it cannot run there; see `library_problem`."""
    return _load(device)[0]


def library_problem(device: torch.device) -> str:
    """Return in a few words why the library is not used on a device; empty if it is used."""
    return _load(device)[1]


def fits(weight: Tensor) -> bool:
    """Return whether the library can multiply with a weight [n, k], by its sizes."""
    n, k = weight.shape
    return n % COLUMN_MULTIPLE == 0 and k % WIDTH_MULTIPLE == 0


@functools.cache
def _load(device: torch.device) -> tuple[HopperLibrary | None, str]:
    """Load the library for a device, once. Returns it, or None and the reason.

    A library that is missing or does not load on a GPU that it is made for is logged as a warning.
    """
    if device.type != "cuda":
        return None, "not an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        major, minor = capability
        return None, f"compute capability {major}.{minor}, not 9.0"
    machine = platform.machine()
    if machine != "x86_64":
        return None, f"built for x86_64, not {machine}"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        store = library.virnuc_int8_store
        add = library.virnuc_int8_add
    except (OSError, AttributeError) as error:
        problem = f"cannot be loaded: {error}"
        log.warning("%s %s; int8 products run slower", LIBRARY.name, problem)
        return None, problem
    for function in (store, add):
        function.argtypes = ARGUMENT_TYPES
        function.restype = ctypes.c_int
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return HopperLibrary(store, add, multiprocessors), ""
