"""A models directory made: of public checkpoints at hand, of fetched ones, or of random weights."""

from __future__ import annotations

import argparse
import functools
import os
import pickle
import re
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from virnuc_core.config import DEFAULT_MODEL_LENGTH
from virnuc_core.encoders.attention import inv_freq
from virnuc_core.encoders.checkpoint import (
    PARTS,
    STORAGE,
    Source,
    Storage,
    Tensors,
    find_safetensors,
    fit,
    open_safetensors,
    our_name,
    read_index,
    write_tensors,
)
from virnuc_core.encoders.model_config import (
    DNABERT_SIZES,
    ESM2_SIZES,
    RANDOM_ORIGIN,
    DnabertShape,
    DnabertSize,
    Esm2Shape,
    Esm2Size,
    HeadShape,
    Shape,
    read_shape,
    write_shape,
)
from virnuc_core.encoders.tokenize import read_tokenizer, train_tokenizer
from virnuc_core.errors import ConfigError, WeightsError

DRAWN_AT_ONCE: Final = 1 << 20  # numbers one thread draws for a piece of a tensor
THREADS: Final = 16
DNABERT_WIDTH: Final = 768
HEAD_NAME: Final = re.compile(r"(\d+)_model\.pth")
HEAD_CLASS: Final = "MLPClassifier"
HEAD_MAX_TENSORS: Final = 100  # it has 9; a pickle of a few lines can name one module within itself many times over
HEAD_MAX_BYTES: Final = 1 << 28  # a head has 7 MB; what claims to be one and is larger than this is not read

ESM2_REPOSITORY: Final = ("facebook/esm2_t36_3B_UR50D", "476b639933c8baad5ad09a60ac1a87f987b656fc")
DNABERT_REPOSITORY: Final = ("zhihan1996/DNABERT-S", "00e47f96cdea35e4b6f5df89e5419cbe47d490c6")
# weights and sizes only: no code of a repository is downloaded, let alone run
FETCHED_FILES: Final = ("config.json", "tokenizer.json", "model*.safetensors*", "pytorch_model*.bin*")
Download = Callable[[str, str], Path]  # of a repository at a revision: the folder with its files


def convert_esm2(source: Path, out: Path, dtype: Storage | None = None) -> Esm2Shape:
    """Write `out/esm2` from a folder or file of the public ESM-2, in HF layout or fair-esm's.

    Sizes come from the `config.json` beside the weights, else from the tensors. `dtype` stores them narrower than they
    are. Raises `WeightsError` naming the tensor that is missing, unexpected or misshapen.
    """
    opened = open_public(source)
    config = _beside(source, "config.json")
    shape = read_shape(config, Esm2Shape) if config else guess_esm2_shape(opened)
    _write_part(out, shape, fit(opened, shape), source, dtype)
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
    shape = read_shape(config, DnabertShape)
    file = tokenizer or _beside(source, "tokenizer.json")
    if file is None:
        raise WeightsError(f"{source}: no tokenizer.json beside it; name the file")
    read_tokenizer(file)
    _write_part(out, shape, fit(opened, shape), source, dtype, file)
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
    safe = source.suffix == ".safetensors"
    opened = open_safetensors([source]) if safe else Source(str(source), read_head(source))
    if "hidden_layer.weight" not in opened.tensors:
        raise WeightsError(f"{source}: no tensor hidden_layer.weight; not a head of VirNucPro")
    hidden, width = opened.tensors["hidden_layer.weight"].shape
    if width <= dna_width:
        raise WeightsError(f"{source}: takes {width} columns, DNA alone has {dna_width}; not made for these encoders")
    shape = HeadShape(model_length=length, dna_width=dna_width, protein_width=width - dna_width, hidden=hidden)
    _write_part(out, shape, fit(opened, shape), source, "fp32")
    return shape


def fetch(
    out: Path,
    head: Path,
    *,
    model_length: int | None = None,
    dtype: Storage | None = None,
    download: Download | None = None,
) -> None:
    """Make a models directory of the public ESM-2 3B and DNABERT-S, and a head file of VirNucPro.

    The head (`300_model.pth` or `500_model.pth`) comes with VirNucPro's own repository and is not downloaded here.
    Parts that `out` already holds are left as they are. Raises `WeightsError` when the network does not answer.
    """
    if not head.is_file():
        raise WeightsError(f"{head}: no such file; 300_model.pth and 500_model.pth come with VirNucPro's repository")
    get = download or _download
    if not (out / "head").exists():
        convert_head(head, out, model_length)
    if not (out / "dnabert_s").exists():
        convert_dnabert_s(get(*DNABERT_REPOSITORY), out, dtype=dtype)
    if not (out / "esm2").exists():
        convert_esm2(get(*ESM2_REPOSITORY), out, dtype=dtype)


