"""Sequences to token ids, many at once."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer as BpeFile
from torch import Tensor

from virnuc_core.errors import WeightsError

ESM2_BEGIN: Final = 0
ESM2_PAD: Final = 1
ESM2_END: Final = 2
ESM2_UNKNOWN: Final = 3
ESM2_FIRST: Final = 4
ESM2_SYMBOLS: Final = b"LAGVSERTIDPKQNFYMHWCXBUZO.-"  # ids from ESM2_FIRST on


def _byte_table() -> NDArray[np.int64]:
    table = np.full(256, ESM2_UNKNOWN, dtype=np.int64)
    table[np.frombuffer(ESM2_SYMBOLS, dtype=np.uint8)] = ESM2_FIRST + np.arange(len(ESM2_SYMBOLS))
    return table


class Esm2Tokenizer:
    """One token a residue, between a start and an end token; a byte that is no residue becomes the unknown token."""

    def __init__(self) -> None:
        self._table = _byte_table()

    @property
    def pad_id(self) -> int:
        return ESM2_PAD

    def encode(self, sequences: list[bytes]) -> tuple[Tensor, Tensor]:
        """All tokens end to end (int64 [total]) and row offsets (int64 [n + 1])."""
        lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
        offsets = np.zeros(len(sequences) + 1, dtype=np.int64)
        np.cumsum(lengths + 2, out=offsets[1:])
        tokens = np.empty(int(offsets[-1]), dtype=np.int64)
        tokens[offsets[:-1]] = ESM2_BEGIN
        tokens[offsets[1:] - 1] = ESM2_END
        inner = np.ones(len(tokens), dtype=bool)
        inner[offsets[:-1]] = False
        inner[offsets[1:] - 1] = False
        tokens[inner] = self._table[np.frombuffer(b"".join(sequences), dtype=np.uint8)]
        return torch.from_numpy(tokens), torch.from_numpy(offsets)


class DnabertTokenizer:
    """Byte pairs as `dnabert_s/tokenizer.json` of a models directory says, between [CLS] and [SEP].

    That file has no normaliser: a lower-case base, an N or another ambiguity letter each becomes [UNK].
    """

    def __init__(self, models: Path) -> None:
        path = models / "dnabert_s" / "tokenizer.json"
        self._bpe = read_tokenizer(path)
        pad = self._bpe.token_to_id("[PAD]")
        if pad is None:
            raise WeightsError(f"{path}: has no [PAD] token")
        self._pad_id = pad

    @property
    def pad_id(self) -> int:
        return self._pad_id

    @property
    def vocab(self) -> int:
        """Number of token ids, added tokens included."""
        return int(self._bpe.get_vocab_size())

    def encode(self, sequences: list[bytes]) -> tuple[Tensor, Tensor]:
        """All tokens end to end (int64 [total]) and row offsets (int64 [n + 1])."""
        texts = [sequence.decode("latin-1") for sequence in sequences]  # any byte is some letter; odd ones are [UNK]
        rows = [row.ids for row in self._bpe.encode_batch_fast(texts, add_special_tokens=True)]
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)), out=offsets[1:])
        tokens = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(offsets[-1]))
        return torch.from_numpy(tokens), torch.from_numpy(offsets)


def read_tokenizer(path: Path) -> BpeFile:
    """A `tokenizer.json` with [CLS] and [SEP]; its own padding and truncation, if any, are switched off."""
    if not path.is_file():
        raise WeightsError(f"{path}: no such file; a models directory needs the tokenizer of its DNABERT-S")
    try:
        bpe = BpeFile.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise WeightsError(f"{path}: not a tokenizer file: {error}") from error
    for special in ("[CLS]", "[SEP]"):
        if bpe.token_to_id(special) is None:
            raise WeightsError(f"{path}: has no {special} token")
    bpe.no_padding()
    bpe.no_truncation()
    return bpe
