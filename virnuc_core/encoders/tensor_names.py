"""Find the tensors of a checkpoint by virnuc's own names for them.

Public checkpoints of the same model name their tensors differently. `tensor_names.toml` translates
the names of the public layouts to ours: ESM-2 as fair-esm saved it and as it was ported to
transformers, and DNABERT-S.
"""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from virnuc_core.encoders.model_config import EncoderShape, Shape
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
_ADAPTER: Final = re.compile(_NAMES["adapter"])
_IN_ENCODER: Final = re.compile(_NAMES["in_encoder"])
_LAYER: Final = re.compile(r"layers?\.(\d+)\.(.+)")
UNUSED_NAME: Final = ""  # our name for a tensor that is not used here
MERGE_ADVICE: Final = (
    "merge it (peft: merge_and_unload), save the result to a folder of its own and convert that"
)


class TensorHeader(NamedTuple):
    """What a file says about a tensor: enough to check it without reading its numbers."""

    shape: tuple[int, ...]
    dtype: str


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, and its name in the checkpoint."""

    public_name: str
    tensor: Any  # a tensor, an array or a TensorHeader


def our_name(public_name: str) -> str:
    """Translate the name of a tensor in a public checkpoint to our name.

    A name consists of a module, such as `encoder.layer.3.attention.self.query`, and `weight` or
    `bias`. Two tables translate the modules: one those within a layer, one those outside of layers.

    Returns:
        Our name, for instance `layers.3.qkv.weight`; "" for a tensor that virnuc does not use; the
        public name itself if it is unknown.
    """
    bare_name = _PREFIXES.sub("", public_name)
    if bare_name.endswith(".inv_freq"):
        return "inv_freq"  # every layer stores the same rotary frequencies

    module, _, parameter = bare_name.rpartition(".")  # parameter: weight or bias
    layer_match = _LAYER.fullmatch(module)
    if layer_match:
        index, module_in_layer = layer_match.groups()
        if module_in_layer in _NAMES["in_layer"]:
            return f"layers.{index}.{_NAMES['in_layer'][module_in_layer]}.{parameter}"
    if module in _NAMES["outside"]:
        return f"{_NAMES['outside'][module]}.{parameter}"
    if _UNUSED.fullmatch(bare_name):
        return UNUSED_NAME
    return public_name


def match_tensors(
    source: Path,
    tensors: Mapping[str, Tensor | TensorHeader],
    shape: Shape,
    drop_extra: bool = False,
) -> Callable[[str], Any]:
    """Find all tensors of a model in a checkpoint, and check their names, shapes and formats.

    Checkpoints name the same tensors differently, so their names are translated to ours. The
    numbers are not read. Rotary frequencies, which newer checkpoints do not contain, are
    computed if they are missing. Tensors of a task head (for instance a language model's output
    layer) are left out, and a warning is logged.

    Args:
        source: File or folder of the checkpoint, for messages.
        tensors: The tensors of the checkpoint by their names there.
        shape: Sizes of the model.
        drop_extra: Also leave out other tensors that the model does not have, with a warning. A
            tensor that takes part in an embedding is never left out.

    Returns:
        A function that returns a tensor when it is given our name for the tensor. The tensor has
        the format in which it is stored.

    Raises:
        WeightsError: A tensor is missing, unexpected, of another shape or of no floating type, or
            belongs to an adapter, or two tensors that must be equal differ.
    """
    model_shapes = shape.tensors()  # by our names
    stored = _by_our_names(source, tensors, model_shapes, shape)

    # A tensor of the model is stored as one tensor or as several that are joined.
    parts = {name: _stored_parts(name, stored) for name in model_shapes}
    _check_names(source, stored, parts, drop_extra)
    for name, part_names in parts.items():
        n_rows, *further_sizes = model_shapes[name]
        part_shape = (n_rows // len(part_names), *further_sizes)  # parts are joined row by row
        for part_name in part_names:
            _check_tensor(source, stored[part_name], part_shape)

    def read_tensor(name: str) -> Any:
        """Return a tensor of the model by our name; if it is stored in parts, the joined parts."""
        part_tensors = [stored[part_name].tensor for part_name in parts[name]]
        if len(part_tensors) == 1:
            return part_tensors[0]
        import torch

        return torch.cat(part_tensors)

    return read_tensor


def _by_our_names(
    source: Path, tensors: Mapping[str, Any], model_shapes: Mapping[str, object], shape: Shape
) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by our names, and compute missing rotary frequencies.

    Several tensors may have the same name of ours: each layer of an ESM-2 stores the rotary
    frequencies. They must be equal, and the first one is taken.

    Args:
        source: File or folder of the checkpoint, for messages.
        tensors: The tensors by their names in the checkpoint.
        model_shapes: The model's tensors by our names.
        shape: Sizes of the model.

    Raises:
        WeightsError: Two tensors with the same name of ours differ.
    """
    stored: dict[str, StoredTensor] = {}
    for public_name, tensor in tensors.items():
        # Our own files have our names already.
        name = public_name if public_name in model_shapes else our_name(public_name)
        # The first tensor of this name: this one, or an earlier one that is compared with it.
        first = stored.setdefault(name, StoredTensor(public_name, tensor))
        if name != UNUSED_NAME and not _are_equal(first.tensor, tensor):
            raise WeightsError(
                f"{source}: tensors {first.public_name} and {public_name} differ, but such a model "
                "has the same numbers there; not the model that config.json describes"
            )
    is_missing = "inv_freq" in model_shapes and "inv_freq" not in stored
    if is_missing and isinstance(shape, EncoderShape):
        from virnuc_core.encoders.positions import rotary_frequencies

        stored["inv_freq"] = StoredTensor("inv_freq", rotary_frequencies(shape.head_dim))
    return stored


