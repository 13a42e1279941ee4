"""Tensors on disk: public checkpoints read under our names, files of any size written one tensor at a time."""

from __future__ import annotations

import functools
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

from virnuc_core.encoders.model_config import DnabertShape, Esm2Shape, HeadShape
from virnuc_core.errors import WeightsError

Shapes = Mapping[str, tuple[int, ...]]

_DTYPE_NAMES: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint: what is said of it without reading it, and how to read it."""

    shape: tuple[int, ...]
    dtype: str  # in the words of the file: F32, BF16, I64, torch.float32, ...
    read: Callable[[], Tensor]

    @property
    def floating(self) -> bool:
        return self.dtype.removeprefix("torch.").upper().startswith(("F", "BF"))


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint under whatever names its author chose."""

    origin: str
    tensors: Mapping[str, Stored]


class Readable(Protocol):
    """A model's tensors under our names."""

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """One tensor, in the shape the model wants."""
        ...


def open_safetensors(files: list[Path]) -> Source:
    """One or several `.safetensors` files, mapped into memory; a tensor is read when it is asked for."""
    found: dict[str, Stored] = {}
    for file in files:
        try:
            handle: Any = safe_open(file, framework="pt")
            for name in handle.keys():  # noqa: SIM118 - it is no mapping
                piece = handle.get_slice(name)
                read = functools.partial(handle.get_tensor, name)
                found[name] = Stored(tuple(piece.get_shape()), str(piece.get_dtype()), read)
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"{file}: cannot be read as safetensors: {error}; is it whole? copy or convert it again"
            ) from error
    return Source(str(files[0] if len(files) == 1 else files[0].parent), found)


def in_memory(origin: str, tensors: Mapping[str, Tensor]) -> Source:
    """A checkpoint that is already there."""

    def stored(tensor: Tensor) -> Stored:
        return Stored(tuple(tensor.shape), str(tensor.dtype), lambda: tensor)

    return Source(origin, {name: stored(tensor) for name, tensor in tensors.items()})


@dataclass(frozen=True, slots=True)
class Rule:
    """How a name of a public layout becomes one of ours: part `part` of `of` that are joined along the first axis."""

    pattern: re.Pattern[str]
    ours: str  # template for re.Match.expand; "" leaves the tensor out
    part: int = 0
    of: int = 1


class Tensors:
    """A checkpoint under our names, complete and with the right shapes, or a `WeightsError` that names what is not.

    Held against the model by what the checkpoint says of its tensors: no weights are read before they are asked for.
    """

    def __init__(self, source: Source, shapes: Shapes, rules: Iterable[Rule] = ()) -> None:
        self.origin = source.origin
        self._parts = {
            name: [_fitting(source, one, shapes[name], len(theirs)) for one in theirs]
            for name, theirs in _match(source, list(rules), shapes).items()
        }

    def names(self) -> list[str]:
        """Our names, in the order of the model."""
        return list(self._parts)

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """One tensor in the precision it is stored in."""
        try:
            parts = [stored.read().to(device) for stored in self._parts[name]]
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{self.origin}: tensor {name} cannot be read: {error}") from error
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _fitting(source: Source, name: str, whole: tuple[int, ...], of: int) -> Stored:
    """One of `of` equal parts of a tensor that are joined along the first axis."""
    stored, wanted = source.tensors[name], whole if of == 1 else (whole[0] // of, *whole[1:])
    if stored.shape != wanted:
        raise WeightsError(
            f"{source.origin}: tensor {name} is {_size(stored.shape)}, config.json makes it {_size(wanted)}"
        )
    if not stored.floating:
        raise WeightsError(f"{source.origin}: tensor {name} holds {stored.dtype}, wanted floating-point numbers")
    return stored


def _size(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape)) or "a scalar"


def _match(source: Source, rules: list[Rule], shapes: Shapes) -> dict[str, list[str]]:
    """Their names for each of ours."""
    found: dict[str, list[str | None]] = {}
    unexpected = []
    for theirs in source.tensors:
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


def _rules(
    prefix: str, layer: str, layered: Mapping[str, str | tuple[str, int, int]], others: Mapping[str, str]
) -> list[Rule]:
    """Rules of one layout: what stands in each `layer`, by our name for it, and what stands outside of them.

    Names end in `weight` or `bias`; a joined tensor is named with the part of it and the number of parts.
    """
    rules = [Rule(re.compile(prefix + theirs), ours) for theirs, ours in others.items()]
    for theirs, named in layered.items():
        ours, part, of = (named, 0, 1) if isinstance(named, str) else named
        pattern = rf"{prefix}{layer}\.(\d+)\.{re.escape(theirs)}\.(weight|bias)"
        rules.append(Rule(re.compile(pattern), rf"layers.\1.{ours}.\2", part, of))
    return rules


