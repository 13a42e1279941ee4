"""Read the tensors of pickled checkpoints (`.bin`, `.pt`, `.pth`) without running code in them.

A pickle can name any class or function, and the usual loader calls it. torch's restricted loader
accepts only tensors, plain containers and the names that are listed here. For these names it uses
our own harmless classes.
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

from virnuc_core.encoders.pickle_scan import check_checkpoint
from virnuc_core.errors import WeightsError
from virnuc_core.system_errors import require_readable

# Keys under which a checkpoint may keep its tensors: fair-esm's has "model", classifiers the other
STATE_KEYS: Final = ("model", "model_state_dict")
# A classifier ("head") has 9 tensors. A hostile pickle of a few lines can contain the same module
# many times, nested in itself, so that the number of tensors explodes.
HEAD_MAX_TENSORS: Final = 100
HEAD_MAX_BYTES: Final = 1 << 28  # a classifier has 7 MB
# Several tensors may share the same numbers in the file. So the tensors together may be larger than
# the file, but not by more than this factor.
MAX_SHARING: Final = 4
EXTRA_BYTES: Final = 1 << 30  # memory that loading may take besides the tensors
ZIP_START: Final = b"PK\x03\x04"  # torch's current format is a zip archive


class ModuleState:
    """Takes the place of a pickled network: it keeps the tensors and none of the code.

    The tensors have dotted names, as in a state dictionary, for instance `bn1.weight`.
    """

    tensors: dict[str, Tensor]

    def __setstate__(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Collect the tensors of a module and of its submodules. The loader calls this.

        The loader restores inner modules first, so the submodules are complete `ModuleState`
        objects here.

        Args:
            state: The attributes of a torch module, as pickled.

        Raises:
            ValueError: There are more tensors than a classifier has.
        """
        values = {**state["_parameters"], **state["_buffers"]}
        for name, module in state["_modules"].items():
            if module is not None:  # torch allows an empty place for a submodule
                for inner_name, tensor in module.tensors.items():
                    values[f"{name}.{inner_name}"] = tensor
            if len(values) > HEAD_MAX_TENSORS:
                raise ValueError("more tensors than any head has")
        self.tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}


# The classes in a classifier that was pickled as an object, as VirNucPro's are
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
    """Return the tensors of a pickled checkpoint by their names. No code in it is executed.

    The checkpoint may be a dictionary of tensors, a dictionary that contains one under a key of
    `STATE_KEYS`, or a classifier that was pickled as an object.

    Args:
        path: The file.
        max_bytes: Refuse a larger file; None: files of any size are read.

    Raises:
        WeightsError: The file is too large or damaged, or contains something that is not allowed.
            The message names it.
    """
    require_readable(path)
    try:
        size = path.stat().st_size
        if max_bytes is not None and size > max_bytes:
            raise ValueError(f"{size:,} bytes is no head (at most {max_bytes:,})")
        with path.open("rb") as file:
            is_zip = file.read(len(ZIP_START)) == ZIP_START
        if is_zip:
            _check_archive(path)
        check_checkpoint(path, is_zip=is_zip)
        # A file that may be large is mapped into memory, not copied.
        return _load_tensors(path, mmap=is_zip and max_bytes is None)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror or error})") from error
    except Exception as error:  # torch raises whatever a broken file leads to
        raise WeightsError(
            f"{path}: refused, no tensors that can be read safely: {error_summary(error)}"
        ) from error


def _check_archive(path: Path) -> None:
    """Refuse a zip archive that is compressed or comes from a big-endian machine.

    torch never compresses its archives. A small compressed file could expand to any size.

    Raises:
        ValueError: The archive is compressed, or has its numbers in the other byte order.
    """
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("compressed, which no checkpoint is: what it swells to cannot be told")
        for name in archive.namelist():
            if name.endswith("/byteorder") and archive.read(name) != b"little":
                raise ValueError("saved on a big-endian machine")


def _load_tensors(path: Path, *, mmap: bool) -> dict[str, Tensor]:
    """Load the tensors of a pickled checkpoint by their names, with limited memory.

    The checkpoint may be a network, a dictionary of tensors, or a dictionary that has one under a
    usual key.

    Args:
        path: The file.
        mmap: Map the file into memory instead of copying it.

    Raises:
        Exception: The file cannot be loaded. torch raises errors of all kinds.
    """
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
    # Tensors that share their numbers may claim far more than the file has.
    claimed_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    if claimed_bytes > MAX_SHARING * size:
        raise ValueError(f"it claims {claimed_bytes:,} bytes of numbers, the file has {size:,}")
    return {str(name): tensor.detach() for name, tensor in state.items()}


@contextmanager
def _limited_memory(further_bytes: int) -> Iterator[None]:
    """Limit how much more memory this process can take inside a `with` block.

    A damaged or hostile file can claim tensors of any size. With the limit, allocating them fails
    with an error instead of filling the machine's memory.

    Args:
        further_bytes: What may be taken in addition to the memory in use.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    # The first number of this file is the size of the process's address space, in pages.
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    in_use_bytes = pages * resource.getpagesize()
    limits = [in_use_bytes + further_bytes]
    for limit in (soft, hard):
        if limit != resource.RLIM_INFINITY:  # a stricter limit of the user stays in force
            limits.append(limit)
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def error_summary(error: Exception) -> str:
    """Return the message of an error as one sentence; its class name if it has no message.

    When torch refuses a pickle, it wraps the reason into advice to load the file without
    restrictions. Nobody should follow this advice, so the reason alone is returned.
    """
    cause: BaseException = error
    if isinstance(error, pickle.UnpicklingError) and error.__context__:
        cause = error.__context__  # the error that torch was handling when it raised its own
    text = str(cause).strip()
    if not text:
        return type(cause).__name__
    first_line = text.splitlines()[0]
    return first_line.split(". ")[0]
