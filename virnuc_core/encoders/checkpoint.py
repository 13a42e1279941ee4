"""A models directory: opened and checked, fingerprinted, loaded to a device; what public checkpoints call tensors.

torch takes seconds to import. It is imported by what loads tensors: the processes that only check do without."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import re
import threading
import tomllib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from virnuc_core.config import Attention, EngineSpec, Precision, read_small_text, refuse_unreadable
from virnuc_core.encoders.model_config import (
    KINDS,
    PRODUCTS,
    DnabertShape,
    Esm2Shape,
    HeadShape,
    S,
    Shape,
    read_shape,
)
from virnuc_core.encoders.registry import ENCODERS, EncoderInfo, EncoderName, embedding_columns
from virnuc_core.encoders.tokenize import DnabertTokenizer
from virnuc_core.errors import VirnucError, WeightsError, join_first
from virnuc_core.rundir import write_text_atomically
from virnuc_core.runfiles import sha256_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from virnuc_core.encoders.classifier import Head
    from virnuc_core.encoders.layers import Encoder, Read

log = logging.getLogger(__name__)

PARTS: Final = tuple(KINDS)
E = TypeVar("E", bound="Encoder")
_hashing: Final = threading.Lock()  # who wants a digest that another thread computes waits for it
WEIGHTS: Final = "model.safetensors"
CALIBRATION: Final = "int8.safetensors"  # beside the weights of ESM-2
LARGE_BYTES: Final = 1 << 26  # whose digest takes longer than looking it up
STRETCH_BYTES: Final = 1 << 24


def open_part(models: Path, kind: type[S]) -> tuple[S, Read]:
    """Sizes of the part of a models directory that `kind` is the shape of, and what reads its weights.
    Raises `WeightsError` when they are missing or do not fit each other, the tokenizer or the other parts."""
    shape_of(models, kind)
    return open_folder(models / kind.part(), kind)


def shape_of(models: Path, kind: type[S]) -> S:
    """Its sizes alone, found right as `open_part` does, once in this process while the files stay the same."""
    states = (path.stat() for path in sorted(models.glob("*/*")) if path.is_file())
    found: S = _shape(
        models, kind, tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in states)
    )
    return found


@functools.cache
def _shape(models: Path, kind: type[Any], _states: object) -> Any:
    shape = read_shape(_folder(models, kind.part()) / "config.json", kind)
    if isinstance(shape, HeadShape):
        check_widths(models, shape)
    _open(models / shape.model, shape, _numbers if isinstance(shape, HeadShape) else _stored)
    if isinstance(shape, DnabertShape) and (vocab := DnabertTokenizer(models).vocab) > shape.vocab:
        raise WeightsError(
            f"{models / shape.model}: the tokenizer has {vocab} tokens, the model only {shape.vocab}"
        )
    return shape


def open_folder(folder: Path, kind: type[S]) -> tuple[S, Read]:
    """The same of one part alone, wherever its folder lies; whether it fits others is for the caller."""
    if not (folder / "config.json").is_file():
        raise WeightsError(
            f"{folder}: no {kind.part()} here; it needs config.json and model.safetensors"
        )
    from safetensors.torch import load_file

    shape = read_shape(folder / "config.json", kind)
    return shape, _open(folder, shape, load_file)


def _open(folder: Path, shape: Shape, opened: Callable[[Path], Mapping[str, Any]]) -> Read:
    read = match_tensors(folder, open_safetensors(_weights(folder), opened), shape)
    if isinstance(shape, HeadShape):  # which is small
        check_finite(folder, shape, read)
    return read


class Stored(NamedTuple):
    """A tensor as its file tells of it."""

    shape: tuple[int, ...]
    dtype: str


def _stored(file: Path) -> dict[str, Stored]:
    with safe_open(file, "np") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        return {
            name: Stored(tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()
        }


def _numbers(file: Path) -> Mapping[str, Any]:
    try:
        return load_file(file)
    except TypeError:  # NumPy has no bfloat16
        from safetensors import torch

        return torch.load_file(file)


def check_widths(models: Path, head: HeadShape) -> None:
    """See that a head's inputs are what the encoders of a models directory give. Errors: `WeightsError`."""
    dna = read_shape(_folder(models, "dnabert_s") / "config.json", DnabertShape).width
    protein = read_shape(_folder(models, "esm2") / "config.json", Esm2Shape).width
    if (head.dna_width, head.protein_width) != (dna, protein):
        raise WeightsError(
            f"{models / 'head'}: made for embeddings of {head.dna_width} (DNA) + {head.protein_width} (protein), "
            f"the encoders beside it give {dna} + {protein}; use the head that belongs to them"
        )


