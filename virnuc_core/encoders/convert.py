"""A models directory made: of public checkpoints at hand, of fetched ones, or of random weights.

Of a pickled file torch's restricted loader reads the tensors, and nothing else of what it may hold: nothing is imported
but tensors, plain containers and what is allowed here."""

import argparse
import functools
import json
import math
import pickle
import re
import resource
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
import torch
from safetensors.torch import load_file
from torch import Tensor

from virnuc_core.config import DEFAULT_MODEL_LENGTH, refuse_unreadable
from virnuc_core.encoders import model_config
from virnuc_core.encoders.checkpoint import WEIGHTS, open_safetensors, tensor_files
from virnuc_core.encoders.layers import Read
from virnuc_core.encoders.model_config import (
    DnabertShape,
    EncoderShape,
    Esm2Shape,
    HeadShape,
    Shape,
    Storage,
)
from virnuc_core.encoders.positions import rotary_frequencies
from virnuc_core.encoders.precision import DTYPES
from virnuc_core.encoders.registry import PARTS
from virnuc_core.encoders.tensor_names import match_tensors, our_name
from virnuc_core.encoders.tokenize import read_tokenizer
from virnuc_core.errors import ConfigError, WeightsError
from virnuc_core.rundir import atomic_file

DNABERT_WIDTH: Final = 768
PICKLED: Final = "pytorch_model.bin"

ESM2_REPOSITORY: Final = ("facebook/esm2_t36_3B_UR50D", "476b639933c8baad5ad09a60ac1a87f987b656fc")
DNABERT_REPOSITORY: Final = ("zhihan1996/DNABERT-S", "00e47f96cdea35e4b6f5df89e5419cbe47d490c6")
# weights and sizes only: no code of a repository is downloaded, let alone run
FETCHED_FILES: Final = [
    "config.json",
    "tokenizer.json",
    "model*.safetensors*",
    "pytorch_model*.bin*",
]

DRAWN_AT_ONCE: Final = 1 << 20  # numbers one thread draws for a piece of a random tensor

STATE_KEYS: Final = ("model", "model_state_dict")  # of fair-esm, and of heads
HEAD_MAX_TENSORS: Final = (
    100  # it has 9; a pickle of a few lines can name one module within itself many times over
)
SHARED: Final = 4  # tensors may share their numbers, so that they have more than the file, but not many times more
BESIDES: Final = 1 << 30  # bytes for whatever else loading takes
HEAD_MAX_BYTES: Final = (
    1 << 28
)  # a head has 7 MB; what claims to be one and is larger than this is not read


def convert_encoder(
    kind: type[EncoderShape],
    source: Path,
    out: Path,
    dtype: Storage | None = None,
    drop_extra: bool = False,
) -> EncoderShape:
    """Write `out/esm2` or `out/dnabert_s` from a folder or file of the public one, in HF layout or fair-esm's, stored
    as `dtype`. Sizes, and DNABERT-S's tokenizer, stand in files beside the weights; fair-esm's sizes follow from its
    tensors. `drop_extra` leaves out tensors that such a model does not have. Errors: `WeightsError`."""
    opened, folder, tokenizer = (
        open_public(source),
        source if source.is_dir() else source.parent,
        None,
    )
    if kind is Esm2Shape and not (folder / "config.json").is_file():
        shape: EncoderShape = guess_esm2_shape(source, opened)
    else:
        shape = model_config.read_shape(folder / "config.json", kind)
    if kind is DnabertShape:
        read_tokenizer(folder / "tokenizer.json")
        tokenizer = (folder / "tokenizer.json").read_bytes()
    write_part(
        out, shape, match_tensors(source, opened, shape, drop_extra), source.name, dtype, tokenizer
    )
    return shape


def convert_head(
    source: Path, out: Path, model_length: int | None = None, dna_width: int = DNABERT_WIDTH
) -> HeadShape:
    """Write `out/head` from a head of VirNucPro: pickled whole, as a dictionary, or as safetensors. `model_length` is
    read from a name like `500_model.pth` when not given. What is left of the input beside `dna_width` columns is the
    protein's. Nothing a pickle holds is executed."""
    named = re.fullmatch(r"(\d+)_model\.pth", source.name)
    if (length := model_length or (int(named[1]) if named else None)) is None:
        raise ConfigError(
            f"{source}: its name does not say the model length; give it (300 or 500 for VirNucPro's)"
        )
    opened = open_public(source, HEAD_MAX_BYTES)
    first = opened.get("hidden_layer.weight", torch.empty(0))
    hidden, width = first.shape if first.ndim == 2 else (0, 0)
    if width <= dna_width:
        problem = f"no head for these encoders: hidden_layer.weight takes {width} columns, DNA alone has {dna_width}"
        raise WeightsError(f"{source}: {problem}")
    with refuse_unreadable(source, "head", WeightsError):
        shape = HeadShape(
            model_length=length, dna_width=dna_width, protein_width=width - dna_width, hidden=hidden
        )
    write_part(out, shape, match_tensors(source, opened, shape), source.name, "fp32")
    return shape


