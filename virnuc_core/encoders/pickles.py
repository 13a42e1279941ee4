"""Pickled checkpoints and heads: their tensors, and nothing else of what such a file may hold.

torch's restricted loader reads them: nothing is imported but tensors, plain containers and what is allowed here.
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

HEAD_CLASS: Final = "MLPClassifier"
HEAD_PARTS: Final = ("linear.Linear", "batchnorm.BatchNorm1d", "dropout.Dropout", "activation.ReLU")
HEAD_MAX_TENSORS: Final = 100  # it has 9; a pickle of a few lines can name one module within itself many times over
SHARED: Final = 4  # tensors may share their numbers, so that they have more than the file, but not many times more
BESIDES: Final = 1 << 30  # bytes for whatever else loading takes
HEAD_MAX_BYTES: Final = 1 << 28  # a head has 7 MB; what claims to be one and is larger than this is not read


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.bin` or `.pt`; `WeightsError` when it holds anything but tensors and plain settings."""
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"  # the newer format can be mapped, not copied, into memory
    try:
        if zipped:
            _check_archive(path, None)
        # fair-esm keeps its arguments in a namespace
        state = _tensors(path, [argparse.Namespace], "model", mmap=zipped)
    except Exception as error:  # torch raises whatever a broken file leads to
        raise WeightsError(f"{path}: refused, not a checkpoint of tensors: {first_line(error)}") from error
    if state is None:
        raise WeightsError(f"{path}: holds no dictionary of tensors")
    return state


class ModuleState:
    """What stands for a pickled module: its tensors under their dotted names, none of its code."""

    tensors: dict[str, Tensor]

    def __setstate__(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        found = {**state["_parameters"], **state["_buffers"]}
        for name, module in state["_modules"].items():  # which have their state already
            inside = {} if module is None else module.tensors
            found |= {f"{name}.{inner}": tensor for inner, tensor in inside.items()}
            if len(found) > HEAD_MAX_TENSORS:
                raise ValueError("more tensors than any head has")
        self.tensors = {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


HEAD_MODULES: Final = tuple(  # a head that was pickled whole names these; each becomes the inert stand-in
    (ModuleState, name) for name in (f"__main__.{HEAD_CLASS}", *(f"torch.nn.modules.{one}" for one in HEAD_PARTS))
)


def read_head(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickled head: a whole module, as VirNucPro's are, a state dictionary, or one within another.
    Errors: `WeightsError` names what the file asked for that a head has no use for."""
    try:
        _check_archive(path, HEAD_MAX_BYTES)
        state = _tensors(path, list(HEAD_MODULES), "model_state_dict", mmap=False)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror})") from error
    except zipfile.BadZipFile as error:
        raise WeightsError(f"{path}: not a file of torch.save (1.6 or later); save the head again with it") from error
    except Exception as error:  # a broken pickle can fail in any way; all of them mean the same
        raise WeightsError(f"{path}: refused, not a head that can be read safely: {first_line(error)}") from error
    if state is None:
        raise WeightsError(f"{path}: holds neither a pickled {HEAD_CLASS} nor a state dictionary; not a head")
    return state


def _check_archive(path: Path, most: int | None) -> None:
    """`ValueError` for an archive of `torch.save` that could not be what it says, or holds more than `most` bytes."""
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("compressed, which no checkpoint is: what it swells to cannot be told")
        unpacked = sum(entry.file_size for entry in archive.infolist())
        if most is not None and unpacked > most:
            raise ValueError(f"{unpacked:,} bytes is no head (at most {most:,})")
        if any(archive.read(name) != b"little" for name in archive.namelist() if name.endswith("/byteorder")):
            raise ValueError("saved on a big-endian machine")


@contextmanager
def _at_most(room: int) -> Iterator[None]:
    """While the body runs this process may take so many bytes more, whatever a file claims to hold."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    limits = [limit for limit in (soft, hard, taken + room) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _tensors(path: Path, allowed: list[Any], key: str, *, mmap: bool) -> dict[str, Tensor] | None:
    """The tensors of a module, of a state dictionary, or of one under `key`; None without any. Errors: of all kinds."""
    size = path.stat().st_size
    with _at_most(SHARED * size + BESIDES), warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
        warnings.simplefilter("ignore")  # of old formats; what cannot be loaded raises
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    content = content.tensors if isinstance(content, ModuleState) else content
    inner = content.get(key) if isinstance(content, Mapping) else None
    found = inner if isinstance(inner, Mapping) else content
    if not isinstance(found, Mapping) or not found or not all(isinstance(one, Tensor) for one in found.values()):
        return None
    claimed = sum(one.numel() * one.element_size() for one in found.values())
    if claimed > SHARED * size:
        raise ValueError(f"it claims {claimed:,} bytes of numbers, the file has {size:,}")
    return {str(name): tensor.detach() for name, tensor in found.items()}


def first_line(error: Exception) -> str:
    """What was wrong, in one line; around what its loader found, torch puts advice that nobody should follow."""
    found = error.__context__ if isinstance(error, pickle.UnpicklingError) and error.__context__ else error
    text = str(found).strip()
    return text.splitlines()[0].split(". ")[0] if text else type(found).__name__
