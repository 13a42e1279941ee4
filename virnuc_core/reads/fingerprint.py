"""Digests of byte strings, and the fingerprint of reads: SHA-256 over ids and bases in their order.

For the fingerprint reads are hashed in leaves, and it is the hash over the leaves' hashes. A leaf ends with a read
whose id has a digest divisible by 64, so that where leaves end depends on the reads alone: however they are cut into
batches, whoever hashes a batch alone knows every leaf within it, and only what sticks out on both sides is left to its
neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from mmh3 import mmh3_x64_128_digest
from numpy.typing import NDArray

from virnuc_core.reads.fast_parser import Part, ReadBatch

BUCKET: Final = 1 << 21  # digests looked for repeats at a time, about
_FEWEST: Final = 3  # rounded up to a power of two
_READ_AT_ONCE: Final = 1 << 17  # digests
_LEAF_READS: Final = np.uint64(64)  # on average


def digests(strings: Iterable[bytes]) -> NDArray[np.uint64]:
    """The MurmurHash3 (x64, 128 bit) of each string: uint64 [n, 2].

    It is no defence against someone who makes strings collide on purpose; by chance two do in 1 of 2¹²⁸ cases.
    """
    return np.frombuffer(b"".join(map(mmh3_x64_128_digest, strings)), "<u8").reshape(-1, 2)


@dataclass(frozen=True, slots=True)
class Leaves:
    """A batch, hashed as far as that can be done without its neighbours."""

    head: tuple[bytes, ...]  # up to the first end of a leaf; of all reads if there is none
    hashes: bytes | None  # of the leaves after, end to end; none if no leaf ends in this batch
    tail: tuple[bytes, ...]  # the reads after the last end of a leaf
    part: Part | None = None  # of a long read: which one this is


def leaves_of(batch: ReadBatch, id_digests: NDArray[np.uint64]) -> Leaves:
    """Hash a batch; `id_digests` [reads, 2] are those of its ids."""
    if (part := batch.part) is not None:  # id and lengths are known with the last
        length = (part.before + len(batch.bases.data)).to_bytes(8, "little")
        about = (batch.ids.data, len(batch.ids.data).to_bytes(8, "little"), length) if part.last else (b"", b"", b"")
        ends_leaf = part.last and bool(id_digests[0, 0] % _LEAF_READS == 0)
        head = (about[0], batch.bases.data, *about[1:])
        return Leaves(head, b"" if ends_leaf else None, (b"",) * 4, part)
    edges = np.concatenate([[0], np.flatnonzero(id_digests[:, 0] % _LEAF_READS == 0) + 1, [len(batch)]])
    columns = [(strings.data, strings.offsets[edges]) for strings in (batch.ids, batch.bases)]
    columns += [(strings.lengths.astype("<i8").tobytes(), 8 * edges) for strings in (batch.ids, batch.bases)]
    head, *others = zip(*([data[a:b] for a, b in pairwise(at.tolist())] for data, at in columns), strict=True)
    if not others:
        return Leaves(head, None, ())
    hashes = [sha256(b"".join([sha256(data).digest() for data in content])).digest() for content in others[:-1]]
    return Leaves(head, b"".join(hashes), others[-1])


class Fingerprint:
    """Hash over the reads, in order, and the settings that decide what a store holds."""

    def __init__(self, settings: str) -> None:
        self._root = sha256(settings.encode())
        self._leaf = [sha256() for _ in range(4)]  # of a column each: how its reads come in pieces makes no difference
        self._before = self._leaf[:0]  # the same as it was before the long read whose parts are coming in

    def add(self, leaves: Leaves) -> None:
        """Take in the next reads. What was taken in of a long one that is dropped is forgotten."""
        if leaves.part is not None:
            before = [column.copy() for column in self._leaf] if leaves.part.first else self._before
            self._before = [] if leaves.part.last else before
            if leaves.part.dropped:
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


# repeats among any number of digests: in one bucket of them after the other, so that memory is bounded


@dataclass(frozen=True, slots=True)
class Column:
    """Entries of several values in a file, read by stretches: none are held."""

    path: Path
    kind: type[np.generic]
    width: int  # values of one entry

    def __len__(self) -> int:
        return self.path.stat().st_size // (np.dtype(self.kind).itemsize * self.width)

    def read(self, low: int, high: int) -> NDArray[Any]:
        """The entries `low` to `high`, fewer at the end: [n, width]."""
        offset = low * self.width * np.dtype(self.kind).itemsize
        values: NDArray[Any] = np.fromfile(self.path, self.kind, (high - low) * self.width, offset=offset)
        return values.reshape(-1, self.width)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Those of a column of digests that equal ones can be among."""

    digests: Column  # [n, 2]
    number: int
    buckets: int  # a power of two

    @classmethod
    def all_of(cls, digests: Column) -> list[Bucket]:
        """All buckets of a column, a few at least, so that all workers have some; every digest is in one."""
        buckets = 1 << max(_FEWEST, -(-len(digests) // BUCKET) - 1).bit_length()
        return [cls(digests, number, buckets) for number in range(buckets)]

    def records(self) -> Iterator[tuple[NDArray[np.uint64], bool]]:
        """Both halves of the digests and their places in the column: uint64 [n, 3]; and whether more come after.

        That is so only where a few digests make up much of the column.
        """
        held, size = [np.empty((0, 3), np.uint64)], 0
        for low in range(0, len(self.digests), _READ_AT_ONCE):
            found = self.digests.read(low, low + _READ_AT_ONCE)
            own = np.flatnonzero(found[:, 0] & np.uint64(self.buckets - 1) == self.number)
            held.append(np.column_stack([found[own], (low + own).astype(np.uint64)]))
            size += len(own)
            if size > BUCKET:
                yield np.concatenate(held), True
                held, size = [np.empty((0, 3), np.uint64)], 0
        yield np.concatenate(held), False


def repeats_in(bucket: Bucket) -> Column:
    """The entries of a bucket that equal an earlier one, in order: int64 [n, 3], in a file.

    Each is its place in the column, the place of the first of its kind, and how many-th of the kind it is, from 2.
    """
    made = Column(bucket.digests.path.with_suffix(f".{bucket.number}"), np.int64, 3)
    known, counted = np.empty((0, 3), np.uint64), np.empty(0, np.int64)  # the first of each kind, how many there were
    with made.path.open("wb") as out:
        for new, more in bucket.records():
            records = np.concatenate([known, new]) if len(known) else new
            # most are one of a kind: a quick sort by one half finds the rest, and only they are sorted with care
            order = np.argsort(records[:, 0])
            low = records[order, 0]
            same = low[1:] == low[:-1]
            in_company = np.zeros(len(order), bool)
            in_company[1:] |= same
            in_company[:-1] |= same
            places = order[in_company]
            places = places[np.lexsort(records[places].T[::-1])]
            kinds, before = records[places], np.append(counted, np.ones(len(new), np.int64))[places]
            begins = np.ones(len(kinds), bool)
            begins[1:] = (kinds[1:, :2] != kinds[:-1, :2]).any(axis=1)
            first = np.maximum.accumulate(np.where(begins, np.arange(len(kinds)), 0))
            count = before[first] + np.arange(len(kinds)) - first
            again = np.flatnonzero(~begins)
            found = np.column_stack([kinds[again, 2], kinds[first[again], 2], count[again]]).astype(np.int64)
            out.write(found[np.argsort(found[:, 0])].data)
            if more:
                ends = np.append(begins, True)[1:]  # none where no two are alike
                alone = order[~in_company]
                known = np.concatenate([records[alone], kinds[begins]])
                counted = np.append(np.append(counted, np.ones(len(new), np.int64))[alone], count[ends])
    return made


class Repeats:
    """What repeats in a whole column of digests, kept in a file by stretches of the column."""

    def __init__(self, path: Path, edges: list[int]) -> None:
        self._column = Column(path, np.int64, 3)
        self._edges = edges  # where stretches begin, and where the last ends
        self._bounds: list[NDArray[np.int64]] = []  # of each bucket: where its repeats of each stretch begin
        path.touch()

    def __len__(self) -> int:
        return len(self._column)

    def add(self, repeats: Column) -> None:
        """Keep the repeats of one more bucket, whose file goes."""
        bounds = np.full(len(self._edges), len(self))
        with self._column.path.open("ab") as file:
            for low in range(0, len(repeats), _READ_AT_ONCE):
                found = repeats.read(low, low + _READ_AT_ONCE)
                bounds += np.searchsorted(found[:, 0], self._edges)
                file.write(found.data)
        self._bounds.append(bounds)
        repeats.path.unlink()

    def of(self, stretch: int) -> NDArray[np.int64]:
        """The repeats within the stretch of this number: [n, 3] as of `repeats_in`, in order of their buckets."""
        return np.concatenate([self._column.read(at[stretch], at[stretch + 1]) for at in self._bounds])

    def first(self) -> tuple[int, int] | None:
        """The first place of all that repeats another, and that one; none where nothing repeats."""
        found = [self._column.read(at[0], at[0] + 1)[0].tolist() for at in self._bounds if at[-1] > at[0]]
        return min(((place, first) for place, first, _ in found), default=None)


@dataclass(frozen=True, slots=True)
class Repeated:
    """Which rows repeat an earlier one."""

    words: NDArray[np.uint64]  # a bit for each row, lowest first
    before: NDArray[np.int64]  # repeating rows before each word

    def uniques_before(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many rows before each of `rows` are the first of their kind: the unique of a row that is one itself."""
        word = rows >> 6
        lower = (np.uint64(1) << (rows & 63).astype(np.uint64)) - np.uint64(1)
        uniques: NDArray[np.int64] = rows - self.before[word] - np.bitwise_count(self.words[word] & lower)
        return uniques


def share_a_digest(pair: tuple[Bucket, Bucket]) -> bool:
    """Whether a digest stands in the same bucket of both columns."""
    one, other = (np.concatenate([some for some, _ in bucket.records()]) for bucket in pair)
    one, other = one[np.isin(one[:, 0], other[:, 0])], other[np.isin(other[:, 0], one[:, 0])]
    return not {*map(tuple, one[:, :2].tolist())}.isdisjoint(map(tuple, other[:, :2].tolist()))
