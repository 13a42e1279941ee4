"""A models directory: opened and checked, fingerprinted, or made with random weights."""

from __future__ import annotations

import hashlib
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from virnuc_core.config import DEFAULT_MODEL_LENGTH
from virnuc_core.encoders.layouts import dnabert_tensors, esm2_tensors, head_tensors, inv_freq
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
from virnuc_core.encoders.tensor_files import SafetensorsSource, Tensors, find_safetensors, write_tensors
from virnuc_core.encoders.tokenize import DnabertTokenizer
from virnuc_core.errors import ConfigError, WeightsError

Part = Literal["esm2", "dnabert_s", "head"]
PARTS: Final[tuple[Part, ...]] = ("esm2", "dnabert_s", "head")
Storage = Literal["fp32", "fp16", "bf16"]
STORAGE: Final[dict[Storage, torch.dtype]] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

HASH_PIECE_BYTES: Final = 1 << 22
DRAWN_AT_ONCE: Final = 1 << 20  # numbers one thread draws for a piece of a tensor
THREADS: Final = 16


def open_esm2(models: Path) -> tuple[Esm2Shape, Tensors]:
    """Sizes and weights of `models/esm2`; raises `WeightsError` when they are missing or do not fit each other."""
    shape = read_esm2_shape(_config(models, "esm2"))
    return shape, esm2_tensors(_source(models, "esm2"), shape)


def open_dnabert(models: Path) -> tuple[DnabertShape, Tensors]:
    """Sizes and weights of `models/dnabert_s`; raises `WeightsError` when they are missing or do not fit each other."""
    shape = read_dnabert_shape(_config(models, "dnabert_s"))
    return shape, dnabert_tensors(_source(models, "dnabert_s"), shape)


def open_head(models: Path) -> tuple[HeadShape, Tensors]:
    """Sizes and weights of `models/head`; raises `WeightsError` also when its inputs are not what the encoders give."""
    shape = read_head_shape(_config(models, "head"))
    dna, protein = read_dnabert_shape(_config(models, "dnabert_s")), read_esm2_shape(_config(models, "esm2"))
    if (shape.dna_width, shape.protein_width) != (dna.width, protein.width):
        raise WeightsError(
            f"{models / 'head'}: made for embeddings of {shape.dna_width} (DNA) + {shape.protein_width} (protein), "
            f"the encoders beside it give {dna.width} + {protein.width}; use the head that belongs to them"
        )
    return shape, head_tensors(_source(models, "head"), shape)


def open_head_folder(folder: Path) -> tuple[HeadShape, Tensors]:
    """Sizes and weights of a head alone, wherever its folder lies; whether it fits is for the caller to check."""
    if not (folder / "config.json").is_file():
        raise WeightsError(f"{folder}: no head here; it needs config.json and model.safetensors")
    shape = read_head_shape(folder / "config.json")
    return shape, head_tensors(SafetensorsSource(_tensor_files(folder)), shape)


def head_digest(folder: Path) -> str:
    """The digest of a head alone, equal to `fingerprint(models).head` for the head of a models directory."""
    return _digest([folder / "config.json", *_tensor_files(folder)])


def check_models(models: Path) -> None:
    """Everything that can be told of a models directory without reading its weights: in milliseconds, of any size.

    The parts are there and whole (a safetensors file is as long as its header says), every tensor has the shape and a
    type its config asks for, the tokenizer is one and its tokens fit the model, the head's inputs are what the encoders
    give. Errors: `WeightsError` names the file and what is wrong with it.
    """
    open_esm2(models)[1].check()
    shape, tensors = open_dnabert(models)
    check_tokenizer(models, DnabertTokenizer(models), shape)
    tensors.check()
    open_head(models)[1].check()


def check_tokenizer(models: Path, tokenizer: DnabertTokenizer, shape: DnabertShape) -> None:
    """`WeightsError` when a token of the tokenizer has no row in the embedding table of the model beside it."""
    if tokenizer.vocab > shape.vocab:
        raise WeightsError(
            f"{models / 'dnabert_s'}: the tokenizer has {tokenizer.vocab} tokens, the model only {shape.vocab}"
        )


def _folder(models: Path, part: Part) -> Path:
    if not models.is_dir():
        raise WeightsError(f"models directory {models}: no such directory; make one with virnuc models")
    folder = models / part
    if not folder.is_dir():
        raise WeightsError(f"models directory {models}: no {part}/ in it; it needs {', '.join(f'{p}/' for p in PARTS)}")
    return folder


def _config(models: Path, part: Part) -> Path:
    path = _folder(models, part) / "config.json"
    if not path.is_file():
        raise WeightsError(f"{path}: no such file; each part of a models directory has its config.json")
    return path


def _source(models: Path, part: Part) -> SafetensorsSource:
    return SafetensorsSource(_source_files(models, part))