def _download(repository: str, revision: str) -> Path:
    """Folder of a repository's weights at one revision, in the cache of huggingface_hub."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(FETCHED_FILES)))
    except Exception as error:  # the library and what it stands on raise many kinds
        raise WeightsError(
            f"{repository} at {revision[:12]}: cannot be downloaded ({_first_line(error)}); "
            f"without a network, copy its files here and use virnuc models convert"
        ) from error


def open_public(source: Path) -> Source:
    """A checkpoint: a folder (safetensors or .bin, single or sharded) or one .safetensors, .bin or .pt file."""
    if source.is_dir():
        if files := find_safetensors(source):
            return open_safetensors(files)
        files = read_index(source / "pytorch_model.bin.index.json") or [source / "pytorch_model.bin"]
        if not files[0].is_file():
            raise WeightsError(f"{source}: no model.safetensors and no pytorch_model.bin in it")
    elif source.is_file():
        if source.suffix == ".safetensors":
            return open_safetensors([source])
        files = [source]
    else:
        raise WeightsError(f"{source}: no such file or directory")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _load_tensors(file)
    return Source(str(source), tensors)


def _load_tensors(path: Path) -> dict[str, Tensor]:
    """State of a `.bin` or `.pt`; only tensors and plain settings are unpickled."""
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"  # the newer format can be mapped, not copied, into memory
    try:
        # fair-esm keeps its arguments in a namespace
        content = _load_pickle(path, [argparse.Namespace], mmap=zipped)
    except Exception as error:  # torch raises whatever a broken file leads to
        raise WeightsError(f"{path}: refused, not a checkpoint of tensors: {_first_line(error)}") from error
    state = _state(content, "model")
    if state is None:
        raise WeightsError(f"{path}: holds no dictionary of tensors")
    return state


def _load_pickle(path: Path, allowed: list[Any], *, mmap: bool) -> object:
    """What torch's own restricted loader makes of a file that may name `allowed` beside tensors and plain containers.

    Nothing else that the file names is imported, let alone called. Raises whatever torch raises.
    """
    with warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
        warnings.simplefilter("ignore")  # of old formats; what cannot be loaded raises
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def _state(content: object, key: str) -> dict[str, Tensor] | None:
    """The tensors of a state dictionary, or of one under `key` of a dictionary; None when there are none."""
    inner = content.get(key) if isinstance(content, Mapping) else None
    found = inner if isinstance(inner, Mapping) else content
    if not isinstance(found, Mapping) or not found or not all(isinstance(one, Tensor) for one in found.values()):
        return None
    return {str(name): tensor.detach() for name, tensor in found.items()}


def _first_line(error: Exception) -> str:
    """What was wrong, in one line; around what its loader found, torch puts advice that nobody should follow."""
    found = error.__context__ if isinstance(error, pickle.UnpicklingError) and error.__context__ else error
    text = str(found).strip()
    return text.splitlines()[0].split(". ")[0] if text else type(found).__name__


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
    (ModuleState, name)
    for name in (
        f"__main__.{HEAD_CLASS}",
        "torch.nn.modules.linear.Linear",
        "torch.nn.modules.batchnorm.BatchNorm1d",
        "torch.nn.modules.dropout.Dropout",
        "torch.nn.modules.activation.ReLU",
    )
)


def read_head(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickled head: a whole module, a state dictionary, or one under `model_state_dict`.

    VirNucPro's are whole modules of a class of its training script. Nothing the file holds is executed. Raises
    `WeightsError` naming what it asked for that a head has no use for.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked > HEAD_MAX_BYTES:
                raise ValueError(f"{unpacked:,} bytes is no head (at most {HEAD_MAX_BYTES:,})")
            if any(archive.read(name) != b"little" for name in archive.namelist() if name.endswith("/byteorder")):
                raise ValueError("saved on a big-endian machine")
        content = _load_pickle(path, list(HEAD_MODULES), mmap=False)
        state = _state(content.tensors if isinstance(content, ModuleState) else content, "model_state_dict")
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror})") from error
    except zipfile.BadZipFile as error:
        raise WeightsError(f"{path}: not a file of torch.save (1.6 or later); save the head again with it") from error
    except Exception as error:  # a broken pickle can fail in any way; all of them mean the same
        raise WeightsError(f"{path}: refused, not a head that can be read safely: {_first_line(error)}") from error
    if state is None:
        raise WeightsError(f"{path}: holds neither a pickled {HEAD_CLASS} nor a state dictionary; not a head")
    return state


def guess_esm2_shape(source: Source) -> Esm2Shape:
    """Sizes of a fair-esm checkpoint from its tensors."""
    sizes = {our_name(name): tensor.shape for name, tensor in source.tensors.items()}
    layers = {int(match[1]) for name in sizes if (match := re.match(r"layers\.(\d+)\.", name))}
    try:
        vocab, width = sizes["embed.weight"]
        head_dim = 2 * sizes["inv_freq"][0]
        ffn_width = sizes["layers.0.fc1.weight"][0]
    except KeyError as error:
        raise WeightsError(
            f"{source.origin}: no config.json beside it, and not the layout of fair-esm's ESM-2"
        ) from error
    return Esm2Shape(layers=max(layers) + 1, width=width, heads=width // head_dim, ffn_width=ffn_width, vocab=vocab)


def _beside(source: Path, name: str) -> Path | None:
    """A file in the same folder, if it is there."""
    path = (source if source.is_dir() else source.parent) / name
    return path if path.is_file() else None


def _write_part(
    out: Path,
    shape: Shape,
    tensors: Tensors,
    source: Path,
    dtype: Storage | None,
    tokenizer: Path | None = None,
) -> None:
    """Write one part of a models directory; it appears whole, or not at all."""
    target = out / shape.model
    if target.exists():
        raise WeightsError(f"{target}: exists already; remove it or choose another directory")
    stored = tensors.read(next(iter(tensors.parts))).dtype if dtype is None else STORAGE[dtype]
    partial = out / f".{shape.model}.{os.getpid()}.partial"
    partial.mkdir(parents=True)
    try:
        write_tensors(partial / "model.safetensors", shape.tensors(), stored, tensors.read)
        write_shape(shape.model_copy(update={"origin": source.name}), partial / "config.json")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, partial / "tokenizer.json")
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# -- random weights ----------------------------------------------------------------------------------------------------


def init_random(
    out: Path,
    esm2: Esm2Size = "tiny",
    dnabert_s: DnabertSize = "tiny",
    model_length: int = DEFAULT_MODEL_LENGTH,
    seed: int = 0,
    dtype: Storage = "fp32",
) -> None:
    """Write a models directory with random weights, for machines without the real ones.

    The same arguments give the same bytes. Weights are drawn so that activations stay of the size of real ones, in half
    precision too. `dtype` is what the encoders are stored in. Raises `WeightsError` when `out` already holds a model.
    """
    taken = [part for part in PARTS if (out / part).exists()]
    if taken:
        raise WeightsError(f"{out}: already holds {', '.join(f'{p}/' for p in taken)}; choose another directory")
    protein, dna = ESM2_SIZES[esm2], DNABERT_SIZES[dnabert_s]
    head = HeadShape(model_length=model_length, dna_width=dna.width, protein_width=protein.width)
    write_random(out / "esm2", protein, seed, STORAGE[dtype])
    write_random(out / "dnabert_s", dna, seed, STORAGE[dtype])
    train_tokenizer(out / "dnabert_s" / "tokenizer.json", dna.vocab, seed)
    write_random(out / "head", head, seed, torch.float32)


def write_random(folder: Path, shape: Shape, seed: int, dtype: torch.dtype) -> None:
    """Write `config.json` and `model.safetensors` of one part with random weights."""
    folder.mkdir(parents=True)
    read = functools.partial(random_tensor, shape, seed=seed)
    write_tensors(folder / "model.safetensors", shape.tensors(), dtype, read)
    write_shape(shape.model_copy(update={"origin": f"{RANDOM_ORIGIN}, seed {seed}"}), folder / "config.json")


def random_tensor(shape: Shape, name: str, seed: int = 0) -> Tensor:
    """One tensor of a random model, float32: a function of its name, its size and the seed only."""
    size = shape.tensors()[name]
    if name == "inv_freq":
        return inv_freq(2 * size[0])
    out = torch.empty(size)
    pieces = out.view(-1).split(DRAWN_AT_ONCE)
    middle, spread = _distribution(name, size, shape)
    name_digest = zlib.crc32(f"{shape.model}/{name}".encode())

    def draw(i: int) -> None:
        random = np.random.Generator(np.random.SFC64((seed, name_digest, i * DRAWN_AT_ONCE)))
        drawn = torch.from_numpy(random.random(len(pieces[i]), dtype=np.float32))
        pieces[i].copy_(drawn.sub_(0.5).mul_(spread * 12**0.5).add_(middle))

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(draw, range(len(pieces))))
    return out


def _distribution(name: str, size: tuple[int, ...], shape: Shape) -> tuple[float, float]:
    """Mean and standard deviation of a tensor's entries.

    A matrix keeps the size of what passes through it; what is added to a stream is smaller the more layers add to it.
    """
    leaf = name.rsplit(".", 1)[-1]
    if name.endswith("running_var"):
        return 1.0, 0.1
    if "norm" in name or name.startswith("bn1"):
        return (1.0, 0.05) if leaf == "weight" else (0.0, 0.05)
    if name.startswith(("embed", "token_type")):
        return 0.0, 1.0
    if leaf == "bias":
        return 0.0, 0.02
    fan_in = size[1] ** -0.5
    if isinstance(shape, Esm2Shape) and name.split(".")[-2] in ("out", "fc2"):
        return 0.0, 2 * fan_in * (2 * shape.layers) ** -0.5
    return 0.0, fan_in
