"""Sequences to token ids, many at once, and the packed batch in which they reach an encoder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import tokenizers

from virnuc_core.config import read_small_text
from virnuc_core.errors import WeightsError

if (
    TYPE_CHECKING
):  # who looks at a tokenizer alone does without torch, which takes seconds to import
    import torch
    from torch import Tensor

SPECIAL: Final = ("[CLS]", "[SEP]", "[PAD]")
ESM2_BEGIN, ESM2_PAD, ESM2_END, ESM2_UNKNOWN, ESM2_FIRST = range(5)
ESM2_SYMBOLS: Final = b"LAGVSERTIDPKQNFYMHWCXBUZO.-"  # ids from ESM2_FIRST on
_ESM2_IDS: Final = bytes(
    ESM2_FIRST + at if (at := ESM2_SYMBOLS.find(byte)) >= 0 else ESM2_UNKNOWN for byte in range(256)
)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences end to end in a fixed number of token slots, without padding between them. Shapes are fixed by (slots,
    row_capacity); `rows` counts the real ones."""

    tokens: Tensor  # int64 [slots]; slots past cu_seqlens[rows] are dead and hold the pad token
    cu_seqlens: (
        Tensor  # int32 [row_capacity + 1]; starts at 0; entries past `rows` repeat the total
    )
    rows: int
    max_seqlen: int  # an upper bound on the longest row, fixed for a shard so that kernels are not re-specialised
    real_tokens: int

    @property
    def slots(self) -> int:
        return int(self.tokens.shape[0])

    def to(self, device: torch.device) -> Self:
        """The same batch on `device`; asynchronous when the source is page-locked."""
        tokens, bounds = (
            one.to(device, non_blocking=True) for one in (self.tokens, self.cu_seqlens)
        )
        return replace(self, tokens=tokens, cu_seqlens=bounds)

    def pin(self) -> Self:
        """The same batch in page-locked host memory."""
        return replace(
            self, tokens=self.tokens.pin_memory(), cu_seqlens=self.cu_seqlens.pin_memory()
        )


class Esm2Tokenizer:
    """One token a residue, between a start and an end token; a byte that is no residue becomes the unknown token."""

    pad_id: Final = ESM2_PAD

    def encode(self, sequences: list[bytes]) -> tuple[Tensor, Tensor]:
        """All tokens end to end (int64 [total]) and row offsets (int64 [n + 1])."""
        import torch

        offsets = np.cumsum([0, *(len(sequence) + 2 for sequence in sequences)], dtype=np.int64)
        begin, end = bytes([ESM2_BEGIN]), bytes([ESM2_END])
        ids = b"".join([begin + sequence.translate(_ESM2_IDS) + end for sequence in sequences])
        return torch.from_numpy(np.frombuffer(ids, np.uint8).astype(np.int64)), torch.from_numpy(
            offsets
        )


class DnabertTokenizer:
    """Byte pairs as `dnabert_s/tokenizer.json` of a models directory says, between [CLS] and [SEP]. It normalises
    nothing: a lower-case base, an N or another ambiguity letter each becomes [UNK]."""

    def __init__(self, models: Path) -> None:
        self._bpe = read_tokenizer(models / "dnabert_s" / "tokenizer.json")
        vocabulary = self._bpe.get_vocab()  # added tokens included; ids may have gaps
        self.pad_id: Final[int] = vocabulary["[PAD]"]
        self.vocab: Final[int] = 1 + max(vocabulary.values())

    def encode(self, sequences: list[bytes]) -> tuple[Tensor, Tensor]:
        """All tokens end to end (int64 [total]) and row offsets (int64 [n + 1])."""
        import torch

        texts = [
            sequence.decode("latin-1") for sequence in sequences
        ]  # any byte is some letter; odd ones are [UNK]
        rows = [row.ids for row in self._bpe.encode_batch_fast(texts, add_special_tokens=True)]
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        tokens = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(offsets[-1]))
        return torch.from_numpy(tokens), torch.from_numpy(offsets)


Tokenizer = Esm2Tokenizer | DnabertTokenizer


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """A `tokenizer.json` with [CLS], [SEP] and [PAD]; its own padding and truncation, if any, are switched off."""
    if not path.is_file():
        raise WeightsError(
            f"{path}: no such file; a models directory needs the tokenizer of its DNABERT-S"
        )
    try:
        bpe = tokenizers.Tokenizer.from_str(read_small_text(path))
    except Exception as error:  # the library raises plain Exception
        raise WeightsError(f"{path}: not a tokenizer file: {error}") from error
    begin, end, _ = special = [bpe.token_to_id(name) for name in SPECIAL]
    if None in special:
        raise WeightsError(f"{path}: has no {SPECIAL[special.index(None)]} token")
    bpe.no_padding()
    bpe.no_truncation()
    if dropout := getattr(bpe.model, "dropout", None):
        raise WeightsError(
            f"{path}: with a dropout of {dropout:g} the same read gives other tokens each time"
        )
    for text in ("", "ACGTN" * 8):  # what is packed into a batch is counted by letters
        ids = bpe.encode(text).ids
        if len(ids) > len(text) + 2:
            raise WeightsError(
                f"{path}: makes {len(ids)} tokens of {len(text)} letters; not a tokenizer of DNA"
            )
        if [*ids[:1], *ids[1:][-1:]] != [begin, end]:
            raise WeightsError(f"{path}: does not put a sequence between [CLS] and [SEP]")
    return bpe
