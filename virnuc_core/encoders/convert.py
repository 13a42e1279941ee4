"""Makes a models directory: from public checkpoints, at hand or fetched, or of random weights."""

import functools
import re
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import tokenizers
import torch
from safetensors.torch import load_file
from torch import Tensor

from virnuc_core.config import DEFAULT_MODEL_LENGTH, refuse_unreadable
from virnuc_core.encoders.checkpoint import WEIGHTS, open_safetensors, tensor_files
from virnuc_core.encoders.model_config import (
    CONFIG,
    RANDOM_ORIGIN,
    DnabertSize,
    EncoderShape,
    Esm2Shape,
    Esm2Size,
    HeadShape,
    Shape,
    Storage,
    read_shape,
)
from virnuc_core.encoders.model_files import TOKENIZER, write_part
from virnuc_core.encoders.pickles import HEAD_MAX_BYTES, first_line, read_pickled
from virnuc_core.encoders.positions import rotary_frequencies
from virnuc_core.encoders.registry import (
    DNA_ENCODER,
    DNABERT_S,
    ENCODERS,
    ESM2,
    HEAD,
    PARTS,
    EncoderInfo,
)
from virnuc_core.encoders.tensor_names import match_tensors, our_name
from virnuc_core.encoders.tokenize import read_tokenizer
from virnuc_core.errors import ConfigError, WeightsError

PICKLED: Final = "pytorch_model.bin"
VIRNUCPRO_DNA_WIDTH: Final = DNA_ENCODER.sizes[DNA_ENCODER.reference_size].width

# Weights and sizes only: no code of a repository is downloaded, let alone run.
FETCHED_FILES: Final = [
    "config.json",
    "tokenizer.json",
    "model*.safetensors*",
    "pytorch_model*.bin*",
]

DRAWN_AT_ONCE: Final = 1 << 20  # numbers one thread draws for a piece of a random tensor
DRAW_THREADS: Final = 16
UNIFORM_SPREAD: Final = 12**0.5  # 1 divided by the standard deviation of uniform numbers in [0, 1)
BASES_PER_ENTRY: Final = 500  # of random DNA, for each entry of a tokenizer's vocabulary
PIECE_BASES: Final = 60


def convert_encoder(
    encoder: EncoderInfo,
    source: Path,
    out: Path,
    dtype: Storage | None = None,
    drop_extra: bool = False,
) -> EncoderShape:
    """Write an encoder into a models directory, from a public checkpoint.

    The sizes and the tokenizer are read from files beside the weights. Only fair-esm's checkpoints
    have no `config.json`; their sizes follow from the tensors.

    Args:
        encoder: Which encoder it is.
        source: Folder or file of the public one, in the layout of transformers or of fair-esm.
        out: Models directory.
        dtype: Format in which the weights are stored; None: as in the source.
        drop_extra: Leave out tensors that such a model does not have.

    Returns:
        Its sizes.

    Raises:
        WeightsError: The checkpoint cannot be used, or the encoder is in `out` already.
    """
    tensors = open_public(source)
    folder = source if source.is_dir() else source.parent
    shape: EncoderShape
    if encoder is ESM2 and not (folder / CONFIG).is_file():
        shape = guess_esm2_shape(source, tensors)
    else:
        shape = read_shape(folder / CONFIG, encoder.shape_type)
    tokenizer = None
    if TOKENIZER in encoder.extra_files:
        read_tokenizer(folder / TOKENIZER)
        tokenizer = (folder / TOKENIZER).read_bytes()
    read_tensor = match_tensors(source, tensors, shape, drop_extra)
    write_part(out, shape, read_tensor, source.name, dtype, tokenizer)
    return shape