def _are_equal(first: Any, second: Any) -> bool:
    """Return whether two tensors have the same shape and numbers, in whatever number format.

    If only the header of one of them was read, the shapes alone are compared.
    """
    if first is second:
        return True
    if tuple(first.shape) != tuple(second.shape):
        return False
    if isinstance(first, TensorHeader) or isinstance(second, TensorHeader):
        return True
    return bool((first == second).all())


def _stored_parts(name: str, stored: Mapping[str, object]) -> list[str]:
    """Return under which names a tensor of the model is stored.

    Our `qkv` has the rows of queries, keys and values in one tensor. A checkpoint may have three
    tensors `q`, `k` and `v` in its place. Every other tensor is stored under its own name.

    Args:
        name: Our name for the tensor.
        stored: The tensors of the checkpoint by our names.
    """
    if ".qkv." in name and name not in stored:
        return [name.replace(".qkv.", f".{letter}.") for letter in "qkv"]
    return [name]


def _check_names(
    source: Path,
    stored: Mapping[str, StoredTensor],
    parts: Mapping[str, list[str]],
    drop_extra: bool,
) -> None:
    """Refuse a checkpoint with missing or unexpected tensors.

    Tensors of a task head are left out with a warning. With `drop_extra`, other unexpected tensors
    are left out as well, unless they take part in an embedding: without them, the model would
    silently give other results than its author's.

    Args:
        source: File or folder of the checkpoint, for messages.
        stored: The tensors of the checkpoint by our names.
        parts: Under which names each tensor of the model is stored.
        drop_extra: Accept tensors that the model does not have.

    Raises:
        WeightsError: A tensor is missing or unexpected, or belongs to an adapter.
    """
    missing = []
    known_names = {UNUSED_NAME}
    for name, part_names in parts.items():
        known_names.update(part_names)
        if not stored.keys() >= set(part_names):
            missing.append(name)
    unexpected = {stored[name].public_name for name in stored.keys() - known_names}
    task_head = {name for name in unexpected if _TASK_HEAD.fullmatch(name)}
    adapter = {name for name in unexpected - task_head if _ADAPTER.fullmatch(name)}
    if adapter:
        raise WeightsError(
            f"{source}: {_list_tensors(adapter)} of an adapter (such as LoRA) that is not merged "
            f"into the weights; {MERGE_ADVICE}"
        )

    # Tensors of the encoder itself, such as a further layer, take part in an embedding.
    embedding_tensors = {
        name for name in unexpected - task_head if _IN_ENCODER.fullmatch(_PREFIXES.sub("", name))
    }
    # Each unexpected tensor is either left out or refused.
    left_out = task_head  # no embedding needs it
    if drop_extra:
        left_out = unexpected - embedding_tensors
    refused = unexpected - left_out
    problems = []
    if missing:
        problems.append(f"no {_list_tensors(missing)}")
    if refused:
        problems.append(f"unexpected {_list_tensors(refused)}")
    if problems:
        # The option `--drop-extra` is named only where it would help.
        advice = ""
        if embedding_tensors:
            advice = " (without a tensor of its layers or embeddings its results would change)"
        elif not missing:
            advice = " (models convert --drop-extra leaves them out)"
        raise WeightsError(
            f"{source}: {'; '.join(problems)}; not the model that config.json describes{advice}"
        )
    if left_out:
        names = join_first(sorted(left_out))
        log.warning("%s: left out %s, which such a model does not have", source, names)


def _list_tensors(names: Iterable[str]) -> str:
    """Return the names of tensors for a message: "tensor a" or "tensors a, b and 3 more"."""
    ordered = sorted(names)
    noun = "tensor" if len(ordered) == 1 else "tensors"
    return f"{noun} {join_first(ordered)}"


def _check_tensor(source: Path, stored: StoredTensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape, or one without floating-point numbers.

    Args:
        source: File or folder of the checkpoint, for messages.
        stored: The tensor.
        shape: The shape that the model's sizes require.

    Raises:
        WeightsError: The tensor does not fit.
    """
    name, tensor = stored
    if tensor.shape != shape:
        raise WeightsError(
            f"{source}: tensor {name} is {list(tensor.shape)}, config.json makes it {list(shape)}"
        )
    if "F" not in str(tensor.dtype).upper():  # float32, or F32 in a safetensors file
        raise WeightsError(
            f"{source}: tensor {name} holds {tensor.dtype}, wanted floating-point numbers"
        )
