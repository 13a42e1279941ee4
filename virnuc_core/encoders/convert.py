"""Make a models directory: from public checkpoints, at hand or fetched, or with random weights."""

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
from virnuc_core.encoder_names import RANDOM_ORIGIN
from virnuc_core.encoders.checkpoint import (
    WEIGHTS,
    open_safetensors,
    require_no_adapter,
    tensor_files,
)
from virnuc_core.encoders.model_config import (
    CONFIG,
    DnaSize,
    EncoderShape,
    Esm2Shape,
    HeadShape,
    ProteinSize,
    Shape,
    Storage,
    read_shape,
)
from virnuc_core.encoders.model_files import TOKENIZER, write_part
from virnuc_core.encoders.pickles import HEAD_MAX_BYTES, error_summary, read_pickled
from virnuc_core.encoders.positions import rotary_frequencies
from virnuc_core.encoders.registry import (
    DNA_ENCODER,
    ENCODERS,
    HEAD,
    PARTS,
    PROTEIN_ENCODER,
    EncoderInfo,
)
from virnuc_core.encoders.tensor_names import match_tensors, our_name
from virnuc_core.encoders.tokenize import read_tokenizer
from virnuc_core.errors import ConfigError, WeightsError
from virnuc_core.system_errors import is_folder, is_regular_file, path_exists

PICKLED: Final = "pytorch_model.bin"
VIRNUCPRO_DNA_WIDTH: Final = DNA_ENCODER.sizes[DNA_ENCODER.reference_size].width

# Weights and sizes only: no code of a repository is downloaded, let alone run.
FETCHED_FILES: Final = [
    "config.json",
    "tokenizer.json",
    "model*.safetensors*",
    "pytorch_model*.bin*",
]

PIECE_NUMBERS: Final = 1 << 20  # numbers of a piece of a random tensor, drawn by one thread
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
    """Convert the public checkpoint of an encoder, and write it into a models directory.

    The sizes and the tokenizer are read from the files beside the weights. Checkpoints of fair-esm
    have no `config.json`, so their sizes are derived from the tensors.

    Args:
        encoder: The encoder's entry in the registry.
        source: The checkpoint, a folder or file in the layout of transformers or of fair-esm.
        out: Models directory.
        dtype: Format in which the weights are stored; None: as in the source.
        drop_extra: Leave out tensors that this kind of model does not have.

    Returns:
        The sizes of the encoder.

    Raises:
        WeightsError: The checkpoint cannot be used, or `out` has this encoder already.
    """
    tensors = open_public(source)
    folder = source if is_folder(source) else source.parent
    require_no_adapter(folder)
    shape: EncoderShape
    if encoder.shape_type is Esm2Shape and not is_regular_file(folder / CONFIG):
        shape = guess_esm2_shape(source, tensors)
    else:
        shape = read_shape(folder / CONFIG, encoder.shape_type)

    tokenizer = None
    if TOKENIZER in encoder.extra_files:
        read_tokenizer(folder / TOKENIZER)  # raises WeightsError for an unusable tokenizer
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
    """Convert a classifier ("head") of VirNucPro, and write it into a models directory.

    VirNucPro publishes pickle files. Their tensors are read, but no code in them is executed.

    Args:
        source: The classifier: a pickled object, a pickled dictionary of tensors, or safetensors.
        out: Models directory.
        model_length: Bases of the chunks that the classifier was trained on. By default the number
            in a file name like `500_model.pth`.
        dna_width: Columns of the classifier's input that are DNA embeddings. The other columns are
            protein embeddings.

    Returns:
        The sizes of the classifier.

    Raises:
        ConfigError: The model length was not given, and the file name does not tell it.
        WeightsError: The classifier cannot be used, or `out` has a classifier already.
    """
    if model_length is None:
        name_match = re.fullmatch(r"(\d+)_model\.pth", source.name)
        if name_match is None:
            raise ConfigError(
                f"{source}: its name does not say the model length; "
                "give it (300 or 500 for VirNucPro's)"
            )
        model_length = int(name_match[1])

    # The shape of the first weight tells the widths of the hidden layer and of the input. Without
    # such a matrix both are 0, which is refused.
    tensors = open_public(source, HEAD_MAX_BYTES)
    first_weight = tensors.get("hidden_layer.weight", torch.empty(0))
    hidden, width = 0, 0
    if first_weight.ndim == 2:
        hidden, width = first_weight.shape
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
    """Fill a models directory with the encoders of VirNucPro and one of its classifiers.

    The encoders are downloaded from the Hugging Face Hub. A model that `out` already has is neither
    downloaded nor changed.

    Args:
        out: Models directory.
        head: File of the classifier, which must exist: classifiers are not on the Hub.
        model_length: Bases of the chunks that the classifier was trained on, if the file name does
            not tell it.
        dtype: Format in which the encoders are stored; None: as they are published.

    Raises:
        ConfigError: The model length is not known.
        WeightsError: A repository cannot be downloaded, or a model cannot be used.
    """
    import huggingface_hub

    if not is_regular_file(head):
        raise WeightsError(
            f"{head}: no such file; "
            "300_model.pth and 500_model.pth come with VirNucPro's repository"
        )
    if not path_exists(out / HEAD):
        convert_head(head, out, model_length)
    for encoder in ENCODERS:
        if path_exists(out / encoder.name):
            continue
        repository = encoder.public.repository
        revision = encoder.public.revision
        try:
            folder = huggingface_hub.snapshot_download(
                repository, revision=revision, allow_patterns=FETCHED_FILES
            )
        except Exception as error:  # the library and its network layers raise many error classes
            raise WeightsError(
                f"{repository} at {revision[:12]}: cannot be downloaded ({error_summary(error)}); "
                "without a network, copy its files here and use virnuc models convert"
            ) from error
        convert_encoder(encoder, Path(folder), out, dtype)


