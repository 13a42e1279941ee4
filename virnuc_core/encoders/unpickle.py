"""VirNucPro's pickled heads, read without running anything they hold.

`300_model.pth` and `500_model.pth` are whole pickled modules of a class `MLPClassifier` of the training script. A
pickle is a program. This reader lets it name a handful of harmless things only, puts an inert stand-in where it names a
module, and opens the archive itself, so that no other loader ever sees the file.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from virnuc_core.errors import WeightsError

MAX_BYTES: Final = 1 << 28  # a head has 7 MB; what claims to be one and is larger than this is not read

HEAD_CLASS: Final = "MLPClassifier"
MODULES: Final = (
    ("torch.nn.modules.linear", "Linear"),
    ("torch.nn.modules.batchnorm", "BatchNorm1d"),
    ("torch.nn.modules.dropout", "Dropout"),
    ("torch.nn.modules.activation", "ReLU"),
)
STORAGES: Final = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
}


def read_head(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickled head: a whole module, a state dictionary, or one under `model_state_dict`.

    Nothing the file holds is executed. Raises `WeightsError` naming what it asked for that a head has no use for.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            content = _unpickle(archive)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror})") from error
    except zipfile.BadZipFile as error:
        raise WeightsError(f"{path}: not a file of torch.save (1.6 or later); save the head again with it") from error
    except Exception as error:  # a broken pickle can fail in any way; all of them mean the same
        raise WeightsError(f"{path}: refused, not a head that can be read safely: {error}") from error
    state = _state(content)
    if state is None:
        raise WeightsError(f"{path}: holds neither a pickled {HEAD_CLASS} nor a state dictionary; not a head")
    return state


def _state(content: object) -> dict[str, Tensor] | None:
    """The tensors by name, from any of the three forms."""
    if isinstance(content, ModuleState):
        return content.flat()
    if isinstance(content, Mapping) and isinstance(content.get("model_state_dict"), Mapping):
        content = content["model_state_dict"]
    if not isinstance(content, Mapping) or not content:
        return None
    if not all(isinstance(tensor, Tensor) for tensor in content.values()):
        return None
    return {str(name): tensor for name, tensor in content.items()}


class ModuleState:
    """What stands for a pickled module: its tensors and children, none of its code."""

    tensors: dict[str, Tensor]
    children: dict[str, ModuleState]

    def __setstate__(self, state: object) -> None:
        self.tensors, self.children = {}, {}
        for group in ("_parameters", "_buffers"):
            self.tensors |= {str(k): v for k, v in _group(state, group).items() if isinstance(v, Tensor)}
        self.children = {str(k): v for k, v in _group(state, "_modules").items() if isinstance(v, ModuleState)}

    def flat(self, prefix: str = "", depth: int = 0) -> dict[str, Tensor]:
        """All tensors under their dotted names."""
        if depth > 4:
            raise pickle.UnpicklingError("modules within modules, deeper than any head")
        found = {prefix + name: tensor for name, tensor in self.tensors.items()}
        for name, child in self.children.items():
            found |= child.flat(f"{prefix}{name}.", depth + 1)
        return found


def _group(state: object, key: str) -> Mapping[Any, Any]:
    group = state.get(key) if isinstance(state, Mapping) else None
    if not isinstance(group, Mapping):
        raise pickle.UnpicklingError(f"a module without {key}")
    return group


def _unpickle(archive: zipfile.ZipFile) -> object:
    """The object in an archive of `torch.save`."""
    sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    if sum(sizes.values()) > MAX_BYTES:
        raise pickle.UnpicklingError(f"{sum(sizes.values()):,} bytes is no head (at most {MAX_BYTES:,})")
    roots = [name.removesuffix("data.pkl") for name in sizes if name.split("/")[1:] == ["data.pkl"]]
    if len(roots) != 1 or f"{roots[0]}constants.pkl" in sizes:
        raise pickle.UnpicklingError("not one saved object (a TorchScript program, perhaps)")
    root = roots[0]
    if f"{root}byteorder" in sizes and archive.read(f"{root}byteorder") != b"little":
        raise pickle.UnpicklingError("saved on a big-endian machine")

    def numbers(saved: object) -> Tensor:
        """The block of numbers that a persistent id names."""
        if not isinstance(saved, tuple) or len(saved) != 5 or saved[0] != "storage":
            raise pickle.UnpicklingError("a reference to something that is no block of numbers")
        _, dtype, key, _, count = saved
        if not isinstance(dtype, torch.dtype) or not isinstance(count, int):
            raise pickle.UnpicklingError("a block of numbers of no known kind")
        raw = archive.read(f"{root}data/{key}")
        if len(raw) != count * dtype.itemsize or count == 0:
            raise pickle.UnpicklingError(f"block {key} is {len(raw)} bytes, wanted {count} of {dtype}")
        return torch.frombuffer(bytearray(raw), dtype=dtype)

    return _Restricted(io.BytesIO(archive.read(f"{root}data.pkl")), numbers).load()


class _Restricted(pickle.Unpickler):
    """An unpickler that knows the names of `_vocabulary` and no others."""

    def __init__(self, file: io.BytesIO, numbers: Callable[[object], Tensor]) -> None:
        super().__init__(file)
        self._numbers, self._vocabulary = numbers, _vocabulary()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._vocabulary:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which a head has no use for")
        return self._vocabulary[module, name]

    def persistent_load(self, pid: object) -> Tensor:
        return self._numbers(pid)


def _vocabulary() -> dict[tuple[str, str], Any]:
    """All a head may name. Made anew for each file: a pickle may write attributes onto what it names."""

    class Module(ModuleState):
        pass

    def tensor(block: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object) -> Tensor:
        if not isinstance(block, Tensor) or math.prod(size) > block.numel():
            raise pickle.UnpicklingError("a tensor larger than its block of numbers")
        return torch.as_strided(block, size, stride, offset).clone()  # refuses what leaves the block

    def parameter(data: Tensor, *_: object) -> Tensor:
        return data

    known: dict[tuple[str, str], Any] = {
        ("__main__", HEAD_CLASS): Module,
        ("torch._utils", "_rebuild_tensor_v2"): tensor,
        ("torch._utils", "_rebuild_parameter"): parameter,
        ("collections", "OrderedDict"): OrderedDict,
        ("builtins", "set"): set,
        ("__builtin__", "set"): set,
    }
    known |= dict.fromkeys(MODULES, Module)
    return known | {("torch", name): dtype for name, dtype in STORAGES.items()}