def check_finite(folder: Path, shape: Shape, read: Read) -> int:
    """How many numbers a part has, all finite; `WeightsError` names the first tensor with another."""
    tensors = ((name, read(name)) for name in shape.tensors())
    if bad := next(
        (name for name, values in tensors if not bool((abs(values) < math.inf).all())), None
    ):
        raise WeightsError(
            f"{folder}: tensor {bad} holds NaN or infinity; make it anew, or copy it again"
        )
    return sum(map(math.prod, shape.tensors().values()))


def check_models(models: Path, new_length: int | None = None) -> HeadShape:
    """The head's sizes of a models directory in which all is right that is told without an encoder's weights.
    With `new_length`, a head of that model length is yet to be made."""
    protein, dna = shape_of(models, Esm2Shape).width, shape_of(models, DnabertShape).width
    if new_length is not None:
        return HeadShape(model_length=new_length, dna_width=dna, protein_width=protein)
    return shape_of(models, HeadShape)


def _folder(models: Path, part: str) -> Path:
    if not models.is_dir():
        raise WeightsError(
            f"models directory {models}: no such directory; make one with virnuc models"
        )
    if not (models / part).is_dir():
        train = "; virnuc models use-head puts one back, virnuc train --model-length makes one" * (
            part == "head"
        )
        needed = ", ".join(f"{one}/" for one in PARTS)
        raise WeightsError(f"models directory {models}: no {part}/ in it; it needs {needed}{train}")
    return models / part


def _weights(folder: Path) -> list[Path]:
    if not (files := tensor_files(folder)):
        raise WeightsError(
            f"{folder / WEIGHTS}: no such file; convert a checkpoint with virnuc models convert"
        )
    return files


def fingerprint(
    models: Path, precision: Precision = "auto", *, anew: bool = False
) -> dict[str, str]:
    """SHA-256 of each part's files, by the part's name, and of the calibration for int8; equal ones mean equal scores.
    `anew`: computed also for large files of which it is remembered.
    Errors: `WeightsError` also for int8 without a calibration, or with that of other weights."""
    further = {"dnabert_s": [models / "dnabert_s" / "tokenizer.json"]}
    found = {
        part: part_digest(_folder(models, part), *further.get(part, []), anew=anew)
        for part in PARTS
    }
    if precision == "int8":
        if calibration(models)[1] != found["esm2"]:
            problem = (
                "was made for other weights of ESM-2; make it anew with virnuc models quantize"
            )
            raise WeightsError(f"{models / 'esm2' / CALIBRATION}: {problem}")
        found["int8"] = sha256_of(models / "esm2" / CALIBRATION)
    return found


