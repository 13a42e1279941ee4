"""int8 on Hopper GPUs (H100, H200) by a prebuilt library: products, and the rounding of rows.

The library is faster than the Triton kernels in `kernels`. Its products have the same bits as
Triton's, so each process uses the library for them where it can. Its rounding of rows has slightly
other bits. Therefore a run decides once, for all devices, what rounds its rows (the setting
`int8_kernels`), and records it.

The sources are in the folder `cuda`. Users need no compiler: the built library comes with the
package. This module does not import torch before it is needed, because a run asks it about the
library before any GPU is used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from virnuc_core.errors import IncapableError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from virnuc_core.config import Int8Kernels


LIBRARY: Final = Path(__file__).parent / "cuda" / "hopper.so"
RECORD: Final = LIBRARY.with_suffix(".json")  # what the library was built from, and its digest
CAPABILITY: Final = (9, 0)  # the compute capability that the library is built for, and no other
WIDTH_MULTIPLE: Final = 16  # rows of both factors must be multiples of this many bytes
COLUMN_MULTIPLE: Final = 8  # and the rows of the product of this many numbers
# Widths of the rows that the library rounds to int8: those of ESM-2 650M and 3B
WIDTHS: Final = (1280, 2560)
GELU_WIDTHS: Final = (5120, 10240)
# What is done with a row before it is rotated: the numbers are those of `int8_rows.cu`
NOTHING: Final = 0
NORM: Final = 1
GELU: Final = 2
# Addresses of the factors, the product, both scales and the bias; m, n, k and the number of
# multiprocessors; the CUDA stream
PRODUCT_TYPES: Final = [ctypes.c_void_p] * 6 + [ctypes.c_int] * 4 + [ctypes.c_void_p]
# Addresses of the rows, the norm's weight and bias, the int8 rows and their scales; rows and width;
# the norm's epsilon; what is done before; the CUDA stream
ROWS_TYPES: Final = (
    [ctypes.c_void_p] * 5
    + [ctypes.c_int] * 2
    + [ctypes.c_float]
    + [ctypes.c_int]
    + [ctypes.c_void_p]
)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HopperLibrary:
    """The functions of the library, for one GPU. Their calls do not wait for the GPU."""

    store: Callable[..., int]  # writes a product
    add: Callable[..., int]  # adds a product to what is there
    rows: Callable[..., int]  # rounds rows to int8
    multiprocessors: int  # of the GPU

    def multiply(
        self,
        x: Tensor,
        row_scale: Tensor,
        layer: tuple[Tensor, Tensor | None, Tensor | None],
        out: Tensor,
        *,
        adds: bool,
    ) -> None:
        """Compute `x @ weight.T + bias` for int8 factors.

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
        status = _call(function, x, *addresses, m, len(weight), k, self.multiprocessors)
        if status != 0:
            raise RuntimeError(f"int8 product [{m}, {k}] x [{len(weight)}, {k}]: status {status}")

    def round_rows(
        self, x: Tensor, *, norm: tuple[Tensor, Tensor] | None, eps: float, gelu: bool
    ) -> tuple[Tensor, Tensor]:
        """Rotate rows and round them to int8, after a layer norm, after exact GELU, or as they are.

        The rows must lie one after the other in memory, and `rounds` must be true for their width.

        Args:
            x: fp16 [rows, width].
            norm: Weight and bias of a layer norm, fp16 [width] each; None: no norm.
            eps: A small number that is added to the norm's variance.
            gelu: Apply exact GELU; only without a norm.

        Returns:
            The rows in int8 [rows, width], and the scales that undo the rounding, float32
            [rows, 1].

        Raises:
            RuntimeError: The library could not start the kernel.
        """
        import torch

        rows, width = x.shape
        weight, bias = norm or (x, x)  # without a norm the kernel does not load them
        assert x.dtype == weight.dtype == bias.dtype == torch.float16
        preparation = NORM if norm else GELU if gelu else NOTHING
        out = torch.empty_like(x, dtype=torch.int8)
        scale = x.new_empty(rows, 1, dtype=torch.float32)
        addresses = [tensor.data_ptr() for tensor in (x, weight, bias, out, scale)]
        status = _call(self.rows, x, *addresses, rows, width, eps, preparation)
        if status != 0:
            raise RuntimeError(f"rounding of rows [{rows}, {width}]: status {status}")
        return out, scale


def _call(function: Callable[..., int], x: Tensor, *arguments: object) -> int:
    """Call a function of the library on the GPU of `x` and its current stream."""
    import torch

    with torch.cuda.device(x.device):  # the library uses the current GPU
        stream = torch.cuda.current_stream().cuda_stream
        return function(*arguments, stream)


