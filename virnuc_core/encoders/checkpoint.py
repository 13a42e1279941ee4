"""A models directory: opened and checked, fingerprinted, loaded to a device, or made with random weights."""

from __future__ import annotations

import functools
import hashlib
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from virnuc_core.config import DEFAULT_MODEL_LENGTH, Attention, EngineSpec, Precision
from virnuc_core.encoders.attention import choose_backend
from virnuc_core.encoders.dnabert_s import DnabertS, place_dnabert
from virnuc_core.encoders.esm2 import Esm2, place_esm2
from virnuc_core.encoders.head import Head, place_head
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
    read_dnabert_shape,
    read_esm2_shape,
    read_head_shape,
    write_shape,
)
from virnuc_core.encoders.precision import resolve_precision
from virnuc_core.encoders.tensor_files import (
    Tensors,
    dnabert_tensors,
    esm2_tensors,
    find_safetensors,
    head_tensors,
    inv_freq,
    open_safetensors,
    write_tensors,
)
from virnuc_core.encoders.tokenize import DnabertTokenizer, train_tokenizer
from virnuc_core.errors import ConfigError, WeightsError

PARTS: Final = ("esm2", "dnabert_s", "head")
Storage = Literal["fp32", "fp16", "bf16"]
STORAGE: Final[dict[Storage, torch.dtype]] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

DRAWN_AT_ONCE: Final = 1 << 20  # numbers one thread draws for a piece of a tensor
THREADS: Final = 16


def open_esm2(models: Path) -> tuple[Esm2Shape, Tensors]:
    """Sizes and weights of `models/esm2`; raises `WeightsError` when they are missing or do not fit each other."""
    shape = read_esm2_shape(_config(models, "esm2"))
    return shape, esm2_tensors(open_safetensors(_tensor_files(models / "esm2")), shape)


def open_dnabert(models: Path) -> tuple[DnabertShape, Tensors]:
    """Sizes and weights of `models/dnabert_s`; raises `WeightsError` when they are missing or do not fit each other."""
    shape = read_dnabert_shape(_config(models, "dnabert_s"))
    return shape, dnabert_tensors(open_safetensors(_tensor_files(models / "dnabert_s")), shape)


def open_head(models: Path) -> tuple[HeadShape, Tensors]:
    """Sizes and weights of `models/head`; raises `WeightsError` also when its inputs are not what the encoders give."""
    shape = read_head_shape(_config(models, "head"))
    dna, protein = read_dnabert_shape(_config(models, "dnabert_s")), read_esm2_shape(_config(models, "esm2"))
    if (shape.dna_width, shape.protein_width) != (dna.width, protein.width):
        raise WeightsError(
            f"{models / 'head'}: made for embeddings of {shape.dna_width} (DNA) + {shape.protein_width} (protein), "
            f"the encoders beside it give {dna.width} + {protein.width}; use the head that belongs to them"
        )
    return open_head_folder(models / "head")


def open_head_folder(folder: Path) -> tuple[HeadShape, Tensors]:
    """Sizes and weights of a head alone, wherever its folder lies; whether it fits is for the caller to check."""
    if not (folder / "config.json").is_file():
        raise WeightsError(f"{folder}: no head here; it needs config.json and model.safetensors")
    shape = read_head_shape(folder / "config.json")
    return shape, head_tensors(open_safetensors(_tensor_files(folder)), shape)


def check_models(models: Path) -> None:
    """Everything that can be told of a models directory without reading its weights: in milliseconds, of any size.

    The parts are there and whole (a safetensors file is as long as its header says), every tensor has the shape and a
    type its config asks for, the tokenizer is one and its tokens fit the model, the head's inputs are what the encoders
    give. Errors: `WeightsError` names the file and what is wrong with it.
    """
    open_esm2(models)
    _open_tokenizer(models, open_dnabert(models)[0])
    open_head(models)


def _open_tokenizer(models: Path, shape: DnabertShape) -> DnabertTokenizer:
    """`WeightsError` when a token of the tokenizer has no row in the embedding table of the model beside it."""
    tokenizer = DnabertTokenizer(models)
    if tokenizer.vocab > shape.vocab:
        raise WeightsError(
            f"{models / 'dnabert_s'}: the tokenizer has {tokenizer.vocab} tokens, the model only {shape.vocab}"
        )
    return tokenizer


def _config(models: Path, part: str) -> Path:
    if not models.is_dir():
        raise WeightsError(f"models directory {models}: no such directory; make one with virnuc models")
    if not (models / part).is_dir():
        raise WeightsError(f"models directory {models}: no {part}/ in it; it needs {', '.join(f'{p}/' for p in PARTS)}")
    path = models / part / "config.json"
    if not path.is_file():
        raise WeightsError(f"{path}: no such file; each part of a models directory has its config.json")
    return path


def _tensor_files(folder: Path) -> list[Path]:
    files = find_safetensors(folder)
    if not files:
        raise WeightsError(
            f"{folder / 'model.safetensors'}: no such file; convert a checkpoint with virnuc models convert"
        )
    return files


# -- fingerprints ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightsPrint:
    """SHA-256 of each part's files; equal prints mean equal scores."""

    esm2: str
    dnabert_s: str
    head: str


def fingerprint(models: Path) -> WeightsPrint:
    """Digests of the three parts; a file's is remembered in this process while its size and time stay the same."""
    for part in PARTS:
        _config(models, part)
    tokenizer = models / "dnabert_s" / "tokenizer.json"
    if not tokenizer.is_file():
        raise WeightsError(f"{tokenizer}: no such file; a models directory needs the tokenizer of its DNABERT-S")
    esm2, dnabert_s, head = (models / part for part in PARTS)
    return WeightsPrint(part_digest(esm2), part_digest(dnabert_s, tokenizer), part_digest(head))


