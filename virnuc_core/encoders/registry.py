"""The registry of encoders: what the rest of virnuc needs to know about each of them.

A read's frame is embedded once by each encoder of `ENCODERS`. The worker, the loader, telemetry,
the baseline and the tools loop over this tuple and take names, budgets and columns from its
entries. Its order is the order of the columns of the joined embeddings: DNA first.

The words for an encoder, such as its name and its title, are in `virnuc_core.encoder_names`.
docs/encoders.md says how to replace an encoder.

torch takes seconds to import, so nothing here imports it: `models.NETWORKS` has the networks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from virnuc_core.config import EngineSpec
from virnuc_core.encoder_names import (
    DNA,
    PROTEIN,
    EncoderName,
    EncoderNames,
    EncoderTitle,
    Molecule,
)
from virnuc_core.encoders.model_config import (
    DNABERT_SIZES,
    ESM2_SIZES,
    AnyEncoderShape,
    DnabertShape,
    Esm2Shape,
    HeadShape,
    Shape,
)
from virnuc_core.encoders.tokenize import DnabertTokenizer, Esm2Tokenizer, Tokenizer

if TYPE_CHECKING:
    from virnuc_core.reads.store import OrfStore

BASES_PER_CODON: Final = 3


@dataclass(frozen=True, slots=True)
class PublicWeights:
    """Where the public weights of an encoder lie on the Hugging Face Hub."""

    repository: str
    revision: str  # commit, so that the same bytes are fetched each time


@dataclass(frozen=True, slots=True)
class EncoderInfo:
    """What the rest of virnuc knows about one encoder.

    Attributes:
        names: What it is called in files, messages and reports.
        shape_type: Sizes of its network, as `config.json` has them.
        sizes: Known sizes by name: those of public models, and a tiny one to try things with.
        open_tokenizer: Opens its tokenizer, given a models directory.
        extra_files: Files beside `config.json` and the weights that belong to the model.
        n_special_tokens: Tokens that the tokenizer adds to a sequence.
        letters_per_token: Letters of its sequence that make one token, about.
        budget_setting: Setting of the engine that holds the token slots of one of its batches.
        has_int8: Whether it can run in int8. If not, it runs in fp16 when int8 is requested.
        ceiling_s: Seconds for which its linear layers are run to measure their highest rate, long
            enough to reach the card's power limit.
        public: Where its public weights are.
        reference_size: Name of the size that VirNucPro uses.
    """

    names: EncoderNames
    shape_type: type[AnyEncoderShape]
    sizes: Mapping[Any, AnyEncoderShape]
    open_tokenizer: Callable[[Path], Tokenizer]
    extra_files: tuple[str, ...]
    n_special_tokens: int
    letters_per_token: int
    budget_setting: Literal["token_budget", "dna_token_budget"]
    has_int8: bool
    ceiling_s: float
    public: PublicWeights
    reference_size: str

    @property
    def name(self) -> EncoderName:
        """Return the name in files: that of the folder in a models directory, for instance."""
        return self.names.name

    @property
    def title(self) -> EncoderTitle:
        """Return the name in messages and reports."""
        return self.names.title

    @property
    def molecule(self) -> Molecule:
        """Return which of the two sequences of an open reading frame it embeds."""
        return self.names.molecule

    def token_budget(self, engine: EngineSpec) -> int:
        """Return how many tokens one batch of this encoder has room for, by the user's settings."""
        budget_of_setting = {
            "token_budget": engine.token_budget,
            "dna_token_budget": engine.dna_token_budget,
        }
        return budget_of_setting[self.budget_setting]

    def sequences(self, store: OrfStore, first: int, end: int) -> list[bytes]:
        """Return the sequences that this encoder embeds: the DNA or the proteins of some frames.

        Args:
            store: The store of open reading frames, in which equal frames are kept once.
            first: Index of the first distinct frame.
            end: Index after the last distinct frame.
        """
        if self.molecule == "dna":
            return store.dna(first, end)
        return store.protein(first, end)

    def estimate_tokens(self, residues: NDArray[np.integer]) -> NDArray[np.integer]:
        """Estimate how many tokens each reading frame becomes, start and end token included.

        The estimate is exact for an encoder with one token per residue. A DNA encoder makes a token
        of several bases.

        Args:
            residues: Length of each frame's protein.

        Returns:
            The number of tokens of each frame.
        """
        letters = residues
        if self.molecule == "dna":
            letters = residues * BASES_PER_CODON
        return letters // self.letters_per_token + self.n_special_tokens

    def chunk_tokens(self, model_length: int) -> int:
        """Return about how many tokens a whole chunk becomes.

        Reads are cut into chunks of the length that the classifier was trained for.

        Args:
            model_length: Bases of a chunk.
        """
        residues = model_length // BASES_PER_CODON
        return int(self.estimate_tokens(np.array(residues)))

    def width_in(self, head: HeadShape) -> int:
        """Return how wide a classifier expects the embeddings of this encoder to be.

        The classifier takes the embeddings of all encoders side by side. Its `config.json` has the
        width of the DNA columns and the width of the protein columns.
        """
        if self.molecule == "dna":
            return head.dna_width
        return head.protein_width


