"""Identical sequences and ids: 128-bit digests of many byte strings at once, and the repeats among any number of them.

The digest is MurmurHash3 (x64, 128 bit), worked out for all strings side by side: step by step along the strings, in
arrays across them. It is no defence against someone who makes strings collide on purpose; by chance two do in 1 of 2¹²⁸
cases. Strings over a kilobyte, which are rare, get BLAKE2b, so that one of them does not widen the table of all.
Digests are kept in a file, and repeats are looked for in one bucket of them after the other, so that memory is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from virnuc_core.reads.fast_parser import offsets_of

STRETCH: Final = 1 << 17  # entries of a column treated together
BUCKET: Final = 1 << 21  # digests looked for repeats at a time, about
Words = NDArray[np.uint64]

LONGEST: Final = 1024  # bytes; longer strings are digested one by one
_BLOCK: Final = 16
_C1: Final = np.uint64(0x87C37B91114253D5)
_C2: Final = np.uint64(0x4CF5AD432745937F)
_ADD1: Final = np.uint64(0x52DCE729)
_ADD2: Final = np.uint64(0x38495AB5)
_FINAL1: Final = np.uint64(0xFF51AFD7ED558CCD)
_FINAL2: Final = np.uint64(0xC4CEB9FE1A85EC53)
_FIVE: Final = np.uint64(5)


def digests(letters: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Words:
    """The digest of each `letters[offsets[i]:offsets[i + 1]]`: uint64 [n, 2]."""
    lengths = np.diff(offsets)
    if lengths.max(initial=0) <= LONGEST:
        return _murmur(letters, offsets[:-1], lengths)
    out = np.empty((len(lengths), 2), np.uint64)
    short = lengths <= LONGEST
    out[short] = _murmur(letters, offsets[:-1][short], lengths[short])
    for i in np.flatnonzero(~short).tolist():
        made = blake2b(letters[offsets[i] : offsets[i + 1]].tobytes(), digest_size=16).digest()
        out[i] = np.frombuffer(made, "<u8")
    return out


def digest_each(content: list[bytes]) -> Words:
    """The digest of each: uint64 [n, 2]."""
    lengths = np.fromiter(map(len, content), np.int64, len(content))
    return digests(np.frombuffer(b"".join(content), np.uint8), offsets_of(lengths))


def _murmur(letters: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Words:
    n, blocks = len(starts), -(-int(lengths.max(initial=0)) // _BLOCK)
    h1, h2 = np.zeros(n, np.uint64), np.zeros(n, np.uint64)
    if blocks:
        words = _words(letters, starts, lengths, blocks)
        whole = lengths // _BLOCK  # blocks that are full; the one after is the tail, if anything is left
        everywhere = int(whole.min())
        for block in range(blocks):
            _mix_in(words[2 * block], words[2 * block + 1], h1, h2, None if block < everywhere else whole > block)
    length = lengths.astype(np.uint64)
    h1 ^= length
    h2 ^= length
    h1 += h2
    h2 += h1
    _finalise(h1)
    _finalise(h2)
    h1 += h2
    h2 += h1
    return np.stack([h1, h2], axis=1)


def _words(letters: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64], blocks: int) -> Words:
    """The strings as words, filled up with zeros: uint64 [words, n], so that one step reads one row."""
    width = blocks * _BLOCK
    room = np.concatenate([letters, np.zeros(width, np.uint8)])
    table = sliding_window_view(room, width)[starts]
    table *= np.arange(width, dtype=np.int32) < lengths.astype(np.int32)[:, None]
    return np.ascontiguousarray(table.view("<u8").T)


def _mix_in(k1: Words, k2: Words, h1: Words, h2: Words, full: NDArray[np.bool_] | None) -> None:
    """Take one block into the state; where it is not `full` it is a tail, or zeros, which change nothing."""
    k1 *= _C1
    _rotate(k1, 31)
    k1 *= _C2
    k2 *= _C2
    _rotate(k2, 33)
    k2 *= _C1
    h1 ^= k1
    if full is None:
        _rotate(h1, 27)
        h1 += h2
        h1 *= _FIVE
        h1 += _ADD1
        h2 ^= k2
        _rotate(h2, 31)
        h2 += h1
        h2 *= _FIVE
        h2 += _ADD2
        return
    h2 ^= k2
    before = h2 ^ k2  # of a full block, h1 is mixed before h2 takes its word
    mixed1 = h1.copy()
    _rotate(mixed1, 27)
    mixed1 = (mixed1 + before) * _FIVE + _ADD1
    mixed2 = h2.copy()
    _rotate(mixed2, 31)
    mixed2 = (mixed2 + mixed1) * _FIVE + _ADD2
    np.copyto(h1, mixed1, where=full)
    np.copyto(h2, mixed2, where=full)


def _rotate(values: Words, bits: int) -> None:
    low = values >> np.uint64(64 - bits)
    values <<= np.uint64(bits)
    values |= low


def _finalise(values: Words) -> None:
    values ^= values >> np.uint64(33)
    values *= _FINAL1
    values ^= values >> np.uint64(33)
    values *= _FINAL2
    values ^= values >> np.uint64(33)


@dataclass(frozen=True, slots=True)
class Column:
    """Values in a file, read by stretches: none are held."""

    path: Path
    kind: type[np.generic]
    width: int = 1  # values of one entry

    def __len__(self) -> int:
        return self.path.stat().st_size // (np.dtype(self.kind).itemsize * self.width)

    def read(self, low: int, high: int) -> NDArray[Any]:
        """The entries `low` to `high`, fewer at the end: [n], or [n, width] where an entry has several values."""
        offset = low * self.width * np.dtype(self.kind).itemsize
        values: NDArray[Any] = np.fromfile(self.path, self.kind, max(high - low, 0) * self.width, offset=offset)
        return values if self.width == 1 else values.reshape(-1, self.width)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Those of a column of digests that equal ones can be among."""

    digests: Column  # [n, 2]
    number: int
    buckets: int  # a power of two

    @classmethod
    def all_of(cls, digests: Column) -> list[Bucket]:
        """All buckets of a column; every digest is in one."""
        buckets = 1 << max(0, -(-len(digests) // BUCKET) - 1).bit_length()
        return [cls(digests, number, buckets) for number in range(buckets)]

    def records(self) -> NDArray[np.uint64]:
        """Both halves of the digests and their places in the column: uint64 [n, 3]."""
        return np.concatenate([np.empty((0, 3), np.uint64), *self._records()])

    def _records(self) -> Iterator[NDArray[np.uint64]]:
        for low in range(0, len(self.digests), STRETCH):
            found = self.digests.read(low, low + STRETCH)
            own = np.flatnonzero(found[:, 0] & np.uint64(self.buckets - 1) == self.number)
            yield np.column_stack([found[own], (low + own).astype(np.uint64)])


def repeats_in(bucket: Bucket) -> NDArray[np.int64]:
    """The entries of a bucket that equal an earlier one, in order: int64 [n, 3].

    Each is its place in the column, the place of the first of its kind, and how many-th of the kind it is, from 2.
    """
    again, first, number = _repeats(bucket.records())
    order = np.argsort(again)
    return np.column_stack([again, first, number])[order]


def _repeats(records: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Which records repeat an earlier one: their index, the index of the first of the kind, and how many-th they are.

    `records` [n, 3]: two halves of a digest and an index, in any order; earlier is what has the smaller index. The
    first of a kind is number 1, and not listed.
    """
    # most are one of a kind: a quick sort by one half finds the rest, and only they are sorted with care
    order = np.argsort(records[:, 0])
    low = records[order, 0]
    alike = low[1:] == low[:-1]
    in_company = np.zeros(len(order), bool)
    in_company[1:] |= alike
    in_company[:-1] |= alike
    records = records[order[in_company]]
    order = np.lexsort((records[:, 2], records[:, 1], records[:, 0]))
    low, high, index = (records[order, column] for column in range(3))
    begins = np.ones(len(order), bool)
    begins[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    start_of = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    again = np.flatnonzero(~begins)
    index = index.astype(np.int64)
    return index[again], index[start_of[again]], again - start_of[again] + 1


class Repeats:
    """What repeats in a whole column, kept in a file by stretches of the column."""

    def __init__(self, path: Path) -> None:
        self._column = Column(path, np.int64, 3)
        self._bounds: list[NDArray[np.int64]] = []  # of each bucket: where its repeats of each stretch begin
        path.touch()

    def __len__(self) -> int:
        return len(self._column)

    def add(self, bucket: Bucket, found: NDArray[np.int64]) -> None:
        """Keep the repeats of one more bucket."""
        edges = np.arange(0, len(bucket.digests) + STRETCH, STRETCH)
        self._bounds.append(len(self) + np.searchsorted(found[:, 0], edges))
        with self._column.path.open("ab") as file:
            file.write(found.data)

    def of(self, stretch: int) -> NDArray[np.int64]:
        """The repeats within the stretch of this number: [n, 3] as of `repeats_in`, in order of their buckets."""
        read = self._column.read
        return np.concatenate([read(at[stretch], at[stretch + 1]) for at in self._bounds])

    def first(self) -> NDArray[np.int64] | None:
        """The first of all repeats: [3]; none where nothing repeats."""
        found = [self._column.read(at[0], at[0] + 1)[0] for at in self._bounds if at[-1] > at[0]]
        return min(found, key=lambda repeat: int(repeat[0]), default=None)


def share_a_digest(pair: tuple[Bucket, Bucket]) -> bool:
    """Whether a digest stands in the same bucket of both columns."""
    one, other = (bucket.records() for bucket in pair)
    one, other = one[np.isin(one[:, 0], other[:, 0])], other[np.isin(other[:, 0], one[:, 0])]
    return not {*map(tuple, one[:, :2].tolist())}.isdisjoint(map(tuple, other[:, :2].tolist()))
