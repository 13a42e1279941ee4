"""The fingerprint of reads: SHA-256 over ids and bases in their order, worked out in parts.

Reads are hashed in leaves, and the fingerprint is the hash over the leaves' hashes. A leaf ends with a read whose id
has a digest divisible by 64, so that where leaves end depends on the reads alone: however they are cut into batches,
whoever hashes a batch alone knows every leaf within it, and only what sticks out on both sides is left to its
neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from virnuc_core.reads.fast_parser import ReadBatch

_LEAF_READS: Final = np.uint64(64)  # on average


@dataclass(frozen=True, slots=True)
class Leaves:
    """A batch, hashed as far as that can be done without its neighbours."""

    head: tuple[bytes, ...]  # up to the first end of a leaf; of all reads if there is none
    hashes: bytes | None  # of the leaves after, end to end; none if no leaf ends in this batch
    tail: tuple[bytes, ...]  # the reads after the last end of a leaf


def leaves_of(batch: ReadBatch, id_digests: NDArray[np.uint64]) -> Leaves:
    """Hash a batch; `id_digests` [reads, 2] are those of its ids."""
    ends = (np.flatnonzero(id_digests[:, 0] % _LEAF_READS == 0) + 1).tolist()
    if not ends:
        return Leaves(_content(batch, 0, len(batch)), None, ())
    hashes = b"".join(_Leaf(_content(batch, low, high)).digest() for low, high in pairwise(ends))
    return Leaves(_content(batch, 0, ends[0]), hashes, _content(batch, ends[-1], len(batch)))


def _content(batch: ReadBatch, low: int, high: int) -> tuple[bytes, ...]:
    """What is hashed of reads `low` to `high`: ids, bases, and their lengths."""
    ids, bases = batch.id_offsets[low : high + 1], batch.base_offsets[low : high + 1]
    lengths = (np.diff(offsets).astype("<i8").tobytes() for offsets in (ids, bases))
    return (batch.ids[ids[0] : ids[-1]], batch.bases[bases[0] : bases[-1]], *lengths)


class _Leaf:
    """Consecutive reads; how they come in pieces makes no difference."""

    def __init__(self, content: tuple[bytes, ...] = (b"",) * 4) -> None:
        self._parts = [sha256(data) for data in content]

    def add(self, content: tuple[bytes, ...]) -> None:
        for part, data in zip(self._parts, content, strict=True):
            part.update(data)

    def digest(self) -> bytes:
        return sha256(b"".join(part.digest() for part in self._parts)).digest()


class Fingerprint:
    """Hash over the reads, in order, and the settings that decide what a store holds."""

    def __init__(self, settings: str) -> None:
        self._root = sha256(settings.encode())
        self._leaf = _Leaf()

    def add(self, leaves: Leaves) -> None:
        """Take in the next reads."""
        self._leaf.add(leaves.head)
        if leaves.hashes is None:
            return
        self._root.update(self._leaf.digest())
        self._root.update(leaves.hashes)
        self._leaf = _Leaf(leaves.tail)

    def hexdigest(self) -> str:
        """The fingerprint of what was taken in so far."""
        root = self._root.copy()
        root.update(self._leaf.digest())
        return root.hexdigest()
