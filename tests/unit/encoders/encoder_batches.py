"""Random sequences, and batches packed by hand: nothing of the engine is needed here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from virnuc_core.encoders.tokenize import PackedBatch, Tokenizer

AMINO_ACIDS = b"ACDEFGHIKLMNPQRSTVWY"


def proteins(lengths: Sequence[int], seed: int = 0) -> list[bytes]:
    """Random proteins of the given lengths."""
    return _letters(AMINO_ACIDS, lengths, seed)


def dnas(lengths: Sequence[int], seed: int = 0) -> list[bytes]:
    """Random DNA of the given lengths."""
    return _letters(b"ACGT", lengths, seed)


def _letters(alphabet: bytes, lengths: Sequence[int], seed: int) -> list[bytes]:
    rng = np.random.default_rng(seed)
    letters = np.frombuffer(alphabet, dtype=np.uint8)
    return [rng.choice(letters, size=n).tobytes() for n in lengths]


def packed(
    tokenizer: Tokenizer,
    sequences: list[bytes],
    *,
    slots: int | None = None,
    capacity: int | None = None,
    max_seqlen: int | None = None,
) -> PackedBatch:
    """All sequences in one batch, in the order given."""
    tokens, offsets = tokenizer.encode(sequences)
    rows = list(tokens.split(offsets.diff().tolist()))
    return packed_tokens(
        rows, tokenizer.pad_id, slots=slots, capacity=capacity, max_seqlen=max_seqlen
    )


def packed_tokens(
    rows: list[Tensor],
    pad: int,
    *,
    slots: int | None = None,
    capacity: int | None = None,
    max_seqlen: int | None = None,
) -> PackedBatch:
    """Rows of token ids in one batch, in the order given."""
    lengths = [len(row) for row in rows]
    total = sum(lengths)
    slots, capacity = slots or total, capacity or len(rows)
    assert slots >= total
    assert capacity >= len(rows)
    filled_tokens = torch.full((slots,), pad, dtype=torch.int64)
    filled_tokens[:total] = torch.cat(rows)
    bounds = torch.full((capacity + 1,), total, dtype=torch.int32)
    bounds[: len(rows) + 1] = torch.tensor([0, *lengths]).cumsum(0)
    return PackedBatch(filled_tokens, bounds, len(rows), max_seqlen or max(lengths), total)
