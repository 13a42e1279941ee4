"""Sizes of the three models, and the card of a trained classifier, as `config.json` keeps them."""

import json
import math
import tomllib
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self, TypeVar

from pydantic import Field, TypeAdapter, model_validator

from virnuc_core.config import Share, Spec, read_small_text, refuse_unreadable
from virnuc_core.errors import WeightsError
from virnuc_core.rundir import write_text_atomically
from virnuc_core.system_errors import read_with_retries

Esm2Size = Literal["tiny", "t6_8M", "t12_35M", "t30_150M", "t33_650M", "t36_3B"]
DnabertSize = Literal["tiny", "base"]
Storage = Literal["fp32", "fp16", "bf16"]  # format in which an encoder's weights are stored
CONFIG: Final = "config.json"
PRODUCTS: Final = ("qkv", "out", "up", "down")  # linear layers of an encoder's layer, in order

# Upper bounds of sizes: no model of this kind comes near them.
MAX_LAYERS: Final = 1024
MAX_HEADS: Final = 1024
MAX_WIDTH: Final = 1 << 16
MAX_FFN_WIDTH: Final = 1 << 18
MAX_VOCAB: Final = 1 << 20

TensorShapes = dict[str, tuple[int, ...]]  # by the name of a tensor


class Shape(Spec):
    """What the sizes of all three models have in common."""

    model: str  # also the name of its folder in a models directory
    origin: str = Field("", description="where the weights come from")

    @classmethod
    def part(cls) -> str:
        """Return the name of the folder that holds this kind of model in a models directory.

        The field `model` has this name: each subclass allows a single value there, its default.
        """
        return str(cls.model_fields["model"].default)

    @abstractmethod
    def tensors(self) -> TensorShapes:
        """Return name and shape of every tensor of the model."""


class EncoderShape(Shape):
    """What the sizes of both encoders have in common."""

    # Whether norms come before attention and the feed-forward part, or behind them
    NORM_FIRST: ClassVar[bool]

    layers: int = Field(ge=1, le=MAX_LAYERS)
    width: int = Field(ge=4, le=MAX_WIDTH)
    heads: int = Field(ge=1, le=MAX_HEADS)
    ffn_width: int = Field(ge=4, le=MAX_FFN_WIDTH)

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        """Refuse a width that does not split into heads, or heads of odd width.

        Rotary positions rotate two halves of a head together, so a head must have an even width.
        """
        if self.width % self.heads or self.head_dim % 2:
            raise ValueError(
                f"width {self.width} does not split into {self.heads} heads of even size"
            )
        return self

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    @property
    def linear_weights(self) -> int:
        """Return how many numbers the weight matrices of all layers have together.

        Every token is multiplied with these matrices. Embedding tables are not counted.
        """
        count = 0
        for name, shape in self.tensors().items():
            if name.startswith("layers.") and len(shape) == 2:  # a matrix, no bias or norm
                count += math.prod(shape)
        return count


