"""Digests of byte strings, and the fingerprint of reads: SHA-256 over ids and bases in their order.

For the fingerprint reads are hashed in leaves, and it is the hash over the leaves' hashes. A leaf ends with a read
whose id has a digest divisible by 64, so that where leaves end depends on the reads alone: however they are cut into
batches, whoever hashes a batch alone knows every leaf within it, and only what sticks out on both sides is left to its
neighbours.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Final, Self

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


@dataclass(frozen=True, slots=True)
class Leaves:
    """A batch, hashed as far as that can be done without its neighbours."""

    head: tuple[bytes, ...]  # up to the first end of a leaf; of all reads if there is none
    hashes: bytes | None  # of the leaves after, end to end; none if no leaf ends in this batch
    tail: tuple[bytes, ...]  # the reads after the last end of a leaf
    part: Part | None = None  # of a long read: which one this is


def leaves_of(batch: ReadBatch, id_digests: NDArray[np.uint64] | None = None) -> Leaves:
    """Hash a batch; `id_digests` [reads, 2] are those of its ids, where they are known."""
    id_digests = digests(batch.ids) if id_digests is None else id_digests
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
    """Entries of several 64-bit values in a file, read by stretches: none are held."""

    path: Path
    width: int  # values of one entry

    def __len__(self) -> int:
        return self.path.stat().st_size // (8 * self.width)

    def read(self, low: int, high: int) -> NDArray[np.int64]:
        """The entries `low` to `high`, fewer at the end: [n, width]."""
        values = np.fromfile(self.path, np.int64, (high - low) * self.width, offset=8 * low * self.width)
        return values.reshape(-1, self.width)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Those of a column of digests that equal ones can be among."""

    digests: Column  # [n, 2]
    number: int
    buckets: int  # a power of two

    @classmethod
    def all_of(cls, digests: Column) -> list[Self]:
        """All buckets of a column, a few at least, so that all workers have some; every digest is in one."""
        buckets = 1 << max(_FEWEST, -(-len(digests) // BUCKET) - 1).bit_length()
        return [cls(digests, number, buckets) for number in range(buckets)]

    def records(self) -> Iterator[tuple[NDArray[np.int64], bool]]:
        """Both halves of the digests and their places in the column: [n, 3]; and whether more come after, which is so
        only where a few digests make up much of the column."""
        held = [np.empty((0, 3), np.int64)]
        for low in range(0, len(self.digests), _READ_AT_ONCE):
            found = self.digests.read(low, low + _READ_AT_ONCE)
            own = np.flatnonzero(found[:, 0] & self.buckets - 1 == self.number)
            held.append(np.column_stack([found[own], low + own]))
            if sum(map(len, held)) > BUCKET:
                yield np.concatenate(held), True
                held = held[:1]
        yield np.concatenate(held), False


def repeats_in(bucket: Bucket) -> Column:
    """The entries of a bucket that equal an earlier one, in order: [n, 3], in a file.

    Each is its place in the column, the place of the first of its kind, and how many-th of the kind it is, from 2.
    """
    made = Column(bucket.digests.path.with_suffix(f".{bucket.number}"), 3)
    known = np.empty((0, 4), np.int64)  # the first of each kind, how many there were
    with made.path.open("wb") as out:
        for new, more in bucket.records():
            records = np.concatenate([known, np.pad(new, ((0, 0), (0, 1)), constant_values=1)])
            # most are one of a kind: a quick sort by one half finds the rest, and only they are sorted with care
            order = np.argsort(records[:, 0])
            same = np.diff(records[order, 0]) == 0
            in_company = np.append(same, False) | np.append(False, same)[: len(order)]
            kinds = records[order[in_company]]
            kinds = kinds[np.lexsort(kinds.T[2::-1])]
            begins = np.append(True, np.diff(kinds[:, :2], axis=0).any(axis=1))[: len(kinds)]
            first = np.flatnonzero(begins)[np.cumsum(begins) - 1]
            count = kinds[first, 3] + np.arange(len(kinds)) - first
            found = np.column_stack([kinds[:, 2], kinds[first, 2], count])[~begins]
            out.write(found[np.argsort(found[:, 0])].data)
            if more:
                counted = np.column_stack([kinds[begins, :3], count[np.append(begins, True)[1:]]])
                known = np.concatenate([records[order[~in_company]], counted])
    return made


class Repeats:
    """What repeats in a whole column of digests, of which each bucket has its file."""

    def __init__(self, buckets: list[Column], edges: list[int]) -> None:
        self._edges = edges  # where stretches of the column begin, and where the last ends
        self._found = [
            np.memmap(one.path, np.int64, "r").reshape(-1, 3) if len(one) else np.empty((0, 3), np.int64)
            for one in buckets
        ]

    def __len__(self) -> int:
        return sum(map(len, self._found))

    def of(self, stretch: int) -> NDArray[np.int64]:
        """The repeats within the stretch of this number: [n, 3] as of `repeats_in`, in order of their buckets."""
        low, high = self._edges[stretch : stretch + 2]
        return np.concatenate([one[bisect_left(one[:, 0], low) : bisect_left(one[:, 0], high)] for one in self._found])

    def first(self) -> tuple[int, int] | None:
        """The first place of all that repeats another, and that one; none where nothing repeats."""
        return min(((int(one[0, 0]), int(one[0, 1])) for one in self._found if len(one)), default=None)


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