def open_public(source: Path, max_bytes: int | None = None) -> dict[str, Tensor]:
    """Return the tensors of a public checkpoint, by their names in the checkpoint.

    Args:
        source: A folder with safetensors or .bin files, one or several, or a single .safetensors,
            .bin, .pt or .pth file.
        max_bytes: Refuse a larger pickled file; None: files of any size are read.

    Raises:
        WeightsError: There is no checkpoint, or it cannot be read.
    """
    if is_regular_file(source):
        files = [source]
    else:  # safetensors come first, because they cannot contain code
        files = tensor_files(source) or tensor_files(source, PICKLED)
    if not files:
        problem = "no such file or directory"
        if is_folder(source):
            problem = f"no {WEIGHTS} and no {PICKLED} in it"
        raise WeightsError(f"{source}: {problem}")
    if files[0].suffix == ".safetensors":
        return open_safetensors(files, load_file)
    tensors = {}
    for file in files:
        tensors.update(read_pickled(file, max_bytes))
    return tensors


def guess_esm2_shape(source: Path, tensors: Mapping[str, Tensor]) -> Esm2Shape:
    """Derive the sizes of an ESM-2 from the shapes of its tensors in fair-esm's checkpoint.

    Args:
        source: The checkpoint, for messages.
        tensors: Its tensors by their names in the checkpoint.

    Raises:
        WeightsError: The tensors are not those of an ESM-2.
    """
    sizes = {our_name(name): tensor.shape for name, tensor in tensors.items()}
    layer_numbers = set()
    for name in sizes:
        name_match = re.match(r"layers\.(\d+)\.", name)
        if name_match:
            layer_numbers.add(int(name_match[1]))
    try:
        vocab, width = sizes["embed.weight"]
        head_dim = 2 * sizes["inv_freq"][0]  # each rotary frequency rotates two columns of a head
        return Esm2Shape(
            layers=max(layer_numbers) + 1,
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
    esm2: ProteinSize = "tiny",
    dnabert_s: DnaSize = "tiny",
    model_length: int = DEFAULT_MODEL_LENGTH,
    seed: int = 0,
    dtype: Storage = "fp32",
) -> None:
    """Write a models directory with random weights, for tests and demonstrations.

    The same arguments give the same bytes on every machine. The weights are drawn so that the
    numbers inside the network are about as large as in a trained one, also in half precision.

    Args:
        out: Models directory.
        esm2: Name of the protein encoder's size.
        dnabert_s: Name of the DNA encoder's size.
        model_length: Bases of the chunks that the classifier takes.
        seed: Seed of the weights and of the tokenizer.
        dtype: Format in which the encoders are stored.

    Raises:
        WeightsError: `out` holds a model already.
    """
    existing_parts = [f"{part}/" for part in PARTS if path_exists(out / part)]
    if existing_parts:
        raise WeightsError(
            f"{out}: already holds {', '.join(existing_parts)}; choose another directory"
        )
    protein = PROTEIN_ENCODER.sizes[esm2]
    dna = DNA_ENCODER.sizes[dnabert_s]
    head = HeadShape(model_length=model_length, dna_width=dna.width, protein_width=protein.width)
    origin = f"{RANDOM_ORIGIN}, seed {seed}"
    tokenizer = train_tokenizer(dna.vocab, seed)
    write_part(out, protein, functools.partial(random_tensor, protein, seed=seed), origin, dtype)
    write_part(out, dna, functools.partial(random_tensor, dna, seed=seed), origin, dtype, tokenizer)
    write_part(out, head, functools.partial(random_tensor, head, seed=seed), origin, "fp32")