ESM2_RULES: Final = (
    *_rules(  # as ported to transformers
        r"(?:esm\.)?",
        r"encoder\.layer",
        {
            "attention.self.query": ("qkv", 0, 3),
            "attention.self.key": ("qkv", 1, 3),
            "attention.self.value": ("qkv", 2, 3),
            "attention.output.dense": "out",
            "attention.LayerNorm": "attn_norm",
            "intermediate.dense": "fc1",
            "output.dense": "fc2",
            "LayerNorm": "ffn_norm",
        },
        {
            r"embeddings\.word_embeddings\.weight": "embed.weight",
            r"encoder\.layer\.\d+\.attention\.self\.rotary_embeddings\.inv_freq": "inv_freq",
            r"encoder\.emb_layer_norm_after\.(weight|bias)": r"final_norm.\1",
            r"(?:embeddings\.position_(?:ids|embeddings\.weight)|contact_head\..*|pooler\..*)": "",
        },
    ),
    *_rules(  # as fair-esm saved it; what predicts tokens or contacts is not used here
        r"(?:encoder\.)?(?:sentence_encoder\.)?",
        "layers",
        {
            "self_attn.q_proj": ("qkv", 0, 3),
            "self_attn.k_proj": ("qkv", 1, 3),
            "self_attn.v_proj": ("qkv", 2, 3),
            "self_attn.out_proj": "out",
            "self_attn_layer_norm": "attn_norm",
            "fc1": "fc1",
            "fc2": "fc2",
            "final_layer_norm": "ffn_norm",
        },
        {
            r"embed_tokens\.weight": "embed.weight",
            r"layers\.\d+\.self_attn\.rot_emb\.inv_freq": "inv_freq",
            r"emb_layer_norm_after\.(weight|bias)": r"final_norm.\1",
            r"(?:lm_head|contact_head)\..*": "",
        },
    ),
)

DNABERT_RULES: Final = _rules(  # what predicts tokens, or pools the first one, is not used here
    r"(?:bert\.)?",
    r"encoder\.layer",
    {
        "attention.self.Wqkv": "qkv",
        "attention.output.dense": "out",
        "attention.output.LayerNorm": "attn_norm",
        "mlp.gated_layers": "gated",
        "mlp.wo": "wo",
        "mlp.layernorm": "ffn_norm",
    },
    {
        r"embeddings\.word_embeddings\.weight": "embed.weight",
        r"embeddings\.token_type_embeddings\.weight": "token_type.weight",
        r"embeddings\.LayerNorm\.(weight|bias)": r"embed_norm.\1",
        r"(?:cls\..*|pooler\..*|embeddings\.position_ids)": "",
    },
)

HEAD_RULES: Final = (Rule(re.compile(r"bn1\.num_batches_tracked"), ""),)


def esm2_tensors(source: Source, shape: Esm2Shape) -> Tensors:
    """An ESM-2 checkpoint of any public layout under our names; `WeightsError` names what is missing or unexpected.

    Newer ports do not save the rotary frequencies, which follow from the head size: they are computed then.
    """
    if not any(name.split(".")[-1] == "inv_freq" for name in source.tensors):
        computed = in_memory(source.origin, {"inv_freq": inv_freq(shape.head_dim)})
        source = Source(source.origin, {**source.tensors, **computed.tensors})
    return Tensors(source, shape.tensors(), ESM2_RULES)


def dnabert_tensors(source: Source, shape: DnabertShape) -> Tensors:
    """A DNABERT-S checkpoint under our names; `WeightsError` names what is missing or unexpected."""
    return Tensors(source, shape.tensors(), DNABERT_RULES)


def head_tensors(source: Source, shape: HeadShape) -> Tensors:
    """A head under our names, which are VirNucPro's."""
    return Tensors(source, shape.tensors(), HEAD_RULES)


def inv_freq(head_dim: int) -> Tensor:
    """Rotary frequencies in base 10,000, float32 [head_dim / 2]."""
    return 1.0 / (10_000 ** (torch.arange(0, head_dim, 2).float() / head_dim))


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
    """Write a safetensors file, one tensor at a time (the library wants all in memory); the file appears whole.

    `make` gives each tensor in any floating type. Rotary frequencies, which lose their meaning in half precision, are
    stored in float32, all others as `dtype`.
    """
    kinds = {name: torch.float32 if name == "inv_freq" else dtype for name in shapes}
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * kinds[name].itemsize
        header[name] = {"dtype": _DTYPE_NAMES[kinds[name]], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, shape in shapes.items():
                tensor = make(name)
                if tuple(tensor.shape) != tuple(shape):
                    raise WeightsError(f"{path}: tensor {name} is {_size(tensor.shape)}, wanted {_size(shape)}")
                raw = tensor.to("cpu", kinds[name]).contiguous()
                file.write(raw.view(torch.uint8).reshape(-1).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
