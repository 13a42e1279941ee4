"""Tensors read from pickled checkpoints (`.bin`, `.pt`, `.pth`) without running what they hold.

torch's restricted loader reads the tensors. It imports nothing but tensors, plain containers and
what is allowed here, each an inert stand-in.
"""

import argparse
import pickle
import resource
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from virnuc_core.errors import WeightsError

STATE_KEYS: Final = ("model", "model_state_dict")  # of fair-esm, and of heads
# A head has 9 tensors. A pickle of a few lines can name one module within itself many times over.
HEAD_MAX_TENSORS: Final = 100
HEAD_MAX_BYTES: Final = 1 << 28  # a head has 7 MB; a larger file is not read as one
# Tensors may share their numbers, so they may claim more than the file has, but not much more.
MAX_SHARING: Final = 4
EXTRA_BYTES: Final = 1 << 30  # of memory, for all else that loading takes
ZIP_START: Final = b"PK\x03\x04"


class ModuleState:
    """Stands for a pickled module: its tensors under their dotted names, none of its code."""

    tensors: dict[str, Tensor]

    def __setstate__(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the tensors of a module and of its submodules, which have their state already."""
        values = {**state["_parameters"], **state["_buffers"]}
        for name, module in state["_modules"].items():
            if module is not None:
                for inner_name, tensor in module.tensors.items():
                    values[f"{name}.{inner_name}"] = tensor
            if len(values) > HEAD_MAX_TENSORS:
                raise ValueError("more tensors than any head has")
        self.tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}


# What a head that was pickled whole, as VirNucPro's are, names beside tensors
HEAD_CLASSES: Final = (
    "__main__.MLPClassifier",
    "torch.nn.modules.linear.Linear",
    "torch.nn.modules.batchnorm.BatchNorm1d",
    "torch.nn.modules.dropout.Dropout",
    "torch.nn.modules.activation.ReLU",
)
ALLOWED: Final[list[Any]] = [
    *((ModuleState, name) for name in HEAD_CLASSES),
    argparse.Namespace,  # in which fair-esm keeps its arguments
]


def read_pickled(path: Path, max_bytes: int | None = None) -> dict[str, Tensor]:
    """Read the tensors of a pickled checkpoint.

    It may be a state dictionary, one within another dictionary, or a head that was pickled whole.

    Args:
        path: The file.
        max_bytes: Refuse a larger file.

    Returns:
        The tensors by their names.

    Raises:
        WeightsError: The file is too large, damaged, or asks for something else, which is named.
    """
    try:
        size = path.stat().st_size
        if max_bytes is not None and size > max_bytes:
            raise ValueError(f"{size:,} bytes is no head (at most {max_bytes:,})")
        with path.open("rb") as file:
            is_zip = file.read(len(ZIP_START)) == ZIP_START
        if is_zip:
            _check_archive(path)
        # A large file is mapped into memory, not copied.
        return _load_tensors(path, mmap=is_zip and max_bytes is None)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror or error})") from error
    except Exception as error:  # torch raises whatever a broken file leads to
        raise WeightsError(
            f"{path}: refused, no tensors that can be read safely: {first_line(error)}"
        ) from error


def _check_archive(path: Path) -> None:
    """Raise `ValueError` if a zip archive is compressed or comes from a big-endian machine."""
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("compressed, which no checkpoint is: what it swells to cannot be told")
        for name in archive.namelist():
            if name.endswith("/byteorder") and archive.read(name) != b"little":
                raise ValueError("saved on a big-endian machine")


def _load_tensors(path: Path, *, mmap: bool) -> dict[str, Tensor]:
    """Load a module, a state dictionary, or one under a usual key. Errors are of all kinds."""
    size = path.stat().st_size
    with (
        _limited_memory(MAX_SHARING * size + EXTRA_BYTES),
        warnings.catch_warnings(),
        torch.serialization.safe_globals(ALLOWED),
    ):
        warnings.simplefilter("ignore")  # of old formats; what cannot be loaded raises
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    if isinstance(content, ModuleState):
        content = content.tensors
    if not isinstance(content, Mapping):
        raise ValueError("no dictionary of tensors")
    state = content
    for key in STATE_KEYS:
        if isinstance(content.get(key), Mapping):
            state = content[key]
            break
    if not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError("no dictionary of tensors")
    claimed_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    if claimed_bytes > MAX_SHARING * size:
        raise ValueError(f"it claims {claimed_bytes:,} bytes of numbers, the file has {size:,}")
    return {str(name): tensor.detach() for name, tensor in state.items()}


@contextmanager
def _limited_memory(further_bytes: int) -> Iterator[None]:
    """Let this process take at most so much more memory, whatever a file claims to hold."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    in_use = pages * resource.getpagesize()
    limits = [in_use + further_bytes]
    for limit in (soft, hard):
        if limit != resource.RLIM_INFINITY:
            limits.append(limit)
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def first_line(error: Exception) -> str:
    """Return what was wrong, in one line.

    Around what its loader found, torch puts advice that nobody should follow, so that is left out.
    """
    cause: BaseException = error
    if isinstance(error, pickle.UnpicklingError) and error.__context__:
        cause = error.__context__
    text = str(cause).strip()
    if not text:
        return type(cause).__name__
    return text.splitlines()[0].split(". ")[0]