def convert_head(
    source: Path,
    out: Path,
    model_length: int | None = None,
    dna_width: int = VIRNUCPRO_DNA_WIDTH,
) -> HeadShape:
    """Write a head of VirNucPro into a models directory. Nothing that a pickle holds is executed.

    Args:
        source: The head, pickled whole, as a dictionary, or as safetensors.
        out: Models directory.
        model_length: Bases of the chunks that it was trained on. By default read from a name like
            `500_model.pth`.
        dna_width: Width of the DNA's embeddings; the rest of the input is the protein's.

    Returns:
        Its sizes.

    Raises:
        ConfigError: The model length is not known.
        WeightsError: The head cannot be used, or there is one in `out` already.
    """
    if model_length is None:
        name = re.fullmatch(r"(\d+)_model\.pth", source.name)
        if name is None:
            raise ConfigError(
                f"{source}: its name does not say the model length; "
                "give it (300 or 500 for VirNucPro's)"
            )
        model_length = int(name[1])
    tensors = open_public(source, HEAD_MAX_BYTES)
    first_weight = tensors.get("hidden_layer.weight", torch.empty(0))
    hidden, width = first_weight.shape if first_weight.ndim == 2 else (0, 0)
    if width <= dna_width:
        raise WeightsError(
            f"{source}: no head for these encoders: hidden_layer.weight takes {width} columns, "
            f"DNA alone has {dna_width}"
        )
    with refuse_unreadable(source, "head", WeightsError):
        shape = HeadShape(
            model_length=model_length,
            dna_width=dna_width,
            protein_width=width - dna_width,
            hidden=hidden,
        )
    write_part(out, shape, match_tensors(source, tensors, shape), source.name, "fp32")
    return shape


def fetch(
    out: Path, head: Path, *, model_length: int | None = None, dtype: Storage | None = None
) -> None:
    """Make a models directory from the public encoders of VirNucPro and one of its heads.

    Parts that `out` already holds are left as they are.

    Args:
        out: Models directory.
        head: File of the head, which must be at hand.
        model_length: Bases of the chunks that it was trained on, if its name does not say it.
        dtype: Format in which the encoders are stored; None: as they are published.

    Raises:
        WeightsError: A repository cannot be downloaded, or a part cannot be used.
    """
    import huggingface_hub

    if not head.is_file():
        raise WeightsError(
            f"{head}: no such file; "
            "300_model.pth and 500_model.pth come with VirNucPro's repository"
        )
    if not (out / HEAD).exists():
        convert_head(head, out, model_length)
    for encoder in ENCODERS:
        if (out / encoder.name).exists():
            continue
        repository, revision = encoder.public.repository, encoder.public.revision
        try:
            folder = huggingface_hub.snapshot_download(
                repository, revision=revision, allow_patterns=FETCHED_FILES
            )
        except Exception as error:  # the library and what it stands on raise many kinds
            raise WeightsError(
                f"{repository} at {revision[:12]}: cannot be downloaded ({first_line(error)}); "
                "without a network, copy its files here and use virnuc models convert"
            ) from error
        convert_encoder(encoder, Path(folder), out, dtype)


def open_public(source: Path, max_bytes: int | None = None) -> dict[str, Tensor]:
    """Open the tensors of a public checkpoint.

    Args:
        source: A folder (safetensors or .bin, single or in shards), or one .safetensors, .bin, .pt
            or .pth file.
        max_bytes: Refuse a larger pickled file.

    Raises:
        WeightsError: There is no checkpoint, or it cannot be read.
    """
    if source.is_file():
        files = [source]
    else:
        files = tensor_files(source) or tensor_files(source, PICKLED)
    if not files:
        problem = "no such file or directory"
        if source.is_dir():
            problem = f"no {WEIGHTS} and no {PICKLED} in it"
        raise WeightsError(f"{source}: {problem}")
    if files[0].suffix == ".safetensors":
        return open_safetensors(files, load_file)
    tensors = {}
    for file in files:
        tensors.update(read_pickled(file, max_bytes))
    return tensors


def guess_esm2_shape(source: Path, tensors: Mapping[str, Tensor]) -> Esm2Shape:
    """Derive the sizes of an ESM-2 from the tensors of fair-esm's checkpoint.

    Raises:
        WeightsError: The tensors are not those of an ESM-2.
    """
    sizes = {our_name(name): tensor.shape for name, tensor in tensors.items()}
    layers = set()
    for name in sizes:
        layer = re.match(r"layers\.(\d+)\.", name)
        if layer:
            layers.add(int(layer[1]))
    try:
        vocab, width = sizes["embed.weight"]
        head_dim = 2 * sizes["inv_freq"][0]
        return Esm2Shape(
            layers=max(layers) + 1,
            width=width,
            heads=width // head_dim,
            ffn_width=sizes["layers.0.fc1.weight"][0],
            vocab=vocab,
        )
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
        # A tensor is missing or has other dimensions.
        raise WeightsError(
            f"{source}: no config.json beside it, and not the layout of fair-esm's ESM-2"
        ) from error