def fetch(
    out: Path, head: Path, *, model_length: int | None = None, dtype: Storage | None = None
) -> None:
    """Make a models directory of the public ESM-2 3B and DNABERT-S, and a head file of VirNucPro, which is at hand.
    Parts that `out` already holds are left as they are. Raises `WeightsError` when the network does not answer."""
    import huggingface_hub

    if not head.is_file():
        raise WeightsError(
            f"{head}: no such file; 300_model.pth and 500_model.pth come with VirNucPro's repository"
        )
    if not (out / "head").exists():
        convert_head(head, out, model_length)
    for kind, (name, revision) in (
        (DnabertShape, DNABERT_REPOSITORY),
        (Esm2Shape, ESM2_REPOSITORY),
    ):
        if (out / kind.part()).exists():
            continue
        try:
            folder = huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=FETCHED_FILES
            )
        except Exception as error:  # the library and what it stands on raise many kinds
            problem = f"{name} at {revision[:12]}: cannot be downloaded ({first_line(error)})"
            advice = "without a network, copy its files here and use virnuc models convert"
            raise WeightsError(f"{problem}; {advice}") from error
        convert_encoder(kind, Path(folder), out, dtype)


def open_public(source: Path, most: int | None = None) -> dict[str, Tensor]:
    """The tensors of a checkpoint: a folder (safetensors or .bin, single or sharded) or one .safetensors, .bin, .pt or
    .pth file; a pickled one of `most` bytes at most. Errors: `WeightsError`."""
    files = [source] if source.is_file() else tensor_files(source) or tensor_files(source, PICKLED)
    if not files:
        problem = (
            f"no {WEIGHTS} and no {PICKLED} in it"
            if source.is_dir()
            else "no such file or directory"
        )
        raise WeightsError(f"{source}: {problem}")
    if files[0].suffix == ".safetensors":
        return open_safetensors(files, load_file)
    return {name: tensor for file in files for name, tensor in read_pickled(file, most).items()}


def guess_esm2_shape(source: Path, tensors: Mapping[str, Tensor]) -> Esm2Shape:
    """Sizes of a fair-esm checkpoint from its tensors."""
    sizes = {our_name(name): tensor.shape for name, tensor in tensors.items()}
    layers = {int(match[1]) for name in sizes if (match := re.match(r"layers\.(\d+)\.", name))}
    try:
        vocab, width = sizes["embed.weight"]
        ffn_width, heads = sizes["layers.0.fc1.weight"][0], width // (2 * sizes["inv_freq"][0])
        return Esm2Shape(
            layers=max(layers) + 1, width=width, heads=heads, ffn_width=ffn_width, vocab=vocab
        )
    except (
        KeyError,
        IndexError,
        ValueError,
        ZeroDivisionError,
    ) as error:  # no such tensor, or of other dimensions
        raise WeightsError(
            f"{source}: no config.json beside it, and not the layout of fair-esm's ESM-2"
        ) from error


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
        self.tensors = {
            name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)
        }


HEAD_MODULES: Final = (
    "linear.Linear",
    "batchnorm.BatchNorm1d",
    "dropout.Dropout",
    "activation.ReLU",
)
ALLOWED: Final[
    list[Any]
] = [  # beside tensors: what a head that was pickled whole names, each an inert stand-in
    *(
        (ModuleState, name)
        for name in ("__main__.MLPClassifier", *(f"torch.nn.modules.{one}" for one in HEAD_MODULES))
    ),
    argparse.Namespace,  # in which fair-esm keeps its arguments
]


def read_pickled(path: Path, most: int | None = None) -> dict[str, Tensor]:
    """The tensors of a `.bin`, `.pt` or `.pth`: of a state dictionary, of one within another, or of a head pickled
    whole, as VirNucPro's are. Errors: `WeightsError` names what else the file asked for; also for one that holds more
    than `most` bytes."""
    try:
        if most is not None and path.stat().st_size > most:
            raise ValueError(f"{path.stat().st_size:,} bytes is no head (at most {most:,})")
        with path.open("rb") as file:
            zipped = file.read(4) == b"PK\x03\x04"
        if zipped:
            with zipfile.ZipFile(path) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise ValueError(
                        "compressed, which no checkpoint is: what it swells to cannot be told"
                    )
                if any(
                    archive.read(name) != b"little"
                    for name in archive.namelist()
                    if name.endswith("/byteorder")
                ):
                    raise ValueError("saved on a big-endian machine")
        return _tensors(
            path, mmap=zipped and most is None
        )  # a large one is mapped into memory, not copied
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (
        Exception
    ) as error:  # torch raises whatever a broken file leads to; all of them mean the same
        raise WeightsError(
            f"{path}: refused, no tensors that can be read safely: {first_line(error)}"
        ) from error


