"""The tensors of a public checkpoint found by our names, whatever layout it has.

`tensor_names.toml` has the names of the public layouts: ESM-2 as fair-esm saved it and as ported to
transformers, and DNABERT-S.
"""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from virnuc_core.encoders.model_config import Esm2Shape, Shape
from virnuc_core.errors import WeightsError, join_first

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

_NAMES: Final = tomllib.loads(
    Path(__file__).with_name("tensor_names.toml").read_text(encoding="utf-8")
)
_PREFIXES: Final = re.compile(_NAMES["prefixes"])
_UNUSED: Final = re.compile(_NAMES["unused"])
_TASK_HEAD: Final = re.compile(_NAMES["task_head"])
_LAYER: Final = re.compile(r"layers?\.(\d+)\.(.+)")
UNUSED_NAME: Final = ""  # our name for a tensor that is not used here


class TensorHeader(NamedTuple):
    """What a file says about a tensor: enough to check it without reading its numbers."""

    shape: tuple[int, ...]
    dtype: str


class GivenTensor(NamedTuple):
    """A tensor of a checkpoint and its name there."""

    public_name: str
    tensor: Any  # a tensor, an array or a TensorHeader


def our_name(public_name: str) -> str:
    """Translate a tensor's name in a public layout.

    Returns:
        Our name; "" for a tensor that is not used here; the given name if it is not known.
    """
    bare_name = _PREFIXES.sub("", public_name)
    if bare_name.endswith(".inv_freq"):
        return "inv_freq"  # each layer has the same
    stem, _, kind = bare_name.rpartition(".")  # kind: weight or bias
    layer = _LAYER.fullmatch(stem)
    if layer and layer[2] in _NAMES["in_layer"]:
        return f"layers.{layer[1]}.{_NAMES['in_layer'][layer[2]]}.{kind}"
    if stem in _NAMES["outside"]:
        return f"{_NAMES['outside'][stem]}.{kind}"
    if _UNUSED.fullmatch(bare_name):
        return UNUSED_NAME
    return public_name


def match_tensors(
    source: Path,
    tensors: Mapping[str, Tensor | TensorHeader],
    shape: Shape,
    drop_extra: bool = False,
) -> Callable[[str], Any]:
    """Find the tensors of a model in a checkpoint of any public layout.

    Names, shapes and formats are checked; no numbers are read for that. Rotary frequencies, which
    newer ports do not save, are computed if they are missing. An encoder's task head is left out
    with a warning.

    Args:
        source: File or folder of the checkpoint, for messages.
        tensors: Its tensors by their names there.
        shape: Sizes of the model.
        drop_extra: Leave out all further tensors that the model does not have, with a warning.

    Returns:
        A function that returns a tensor by our name, in the format in which it is stored.

    Raises:
        WeightsError: A tensor is missing, unexpected, of another shape or of no floating type.
    """
    wanted = shape.tensors()
    given = _by_our_names(tensors, wanted, shape)
    parts = {name: _parts_of(name, given) for name in wanted}  # by our names
    _check_names(source, given, parts, drop_extra)
    for name, part_names in parts.items():
        rows, *columns = wanted[name]
        part_shape = (rows // len(part_names), *columns)
        for part_name in part_names:
            _check_tensor(source, given[part_name], part_shape)

    def read(name: str) -> Any:
        part_tensors = [given[part_name].tensor for part_name in parts[name]]
        if len(part_tensors) == 1:
            return part_tensors[0]
        import torch

        return torch.cat(part_tensors)

    return read


def _by_our_names(
    tensors: Mapping[str, Any], wanted: Mapping[str, object], shape: Shape
) -> dict[str, GivenTensor]:
    """Return the tensors of a checkpoint by our names; of several with one name, the first."""
    given_tensors: dict[str, GivenTensor] = {}
    for public_name, tensor in tensors.items():
        name = public_name if public_name in wanted else our_name(public_name)
        given_tensors.setdefault(name, GivenTensor(public_name, tensor))
    if isinstance(shape, Esm2Shape) and "inv_freq" not in given_tensors:
        from virnuc_core.encoders.positions import rotary_frequencies

        given_tensors["inv_freq"] = GivenTensor("inv_freq", rotary_frequencies(shape.head_dim))
    return given_tensors


def _parts_of(name: str, given: Mapping[str, object]) -> list[str]:
    """Return the names of what a tensor consists of: queries, keys and values may be three."""
    if ".qkv." in name and name not in given:
        return [name.replace(".qkv.", f".{part}.") for part in "qkv"]
    return [name]


def _check_names(
    source: Path,
    given: Mapping[str, GivenTensor],
    parts: Mapping[str, list[str]],
    drop_extra: bool,
) -> None:
    """Raise `WeightsError` for missing or unexpected tensors; warn of those left out."""
    missing = []
    known_names = {UNUSED_NAME}
    for name, part_names in parts.items():
        known_names.update(part_names)
        if not given.keys() >= set(part_names):
            missing.append(name)
    unexpected = {given[name].public_name for name in given.keys() - known_names}
    left_out = {name for name in unexpected if drop_extra or _TASK_HEAD.fullmatch(name)}
    problems = []
    if missing:
        problems.append(f"no {_list_tensors(missing)}")
    if unexpected - left_out:
        problems.append(f"unexpected {_list_tensors(unexpected - left_out)}")
    if problems:
        way_out = "" if missing else " (models convert --drop-extra leaves them out)"
        raise WeightsError(
            f"{source}: {'; '.join(problems)}; not the model that config.json describes{way_out}"
        )
    if left_out:
        names = join_first(sorted(left_out))
        log.warning("%s: left out %s, which such a model does not have", source, names)


def _list_tensors(names: Iterable[str]) -> str:
    """Return "tensor a" or "tensors a, b, ..."."""
    ordered = sorted(names)
    noun = "tensor" if len(ordered) == 1 else "tensors"
    return f"{noun} {join_first(ordered)}"


def _check_tensor(source: Path, given: GivenTensor, shape: tuple[int, ...]) -> None:
    """Raise `WeightsError` if a tensor has another shape or no floating-point numbers."""
    name, tensor = given
    if tensor.shape != shape:
        raise WeightsError(
            f"{source}: tensor {name} is {list(tensor.shape)}, config.json makes it {list(shape)}"
        )
    if "F" not in str(tensor.dtype).upper():  # float32, or F32 in a safetensors file
        raise WeightsError(
            f"{source}: tensor {name} holds {tensor.dtype}, wanted floating-point numbers"
        )
