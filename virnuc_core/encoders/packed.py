"""The one form in which sequences reach an encoder: concatenated, without padding between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences laid end to end in a fixed number of token slots.

    Shapes are fixed by (slots, row_capacity), so that one compiled graph serves all batches; `rows` counts the real
    ones.
    """

    tokens: Tensor  # int64 [slots]; slots past cu_seqlens[rows] are dead and hold the pad token
    cu_seqlens: Tensor  # int32 [row_capacity + 1]; starts at 0; entries past `rows` repeat the total
    rows: int
    max_seqlen: int  # an upper bound on the longest row, fixed for a shard so that kernels are not re-specialised
    real_tokens: int

    @property
    def slots(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def row_capacity(self) -> int:
        return int(self.cu_seqlens.shape[0]) - 1

    def to(self, device: torch.device, *, non_blocking: bool = True) -> PackedBatch:
        """The same batch on `device`; asynchronous when the source is page-locked."""
        return PackedBatch(
            self.tokens.to(device, non_blocking=non_blocking),
            self.cu_seqlens.to(device, non_blocking=non_blocking),
            self.rows,
            self.max_seqlen,
            self.real_tokens,
        )

    def pin(self) -> PackedBatch:
        """The same batch in page-locked host memory."""
        return PackedBatch(
            self.tokens.pin_memory(), self.cu_seqlens.pin_memory(), self.rows, self.max_seqlen, self.real_tokens
        )


class Encoder(Protocol):
    """What the engine asks of ESM-2 and DNABERT-S."""

    @property
    def width(self) -> int:
        """Length of one embedding."""
        ...

    @property
    def pad_id(self) -> int:
        """Token that fills dead slots."""
        ...

    def embed(self, batch: PackedBatch) -> Tensor:
        """Mean-pooled embeddings, float32 [row_capacity, width]; rows past `batch.rows` are zero.

        A row's values depend on its own tokens, the weights, the precision and the number of slots only.
        Never synchronises the device.
        """
        ...


class Tokenizer(Protocol):
    """Sequences to token ids, many at once."""

    @property
    def pad_id(self) -> int: ...

    def encode(self, sequences: list[bytes]) -> tuple[Tensor, Tensor]:
        """All tokens end to end (int64 [total]) and row offsets (int64 [n + 1]), special tokens included."""
        ...