def _tensors(path: Path, *, mmap: bool) -> dict[str, Tensor]:
    """The tensors of a module, of a state dictionary, or of one under a usual key. Errors: of all kinds."""
    size, (soft, hard) = path.stat().st_size, resource.getrlimit(resource.RLIMIT_AS)
    # so many bytes more may this process take meanwhile, whatever the file claims to hold
    taken = (
        int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        * resource.getpagesize()
    )
    limits = [
        limit
        for limit in (soft, hard, taken + SHARED * size + BESIDES)
        if limit != resource.RLIM_INFINITY
    ]
    with (
        ExitStack() as undone,
        warnings.catch_warnings(),
        torch.serialization.safe_globals(ALLOWED),
    ):
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
        undone.callback(resource.setrlimit, resource.RLIMIT_AS, (soft, hard))
        warnings.simplefilter("ignore")  # of old formats; what cannot be loaded raises
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    content = content.tensors if isinstance(content, ModuleState) else content
    if not isinstance(content, Mapping):
        raise ValueError("no dictionary of tensors")
    found = next(
        (content[key] for key in STATE_KEYS if isinstance(content.get(key), Mapping)), content
    )
    if not found or not all(isinstance(one, Tensor) for one in found.values()):
        raise ValueError("no dictionary of tensors")
    claimed = sum(one.numel() * one.element_size() for one in found.values())
    if claimed > SHARED * size:
        raise ValueError(f"it claims {claimed:,} bytes of numbers, the file has {size:,}")
    return {str(name): tensor.detach() for name, tensor in found.items()}


def first_line(error: Exception) -> str:
    """What was wrong, in one line; around what its loader found, torch puts advice that nobody should follow."""
    found = (
        error.__context__
        if isinstance(error, pickle.UnpicklingError) and error.__context__
        else error
    )
    text = str(found).strip()
    return text.splitlines()[0].split(". ")[0] if text else type(found).__name__


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, read: Read
) -> None:
    """Write a safetensors file whole, one tensor of any floating type at a time: the library wants all in memory.
    Rotary frequencies, which lose their meaning in half precision, are stored in float32, all others as `dtype`."""
    short = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    kinds = {name: torch.float32 if name == "inv_freq" else dtype for name in shapes}
    header, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * kinds[name].itemsize
        header[name] = {
            "dtype": short[kinds[name]],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as aside, aside.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            file.write(
                read(name)
                .to("cpu", kinds[name])
                .contiguous()
                .view(torch.uint8)
                .reshape(-1)
                .numpy()
                .data
            )


def write_part(
    out: Path,
    shape: Shape,
    read: Read,
    origin: str,
    dtype: Storage | None,
    tokenizer: bytes | None = None,
) -> None:
    """Write one part of a models directory, whole or not at all; stored as `dtype`, by default as its first tensor."""
    target = out / shape.model
    if target.exists():
        raise WeightsError(f"{target}: exists already; remove it or choose another directory")
    stored = read(next(iter(shape.tensors()))).dtype if dtype is None else DTYPES[dtype]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=out) as folder:
        partial = Path(folder, shape.model)
        write_tensors(partial / WEIGHTS, shape.tensors(), stored, read)
        model_config.write_shape(
            shape.model_copy(update={"origin": origin}), partial / "config.json"
        )
        if tokenizer is not None:
            (partial / "tokenizer.json").write_bytes(tokenizer)
        partial.rename(target)


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
        raise WeightsError(
            f"{out}: already holds {', '.join(f'{p}/' for p in taken)}; choose another directory"
        )
    protein, dna = model_config.ESM2_SIZES[esm2], model_config.DNABERT_SIZES[dnabert_s]
    head = HeadShape(model_length=model_length, dna_width=dna.width, protein_width=protein.width)
    for shape in (protein, dna, head):
        read, origin = (
            functools.partial(random_tensor, shape, seed=seed),
            f"{model_config.RANDOM_ORIGIN}, seed {seed}",
        )
        tokenizer = train_tokenizer(dna.vocab, seed) if shape is dna else None
        write_part(out, shape, read, origin, "fp32" if shape is head else dtype, tokenizer)


def train_tokenizer(vocab: int, seed: int) -> bytes:
    """A file with a tokenizer of exactly `vocab` entries, learned from random DNA of `seed`, as DNABERT-2's is."""
    # pieces of 60 bases, 500 bases for each entry of the vocabulary: rarer pairs than that are not worth one
    drawn = np.random.default_rng(seed).choice(
        np.frombuffer(b"ACGT", np.uint8), size=(vocab * 500 // 60, 60)
    )
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]  # ids 0 … 4, as in DNABERT-2
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=list("ACGT"), show_progress=False
    )
    bpe.train_from_iterator([row.tobytes().decode("ascii") for row in drawn], trainer)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return bpe.to_str(pretty=True).encode()


def random_tensor(shape: Shape, name: str, seed: int = 0) -> Tensor:
    """One tensor of a random model, float32: a function of its name, its size and the seed only."""
    size = shape.tensors()[name]
    if name == "inv_freq":
        return rotary_frequencies(2 * size[0])
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