def part_digest(folder: Path, *further: Path) -> str:
    """The digest of one part, wherever its folder lies: of its config, its weights and `further` files."""
    body = ""
    for file in (folder / "config.json", *_tensor_files(folder), *further):
        state = file.stat()
        body += f"{file.name} {_digest(file.resolve(), state.st_size, state.st_mtime_ns)}\n"
    return hashlib.sha256(body.encode()).hexdigest()


@functools.cache
def _digest(path: Path, size: int, changed_ns: int) -> str:
    """SHA-256 of a file that has not changed since."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- loading -----------------------------------------------------------------------------------------------------------


def load_esm2(models: Path, device: torch.device, precision: Precision = "auto", attention: Attention = "auto") -> Esm2:
    """The ESM-2 of a models directory on `device`, run by our own kernels where they can.

    Raises `WeightsError` when a file is missing or wrong, `DeviceError` or `ConfigError` when the device cannot run
    what is asked for.
    """
    shape, tensors = open_esm2(models)
    ready = resolve_precision(precision, device)
    backend = choose_backend(attention, shape.head_dim, device)
    return Esm2(shape, place_esm2(tensors, shape, ready, device), precision=ready, attention=backend)


def load_dnabert_s(
    models: Path, device: torch.device, precision: Precision = "auto", attention: Attention = "auto"
) -> DnabertS:
    """The DNABERT-S of a models directory on `device`; raises as `load_esm2` does."""
    shape, tensors = open_dnabert(models)
    pad_id = _open_tokenizer(models, shape).pad_id
    ready = resolve_precision(precision, device)
    backend = choose_backend(attention, shape.head_dim, device)
    weights = place_dnabert(tensors, shape, ready, device)
    return DnabertS(shape, weights, pad_id=pad_id, precision=ready, attention=backend)


def load_head(models: Path, device: torch.device) -> Head:
    """The classifier of a models directory; `WeightsError` when its inputs are not what the encoders give."""
    shape, tensors = open_head(models)
    return Head(shape, place_head(tensors, device))


class Encoders(NamedTuple):
    """All three models on one device."""

    esm2: Esm2
    dnabert_s: DnabertS
    head: Head


def load_all(models: Path, device: torch.device, engine: EngineSpec) -> Encoders:
    """The models as an engine's settings want them; raises as the three loaders do."""
    # fp8 turns DNABERT-S's vectors (cosine 0.89), and it is a thirtieth of the time: it keeps fp16
    dna_precision: Precision = "fp16" if engine.precision == "fp8" else engine.precision
    return Encoders(
        load_esm2(models, device, engine.precision, engine.attention),
        load_dnabert_s(models, device, dna_precision, engine.attention),
        load_head(models, device),
    )


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
    precision too. `dtype` is what the encoders are stored in. Raises `ConfigError` for a size that is not known and
    `WeightsError` when `out` already holds a model.
    """
    for name, asked, known in (("esm2", esm2, ESM2_SIZES), ("dnabert_s", dnabert_s, DNABERT_SIZES)):
        if asked not in known:
            raise ConfigError(f"{name} size '{asked}' is not known; choose {', '.join(known)}")
    if dtype not in STORAGE:
        raise ConfigError(f"dtype '{dtype}' is not known; choose {', '.join(STORAGE)}")
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
    with ThreadPoolExecutor(THREADS) as threads:
        write_tensors(
            folder / "model.safetensors",
            shape.tensors(),
            dtype,
            lambda name: _random_tensor(name, shape, seed, dtype, threads),
        )
    write_shape(shape.model_copy(update={"origin": f"{RANDOM_ORIGIN}, seed {seed}"}), folder / "config.json")


def _random_tensor(name: str, shape: Shape, seed: int, dtype: torch.dtype, threads: ThreadPoolExecutor) -> Tensor:
    """One tensor of a random model: a function of its name, its size and the seed only."""
    size = shape.tensors()[name]
    if name == "inv_freq":
        return inv_freq(2 * size[0])
    out = torch.empty(size, dtype=dtype)
    pieces = out.view(-1).split(DRAWN_AT_ONCE)
    middle, spread = _distribution(name, size, shape)
    name_digest = zlib.crc32(f"{shape.model}/{name}".encode())

    def draw(i: int) -> None:
        random = np.random.Generator(np.random.SFC64((seed, name_digest, i * DRAWN_AT_ONCE)))
        drawn = torch.from_numpy(random.random(len(pieces[i]), dtype=np.float32))
        pieces[i].copy_(drawn.sub_(0.5).mul_(spread * 12**0.5).add_(middle))

    list(threads.map(draw, range(len(pieces))))
    return out


class RandomTensors:
    """Random weights made on the device they are wanted on, nothing written: for benchmarks and large checks."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self._shape, self._seed = shape, seed

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """One tensor, float32: a function of its name, its size, the seed and the kind of device."""
        size = self._shape.tensors()[name]
        if name == "inv_freq":
            return inv_freq(2 * size[0]).to(device)
        generator = torch.Generator(device).manual_seed(self._seed << 32 | zlib.crc32(name.encode()))
        middle, spread = _distribution(name, size, self._shape)
        drawn = torch.rand(size, generator=generator, device=device)
        return drawn.sub_(0.5).mul_(spread * 12**0.5).add_(middle)


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
