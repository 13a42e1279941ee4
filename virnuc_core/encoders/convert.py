"""A models directory made: of public checkpoints at hand, of fetched ones, or of random weights.

Of a pickled file torch's restricted loader reads the tensors, and nothing else of what it may hold: nothing is imported
but tensors, plain containers and what is allowed here.
"""

import argparse
import functools
import json
import math
import os
import pickle
import re
import resource
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
import torch
from torch import Tensor

from virnuc_core.config import DEFAULT_MODEL_LENGTH, reading
from virnuc_core.encoders import checkpoint, model_config
from virnuc_core.encoders.checkpoint import PARTS, WEIGHTS, Checkpoint, fit
from virnuc_core.encoders.layers import DTYPES, Read, inv_freq
from virnuc_core.encoders.model_config import DnabertShape, Esm2Shape, HeadShape, Shape, Storage, read_shape
from virnuc_core.encoders.tokenize import read_tokenizer
from virnuc_core.errors import ConfigError, WeightsError
from virnuc_core.rundir import whole_file

DNABERT_WIDTH: Final = 768
PICKLED: Final = "pytorch_model.bin"

ESM2_REPOSITORY: Final = ("facebook/esm2_t36_3B_UR50D", "476b639933c8baad5ad09a60ac1a87f987b656fc")
DNABERT_REPOSITORY: Final = ("zhihan1996/DNABERT-S", "00e47f96cdea35e4b6f5df89e5419cbe47d490c6")
# weights and sizes only: no code of a repository is downloaded, let alone run
FETCHED_FILES: Final = ["config.json", "tokenizer.json", "model*.safetensors*", "pytorch_model*.bin*"]

DRAWN_AT_ONCE: Final = 1 << 20  # numbers one thread draws for a piece of a random tensor

HEAD_CLASS: Final = "MLPClassifier"
HEAD_PARTS: Final = ("linear.Linear", "batchnorm.BatchNorm1d", "dropout.Dropout", "activation.ReLU")
HEAD_MAX_TENSORS: Final = 100  # it has 9; a pickle of a few lines can name one module within itself many times over
SHARED: Final = 4  # tensors may share their numbers, so that they have more than the file, but not many times more
BESIDES: Final = 1 << 30  # bytes for whatever else loading takes
HEAD_MAX_BYTES: Final = 1 << 28  # a head has 7 MB; what claims to be one and is larger than this is not read


def convert_esm2(source: Path, out: Path, dtype: Storage | None = None, drop_extra: bool = False) -> Esm2Shape:
    """Write `out/esm2` from a folder or file of the public ESM-2, in HF layout or fair-esm's, stored as `dtype`. Sizes
    come from the `config.json` beside the weights, else from the tensors; `drop_extra` leaves out tensors that ESM-2
    does not have. Errors: `WeightsError`."""
    opened = open_public(source)
    config = _beside(source, "config.json")
    shape = read_shape(config, Esm2Shape) if config else guess_esm2_shape(opened)
    write_part(out, shape, fit(opened, shape, drop_extra), source.name, dtype)
    return shape


def convert_dnabert_s(
    source: Path, out: Path, tokenizer: Path | None = None, dtype: Storage | None = None, drop_extra: bool = False
) -> None:
    """Write `out/dnabert_s` from the public DNABERT-S, a folder or file, with its tokenizer. Errors: `WeightsError`."""
    opened = open_public(source)
    config = _beside(source, "config.json")
    if config is None:
        raise WeightsError(f"{source}: no config.json beside it; the sizes of DNABERT-S are read from there")
    shape, file = read_shape(config, DnabertShape), tokenizer or _beside(source, "tokenizer.json")
    if file is None:
        raise WeightsError(f"{source}: no tokenizer.json beside it; name the file")
    read_tokenizer(file)
    write_part(out, shape, fit(opened, shape, drop_extra), source.name, dtype, file.read_bytes())