def train_tokenizer(vocab: int, seed: int) -> bytes:
    """Train a byte pair tokenizer on random DNA, for a random model.

    The result has the form of DNABERT-2's tokenizer, which was trained on real genomes.

    Args:
        vocab: Number of entries of the vocabulary.
        seed: Seed of the random DNA.

    Returns:
        The content of `tokenizer.json`.
    """
    bases = np.frombuffer(b"ACGT", np.uint8)
    n_pieces = vocab * BASES_PER_ENTRY // PIECE_BASES
    pieces = np.random.default_rng(seed).choice(bases, size=(n_pieces, PIECE_BASES))
    texts = [piece.tobytes().decode("ascii") for piece in pieces]

    special_tokens = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]  # ids 0 to 4, as in DNABERT-2
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=special_tokens,
        initial_alphabet=list("ACGT"),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)

    # Put every sequence between [CLS] and [SEP].
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return tokenizer.to_str(pretty=True).encode()


def random_tensor(shape: Shape, name: str, seed: int = 0) -> Tensor:
    """Draw one tensor of a random model, in float32.

    The numbers depend only on the name and size of the tensor and on the seed. Rotary frequencies
    are not random: they get their usual values.

    Args:
        shape: Sizes of the model.
        name: Our name for the tensor.
        seed: Seed of the model.
    """
    size = shape.tensors()[name]
    if name == "inv_freq":
        return rotary_frequencies(2 * size[0])

    # The tensor is cut into pieces of fixed length, each with a generator of its own. So the
    # numbers do not depend on how many threads draw them.
    tensor = torch.empty(size)
    pieces = tensor.view(-1).split(PIECE_NUMBERS)
    distribution = _distribution(name, size, shape)
    name_digest = zlib.crc32(f"{shape.model}/{name}".encode())

    def draw(i: int) -> None:
        """Fill piece `i` of the tensor with uniform numbers of the wanted mean and spread."""
        # The seed of the piece has three numbers: the model's, the tensor's and the piece's.
        generator = np.random.Generator(np.random.SFC64((seed, name_digest, i * PIECE_NUMBERS)))
        uniform = torch.from_numpy(generator.random(len(pieces[i]), dtype=np.float32))  # [0, 1)
        uniform.sub_(0.5).mul_(distribution.std * UNIFORM_SPREAD).add_(distribution.mean)
        pieces[i].copy_(uniform)

    with ThreadPoolExecutor(DRAW_THREADS) as threads:
        list(threads.map(draw, range(len(pieces))))
    return tensor


class Distribution(NamedTuple):
    """Mean and standard deviation of a random tensor's entries."""

    mean: float
    std: float


def _distribution(name: str, size: tuple[int, ...], shape: Shape) -> Distribution:
    """Return the mean and standard deviation that the entries of a random tensor shall have.

    Outputs of a random matrix shall be about as large as its inputs. An encoder with norms in front
    adds the outputs of two matrices per layer to its residual stream, and nothing normalises the
    sum. So these matrices get smaller entries the more layers there are.

    The numbers for norms, embeddings and biases are about as in trained models.

    Args:
        name: Our name for the tensor.
        size: Shape of the tensor.
        shape: Sizes of the model.
    """
    is_norm = "norm" in name or name.startswith("bn1")
    if name.endswith("running_var"):
        return Distribution(1.0, 0.1)
    if is_norm and name.endswith(".weight"):
        return Distribution(1.0, 0.05)
    if is_norm:
        return Distribution(0.0, 0.05)
    if name.startswith(("embed", "token_type")):
        return Distribution(0.0, 1.0)
    if name.endswith(".bias"):
        return Distribution(0.0, 0.02)

    std = size[1] ** -0.5  # keeps the size of a vector that is multiplied with the matrix
    linear_layer = name.split(".")[-2]
    adds_to_stream = linear_layer in ("out", "fc2")
    if isinstance(shape, EncoderShape) and shape.NORM_FIRST and adds_to_stream:
        n_additions = 2 * shape.layers
        return Distribution(0.0, 2 * std * n_additions**-0.5)
    return Distribution(0.0, std)
