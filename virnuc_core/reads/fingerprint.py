"""Digests of byte strings, and the fingerprint of reads: SHA-256 over ids and bases in their order.

For the fingerprint reads are hashed in leaves, and it is the hash over the leaves' hashes. A leaf ends with a read
whose id has a digest divisible by 64, so that where leaves end depends on the reads alone: however they are cut into
batches, whoever hashes a batch alone knows every leaf within it, and only what sticks out on both sides is left to its
neighbours."""

from collections.abc import Iterable
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple, Self

import numpy as np
from mmh3 import mmh3_x64_128_digest
from numpy.typing import NDArray

from virnuc_core.reads.fast_parser import Part, ReadBatch

BUCKET: Final = 1 << 21  # digests looked for repeats at a time, about
_FEWEST: Final = 3  # rounded up to a power of two
_READ_AT_ONCE: Final = 1 << 17  # digests
_LEAF_READS: Final = np.uint64(64)  # on average


def digests(strings: Iterable[bytes]) -> NDArray[np.uint64]:
    """The MurmurHash3 (x64, 128 bit) of each string: uint64 [n, 2]. Strings can be made to collide on purpose."""
    return np.frombuffer(b"".join(map(mmh3_x64_128_digest, strings)), "<u8").reshape(-1, 2)


class Leaves(NamedTuple):
    """A batch, hashed as far as that can be done without its neighbours."""

    head: tuple[bytes, ...]  # up to the first end of a leaf; of all reads if there is none
    hashes: bytes | None  # of the leaves after, end to end; none if no leaf ends in this batch
    tail: tuple[bytes, ...]  # the reads after the last end of a leaf
    part: Part | None = None  # of a long read: which one this is


def leaves_of(batch: ReadBatch, id_digests: NDArray[np.uint64] | None = None) -> Leaves:
    """Hash a batch; `id_digests` [reads, 2] are those of its ids, where they are known."""
    id_digests = digests(batch.ids) if id_digests is None else id_digests
    if (part := batch.part) is not None:  # id and lengths are known with the last
        length = (part.n_bases_before + len(batch.bases.data)).to_bytes(8, "little")
        about = (
            (batch.ids.data, len(batch.ids.data).to_bytes(8, "little"), length)
            if part.is_last
            else (b"", b"", b"")
        )
        ends_leaf = part.is_last and bool(id_digests[0, 0] % _LEAF_READS == 0)
        head = (about[0], batch.bases.data, *about[1:])
        return Leaves(head, b"" if ends_leaf else None, (b"",) * 4, part)
    edges = np.concatenate(
        [[0], np.flatnonzero(id_digests[:, 0] % _LEAF_READS == 0) + 1, [len(batch)]]
    )
    columns = [(strings.data, strings.offsets[edges]) for strings in (batch.ids, batch.bases)]
    columns += [
        (strings.lengths.astype("<i8").tobytes(), 8 * edges) for strings in (batch.ids, batch.bases)
    ]
    head, *others = zip(
        *([data[a:b] for a, b in pairwise(at.tolist())] for data, at in columns), strict=True
    )
    if not others:
        return Leaves(head, None, ())
    hashes = [
        sha256(b"".join([sha256(data).digest() for data in content])).digest()
        for content in others[:-1]
    ]
    return Leaves(head, b"".join(hashes), others[-1])


class Fingerprint:
    """Hash over the reads, in order, and the settings that decide what a store holds."""

    def __init__(self, settings: str) -> None:
        self._root = sha256(settings.encode())
        self._leaf = [
            sha256() for _ in range(4)
        ]  # of a column each: how its reads come in pieces makes no difference
        self._before = self._leaf[
            :0
        ]  # the same as it was before the long read whose parts are coming in

    def add(self, leaves: Leaves) -> None:
        """Take in the next reads. What was taken in of a long one that is dropped is forgotten."""
        if leaves.part is not None:
            before = (
                [column.copy() for column in self._leaf] if leaves.part.is_first else self._before
            )
            self._before = [] if leaves.part.is_last else before
            if leaves.part.is_dropped:
                self._leaf = before or self._leaf
                return
        for column, data in zip(self._leaf, leaves.head, strict=True):
            column.update(data)
        if leaves.hashes is None:
            return
        self._root.update(self._leaf_hash() + leaves.hashes)
        self._leaf = [sha256(data) for data in leaves.tail]

    def hexdigest(self) -> str:
        """The fingerprint of what was taken in so far."""
        root = self._root.copy()
        root.update(self._leaf_hash())
        return root.hexdigest()

    def _leaf_hash(self) -> bytes:
        return sha256(b"".join([column.digest() for column in self._leaf])).digest()


# repeats among any number of digests: in one bucket of them after the other, so that few are held


class Bucket(NamedTuple):
    """Those of a file of digests, uint64 [n, 2], that equal ones can be among."""

    digests: Path
    number: int
    buckets: int  # a power of two

    @classmethod
    def all_of(cls, digests: Path) -> list[Self]:
        """All buckets of a file, a few at least, so that all workers have some; every digest is in one."""
        buckets = 1 << max(_FEWEST, -(-digests.stat().st_size // (16 * BUCKET)) - 1).bit_length()
        return [cls(digests, number, buckets) for number in range(buckets)]


def repeats_in(bucket: Bucket) -> NDArray[np.int64]:
    """The digests of a bucket that equal an earlier one: [n, 3], each by its place in the file, the place of the first
    of its kind, and how many-th of the kind it is, from 2."""
    held = [np.empty((0, 3), np.int64)]
    for low in range(0, bucket.digests.stat().st_size // 16, _READ_AT_ONCE):
        found = np.fromfile(bucket.digests, np.int64, 2 * _READ_AT_ONCE, offset=16 * low).reshape(
            -1, 2
        )
        own = np.flatnonzero(found[:, 0] & bucket.buckets - 1 == bucket.number)
        held.append(np.column_stack([found[own], low + own]))
    records = np.concatenate(held)
    # most are one of a kind: a quick sort by one half finds the rest, and only they are sorted with care
    order = np.argsort(records[:, 0])
    same = np.diff(records[order, 0]) == 0
    in_company = np.append(same, False) | np.append(False, same)[: len(order)]
    kinds = records[order[in_company]]
    kinds = kinds[np.lexsort(kinds.T[::-1])]
    begins = np.append(True, np.diff(kinds[:, :2], axis=0).any(axis=1))[: len(kinds)]
    first = np.flatnonzero(begins)[np.cumsum(begins) - 1]
    count = np.arange(len(kinds)) - first + 1
    repeats: NDArray[np.int64] = np.column_stack([kinds[:, 2], kinds[first, 2], count])[~begins]
    return repeats
