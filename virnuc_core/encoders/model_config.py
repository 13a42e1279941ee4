"""Sizes of the three models, and a trained head's card: typed, checked, read from and written to `config.json`."""

import json
import math
import tomllib
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, model_validator

from virnuc_core.config import (
    DEFAULT_THRESHOLD,
    Share,
    Spec,
    VerdictSpec,
    read_small_text,
    refuse_unreadable,
)
from virnuc_core.errors import ConfigError, WeightsError
from virnuc_core.rundir import write_text_atomically

Esm2Size = Literal["tiny", "t6_8M", "t12_35M", "t30_150M", "t33_650M", "t36_3B"]
DnabertSize = Literal["tiny", "base"]
Storage = Literal["fp32", "fp16", "bf16"]  # what numbers an encoder's weights are stored in
PRODUCTS: Final = ("qkv", "out", "up", "down")  # linear layers of an encoder's layer, in order
FAR: Final = (
    1.5  # times as long, or as short, as in training is the median read of which no number is known
)
MOST_OUTSIDE: Final = 0.1  # of the reads may be shorter or longer than any in training


class Shape(Spec):
    """What the sizes of all three models have in common."""

    model: str  # also its folder's name in a models directory
    origin: str = Field("", description="where the weights come from")

    @classmethod
    def part(cls) -> str:
        """The folder of such a model in a models directory."""
        return str(cls.model_fields["model"].default)

    @abstractmethod
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the model."""


class EncoderShape(Shape):
    """What the sizes of both encoders have in common."""

    layers: int = Field(
        ge=1, le=1024
    )  # the upper bounds: what no model of this kind will soon have
    width: int = Field(ge=4, le=1 << 16)
    heads: int = Field(ge=1, le=1024)
    ffn_width: int = Field(ge=4, le=1 << 18)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.width % self.heads or self.head_dim % 2:
            raise ValueError(
                f"width {self.width} does not split into {self.heads} heads of even size"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def linear_weights(self) -> int:
        """Numbers in the weight matrices that every token meets."""
        shapes = self.tensors().items()
        return sum(
            math.prod(shape)
            for name, shape in shapes
            if name.startswith("layers.") and len(shape) == 2
        )


class Esm2Shape(EncoderShape):
    """An ESM-2: pre-norm layers with rotary positions."""

    model: Literal["esm2"] = "esm2"
    vocab: int = Field(
        33, ge=33, le=1 << 20
    )  # rows of the embedding table; some ports pad it beyond the 33 symbols
    norm_eps: float = Field(1e-5, gt=0)
    token_dropout: bool = True

    def tensors(self) -> dict[str, tuple[int, ...]]:
        w, f = self.width, self.ffn_width
        shapes: dict[str, tuple[int, ...]] = {
            "embed.weight": (self.vocab, w),
            "inv_freq": (self.head_dim // 2,),
        }
        for i in range(self.layers):
            p = f"layers.{i}"
            shapes |= (
                _layer(f"{p}.attn_norm", w)
                | _layer(f"{p}.qkv", 3 * w, w)
                | _layer(f"{p}.out", w, w)
            )
            shapes |= (
                _layer(f"{p}.ffn_norm", w) | _layer(f"{p}.fc1", f, w) | _layer(f"{p}.fc2", w, f)
            )
        return shapes | _layer("final_norm", w)


class DnabertShape(EncoderShape):
    """A DNABERT-S: post-norm layers with ALiBi and gated linear units."""

    model: Literal["dnabert_s"] = "dnabert_s"
    vocab: int = Field(ge=9, le=1 << 20)
    token_types: int = Field(2, ge=1, le=1024)
    norm_eps: float = Field(1e-12, gt=0)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        w, f = self.width, self.ffn_width
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab, w)}
        shapes |= {"token_type.weight": (self.token_types, w)} | _layer("embed_norm", w)
        for i in range(self.layers):
            p = f"layers.{i}"
            shapes |= (
                _layer(f"{p}.qkv", 3 * w, w)
                | _layer(f"{p}.out", w, w)
                | _layer(f"{p}.attn_norm", w)
            )
            shapes |= (
                {f"{p}.gated.weight": (2 * f, w)}
                | _layer(f"{p}.wo", w, f)
                | _layer(f"{p}.ffn_norm", w)
            )
        return shapes


class Estimate(Spec):
    """A measured share with its 95 % interval."""

    value: Share
    low: Share
    high: Share

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


class HeadCard(Spec):
    """What a trained head says of itself. Its numbers are of whole reads, of genomes that it was not trained on."""

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
        {}, description="false discovery rate: viral score from which it holds"
    )
    uncertain: tuple[Share, Share] | None = Field(
        None, description="viral scores from the first to below the second"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for name, ends in {"lengths": self.lengths, "uncertain": self.uncertain or ()}.items():
            if list(ends) != sorted(ends):
                raise ValueError(f"{name} {', '.join(map(str, ends))}: not in ascending order")
        return self


class HeadShape(Shape):
    """The classifier: its input is DNA width + protein width, and it was trained on chunks of `model_length` bases."""

    model: Literal["head"] = "head"
    model_length: int = Field(ge=3, le=1 << 20)
    dna_width: int = Field(ge=1, le=1 << 16)
    protein_width: int = Field(ge=1, le=1 << 16)
    hidden: int = Field(512, ge=1, le=1 << 16)
    norm_eps: float = Field(1e-5, gt=0)
    card: HeadCard | None = None  # of a head that was trained here

    @property
    def width(self) -> int:
        return self.dna_width + self.protein_width

    def tensors(self) -> dict[str, tuple[int, ...]]:
        shapes = _layer("hidden_layer", self.hidden, self.width) | _layer("bn1", self.hidden)
        shapes |= {"bn1.running_mean": (self.hidden,), "bn1.running_var": (self.hidden,)}
        return shapes | _layer("output_layer", 2, self.hidden)


def verdict(head: HeadShape, asked: VerdictSpec) -> tuple[float, tuple[float, float] | None]:
    """The viral score from which a read is viral, and, if asked for, the uncertain ones. Errors: `ConfigError`."""
    card, threshold = head.card, asked.threshold
    if asked.fdr is None and not asked.abstain:
        return threshold, None
    if card is None:
        raise ConfigError(
            "fdr, abstain: the head has no card that would tell; virnuc train writes heads with one"
        )
    if asked.fdr is not None:
        if threshold != DEFAULT_THRESHOLD:
            raise ConfigError(
                f"fdr {asked.fdr:g} and threshold {threshold:g} both say when a read is viral; give one"
            )
        if asked.fdr not in card.thresholds:
            known = ", ".join(f"{rate:g}" for rate in sorted(card.thresholds)) or "none"
            raise ConfigError(
                f"fdr {asked.fdr:g}: the head's card has no threshold for it; it has those for {known}"
            )
        threshold = card.thresholds[asked.fdr]
    if asked.abstain and card.uncertain is None:
        raise ConfigError("abstain: the head's card names no uncertain scores")
    band = (
        card.uncertain if asked.abstain else None
    )  # where fewer viral reads are awaited, it reaches to the threshold
    return threshold, band if band is None or asked.fdr is None else (
        band[0],
        max(band[1], threshold),
    )


def remarks(
    head: HeadShape, lengths: NDArray[np.integer], digests: Mapping[str, str]
) -> tuple[str, ...]:
    """What to say of encoders that are not those of the head's training, by their digests, and of reads whose lengths
    are far from those that it was trained on."""
    if head.card is None:
        return ()
    others = " and ".join(
        part for part, digest in head.card.encoders.items() if digests.get(part) != digest
    )
    strange = f"the head was trained on embeddings by another {others}: if its weights differ, scores mean nothing"
    return (*([strange] if others else []), *_far(head.card, lengths))


def _far(card: HeadCard, lengths: NDArray[np.integer]) -> tuple[str, ...]:
    if not len(lengths):
        return ()
    (shortest, usual, longest), median = card.lengths, float(np.median(lengths))
    outside = float(np.mean((lengths < shortest) | (lengths > longest)))
    if outside <= MOST_OUTSIDE and usual / FAR <= median <= usual * FAR:
        return ()
    alike = (
        f"{usual} bases"
        if shortest == longest
        else f"{shortest} to {longest} bases, half of them up to {usual}"
    )
    trained = f"the head was trained on reads of {alike}"
    here = f"here half are up to {median:.0f}, and {100 * outside:.0f} % outside that range"
    return (f"{trained}; {here}: do not rely on their scores",)


KINDS: Final[dict[str, type[Shape]]] = {
    kind.part(): kind for kind in (Esm2Shape, DnabertShape, HeadShape)
}
RANDOM_ORIGIN: Final = "random"  # the origin of weights that mean nothing begins with this word
S = TypeVar("S", bound=Shape)


def _layer(name: str, out: int, *into: int) -> dict[str, tuple[int, ...]]:
    """Weight and bias of a linear layer, or of a norm, which takes no width in."""
    return {f"{name}.weight": (out, *into), f"{name}.bias": (out,)}


_SIZES: Final = tomllib.loads(Path(__file__).with_name("sizes.toml").read_text(encoding="utf-8"))
ESM2_SIZES: Final[Mapping[Esm2Size, Esm2Shape]] = {
    name: Esm2Shape(**sizes) for name, sizes in _SIZES["esm2"].items()
}
DNABERT_SIZES: Final[Mapping[DnabertSize, DnabertShape]] = {
    name: DnabertShape(**sizes) for name, sizes in _SIZES["dnabert_s"].items()
}


def write_shape(shape: Shape, path: Path) -> None:
    """Write `config.json` whole; what is not known is left out."""
    write_text_atomically(path, json.dumps(shape.model_dump(exclude_none=True), indent=1) + "\n")


def read_shape(path: Path, kind: type[S]) -> S:
    """Sizes from our `config.json`, an encoder's also from HF's; `WeightsError` names the key that is wrong."""
    with refuse_unreadable(path, "JSON", WeightsError):
        raw = TypeAdapter(dict[str, Any]).validate_json(read_small_text(path))
    if "model" not in raw and kind is not HeadShape:  # HF layout, which has many more keys
        if kind is Esm2Shape and (
            raw.get("position_embedding_type") != "rotary" or raw.get("emb_layer_norm_before")
        ):
            raise WeightsError(
                f"{path}: an ESM-1 style model (no rotary positions); ESM-2 is needed"
            )
        if missing := [theirs for theirs in _SIZES["huggingface"] if theirs not in raw]:
            raise WeightsError(
                f"{path}: no {', '.join(missing)}; not the sizes of a model that can be read here"
            )
        known = (_SIZES["huggingface"] | _SIZES["huggingface_further"]).items()
        raw = {
            ours: raw[theirs]
            for theirs, ours in known
            if theirs in raw and ours in kind.model_fields
        }
    with refuse_unreadable(path, "JSON", WeightsError):
        return kind.model_validate(raw)
