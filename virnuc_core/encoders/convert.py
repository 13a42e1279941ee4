"""Public checkpoints into a models directory."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from virnuc_core.encoders.checkpoint import STORAGE, Part, Storage
from virnuc_core.encoders.layouts import dnabert_tensors, esm2_tensors, head_tensors
from virnuc_core.encoders.model_config import (
    DnabertShape,
    Esm2Shape,
    HeadShape,
    Shape,
    read_dnabert_shape,
    read_esm2_shape,
    write_shape,
)
from virnuc_core.encoders.tensor_files import (
    DictSource,
    SafetensorsSource,
    Source,
    Tensors,
    find_safetensors,
    read_index,
    write_tensors,
)
from virnuc_core.encoders.tokenize import read_tokenizer
from virnuc_core.encoders.unpickle import read_head
from virnuc_core.errors import ConfigError, WeightsError

DNABERT_WIDTH: Final = 768
HEAD_NAME: Final = re.compile(r"(\d+)_model\.pth")


def convert_esm2(source: Path, out: Path, dtype: Storage | None = None) -> Esm2Shape:
    """Write `out/esm2` from a folder or file of the public ESM-2, in HF layout or fair-esm's.

    Sizes come from the `config.json` beside the weights, else from the tensors. `dtype` stores them narrower than they
    are. Raises `WeightsError` naming the tensor that is missing, unexpected or misshapen.
    """
    opened = open_public(source)
    config = _beside(source, "config.json")
    shape = read_esm2_shape(config) if config else guess_esm2_shape(opened)
    _write_part(out, "esm2", shape, esm2_tensors(opened, shape), source, dtype)
    return shape


def convert_dnabert_s(
    source: Path, out: Path, tokenizer: Path | None = None, dtype: Storage | None = None
) -> DnabertShape:
    """Write `out/dnabert_s` from a folder or file of the public DNABERT-S; `config.json` must stand beside the weights.

    `tokenizer` is the tokenizer file when it does not stand there too.
    """
    opened = open_public(source)
    config = _beside(source, "config.json")
    if config is None:
        raise WeightsError(f"{source}: no config.json beside it; the sizes of DNABERT-S are read from there")
    shape = read_dnabert_shape(config)
    file = tokenizer or _beside(source, "tokenizer.json")
    if file is None:
        raise WeightsError(f"{source}: no tokenizer.json beside it; name the file")
    read_tokenizer(file)

    def add_tokenizer(folder: Path) -> None:
        shutil.copyfile(file, folder / "tokenizer.json")

    _write_part(out, "dnabert_s", shape, dnabert_tensors(opened, shape), source, dtype, add_tokenizer)
    return shape


def convert_head(source: Path, out: Path, model_length: int | None = None, dna_width: int = DNABERT_WIDTH) -> HeadShape:
    """Write `out/head` from a head of VirNucPro: pickled whole, as a dictionary, or as safetensors.

    `model_length` is read from a name like `500_model.pth` when not given. What is left of the input beside `dna_width`
    columns is the protein's. Nothing a pickle holds is executed.
    """
    named = HEAD_NAME.fullmatch(source.name)
    length = model_length or (int(named[1]) if named else None)
    if length is None:
        raise ConfigError(f"{source}: its name does not say the model length; give it (300 or 500 for VirNucPro's)")
    opened: Source
    if source.suffix == ".safetensors":
        opened = SafetensorsSource([source])
    else:
        opened = DictSource(str(source), read_head(source))
    if "hidden_layer.weight" not in opened.names():
        raise WeightsError(f"{source}: no tensor hidden_layer.weight; not a head of VirNucPro")
    hidden, width = opened.get("hidden_layer.weight").shape
    if width <= dna_width:
        raise WeightsError(f"{source}: takes {width} columns, DNA alone has {dna_width}; not made for these encoders")
    shape = HeadShape(model_length=length, dna_width=dna_width, protein_width=width - dna_width, hidden=hidden)
    _write_part(out, "head", shape, head_tensors(opened, shape), source, "fp32")
    return shape


def open_public(source: Path) -> Source:
    """A checkpoint: a folder (safetensors or .bin, single or sharded) or one .safetensors, .bin or .pt file."""
    if source.is_dir():
        if files := find_safetensors(source):
            return SafetensorsSource(files)
        files = read_index(source / "pytorch_model.bin.index.json") or [source / "pytorch_model.bin"]
        if not files[0].is_file():
            raise WeightsError(f"{source}: no model.safetensors and no pytorch_model.bin in it")
    elif source.is_file():
        if source.suffix == ".safetensors":
            return SafetensorsSource([source])
        files = [source]
    else:
        raise WeightsError(f"{source}: no such file or directory")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _load_tensors(file)
    return DictSource(str(source), tensors)


def _load_tensors(path: Path) -> dict[str, Tensor]:
    """State of a `.bin` or `.pt`; only tensors and plain settings are unpickled."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # fair-esm keeps its arguments in one
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=_can_map(path))
    except Exception as error:  # torch raises whatever a broken file leads to
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WeightsError(f"{path}: refused, not a checkpoint of tensors: {first}") from error
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"]
    if not isinstance(content, dict) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise WeightsError(f"{path}: holds no dictionary of tensors")
    return content


def _can_map(path: Path) -> bool:
    """Files of the newer format are mapped, not copied, into memory."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def guess_esm2_shape(source: Source) -> Esm2Shape:
    """Sizes of a fair-esm checkpoint from its tensors."""
    names = list(source.names())
    layers = {int(match[1]) for name in names if (match := re.search(r"\blayers\.(\d+)\.", name))}
    by_end: dict[str, str] = {name.split("layers.0.")[-1]: name for name in names if "layers.0." in name}
    embedding = next((name for name in names if name.endswith("embed_tokens.weight")), None)
    angles = by_end.get("self_attn.rot_emb.inv_freq")
    if not layers or embedding is None or angles is None or "fc1.weight" not in by_end:
        raise WeightsError(f"{source.origin}: no config.json beside it, and not the layout of fair-esm's ESM-2")
    vocab, width = source.get(embedding).shape
    head_dim = 2 * source.get(angles).numel()
    return Esm2Shape(
        layers=max(layers) + 1,
        width=width,
        heads=width // head_dim,
        ffn_width=source.get(by_end["fc1.weight"]).shape[0],
        vocab=vocab,
    )


def _beside(source: Path, name: str) -> Path | None:
    """A file in the same folder, if it is there."""
    path = (source if source.is_dir() else source.parent) / name
    return path if path.is_file() else None


def _write_part(
    out: Path,
    part: Part,
    shape: Shape,
    tensors: Tensors,
    source: Path,
    dtype: Storage | None,
    more: Callable[[Path], Any] = lambda folder: None,
) -> None:
    """Write one part of a models directory; it appears whole, or not at all."""
    target = out / part
    if target.exists():
        raise WeightsError(f"{target}: exists already; remove it or choose another directory")
    stored = tensors.read(tensors.names()[0]).dtype if dtype is None else STORAGE[dtype]
    partial = out / f".{part}.{os.getpid()}.partial"
    partial.mkdir(parents=True)
    try:
        write_tensors(partial / "model.safetensors", shape.tensors(), stored, tensors.read)
        write_shape(shape.model_copy(update={"origin": source.name}), partial / "config.json")
        more(partial)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
