"""Tensors on disk: any public layout read under our names, files of any size written one tensor at a time."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from virnuc_core.errors import WeightsError

Shapes = Mapping[str, tuple[int, ...]]

_DTYPE_NAMES: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_FLOATING: Final = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint says of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: str  # as it is spoken of in messages
    floating: bool


class Source(Protocol):
    """A checkpoint under whatever names its author chose."""

    @property
    def origin(self) -> str: ...

    def names(self) -> Iterable[str]: ...

    def stored(self, name: str) -> Stored: ...

    def get(self, name: str) -> Tensor: ...


class Readable(Protocol):
    """A model's tensors under our names."""

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """One tensor, in the shape the model wants."""
        ...


class SafetensorsSource:
    """One or several `.safetensors` files, mapped into memory; a tensor is read when it is asked for."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = list(files)
        self._open: dict[str, Any] = {}
        for file in self._files:
            try:
                handle: Any = safe_open(file, framework="pt")
                self._open |= dict.fromkeys(handle.keys(), handle)
            except (SafetensorError, OSError) as error:
                raise WeightsError(
                    f"{file}: cannot be read as safetensors: {error}; is it whole? copy or convert it again"
                ) from error

    @property
    def origin(self) -> str:
        return str(self._files[0] if len(self._files) == 1 else self._files[0].parent)

    def names(self) -> Iterable[str]:
        return self._open.keys()

    def stored(self, name: str) -> Stored:
        """From the file's header."""
        piece = self._open[name].get_slice(name)
        kind = str(piece.get_dtype())
        return Stored(tuple(piece.get_shape()), kind, kind in _FLOATING or kind.startswith("F8_"))

    def get(self, name: str) -> Tensor:
        tensor: Tensor = self._open[name].get_tensor(name)
        return tensor


@dataclass(frozen=True, slots=True)
class DictSource:
    """A checkpoint already in memory."""

    origin: str
    tensors: Mapping[str, Tensor]

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def stored(self, name: str) -> Stored:
        tensor = self.tensors[name]
        return Stored(tuple(tensor.shape), str(tensor.dtype), tensor.is_floating_point())

    def get(self, name: str) -> Tensor:
        return self.tensors[name]


@dataclass(frozen=True, slots=True)
class Rule:
    """How a name of a public layout becomes one of ours: part `part` of `of` that are joined along the first axis."""

    pattern: re.Pattern[str]
    ours: str  # template for re.Match.expand; "" leaves the tensor out
    part: int = 0
    of: int = 1


class Tensors:
    """A checkpoint under our names, complete and with the right shapes, or a `WeightsError` that names what is not."""

    def __init__(self, source: Source, shapes: Shapes, rules: Iterable[Rule] = ()) -> None:
        self._source, self._shapes = source, shapes
        self._parts = _match(source, list(rules), shapes)

    @property
    def origin(self) -> str:
        return self._source.origin

    def names(self) -> list[str]:
        """Our names, in the order of the model."""
        return list(self._shapes)

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """One tensor in the precision it is stored in."""
        self._check(name)
        try:
            parts = [self._source.get(theirs).to(device) for theirs in self._parts[name]]
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{self.origin}: tensor {name} cannot be read: {error}") from error
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def check(self) -> None:
        """Hold every tensor's shape and type against the model, by what the checkpoint says of it; reads no weights.

        Errors: `WeightsError` names the first tensor that does not fit.
        """
        for name in self._shapes:
            self._check(name)

    def _check(self, name: str) -> None:
        parts = [self._source.stored(theirs) for theirs in self._parts[name]]
        shape = _joined([part.shape for part in parts])
        if shape != self._shapes[name]:
            found = " + ".join(_size(part.shape) for part in parts) if shape is None else _size(shape)
            raise WeightsError(
                f"{self.origin}: tensor {' + '.join(self._parts[name])} is {found}, "
                f"config.json makes it {_size(self._shapes[name])}"
            )
        odd = next((part.dtype for part in parts if not part.floating), None)
        if odd is not None:
            raise WeightsError(f"{self.origin}: tensor {name} holds {odd}, wanted floating-point numbers")


def _joined(shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape of tensors joined along their first axis; None when they cannot be."""
    if len(shapes) == 1:
        return shapes[0]
    if not all(shapes) or len({shape[1:] for shape in shapes}) > 1:
        return None
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _size(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape)) or "a scalar"


def _match(source: Source, rules: list[Rule], shapes: Shapes) -> dict[str, list[str]]:
    """Their names for each of ours."""
    found: dict[str, list[str | None]] = {}
    unexpected = []
    for theirs in source.names():
        if theirs in shapes:
            found[theirs] = [theirs]
            continue
        hit = next(((rule, match) for rule in rules if (match := rule.pattern.fullmatch(theirs))), None)
        ours = "" if hit is None else hit[1].expand(hit[0].ours)
        if hit is None or (ours and ours not in shapes):
            unexpected.append(theirs)
        elif ours:
            parts = found.setdefault(ours, [None] * hit[0].of)
            parts[hit[0].part] = parts[hit[0].part] or theirs
    complete = {name: [part for part in parts if part] for name, parts in found.items() if all(parts)}
    missing = [name for name in shapes if name not in complete]
    problems = [f"no {_few(missing)}"] * bool(missing) + [f"unexpected {_few(unexpected)}"] * bool(unexpected)
    if problems:
        raise WeightsError(f"{source.origin}: {'; '.join(problems)}; not the model that config.json describes")
    return {name: complete[name] for name in shapes}


def _few(names: list[str], most: int = 4) -> str:
    tail = f" and {len(names) - most} more" if len(names) > most else ""
    return f"tensor{'s' * (len(names) > 1)} {', '.join(sorted(names)[:most])}{tail}"


def find_safetensors(folder: Path) -> list[Path]:
    """The safetensors files of a folder: `model.safetensors`, or the shards its index names; empty without either."""
    single = folder / "model.safetensors"
    return [single] if single.is_file() else read_index(folder / "model.safetensors.index.json")


def read_index(path: Path) -> list[Path]:
    """The shards that an index beside them names; empty when there is no index."""
    if not path.is_file():
        return []
    try:
        files = sorted({str(file) for file in json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path}: not an index of the shards of a checkpoint") from error
    for file in files:
        if Path(file).name != file or not (path.parent / file).is_file():
            raise WeightsError(f"{path}: names {file}, which is not in {path.parent}")
    return [path.parent / file for file in files]


def write_tensors(path: Path, shapes: Shapes, dtype: torch.dtype, make: Callable[[str], Tensor]) -> None:
    """Write a safetensors file, one tensor at a time; the file appears whole.

    `make` gives each tensor in any floating type; `stored_dtype` says which ones are not stored as `dtype`.
    """
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        kind = stored_dtype(name, dtype)
        size = math.prod(shape) * kind.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[kind], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for name, shape in shapes.items():
                tensor = make(name)
                if tuple(tensor.shape) != tuple(shape):
                    raise WeightsError(f"{path}: tensor {name} is {_size(tensor.shape)}, wanted {_size(shape)}")
                raw = tensor.to("cpu", stored_dtype(name, dtype)).contiguous()
                file.write(raw.view(torch.uint8).reshape(-1).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What a tensor is stored as: rotary frequencies lose their meaning in half precision."""
    return torch.float32 if name == "inv_freq" else dtype