@dataclass(frozen=True, slots=True)
class WeightsPrint:
    """SHA-256 of each part's files; equal prints mean equal scores."""

    esm2: str
    dnabert_s: str
    head: str


_digests: dict[tuple[str, int, int], str] = {}


def fingerprint(models: Path) -> WeightsPrint:
    """Digests of the three parts; a file's is remembered in this process while its size and time stay the same."""
    return WeightsPrint(*(_part_digest(models, part) for part in PARTS))


def _part_digest(models: Path, part: Part) -> str:
    files = [_config(models, part), *_source_files(models, part)]
    if part == "dnabert_s":
        tokenizer = models / part / "tokenizer.json"
        if not tokenizer.is_file():
            raise WeightsError(f"{tokenizer}: no such file; a models directory needs the tokenizer of its DNABERT-S")
        files.append(tokenizer)
    return _digest(files)


def _digest(files: list[Path]) -> str:
    body = "".join(f"{file.name} {file_digest(file)}\n" for file in files)
    return hashlib.sha256(body.encode()).hexdigest()


def _source_files(models: Path, part: Part) -> list[Path]:
    return _tensor_files(_folder(models, part))


def _tensor_files(folder: Path) -> list[Path]:
    files = find_safetensors(folder)
    if not files:
        raise WeightsError(
            f"{folder / 'model.safetensors'}: no such file; convert a checkpoint with virnuc models convert"
        )
    return files


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content, as hex."""
    state = path.stat()
    key = (str(path.resolve()), state.st_size, state.st_mtime_ns)
    if key not in _digests:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(HASH_PIECE_BYTES):
                digest.update(piece)
        _digests[key] = digest.hexdigest()
    return _digests[key]


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
    if esm2 not in ESM2_SIZES:
        raise ConfigError(f"esm2 size '{esm2}' is not known; choose {', '.join(ESM2_SIZES)}")
    if dnabert_s not in DNABERT_SIZES:
        raise ConfigError(f"dnabert_s size '{dnabert_s}' is not known; choose {', '.join(DNABERT_SIZES)}")
    if dtype not in STORAGE:
        raise ConfigError(f"dtype '{dtype}' is not known; choose {', '.join(STORAGE)}")
    taken = [part for part in PARTS if (out / part).exists()]
    if taken:
        raise WeightsError(f"{out}: already holds {', '.join(f'{p}/' for p in taken)}; choose another directory")
    from virnuc_core.encoders.vocabulary import train_tokenizer

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
            lambda name: random_tensor(name, shape, seed, dtype, threads),
        )
    write_shape(shape.model_copy(update={"origin": f"{RANDOM_ORIGIN}, seed {seed}"}), folder / "config.json")


def random_tensor(name: str, shape: Shape, seed: int, dtype: torch.dtype, threads: ThreadPoolExecutor) -> Tensor:
    """One tensor of a random model: a function of its name, its size and the seed only."""
    size = shape.tensors()[name]
    if name == "inv_freq":
        assert isinstance(shape, Esm2Shape)
        return inv_freq(shape.head_dim)
    middle, spread = _distribution(name, size, shape)
    out = torch.empty(size, dtype=dtype)
    flat = out.view(-1)
    jobs: list[Future[None]] = []
    for start in range(0, len(flat), DRAWN_AT_ONCE):
        key = (seed, zlib.crc32(f"{shape.model}/{name}".encode()), start)
        jobs.append(threads.submit(_draw, flat[start : start + DRAWN_AT_ONCE], key, middle, spread))
    for job in jobs:
        job.result()
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
        middle, spread = _distribution(name, size, self._shape)
        generator = torch.Generator(device).manual_seed(self._seed << 32 | zlib.crc32(name.encode()))
        drawn = torch.rand(size, generator=generator, device=device)
        return drawn.sub_(0.5).mul_(spread * 12**0.5).add_(middle)


def _draw(into: Tensor, key: tuple[int, int, int], middle: float, spread: float) -> None:
    """Fill with even draws of the given mean and standard deviation."""
    drawn = torch.from_numpy(np.random.Generator(np.random.SFC64(key)).random(len(into), dtype=np.float32))
    into.copy_(drawn.sub_(0.5).mul_(spread * 12**0.5).add_(middle))


def _distribution(name: str, size: tuple[int, ...], shape: Shape) -> tuple[float, float]:
    """Mean and standard deviation of a tensor's entries.

    A matrix keeps the size of what passes through it; what is added to a stream is smaller the more layers add to it.
    """
    layer_sum = (2 * getattr(shape, "layers", 1)) ** -0.5
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
    if shape.model == "esm2" and name.split(".")[-2] in ("out", "fc2"):
        return 0.0, 2 * fan_in * layer_sum
    return 0.0, fan_in
