"""Digest byte strings, find those that repeat, and compute the fingerprint of reads.

The fingerprint is a SHA-256 over the ids and bases of all reads in their order. Reads are hashed in
leaves, and the fingerprint is the hash over the hashes of the leaves. A leaf ends with a read whose
id has a digest divisible by 64. So the reads alone determine where leaves end, however the reads
are cut into batches. Whoever hashes a batch hashes each leaf that lies within it; only the reads
before the first and after the last leaf are left to be joined with those of the neighbours.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple, Self

import numpy as np
from mmh3 import mmh3_x64_128_digest
from numpy.typing import NDArray

from virnuc_core.reads.fast_parser import Part, ReadBatch

BUCKET: Final = 1 << 21  # digests that are searched for repeats at a time, about
_MIN_BUCKETS: Final = 3  # rounded up to a power of two
_READ_AT_ONCE: Final = 1 << 17  # digests
_DIGEST_BYTES: Final = 16
_LEAF_READS: Final = np.uint64(64)  # on average


def digests(strings: Iterable[bytes]) -> NDArray[np.uint64]:
    """Return the MurmurHash3 (x64, 128 bit) of each string: uint64 [n, 2].

    This is not a cryptographic hash: somebody could construct two strings with equal digests.
    """
    return np.frombuffer(b"".join(map(mmh3_x64_128_digest, strings)), "<u8").reshape(-1, 2)


class LeafContent(NamedTuple):
    """The reads of a leaf, or of a stretch of one, as columns of bytes."""

    ids: bytes = b""
    bases: bytes = b""
    id_lengths: bytes = b""  # little-endian int64 each
    base_lengths: bytes = b""


_NO_READS: Final = LeafContent()


class Leaves(NamedTuple):
    """The hashes of one batch of reads.

    A leaf is a group of consecutive reads that is hashed together (see the module). Leaves that lie
    within the batch are hashed. Reads before and after them belong to leaves that continue in the
    neighbouring batches, so their content is kept.
    """

    head: LeafContent  # up to the first end of a leaf; all reads if there is none
    hashes: bytes | None  # of the leaves after it, end to end; None if no leaf ends in this batch
    tail: LeafContent = _NO_READS  # the reads after the last end of a leaf
    part: Part | None = None  # the position within a long read, if this is a part of one


def hash_leaves(batch: ReadBatch, id_digests: NDArray[np.uint64] | None = None) -> Leaves:
    """Hash the leaves of a batch. A leaf is a group of consecutive reads that is hashed together.

    Args:
        batch: Reads, or a part of a long one.
        id_digests: The digests of the ids, if they are known: uint64 [reads, 2].
    """
    if id_digests is None:
        id_digests = digests(batch.ids)
    ends_leaf: NDArray[np.bool_] = id_digests[:, 0] % _LEAF_READS == 0
    if batch.part is not None:
        return _hash_part(batch, batch.part, bool(ends_leaf[0]))
    return _hash_reads(batch, ends_leaf)


def _hash_part(batch: ReadBatch, part: Part, ends_leaf: bool) -> Leaves:
    """Return the content of a part of a long read.

    Only the last part adds the id and the lengths, because only then the total length is known.

    Args:
        batch: The part.
        part: Its position within the long read.
        ends_leaf: The long read is the last one of its leaf.
    """
    bases = batch.bases.data
    if not part.is_last:
        return Leaves(LeafContent(bases=bases), hashes=None, part=part)
    read_id = batch.ids.data
    content = LeafContent(
        ids=read_id,
        bases=bases,
        id_lengths=len(read_id).to_bytes(8, "little"),
        base_lengths=(part.n_bases_before + len(bases)).to_bytes(8, "little"),
    )
    return Leaves(content, hashes=b"" if ends_leaf else None, part=part)


def _hash_reads(batch: ReadBatch, ends_leaf: NDArray[np.bool_]) -> Leaves:
    """Hash the leaves that lie within a batch of whole reads.

    Args:
        batch: The reads.
        ends_leaf: Marks the reads that are the last one of a leaf: bool [reads].
    """
    leaf_ends = np.flatnonzero(ends_leaf) + 1
    edges = np.concatenate([[0], leaf_ends, [len(batch)]])
    id_edges = batch.ids.offsets[edges].tolist()
    base_edges = batch.bases.offsets[edges].tolist()
    id_lengths = batch.ids.lengths.astype("<i8")
    base_lengths = batch.bases.lengths.astype("<i8")
    contents: list[LeafContent] = []
    for i, (start, end) in enumerate(pairwise(edges.tolist())):
        content = LeafContent(
            ids=batch.ids.data[id_edges[i] : id_edges[i + 1]],
            bases=batch.bases.data[base_edges[i] : base_edges[i + 1]],
            id_lengths=id_lengths[start:end].tobytes(),
            base_lengths=base_lengths[start:end].tobytes(),
        )
        contents.append(content)
    if len(contents) == 1:
        return Leaves(contents[0], hashes=None)
    hashes = [_LeafHash(content).digest() for content in contents[1:-1]]
    return Leaves(contents[0], b"".join(hashes), contents[-1])


class _LeafHash:
    """The hash of a leaf, a group of consecutive reads. The reads may be added in several steps.

    Each column (ids, bases and their lengths) is hashed separately.
    """

    def __init__(self, content: LeafContent = _NO_READS) -> None:
        """Begin with the given reads."""
        self._columns = [sha256(column) for column in content]

    def update(self, content: LeafContent) -> None:
        """Add the next reads of the leaf."""
        for column_hash, column in zip(self._columns, content, strict=True):
            column_hash.update(column)

    def copy(self) -> "_LeafHash":
        """Return an independent copy of the current state."""
        copied = _LeafHash()
        copied._columns = [column_hash.copy() for column_hash in self._columns]
        return copied

    def digest(self) -> bytes:
        """Return the hash over the hashes of the columns."""
        return sha256(b"".join([column_hash.digest() for column_hash in self._columns])).digest()


class Fingerprint:
    """The hash over all reads in their order, and over the settings that change a store."""

    def __init__(self, settings: str) -> None:
        """Begin without reads. `settings` names all settings that change the content of a store."""
        self._root = sha256(settings.encode())
        self._leaf = _LeafHash()  # the leaf that has not ended yet
        self._leaf_before_long_read: _LeafHash | None = None  # while parts of one come in

    def add(self, leaves: Leaves) -> None:
        """Add the next reads, in input order.

        A long read comes in parts. If its last part is marked as dropped, the record was broken,
        and the state before its first part is restored.
        """
        part = leaves.part
        if part is not None:
            if part.is_first:
                self._leaf_before_long_read = self._leaf.copy()
            leaf_before = self._leaf_before_long_read
            if part.is_last:
                self._leaf_before_long_read = None
            if part.is_dropped:
                self._leaf = leaf_before or self._leaf
                return
        self._leaf.update(leaves.head)
        if leaves.hashes is not None:
            # A leaf ends in this batch: its hash and those of the following leaves are final.
            self._root.update(self._leaf.digest() + leaves.hashes)
            self._leaf = _LeafHash(leaves.tail)

    def hexdigest(self) -> str:
        """Return the fingerprint of the reads that were added so far."""
        root = self._root.copy()
        root.update(self._leaf.digest())
        return root.hexdigest()


@dataclass(frozen=True)
class Repeats:
    """Strings that equal an earlier one, as columns."""

    index: NDArray[np.int64]  # [n] place of the string among all
    first_index: NDArray[np.int64]  # [n] place of the first string that equals it
    number: NDArray[np.int64]  # [n] it is the second (2), third (3), … of its kind

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> "Repeats":
        """Return the given rows of all columns."""
        return Repeats(self.index[rows], self.first_index[rows], self.number[rows])

    @classmethod
    def concatenate(cls, repeats: Sequence["Repeats"]) -> "Repeats":
        """Join the repeats of several buckets, sorted by the position of the string."""
        joined = cls(
            np.concatenate([some.index for some in repeats]),
            np.concatenate([some.first_index for some in repeats]),
            np.concatenate([some.number for some in repeats]),
        )
        return joined[np.argsort(joined.index)]


class Bucket(NamedTuple):
    """A share of the digests in a file; equal digests are in the same bucket.

    Repeats are searched in one bucket after the other, so that few digests are in memory.
    """

    digests: Path  # uint64 [n, 2]
    number: int
    n_buckets: int  # a power of two

    @classmethod
    def all_of(cls, digests: Path) -> list[Self]:
        """Return all buckets of a file of digests, each with about `BUCKET` digests.

        There are at least a few buckets, so that several workers can search at the same time.
        """
        n_digests = digests.stat().st_size // _DIGEST_BYTES
        n_needed = max(_MIN_BUCKETS, -(-n_digests // BUCKET))
        n_buckets = 1 << (n_needed - 1).bit_length()  # the next power of two
        return [cls(digests, number, n_buckets) for number in range(n_buckets)]


class _Digests(NamedTuple):
    """Digests with their places in a file, as columns."""

    low: NDArray[np.int64]  # [n] first half
    high: NDArray[np.int64]  # [n] second half
    place: NDArray[np.int64]  # [n] in the file

    def take(self, rows: NDArray[np.int64]) -> "_Digests":
        """Return the given rows."""
        return _Digests(self.low[rows], self.high[rows], self.place[rows])


def find_repeats(bucket: Bucket) -> Repeats:
    """Return the digests of a bucket that are equal to an earlier digest."""
    members = _read_bucket(bucket)
    # Most digests are unique. Sorting by one half of the digest is fast and leaves few candidates.
    # Only these are sorted by the whole digest and their position.
    order = np.argsort(members.low)
    equals_next = np.diff(members.low[order]) == 0
    is_candidate = np.zeros(len(order), bool)
    is_candidate[1:] |= equals_next
    is_candidate[:-1] |= equals_next
    candidates = members.take(order[is_candidate])
    candidates = candidates.take(
        np.lexsort((candidates.place, candidates.high, candidates.low))  # the last key is primary
    )
    n = len(candidates.place)
    is_first = np.ones(n, bool)
    is_first[1:] = (np.diff(candidates.low) != 0) | (np.diff(candidates.high) != 0)
    first_row = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
    number = np.arange(n) - first_row + 1
    is_repeat = ~is_first
    return Repeats(
        index=candidates.place[is_repeat],
        first_index=candidates.place[first_row][is_repeat],
        number=number[is_repeat],
    )


def _read_bucket(bucket: Bucket) -> _Digests:
    """Read the digests of a bucket with their places."""
    n_digests = bucket.digests.stat().st_size // _DIGEST_BYTES
    low = [np.empty(0, np.int64)]
    high = [np.empty(0, np.int64)]
    place = [np.empty(0, np.int64)]
    for start in range(0, n_digests, _READ_AT_ONCE):
        stretch = np.fromfile(
            bucket.digests, np.int64, 2 * _READ_AT_ONCE, offset=_DIGEST_BYTES * start
        ).reshape(-1, 2)
        bucket_of_digest = stretch[:, 0] & (bucket.n_buckets - 1)
        members = np.flatnonzero(bucket_of_digest == bucket.number)
        low.append(stretch[members, 0])
        high.append(stretch[members, 1])
        place.append(start + members)
    return _Digests(np.concatenate(low), np.concatenate(high), np.concatenate(place))
