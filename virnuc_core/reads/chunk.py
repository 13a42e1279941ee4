"""Reads to chunks of the model's length: where each chunk of each read lies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks in order of read and position, as columns; a read without bases has none."""

    read: NDArray[np.int64]  # [n] index of the read
    number: NDArray[np.int32]  # [n] from 0 within the read
    start: NDArray[np.int64]  # [n] first base within the read
    end: NDArray[np.int64]  # [n] one past the last base

    def __len__(self) -> int:
        return len(self.read)


def chunk(lengths: NDArray[np.int64], size: int) -> Chunks:
    """Cut reads of the given lengths into chunks of at most `size` bases.

    Neighbours overlap so that all but the last chunk are full; the last ends with the read and may be shorter, never
    empty. A read of at most `size` bases is one chunk.
    """
    counts = -(-lengths // size)
    read = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    if (counts == 1).all():  # nothing but whole reads, as nearly always: no arithmetic needed
        none = np.zeros(len(read), np.int64)
        return Chunks(read, none.astype(np.int32), none, lengths.astype(np.int64))
    number = np.arange(len(read), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    length, count = lengths[read], counts[read]
    lower, extra = np.divmod(count * size - length, count)
    start = number * size - (lower * number + np.minimum(number, lower + extra))
    return Chunks(read, number.astype(np.int32), start, np.minimum(start + size, length))