def convert_head(source: Path, out: Path, model_length: int | None = None, dna_width: int = DNABERT_WIDTH) -> HeadShape:
    """Write `out/head` from a head of VirNucPro: pickled whole, as a dictionary, or as safetensors. `model_length` is
    read from a name like `500_model.pth` when not given. What is left of the input beside `dna_width` columns is the
    protein's. Nothing a pickle holds is executed."""
    named = re.fullmatch(r"(\d+)_model\.pth", source.name)
    if (length := model_length or (int(named[1]) if named else None)) is None:
        raise ConfigError(f"{source}: its name does not say the model length; give it (300 or 500 for VirNucPro's)")
    safe = source.suffix == ".safetensors"
    opened = checkpoint.open_safetensors([source]) if safe else Checkpoint(str(source), read_head(source))
    if "hidden_layer.weight" not in opened.tensors:
        raise WeightsError(f"{source}: no tensor hidden_layer.weight; not a head of VirNucPro")
    hidden, width = (*opened.tensors["hidden_layer.weight"].shape, 0)[:2]
    if width <= dna_width:
        raise WeightsError(f"{source}: takes {width} columns, DNA alone has {dna_width}; not made for these encoders")
    with reading(source, "head", WeightsError):
        shape = HeadShape(model_length=length, dna_width=dna_width, protein_width=width - dna_width, hidden=hidden)
    write_part(out, shape, fit(opened, shape), source.name, "fp32")
    return shape


def fetch(out: Path, head: Path, *, model_length: int | None = None, dtype: Storage | None = None) -> None:
    """Make a models directory of the public ESM-2 3B and DNABERT-S, and a head file of VirNucPro, which is at hand.
    Parts that `out` already holds are left as they are. Raises `WeightsError` when the network does not answer."""
    if not head.is_file():
        raise WeightsError(f"{head}: no such file; 300_model.pth and 500_model.pth come with VirNucPro's repository")
    if not (out / "head").exists():
        convert_head(head, out, model_length)
    if not (out / "dnabert_s").exists():
        convert_dnabert_s(_download(*DNABERT_REPOSITORY), out, dtype=dtype)
    if not (out / "esm2").exists():
        convert_esm2(_download(*ESM2_REPOSITORY), out, dtype=dtype)


def _download(repository: str, revision: str) -> Path:
    """Folder of a repository's weights at one revision, in the cache of huggingface_hub."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=FETCHED_FILES))
    except Exception as error:  # the library and what it stands on raise many kinds
        problem = f"{repository} at {revision[:12]}: cannot be downloaded ({first_line(error)})"
        advice = "without a network, copy its files here and use virnuc models convert"
        raise WeightsError(f"{problem}; {advice}") from error


def open_public(source: Path) -> Checkpoint:
    """A checkpoint: a folder (safetensors or .bin, single or sharded) or one .safetensors, .bin or .pt file."""
    find = checkpoint.tensor_files
    files = [source] if source.is_file() else find(source) or find(source, PICKLED)
    if not files:
        problem = f"no {WEIGHTS} and no {PICKLED} in it" if source.is_dir() else "no such file or directory"
        raise WeightsError(f"{source}: {problem}")
    if files[0].suffix == ".safetensors":
        return checkpoint.open_safetensors(files)
    return Checkpoint(str(source), {name: tensor for file in files for name, tensor in read_state(file).items()})


def guess_esm2_shape(source: Checkpoint) -> Esm2Shape:
    """Sizes of a fair-esm checkpoint from its tensors."""
    sizes = {checkpoint.our_name(name): tensor.shape for name, tensor in source.tensors.items()}
    layers = {int(match[1]) for name in sizes if (match := re.match(r"layers\.(\d+)\.", name))}
    try:
        vocab, width = sizes["embed.weight"]
        ffn_width, heads = sizes["layers.0.fc1.weight"][0], width // (2 * sizes["inv_freq"][0])
        return Esm2Shape(layers=max(layers) + 1, width=width, heads=heads, ffn_width=ffn_width, vocab=vocab)
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:  # no such tensor, or of other dimensions
        problem = "no config.json beside it, and not the layout of fair-esm's ESM-2"
        raise WeightsError(f"{source.origin}: {problem}") from error


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.bin` or `.pt`; `WeightsError` when it holds anything but tensors and plain settings."""
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"  # the newer format can be mapped, not copied, into memory
    try:
        if zipped:
            _check_archive(path, None)
        # fair-esm keeps its arguments in a namespace
        state = _tensors(path, [argparse.Namespace], "model", mmap=zipped)
    except Exception as error:  # torch raises whatever a broken file leads to
        raise WeightsError(f"{path}: refused, not a checkpoint of tensors: {first_line(error)}") from error
    if state is None:
        raise WeightsError(f"{path}: holds no dictionary of tensors")
    return state


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
    (ModuleState, name) for name in (f"__main__.{HEAD_CLASS}", *(f"torch.nn.modules.{one}" for one in HEAD_PARTS))
)