class Esm2Shape(EncoderShape):
    """Sizes of an ESM-2: norms before attention and feed-forward part, and rotary positions."""

    NORM_FIRST = True

    model: Literal["esm2"] = "esm2"
    # Rows of the embedding table; some ports pad it beyond the 33 symbols.
    vocab: int = Field(33, ge=33, le=MAX_VOCAB)
    norm_eps: float = Field(1e-5, gt=0)
    token_dropout: bool = True

    def tensors(self) -> TensorShapes:
        """Return name and shape of every tensor of the model."""
        width, ffn_width = self.width, self.ffn_width
        shapes: TensorShapes = {
            "embed.weight": (self.vocab, width),
            "inv_freq": (self.head_dim // 2,),
        }
        for i in range(self.layers):
            prefix = f"layers.{i}"
            shapes |= _norm_shapes(f"{prefix}.attn_norm", width)
            shapes |= _linear_shapes(f"{prefix}.qkv", 3 * width, width)
            shapes |= _linear_shapes(f"{prefix}.out", width, width)
            shapes |= _norm_shapes(f"{prefix}.ffn_norm", width)
            shapes |= _linear_shapes(f"{prefix}.fc1", ffn_width, width)
            shapes |= _linear_shapes(f"{prefix}.fc2", width, ffn_width)
        return shapes | _norm_shapes("final_norm", width)


class DnabertShape(EncoderShape):
    """Sizes of a DNABERT-S: norms after attention and feed-forward part, ALiBi, gated units."""

    NORM_FIRST = False

    model: Literal["dnabert_s"] = "dnabert_s"
    vocab: int = Field(ge=9, le=MAX_VOCAB)
    token_types: int = Field(2, ge=1, le=1024)
    norm_eps: float = Field(1e-12, gt=0)

    def tensors(self) -> TensorShapes:
        """Return name and shape of every tensor of the model."""
        width, ffn_width = self.width, self.ffn_width
        shapes: TensorShapes = {
            "embed.weight": (self.vocab, width),
            "token_type.weight": (self.token_types, width),
        }
        shapes |= _norm_shapes("embed_norm", width)
        for i in range(self.layers):
            prefix = f"layers.{i}"
            shapes |= _linear_shapes(f"{prefix}.qkv", 3 * width, width)
            shapes |= _linear_shapes(f"{prefix}.out", width, width)
            shapes |= _norm_shapes(f"{prefix}.attn_norm", width)
            shapes[f"{prefix}.gated.weight"] = (2 * ffn_width, width)
            shapes |= _linear_shapes(f"{prefix}.wo", width, ffn_width)
            shapes |= _norm_shapes(f"{prefix}.ffn_norm", width)
        return shapes


# One of the registered encoders, and the names of the sizes of each
AnyEncoderShape = Esm2Shape | DnabertShape
ProteinSize = Esm2Size
DnaSize = DnabertSize


class Estimate(Spec):
    """A measured share with its 95 % interval."""

    value: Share
    low: Share
    high: Share

    def __str__(self) -> str:
        """Return the value and its interval as text, for instance `0.950 (0.930 to 0.970)`."""
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


class DomainRow(Spec):
    """How a classifier judged the reads of one kind, GC content or length, of one class."""

    name: str = Field(description="the kind, or the range of GC content or length")
    label: Literal["others", "virus"]
    genomes: int = Field(ge=0, description="independent genomes; windows of a sequence are one")
    reads: int = Field(ge=0, description="that have an open frame and were scored")
    share_with_frame: Share | None = Field(
        None,
        description="share of all such reads that have an open frame; "
        "none: not known, as the GC content of reads without one",
    )
    called: Estimate | None = Field(
        None, description="share called viral: of viruses the recall, of others false positives"
    )
    called_of_all: Estimate | None = Field(
        None, description="the same of all reads, those without an open frame included"
    )


class TrainingDomain(Spec):
    """What a classifier was tested on: its kinds of reads, and how it judged each."""

    kinds: tuple[DomainRow, ...]
    gc: tuple[DomainRow, ...] = Field(description="by share of G and C, reads with an open frame")
    lengths: tuple[DomainRow, ...]
    gc_ranges: dict[str, tuple[Share, Share]] = Field(
        description="by class: share of G and C between which nine in ten reads lie"
    )
    length_ranges: dict[str, tuple[int, int]] = Field(
        description="by class: bases between which nine in ten reads lie"
    )
    prevalence: Share = Field(description="share of viral reads at which the precision holds")
    recall_of_all: Estimate | None = Field(
        None, description="recall over all viral reads, those without an open frame included"
    )
    precision_of_all: Estimate | None = Field(
        None, description="share of viral reads among those called viral"
    )


class HeadCard(Spec):
    """What a trained classifier says about itself.

    Its numbers are of whole reads, of genomes that it was not trained on.
    """

    method: Literal["linear", "mean"] | None = Field(
        None, description="logistic regression, or its mean with a network; none: a network"
    )
    reads: str = Field(min_length=1, description="fingerprint of the labelled reads")
    truth: str = Field(min_length=1, description="SHA-256 of the truth file")
    encoders: dict[str, str] = Field(
        {}, description="digests of the encoders of its training; none: not known"
    )
    test: str = Field(
        min_length=1,
        description="digest of the reads it was tested on; equal ones: numbers compare",
    )
    lengths: tuple[int, int, int] = Field(
        description="bases of the reads in training: shortest, median, longest"
    )
    prevalence: Share = Field(
        description="share of viral reads at which metrics and thresholds hold"
    )
    auroc: Estimate
    metrics: dict[str, Estimate] = Field(
        {}, description="further ones, by name: auprc, precision, recall, ..."
    )
    thresholds: dict[Share, Share] = Field(
        {}, description="false discovery rate: viral score from which it is expected"
    )
    expected_fdr: dict[Share, Estimate] = Field(
        {},
        description="wanted false discovery rate: the rate in new samples of other genomes of the "
        "same kinds, with the interval that holds 95 % of such samples; "
        "without a threshold: refused; none: an older card",
    )
    uncertain: tuple[Share, Share] | None = Field(
        None, description="viral scores from the first to below the second"
    )
    domain: TrainingDomain | None = Field(
        None, description="how it judged reads of each kind; none: an older card"
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        """Refuse lengths or uncertain scores that are not in ascending order."""
        _require_ascending("lengths", self.lengths)
        _require_ascending("uncertain", self.uncertain or ())
        return self


def _require_ascending(name: str, values: tuple[float, ...]) -> None:
    """Raise `ValueError` if the values are not in ascending order; equal ones are allowed."""
    if list(values) != sorted(values):
        raise ValueError(f"{name} {', '.join(map(str, values))}: not in ascending order")


class HeadShape(Shape):
    """Sizes of the classifier, which was trained on chunks of `model_length` bases."""

    model: Literal["head"] = "head"
    model_length: int = Field(ge=3, le=1 << 20)
    dna_width: int = Field(ge=1, le=MAX_WIDTH)
    protein_width: int = Field(ge=1, le=MAX_WIDTH)
    hidden: int = Field(512, ge=1, le=MAX_WIDTH)
    norm_eps: float = Field(1e-5, gt=0)
    card: HeadCard | None = None  # of a classifier that was trained here

    @property
    def width(self) -> int:
        """Width of the joined embeddings that it takes."""
        return self.dna_width + self.protein_width

    def tensors(self) -> TensorShapes:
        """Return name and shape of every tensor of the model."""
        shapes = _linear_shapes("hidden_layer", self.hidden, self.width)
        shapes |= _norm_shapes("bn1", self.hidden)
        shapes["bn1.running_mean"] = (self.hidden,)
        shapes["bn1.running_var"] = (self.hidden,)
        return shapes | _linear_shapes("output_layer", 2, self.hidden)


S = TypeVar("S", bound=Shape)


def _linear_shapes(name: str, width_out: int, width_in: int) -> TensorShapes:
    """Return the shapes of weight and bias of a linear layer."""
    return {f"{name}.weight": (width_out, width_in), f"{name}.bias": (width_out,)}


def _norm_shapes(name: str, width: int) -> TensorShapes:
    """Return the shapes of weight and bias of a norm."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


_SIZES: Final = tomllib.loads(Path(__file__).with_name("sizes.toml").read_text(encoding="utf-8"))
ESM2_SIZES: Final[Mapping[Esm2Size, Esm2Shape]] = {
    name: Esm2Shape(**sizes) for name, sizes in _SIZES["esm2"].items()
}
DNABERT_SIZES: Final[Mapping[DnabertSize, DnabertShape]] = {
    name: DnabertShape(**sizes) for name, sizes in _SIZES["dnabert_s"].items()
}


def write_shape(shape: Shape, path: Path) -> None:
    """Write the sizes of a model as `config.json`, atomically. Fields with None are left out."""
    values = shape.model_dump(exclude_none=True)
    write_text_atomically(path, json.dumps(values, indent=1) + "\n")


def read_shape(path: Path, shape_type: type[S]) -> S:
    """Read the sizes of a model from its `config.json`.

    The file may have our format or, for an encoder, the format of the transformers library.

    Args:
        path: The file.
        shape_type: The type of the sizes.

    Raises:
        WeightsError: The file cannot be read, or a value in it is missing or wrong. The message
            names the key.
    """
    with refuse_unreadable(path, "JSON", WeightsError):
        text = read_with_retries(path, lambda: read_small_text(path))
        values = TypeAdapter(dict[str, Any]).validate_json(text)
    is_our_format = "model" in values
    if not is_our_format and shape_type is not HeadShape:
        values = _from_transformers(path, values, shape_type)
    with refuse_unreadable(path, "JSON", WeightsError):
        return shape_type.model_validate(values)


def _from_transformers(
    path: Path, values: dict[str, Any], shape_type: type[Shape]
) -> dict[str, Any]:
    """Translate the content of a `config.json` of transformers to our keys.

    Keys that our sizes do not have are left out.

    Args:
        path: The file, for messages.
        values: Its content.
        shape_type: The type of our sizes.

    Returns:
        The values by our keys.

    Raises:
        WeightsError: The file describes another kind of model, or a required key is missing.
    """
    if shape_type is Esm2Shape:
        # ESM-1 has learnt positions, or a norm before the first layer. ESM-2 has neither.
        is_rotary = values.get("position_embedding_type") == "rotary"
        if not is_rotary or values.get("emb_layer_norm_before"):
            raise WeightsError(
                f"{path}: an ESM-1 style model (no rotary positions); ESM-2 is needed"
            )
    required_keys: dict[str, str] = _SIZES["huggingface"]
    optional_keys: dict[str, str] = _SIZES["huggingface_further"]
    missing = [key for key in required_keys if key not in values]
    if missing:
        raise WeightsError(
            f"{path}: no {', '.join(missing)}; not the sizes of a model that can be read here"
        )
    our_values = {}
    for key, our_key in (required_keys | optional_keys).items():
        if key in values and our_key in shape_type.model_fields:
            our_values[our_key] = values[key]
    return our_values
