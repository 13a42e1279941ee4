"""Convert many sequences to token ids; and the packed batch in which an encoder gets the tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import tokenizers

from virnuc_core.config import read_small_text
from virnuc_core.encoder_names import DNA
from virnuc_core.errors import WeightsError
from virnuc_core.system_errors import is_regular_file, require_readable

if TYPE_CHECKING:  # torch takes seconds to import, and a check of a tokenizer does not need it
    import torch
    from torch import Tensor

BEGIN, END, PAD = "[CLS]", "[SEP]", "[PAD]"
ESM2_BEGIN, ESM2_PAD, ESM2_END, ESM2_UNKNOWN, ESM2_FIRST = range(5)
ESM2_SYMBOLS: Final = b"LAGVSERTIDPKQNFYMHWCXBUZO.-"  # ids from ESM2_FIRST on
ESM2_VOCAB: Final = 33


def _esm2_ids() -> bytes:
    """Return ESM-2's token id of each of the 256 bytes, as a table for `bytes.translate`.

    A byte that is no residue has the id of the unknown token.
    """
    ids = bytearray([ESM2_UNKNOWN] * 256)
    for i, symbol in enumerate(ESM2_SYMBOLS):
        ids[symbol] = ESM2_FIRST + i
    return bytes(ids)


_ESM2_IDS: Final = _esm2_ids()


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The tokens of many sequences, one after the other in a fixed number of slots.

    A row is one sequence; there is no padding between rows. The shapes of the tensors depend only
    on the number of token slots and on the row capacity, the largest number of rows of a batch.

    Attributes:
        tokens: int64 [slots]. Slots from `cu_seqlens[rows]` on are unused and hold the pad token.
        cu_seqlens: int32 [row_capacity + 1]. The first slot of each row, then the end of the last
            row, which is repeated for the rows that the batch does not have.
        rows: Number of rows that the batch has.
        max_seqlen: No row has more tokens. It is the same for many batches, because the kernels are
            chosen by it.
        real_tokens: Number of used slots.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    rows: int
    max_seqlen: int
    real_tokens: int

    @property
    def slots(self) -> int:
        """Return the number of token slots, used or not."""
        return int(self.tokens.shape[0])

    def to(self, device: torch.device) -> Self:
        """Return a copy of the batch on a device.

        From page-locked memory the copy is asynchronous: the call returns before it is finished.
        """
        tokens = self.tokens.to(device, non_blocking=True)
        cu_seqlens = self.cu_seqlens.to(device, non_blocking=True)
        return replace(self, tokens=tokens, cu_seqlens=cu_seqlens)

    def pin(self) -> Self:
        """Return a copy of the batch in page-locked host memory, from which a GPU copies faster."""
        return replace(
            self, tokens=self.tokens.pin_memory(), cu_seqlens=self.cu_seqlens.pin_memory()
        )


class Esm2Tokenizer:
    """One token for each residue, between a start and an end token.

    A byte that is no residue becomes the unknown token.
    """

    pad_id: Final = ESM2_PAD
    vocab: Final = ESM2_VOCAB

    def encode(self, sequences: list[bytes]) -> tuple[Tensor, Tensor]:
        """Convert proteins to token ids.

        Args:
            sequences: The proteins, one letter for each residue.

        Returns:
            The tokens of all proteins one after the other, int64 [total]; and the index of the
            first token of each protein, then the total, int64 [n + 1].
        """
        import torch

        # All ids are below 256, so a protein's tokens are bytes until the end.
        begin = bytes([ESM2_BEGIN])
        end = bytes([ESM2_END])
        id_rows = [begin + sequence.translate(_ESM2_IDS) + end for sequence in sequences]
        n_tokens = [len(ids) for ids in id_rows]
        offsets = np.cumsum([0, *n_tokens], dtype=np.int64)
        tokens = np.frombuffer(b"".join(id_rows), np.uint8).astype(np.int64)
        return torch.from_numpy(tokens), torch.from_numpy(offsets)


class DnabertTokenizer:
    """Byte pairs, as `tokenizer.json` of a models directory says, between [CLS] and [SEP].

    Nothing is normalised: a lower-case base, an N or another ambiguity letter becomes [UNK].
    """

    def __init__(self, models: Path) -> None:
        """Read the tokenizer of a models directory.

        Raises:
            WeightsError: The file is missing, or it is not a tokenizer of DNA.
        """
        self._bpe = read_tokenizer(models / DNA.name / "tokenizer.json")
        vocabulary = self._bpe.get_vocab()  # id of each token, added tokens included
        self.pad_id: Final[int] = vocabulary[PAD]
        # The embedding table needs a row for the largest id; ids may have gaps.
        self.vocab: Final[int] = 1 + max(vocabulary.values())

    def encode(self, sequences: list[bytes]) -> tuple[Tensor, Tensor]:
        """Convert DNA sequences to token ids.

        Args:
            sequences: The DNA sequences in ASCII letters.

        Returns:
            The tokens of all sequences one after the other, int64 [total]; and the index of the
            first token of each sequence, then the total, int64 [n + 1].
        """
        import torch

        # Latin 1 has a letter for every byte, so decoding never fails. Letters that are no base
        # become [UNK].
        texts = [sequence.decode("latin-1") for sequence in sequences]
        encodings = self._bpe.encode_batch_fast(texts, add_special_tokens=True)
        id_rows = [encoding.ids for encoding in encodings]
        n_tokens = [len(ids) for ids in id_rows]
        offsets = np.cumsum([0, *n_tokens], dtype=np.int64)
        all_ids = chain.from_iterable(id_rows)
        tokens = np.fromiter(all_ids, dtype=np.int64, count=int(offsets[-1]))
        return torch.from_numpy(tokens), torch.from_numpy(offsets)


Tokenizer = Esm2Tokenizer | DnabertTokenizer


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Read a `tokenizer.json`, and check that it is a tokenizer of DNA.

    Padding and truncation, which the file may ask for, are switched off: virnuc packs sequences
    without padding and never shortens them.

    Raises:
        WeightsError: The file is missing or no tokenizer, or the tokenizer is random, makes too
            many tokens, or does not put a sequence between [CLS] and [SEP].
    """
    if not is_regular_file(path):
        raise WeightsError(
            f"{path}: no such file; a models directory needs the tokenizer of its DNABERT-S"
        )
    require_readable(path)
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
    for example in ("", "ACGTN" * 8):  # without a letter; with bases and an unknown one
        _check_encoding(path, tokenizer, example)
    return tokenizer


def _check_encoding(path: Path, tokenizer: tokenizers.Tokenizer, dna: str) -> None:
    """Check that a tokenizer encodes an example like a tokenizer of DNA.

    Args:
        path: The tokenizer's file, for messages.
        tokenizer: The tokenizer.
        dna: The example, which may be empty.

    Raises:
        WeightsError: There are more tokens than letters (besides the first and the last token), or
            the tokens do not begin with [CLS] and end with [SEP].
    """
    ids = tokenizer.encode(dna).ids
    # Batches reserve at most one token for each letter, and two for [CLS] and [SEP].
    max_tokens = len(dna) + 2
    if len(ids) > max_tokens:
        raise WeightsError(
            f"{path}: makes {len(ids)} tokens of {len(dna)} letters; not a tokenizer of DNA"
        )
    begin_and_end = [tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)]
    if len(ids) < 2 or [ids[0], ids[-1]] != begin_and_end:
        raise WeightsError(f"{path}: does not put a sequence between [CLS] and [SEP]")
