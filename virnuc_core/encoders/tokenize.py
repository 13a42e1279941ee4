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

if TYPE_CHECKING:  # torch takes seconds to import: to look at a tokenizer, nobody needs it
    import torch
    from torch import Tensor

BEGIN, END, PAD = "[CLS]", "[SEP]", "[PAD]"
ESM2_BEGIN, ESM2_PAD, ESM2_END, ESM2_UNKNOWN, ESM2_FIRST = range(5)
ESM2_SYMBOLS: Final = b"LAGVSERTIDPKQNFYMHWCXBUZO.-"  # ids from ESM2_FIRST on
ESM2_VOCAB: Final = 33


def _esm2_ids() -> bytes:
    """Return the token id of each byte, for `bytes.translate`."""
    ids = bytearray([ESM2_UNKNOWN] * 256)
    for i, symbol in enumerate(ESM2_SYMBOLS):
        ids[symbol] = ESM2_FIRST + i
    return bytes(ids)


_ESM2_IDS: Final = _esm2_ids()


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences end to end in a fixed number of token slots, without padding between them.

    Its shapes depend only on the number of slots and on the row capacity.
    """

    tokens: Tensor  # int64 [slots]; slots from cu_seqlens[rows] on are dead and hold the pad token
    cu_seqlens: (
        Tensor  # int32 [row_capacity + 1]: 0, then the end of each row; the last end repeats
    )
    rows: int  # the real ones
    max_seqlen: int  # bound on the longest row, the same for many batches: kernels depend on it
    real_tokens: int

    @property
    def slots(self) -> int:
        """Token slots of the batch."""
        return int(self.tokens.shape[0])

    def to(self, device: torch.device) -> Self:
        """Return the same batch on a device; asynchronously from page-locked memory."""
        tokens = self.tokens.to(device, non_blocking=True)
        cu_seqlens = self.cu_seqlens.to(device, non_blocking=True)
        return replace(self, tokens=tokens, cu_seqlens=cu_seqlens)

    def pin(self) -> Self:
        """Return the same batch in page-locked host memory."""
        tokens, cu_seqlens = self.tokens.pin_memory(), self.cu_seqlens.pin_memory()
        return replace(self, tokens=tokens, cu_seqlens=cu_seqlens)


class Esm2Tokenizer:
    """One token for each residue, between a start and an end token.

    A byte that is no residue becomes the unknown token.
    """

    pad_id: Final = ESM2_PAD
    vocab: Final = ESM2_VOCAB

    def encode(self, sequences: list[bytes]) -> tuple[Tensor, Tensor]:
        """Tokenise proteins.

        Returns:
            All tokens end to end, int64 [total], and where each row begins, int64 [n + 1].
        """
        import torch

        begin, end = bytes([ESM2_BEGIN]), bytes([ESM2_END])
        rows = [begin + sequence.translate(_ESM2_IDS) + end for sequence in sequences]
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        tokens = np.frombuffer(b"".join(rows), np.uint8).astype(np.int64)
        return torch.from_numpy(tokens), torch.from_numpy(offsets)


class DnabertTokenizer:
    """Byte pairs, as `tokenizer.json` of a models directory says, between [CLS] and [SEP].

    Nothing is normalised: a lower-case base, an N or another ambiguity letter becomes [UNK].
    """

    def __init__(self, models: Path) -> None:
        """Read the tokenizer of a models directory.

        Raises:
            WeightsError: Its file is missing or not a tokenizer of DNA.
        """
        self._bpe = read_tokenizer(models / "dnabert_s" / "tokenizer.json")
        vocabulary = self._bpe.get_vocab()  # added tokens included; ids may have gaps
        self.pad_id: Final[int] = vocabulary[PAD]
        self.vocab: Final[int] = 1 + max(vocabulary.values())

    def encode(self, sequences: list[bytes]) -> tuple[Tensor, Tensor]:
        """Tokenise DNA.

        Returns:
            All tokens end to end, int64 [total], and where each row begins, int64 [n + 1].
        """
        import torch

        # Any byte is some letter in Latin 1; letters that are no base become [UNK].
        texts = [sequence.decode("latin-1") for sequence in sequences]
        encodings = self._bpe.encode_batch_fast(texts, add_special_tokens=True)
        rows = [encoding.ids for encoding in encodings]
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        tokens = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(offsets[-1]))
        return torch.from_numpy(tokens), torch.from_numpy(offsets)


Tokenizer = Esm2Tokenizer | DnabertTokenizer


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Read a `tokenizer.json`. Its own padding and truncation are switched off.

    Raises:
        WeightsError: The file is missing, no tokenizer, or not one of DNA between [CLS] and [SEP].
    """
    if not path.is_file():
        raise WeightsError(
            f"{path}: no such file; a models directory needs the tokenizer of its DNABERT-S"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_str(read_small_text(path))
    except Exception as error:  # the library raises plain Exception
        raise WeightsError(f"{path}: not a tokenizer file: {error}") from error
    for token in (BEGIN, END, PAD):
        if tokenizer.token_to_id(token) is None:
            raise WeightsError(f"{path}: has no {token} token")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        raise WeightsError(
            f"{path}: with a dropout of {dropout:g} the same read gives other tokens each time"
        )
    _check_encoding(path, tokenizer, "")
    _check_encoding(path, tokenizer, "ACGTN" * 8)
    return tokenizer


def _check_encoding(path: Path, tokenizer: tokenizers.Tokenizer, text: str) -> None:
    """Raise `WeightsError` for too many tokens, or if [CLS] and [SEP] are missing."""
    ids = tokenizer.encode(text).ids
    if len(ids) > len(text) + 2:  # the room in batches is counted by letters
        raise WeightsError(
            f"{path}: makes {len(ids)} tokens of {len(text)} letters; not a tokenizer of DNA"
        )
    ends = [tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)]
    if len(ids) < 2 or [ids[0], ids[-1]] != ends:
        raise WeightsError(f"{path}: does not put a sequence between [CLS] and [SEP]")