def read_head(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickled head: a whole module, as VirNucPro's are, a state dictionary, or one within another.
    Errors: `WeightsError` names what the file asked for that a head has no use for."""
    try:
        _check_archive(path, HEAD_MAX_BYTES)
        state = _tensors(path, list(HEAD_MODULES), "model_state_dict", mmap=False)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror})") from error
    except zipfile.BadZipFile as error:
        raise WeightsError(f"{path}: not a file of torch.save (1.6 or later); save the head again with it") from error
    except Exception as error:  # a broken pickle can fail in any way; all of them mean the same
        raise WeightsError(f"{path}: refused, not a head that can be read safely: {first_line(error)}") from error
    if state is None:
        raise WeightsError(f"{path}: holds neither a pickled {HEAD_CLASS} nor a state dictionary; not a head")
    return state


def _check_archive(path: Path, most: int | None) -> None:
    """`ValueError` for an archive of `torch.save` that could not be what it says, or holds more than `most` bytes."""
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("compressed, which no checkpoint is: what it swells to cannot be told")
        unpacked = sum(entry.file_size for entry in archive.infolist())
        if most is not None and unpacked > most:
            raise ValueError(f"{unpacked:,} bytes is no head (at most {most:,})")
        if any(archive.read(name) != b"little" for name in archive.namelist() if name.endswith("/byteorder")):
            raise ValueError("saved on a big-endian machine")


@contextmanager
def _at_most(room: int) -> Iterator[None]:
    """While the body runs this process may take so many bytes more, whatever a file claims to hold."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    limits = [limit for limit in (soft, hard, taken + room) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _tensors(path: Path, allowed: list[Any], key: str, *, mmap: bool) -> dict[str, Tensor] | None:
    """The tensors of a module, of a state dictionary, or of one under `key`; None without any. Errors: of all kinds."""
    size = path.stat().st_size
    with _at_most(SHARED * size + BESIDES), warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
        warnings.simplefilter("ignore")  # of old formats; what cannot be loaded raises
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    content = content.tensors if isinstance(content, ModuleState) else content
    inner = content.get(key) if isinstance(content, Mapping) else None
    found = inner if isinstance(inner, Mapping) else content
    if not isinstance(found, Mapping) or not found or not all(isinstance(one, Tensor) for one in found.values()):
        return None
    claimed = sum(one.numel() * one.element_size() for one in found.values())
    if claimed > SHARED * size:
        raise ValueError(f"it claims {claimed:,} bytes of numbers, the file has {size:,}")
    return {str(name): tensor.detach() for name, tensor in found.items()}


def first_line(error: Exception) -> str:
    """What was wrong, in one line; around what its loader found, torch puts advice that nobody should follow."""
    found = error.__context__ if isinstance(error, pickle.UnpicklingError) and error.__context__ else error
    text = str(found).strip()
    return text.splitlines()[0].split(". ")[0] if text else type(found).__name__


def _beside(source: Path, name: str) -> Path | None:
    """A file in the same folder, if it is there."""
    path = (source if source.is_dir() else source.parent) / name
    return path if path.is_file() else None


def write_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, read: Read) -> None:
    """Write a safetensors file whole, one tensor of any floating type at a time: the library wants all in memory.
    Rotary frequencies, which lose their meaning in half precision, are stored in float32, all others as `dtype`."""
    short = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    kinds = {name: torch.float32 if name == "inv_freq" else dtype for name in shapes}
    header, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * kinds[name].itemsize
        header[name] = {"dtype": short[kinds[name]], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(path) as aside, aside.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            tensor = read(name)
            if tuple(tensor.shape) != tuple(shape):
                found, wanted = map(checkpoint.size_text, (tensor.shape, shape))
                raise WeightsError(f"{path}: tensor {name} is {found}, wanted {wanted}")
            raw = tensor.to("cpu", kinds[name]).contiguous()
            file.write(raw.view(torch.uint8).reshape(-1).numpy().data)


def write_part(
    out: Path, shape: Shape, read: Read, origin: str, dtype: Storage | None, tokenizer: bytes | None = None
) -> None:
    """Write one part of a models directory, whole or not at all; stored as `dtype`, by default as its first tensor."""
    target = out / shape.model
    if target.exists():
        raise WeightsError(f"{target}: exists already; remove it or choose another directory")
    stored = read(next(iter(shape.tensors()))).dtype if dtype is None else DTYPES[dtype]
    partial = out / f".{shape.model}.{os.getpid()}.partial"
    partial.mkdir(parents=True)
    try:
        write_tensors(partial / WEIGHTS, shape.tensors(), stored, read)
        model_config.write_shape(shape.model_copy(update={"origin": origin}), partial / "config.json")
        if tokenizer is not None:
            (partial / "tokenizer.json").write_bytes(tokenizer)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def init_random(
    out: Path,
    esm2: model_config.Esm2Size = "tiny",
    dnabert_s: model_config.DnabertSize = "tiny",
    model_length: int = DEFAULT_MODEL_LENGTH,
    seed: int = 0,
    dtype: Storage = "fp32",
) -> None:
    """Write a models directory with random weights, its encoders stored as `dtype`; the same arguments, the same bytes.
    Activations stay of the size of real ones, in half precision too. Errors: `WeightsError` when `out` holds a
    model."""
    if taken := [part for part in PARTS if (out / part).exists()]:
        raise WeightsError(f"{out}: already holds {', '.join(f'{p}/' for p in taken)}; choose another directory")
    protein, dna = model_config.ESM2_SIZES[esm2], model_config.DNABERT_SIZES[dnabert_s]
    head = HeadShape(model_length=model_length, dna_width=dna.width, protein_width=protein.width)
    parts: list[tuple[Shape, Storage, bytes | None]] = [(protein, dtype, None)]
    parts += [(dna, dtype, train_tokenizer(dna.vocab, seed)), (head, "fp32", None)]
    for shape, stored, tokenizer in parts:
        read = functools.partial(random_tensor, shape, seed=seed)
        write_part(out, shape, read, f"{model_config.RANDOM_ORIGIN}, seed {seed}", stored, tokenizer)


def train_tokenizer(vocab: int, seed: int) -> bytes:
    """A file with a tokenizer of exactly `vocab` entries, learned from random DNA of `seed`, as DNABERT-2's is."""
    letters = np.frombuffer(b"ACGT", dtype=np.uint8)
    # pieces of 60 bases, 500 bases for each entry of the vocabulary: rarer pairs than that are not worth one
    drawn = np.random.default_rng(seed).choice(letters, size=(vocab * 500 // 60, 60))
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]  # ids 0 … 4, as in DNABERT-2
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=list("ACGT"), show_progress=False
    )
    bpe.train_from_iterator([row.tobytes().decode("ascii") for row in drawn], trainer)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return bpe.to_str(pretty=True).encode()


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

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(draw, range(len(pieces))))
    return out


def _distribution(name: str, size: tuple[int, ...], shape: Shape) -> tuple[float, float]:
    """Mean and standard deviation of a tensor's entries. A matrix keeps the size of what passes through it; what is
    added to a stream is smaller the more layers add to it."""
    if name.endswith("running_var"):
        return 1.0, 0.1
    if "norm" in name or name.startswith("bn1"):
        return float(name.endswith(".weight")), 0.05
    if name.startswith(("embed", "token_type")):
        return 0.0, 1.0
    if name.endswith(".bias"):
        return 0.0, 0.02
    fan_in = size[1] ** -0.5
    if isinstance(shape, Esm2Shape) and name.split(".")[-2] in ("out", "fc2"):
        return 0.0, 2 * fan_in * (2 * shape.layers) ** -0.5
    return 0.0, fan_in