def fits(weight: Tensor) -> bool:
    """Return whether the library can multiply with a weight [n, k], by its sizes."""
    n, k = weight.shape
    return n % COLUMN_MULTIPLE == 0 and k % WIDTH_MULTIPLE == 0


def rounds(width: int, *, has_norm: bool, gelu: bool) -> bool:
    """Return whether the library has a kernel that rounds rows of this width.

    Args:
        width: Numbers in a row.
        has_norm: Whether a layer norm comes before.
        gelu: Whether GELU comes before.
    """
    widths = GELU_WIDTHS if gelu else WIDTHS
    return width in widths and not (has_norm and gelu)


def capability_problem(capability: tuple[int, int] | None) -> str:
    """Return in a few words why the library cannot run on a GPU; empty if it can.

    Args:
        capability: The compute capability of the GPU. None: there is no GPU, or it is not known.
    """
    if capability is None:
        return "no known compute capability"
    if capability != CAPABILITY:
        major, minor = capability
        return f"compute capability {major}.{minor}, not 9.0"
    return ""


@dataclass(frozen=True, slots=True)
class OpenedLibrary:
    """The library of this machine, or in a few words why it cannot be used."""

    library: ctypes.CDLL | None
    problem: str


@functools.cache
def open_library() -> OpenedLibrary:
    """Open the library, once per process. This needs no GPU.

    A library that is missing, does not load or has other bytes than the record says is not used.
    This is logged as a warning.
    """
    machine = platform.machine()
    if machine != "x86_64":
        return OpenedLibrary(None, f"built for x86_64, not {machine}")
    try:
        _require_recorded_bytes()
        library = ctypes.CDLL(str(LIBRARY))
        for product in (library.virnuc_int8_store, library.virnuc_int8_add):
            product.argtypes = PRODUCT_TYPES
            product.restype = ctypes.c_int
        library.virnuc_int8_rows.argtypes = ROWS_TYPES
        library.virnuc_int8_rows.restype = ctypes.c_int
    except (OSError, ValueError, AttributeError) as error:
        problem = f"cannot be loaded: {error}"
        log.warning("%s %s; int8 runs slower", LIBRARY.name, problem)
        return OpenedLibrary(None, problem)
    return OpenedLibrary(library, "")


def _require_recorded_bytes() -> None:
    """Raise an error if the library is not the one of its record.

    One changed bit in the code for the GPU could give wrong numbers without an error.

    Raises:
        OSError: The library or its record cannot be read.
        ValueError: The library has another digest, or its record is damaged.
    """
    digest = hashlib.sha256(LIBRARY.read_bytes()).hexdigest()
    try:
        recorded_digest = json.loads(RECORD.read_bytes())["library"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{RECORD.name} is damaged; install virnuc again") from error
    if digest != recorded_digest:
        raise ValueError(f"its SHA-256 is not the one in {RECORD.name}; install virnuc again")


def find_library(device: torch.device) -> HopperLibrary | None:
    """Return the library for a device, or None if it cannot run there; see `library_problem`."""
    return _load(device)[0]


def library_problem(device: torch.device) -> str:
    """Return in a few words why the library is not used on a device; empty if it is used."""
    return _load(device)[1]


def choose_library(kernels: Int8Kernels, device: torch.device) -> HopperLibrary | None:
    """Return the library if it shall round the rows of an encoder on a device; None for Triton.

    Args:
        kernels: The setting: hopper, triton, or auto for the library where it can run.
        device: Where the encoder runs.

    Raises:
        IncapableError: The library was asked for, and cannot run on the device.
    """
    if kernels == "triton":
        return None
    problem = library_problem(device)
    if problem and kernels == "hopper":
        raise IncapableError(
            f"int8 kernels 'hopper' cannot run on {device}: {problem}; use --int8-kernels triton"
        )
    return find_library(device)


@functools.cache
def _load(device: torch.device) -> tuple[HopperLibrary | None, str]:
    """Load the library for a device, once. Returns it, or None and the reason."""
    import torch

    if device.type != "cuda":
        return None, "not an NVIDIA GPU"
    problem = capability_problem(torch.cuda.get_device_capability(device))
    if problem:
        return None, problem
    opened = open_library()
    if opened.library is None:
        return None, opened.problem
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    library = HopperLibrary(
        store=opened.library.virnuc_int8_store,
        add=opened.library.virnuc_int8_add,
        rows=opened.library.virnuc_int8_rows,
        multiprocessors=multiprocessors,
    )
    return library, ""