def calibration(models: Path) -> tuple[list[dict[str, NDArray[np.float32]]], str]:
    """What `virnuc models quantize` saw the products of ESM-2 take, of each layer by product: the largest and the mean,
    [2, in]; and the digest of the weights it saw."""
    path, kind = models / "esm2" / CALIBRATION, Esm2Shape
    if not path.is_file():
        raise WeightsError(
            f"{path}: no such file; int8 needs it, and virnuc models quantize makes it from some reads"
        )
    try:
        with safe_open(path, "np") as file:
            seen = {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118 - no mapping
            count = read_shape(models / "esm2" / "config.json", kind).layers
            products = [
                {name: seen[f"layers.{i}.{name}"] for name in PRODUCTS} for i in range(count)
            ]
            for largest, mean in seen.values():
                if not (
                    np.isfinite(largest) & (np.abs(mean) <= 1.01 * largest)
                ).all():  # sums of float32 are rounded
                    raise ValueError("no mean is above the largest")
            return products, (file.metadata() or {})["weights"]
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise WeightsError(
            f"{path}: is no calibration for this ESM-2; make it with virnuc models quantize"
        ) from error


def part_digest(folder: Path, *further: Path, anew: bool = False) -> str:
    """The digest of one part, wherever its folder lies: of its config, its weights and `further` files."""
    body = ""
    for file in (folder / "config.json", *_weights(folder), *further):
        with refuse_unreadable(file, "file", WeightsError):
            at = file.stat()
        state = at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns
        with _hashing:
            body += f"{file.name} {_digest(file.resolve(), state, anew)}\n"
    return hashlib.sha256(body.encode()).hexdigest()


@functools.cache
def _digest(path: Path, state: tuple[int, ...], anew: bool) -> str:
    """The digest of a file in this state; of a large one it is remembered in the user's own folder for such things."""
    kept = Path("~/.cache/virnuc/digests", hashlib.sha256(f"{path} {state}".encode()).hexdigest())
    with suppress(OSError, RuntimeError):  # RuntimeError: nobody's home
        kept = kept.expanduser()
        if not anew and re.fullmatch("[0-9a-f]{64}", found := kept.read_text("ascii", "replace")):
            return found
    found = digest_of(path)
    with suppress(OSError, VirnucError):
        if path.stat().st_size >= LARGE_BYTES and kept.is_absolute():
            write_text_atomically(kept, found)
    return found


def digest_of(path: Path) -> str:
    """SHA-256; of a file of several stretches over theirs, for 6 GB take one thread seconds. Errors: `OSError`."""

    def of(start: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(STRETCH_BYTES)).digest()

    if (size := path.stat().st_size) <= STRETCH_BYTES:
        return sha256_of(path)
    with ThreadPoolExecutor(8) as threads:
        return hashlib.sha256(b"".join(threads.map(of, range(0, size, STRETCH_BYTES)))).hexdigest()


def load_encoder(
    network: type[E],
    models: Path,
    device: torch.device,
    precision: Precision = "auto",
    attention: Attention = "auto",
) -> E:
    """Load an encoder of a models directory to a device.

    Args:
        network: The class of the encoder, `Esm2` or `DnabertS`.
        models: Models directory.
        device: Where the encoder runs.
        precision: Number format. With int8, encoders that have no int8 run in fp16.
        attention: Which implementation runs the layers.

    Raises:
        WeightsError: The weights, or the calibration for int8, cannot be used.
        IncapableError: The device cannot run what is asked for.
        ConfigError: The model's sizes do not allow what is asked for.
    """
    from virnuc_core.encoders.backends import choose_backend
    from virnuc_core.encoders.layers import as_calibration
    from virnuc_core.encoders.precision import resolve_precision

    shape, read = open_part(models, network.INFO.shape_type)
    if precision == "int8" and not network.INFO.has_int8:
        precision = "fp16"
    resolved = resolve_precision(precision, device)
    backend = choose_backend(attention, shape.head_dim, device)
    statistics = None
    if resolved == "int8":
        layer_inputs, _ = calibration(models)
        statistics = as_calibration(layer_inputs)
    return network(
        shape, read, device, precision=resolved, attention=backend, calibration=statistics
    )


@dataclass(frozen=True)
class LoadedModels:
    """The encoders and the classifier, ready to run on one device."""

    encoders: Mapping[EncoderName, Encoder]  # in the registry's order
    head: Head

    def columns(self) -> dict[EncoderName, slice]:
        """Return the columns of the joined embeddings that each encoder fills."""
        widths = {name: encoder.width for name, encoder in self.encoders.items()}
        return embedding_columns(widths)


def load_models(
    models: Path,
    device: torch.device,
    engine: EngineSpec,
    warm: Callable[[Encoder], object] = lambda _: None,
) -> LoadedModels:
    """Load all encoders and the classifier to one device, the encoders at the same time.

    Args:
        models: Models directory.
        device: Where the models run.
        engine: Settings: precision and attention backend.
        warm: Called with each encoder as soon as it is loaded, because compiling its kernels takes
            longest. Called again after all are loaded for an encoder for which there was not
            enough memory while another one was still loading.

    Raises:
        WeightsError: A part of the models directory cannot be used.
        DeviceError: The device cannot run what the settings ask for.
        ConfigError: The settings do not fit the models.
    """
    import torch

    from virnuc_core.encoders.classifier import Head
    from virnuc_core.encoders.models import NETWORKS

    out_of_memory: list[Encoder] = []

    def load(info: EncoderInfo) -> Encoder:
        network = NETWORKS[info.name]
        encoder = load_encoder(network, models, device, engine.precision, engine.attention)
        try:
            warm(encoder)
        except torch.OutOfMemoryError:
            out_of_memory.append(encoder)
        return encoder

    with ThreadPoolExecutor(len(ENCODERS)) as threads:
        # The last one of the registry is the largest, so its loading starts first.
        loading = {info.name: threads.submit(load, info) for info in reversed(ENCODERS)}
    loaded = {name: future.result() for name, future in loading.items()}
    encoders = {info.name: loaded[info.name] for info in ENCODERS}
    head = Head(*open_part(models, HeadShape), device)
    for encoder in out_of_memory:
        warm(encoder)
    return LoadedModels(encoders, head)


def load_all(
    models: Path,
    device: torch.device,
    engine: EngineSpec,
    warm: Callable[[Encoder], object] = lambda _: None,
) -> tuple[Encoder, Encoder, Head]:
    """Load ESM-2, DNABERT-S and the classifier as `load_models` does."""
    loaded = load_models(models, device, engine, warm)
    return loaded.encoders["esm2"], loaded.encoders["dnabert_s"], loaded.head


def open_safetensors(
    files: list[Path], opened: Callable[[Path], Mapping[str, Any]]
) -> dict[str, Any]:
    """The tensors of some `.safetensors` files as `opened` has them; torch's `load_file` maps them into memory: a
    tensor's numbers are read when they are used."""
    found: dict[str, Any] = {}
    for file in files:
        try:
            found |= opened(file)
        except Exception as error:  # the library, and torch for it, raise many kinds
            problem = (
                f"cannot be read as safetensors: {error}; is it whole? copy or convert it again"
            )
            raise WeightsError(f"{file}: {problem}") from error
    return found


# Names of the public layouts (ESM-2 as fair-esm saved it and as ported to transformers, DNABERT-S), prefixes taken off
_NAMES: Final = tomllib.loads(
    Path(__file__).with_name("tensor_names.toml").read_text(encoding="utf-8")
)
_PREFIXES, _UNUSED, _TASK_HEAD = (
    re.compile(_NAMES[key]) for key in ("prefixes", "unused", "task_head")
)


def our_name(theirs: str) -> str:
    """Our name for a tensor of a public layout: empty for what is not used here, theirs for what is not known."""
    bare = _PREFIXES.sub("", theirs)
    if bare.endswith(".inv_freq"):
        return "inv_freq"  # each layer has the same
    stem, _, end = bare.rpartition(".")
    layer = re.fullmatch(r"layers?\.(\d+)\.(.+)", stem)
    if layer and (name := _NAMES["in_layer"].get(layer[2])):
        return f"layers.{layer[1]}.{name}.{end}"
    if name := _NAMES["outside"].get(stem):
        return f"{name}.{end}"
    return "" if _UNUSED.fullmatch(bare) else theirs


def match_tensors(
    source: Path, tensors: Mapping[str, Tensor | Stored], shape: Shape, drop_extra: bool = False
) -> Read:
    """Reads the tensors of a checkpoint of any public layout by our names, each in the precision it is stored in.
    Rotary frequencies, which newer ports do not save, are computed from the head size then. An encoder's task head, and
    with `drop_extra` all that is not wanted, is left out with a remark. Errors: `WeightsError` names what is missing,
    unexpected or misshapen; no weights are read for that."""
    wanted, given = (
        shape.tensors(),
        dict[str, tuple[str, Any]](),
    )  # by our names: theirs, the first of several
    for theirs, tensor in tensors.items():
        given.setdefault(theirs if theirs in wanted else our_name(theirs), (theirs, tensor))
    if isinstance(shape, Esm2Shape) and "inv_freq" not in given:
        from virnuc_core.encoders.positions import rotary_frequencies

        given["inv_freq"] = "inv_freq", rotary_frequencies(shape.head_dim)
    in_three = {name for name in wanted if ".qkv." in name and name not in given}
    parts = {
        name: [name.replace(".qkv.", f".{c}.") for c in "qkv"] if name in in_three else [name]
        for name in wanted
    }
    missing = [name for name, needed in parts.items() if not given.keys() >= set(needed)]
    unexpected = {
        given[name][0] for name in given.keys() - {"", *chain.from_iterable(parts.values())}
    }
    dropped = {name for name in unexpected if drop_extra or _TASK_HEAD.fullmatch(name)}
    lists = (("no", missing), ("unexpected", unexpected - dropped))
    if said := [
        f"{what} tensor{'s' * (len(found) > 1)} {join_first(sorted(found))}"
        for what, found in lists
        if found
    ]:
        way_out = "" if missing else " (models convert --drop-extra leaves them out)"
        raise WeightsError(
            f"{source}: {'; '.join(said)}; not the model that config.json describes{way_out}"
        )
    if dropped:
        log.warning(
            "%s: left out %s, which such a model does not have", source, join_first(sorted(dropped))
        )
    for name, needed in parts.items():
        size = (
            wanted[name]
            if len(needed) == 1
            else (wanted[name][0] // len(needed), *wanted[name][1:])
        )
        for theirs, tensor in (given[part] for part in needed):
            if tensor.shape != size:
                problem = f"is {list(tensor.shape)}, config.json makes it {list(size)}"
                raise WeightsError(f"{source}: tensor {theirs} {problem}")
            if "F" not in str(tensor.dtype).upper():  # float32, or F32 to safetensors
                raise WeightsError(
                    f"{source}: tensor {theirs} holds {tensor.dtype}, wanted floating-point numbers"
                )

    def read(name: str) -> Any:
        found = [given[part][1] for part in parts[name]]
        if len(found) == 1:
            return found[0]
        import torch

        return torch.cat(found)

    return read


def tensor_files(folder: Path, name: str = WEIGHTS) -> list[Path]:
    """The file of this name in a folder, or the shards that its index names; empty without either."""
    single, index = folder / name, folder / f"{name}.index.json"
    if single.is_file() or not index.is_file():
        return [single] * single.is_file()
    try:
        files = sorted(
            {str(file) for file in json.loads(read_small_text(index))["weight_map"].values()}
        )
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index}: not an index of the shards of a checkpoint") from error
    for file in files:
        if Path(file).name != file or not (folder / file).is_file():
            raise WeightsError(f"{index}: names {file}, which is not in {folder}")
    return [folder / file for file in files]