def _open_dnabert_tokenizer(models: Path) -> Tokenizer:
    return DnabertTokenizer(models)


def _open_esm2_tokenizer(_models: Path) -> Tokenizer:
    return Esm2Tokenizer()  # its alphabet is fixed


DNABERT_S: Final = EncoderInfo(
    names=DNA,
    shape_type=DnabertShape,
    sizes=DNABERT_SIZES,
    open_tokenizer=_open_dnabert_tokenizer,
    extra_files=("tokenizer.json",),
    n_special_tokens=2,
    letters_per_token=4,
    budget_setting="dna_token_budget",
    has_int8=False,  # it takes a thirtieth of the time
    ceiling_s=1.0,
    public=PublicWeights("zhihan1996/DNABERT-S", "00e47f96cdea35e4b6f5df89e5419cbe47d490c6"),
    reference_size="base",
)

ESM2: Final = EncoderInfo(
    names=PROTEIN,
    shape_type=Esm2Shape,
    sizes=ESM2_SIZES,
    open_tokenizer=_open_esm2_tokenizer,
    extra_files=(),
    n_special_tokens=2,
    letters_per_token=1,
    budget_setting="token_budget",
    has_int8=True,
    ceiling_s=2.0,
    public=PublicWeights("facebook/esm2_t36_3B_UR50D", "476b639933c8baad5ad09a60ac1a87f987b656fc"),
    reference_size="t36_3B",
)

ENCODERS: Final[tuple[EncoderInfo, ...]] = (DNABERT_S, ESM2)
DNA_ENCODER: Final = DNABERT_S
PROTEIN_ENCODER: Final = ESM2  # more than 90 % of the time; shards are measured in its tokens
HEAD: Final = "head"

# The parts of a models directory and the type of their sizes, in the order in which they are
# checked and named in messages: the largest first.
PART_SHAPES: Final[dict[str, type[Shape]]] = {
    PROTEIN_ENCODER.name: PROTEIN_ENCODER.shape_type,
    DNA_ENCODER.name: DNA_ENCODER.shape_type,
    HEAD: HeadShape,
}
PARTS: Final = tuple(PART_SHAPES)
ENCODER_PARTS: Final = PARTS[:-1]


def count_protein_tokens(store: OrfStore) -> int:
    """Return how many tokens the protein encoder makes of the distinct proteins of a store.

    Each residue is a token, and each protein has the tokenizer's special tokens besides.
    """
    n_residues = int(store.protein_offsets[-1])
    n_special_tokens = PROTEIN_ENCODER.n_special_tokens * store.n_uniques
    return n_residues + n_special_tokens


def encoder_named(name: str) -> EncoderInfo:
    """Return the registered encoder of this name.

    Raises:
        KeyError: No encoder has this name.
    """
    by_name: dict[str, EncoderInfo] = {encoder.name: encoder for encoder in ENCODERS}
    return by_name[name]


def embedding_columns(widths: Mapping[EncoderName, int]) -> dict[EncoderName, slice]:
    """Return which columns of the joined embeddings belong to which encoder.

    The embeddings of one frame stand side by side in one row, in the order of the registry.

    Args:
        widths: Width of each encoder's embeddings, by the encoder's name.

    Returns:
        The range of columns of each encoder, by the encoder's name.
    """
    columns: dict[EncoderName, slice] = {}
    first = 0
    for encoder in ENCODERS:
        end = first + widths[encoder.name]
        columns[encoder.name] = slice(first, end)
        first = end
    return columns