def init_random(
    out: Path,
    esm2: Esm2Size = "tiny",
    dnabert_s: DnabertSize = "tiny",
    model_length: int = DEFAULT_MODEL_LENGTH,
    seed: int = 0,
    dtype: Storage = "fp32",
) -> None:
    """Write a models directory with random weights; the same arguments give the same bytes.

    Activations stay of the size of real ones, also in half precision.

    Args:
        out: Models directory.
        esm2: Size of the ESM-2.
        dnabert_s: Size of the DNABERT-S.
        model_length: Bases of the chunks that the head is for.
        seed: Seed of the weights.
        dtype: Format in which the encoders are stored.

    Raises:
        WeightsError: `out` holds a model already.
    """
    existing_parts = [f"{part}/" for part in PARTS if (out / part).exists()]
    if existing_parts:
        raise WeightsError(
            f"{out}: already holds {', '.join(existing_parts)}; choose another directory"
        )
    protein, dna = ESM2.sizes[esm2], DNABERT_S.sizes[dnabert_s]
    head = HeadShape(model_length=model_length, dna_width=dna.width, protein_width=protein.width)
    origin = f"{RANDOM_ORIGIN}, seed {seed}"
    tokenizer = train_tokenizer(dna.vocab, seed)
    write_part(out, protein, functools.partial(random_tensor, protein, seed=seed), origin, dtype)
    write_part(out, dna, functools.partial(random_tensor, dna, seed=seed), origin, dtype, tokenizer)
    write_part(out, head, functools.partial(random_tensor, head, seed=seed), origin, "fp32")


def train_tokenizer(vocab: int, seed: int) -> bytes:
    """Train a byte pair tokenizer on random DNA, as DNABERT-2's was trained on genomes.

    Args:
        vocab: Entries of its vocabulary, exactly.
        seed: Seed of the DNA.

    Returns:
        The content of its `tokenizer.json`.
    """
    bases = np.frombuffer(b"ACGT", np.uint8)
    n_pieces = vocab * BASES_PER_ENTRY // PIECE_BASES
    pieces = np.random.default_rng(seed).choice(bases, size=(n_pieces, PIECE_BASES))
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]  # ids 0 to 4, as in DNABERT-2
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=list("ACGT"), show_progress=False
    )
    texts = [piece.tobytes().decode("ascii") for piece in pieces]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return tokenizer.to_str(pretty=True).encode()


def random_tensor(shape: Shape, name: str, seed: int = 0) -> Tensor:
    """Draw one tensor of a random model, float32, which depends on name, size and seed only.

    Args:
        shape: Sizes of the model.
        name: Our name for the tensor.
        seed: Seed of the model.
    """
    size = shape.tensors()[name]
    if name == "inv_freq":
        return rotary_frequencies(2 * size[0])
    tensor = torch.empty(size)
    pieces = tensor.view(-1).split(DRAWN_AT_ONCE)
    distribution = _distribution(name, size, shape)
    name_digest = zlib.crc32(f"{shape.model}/{name}".encode())

    def draw(i: int) -> None:
        generator = np.random.Generator(np.random.SFC64((seed, name_digest, i * DRAWN_AT_ONCE)))
        uniform = torch.from_numpy(generator.random(len(pieces[i]), dtype=np.float32))
        centred = uniform.sub_(0.5)
        pieces[i].copy_(centred.mul_(distribution.std * UNIFORM_SPREAD).add_(distribution.mean))

    with ThreadPoolExecutor(DRAW_THREADS) as threads:
        list(threads.map(draw, range(len(pieces))))
    return tensor


class Distribution(NamedTuple):
    """Mean and standard deviation of a random tensor's entries."""

    mean: float
    std: float


def _distribution(name: str, size: tuple[int, ...], shape: Shape) -> Distribution:
    """Return how a tensor's entries are distributed.

    A matrix keeps the size of what passes through it. What is added to a residual stream is smaller
    the more layers add to it.
    """
    if name.endswith("running_var"):
        return Distribution(1.0, 0.1)
    if "norm" in name or name.startswith("bn1"):
        return Distribution(1.0 if name.endswith(".weight") else 0.0, 0.05)
    if name.startswith(("embed", "token_type")):
        return Distribution(0.0, 1.0)
    if name.endswith(".bias"):
        return Distribution(0.0, 0.02)
    std = size[1] ** -0.5
    is_added = name.split(".")[-2] in ("out", "fc2")
    if isinstance(shape, Esm2Shape) and is_added:
        return Distribution(0.0, 2 * std * (2 * shape.layers) ** -0.5)
    return Distribution(0.0, std)
