"""Compute the fingerprint of the reads of a run, and find repeated strings by their digests.

The fingerprint is one SHA-256 for the ids and bases of all reads in order. It must not depend on
how the reads were split into batches for the workers. So it is a hash tree with two levels:

- Consecutive reads form a group, called a leaf. A leaf ends with a read whose id has a digest
  divisible by 64. So the reads alone determine where a leaf ends.
- A worker hashes the leaves that lie within its batch. The reads before the first and after the
  last such leaf are returned as they are, and are joined with those of the neighbouring batches.
- The fingerprint is the hash of the hashes of all leaves.
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

# About how many digests are searched for repeats at a time; they take about 50 MB of memory.
BUCKET: Final = 1 << 21
_MIN_BUCKETS: Final = 3  # rounded up to 4, so that several workers have something to do
_READ_AT_ONCE: Final = 1 << 17  # digests that are read from the file at a time
_DIGEST_BYTES: Final = 16  # of a 128-bit hash
_LEAF_READS: Final = np.uint64(64)  # average number of reads in a leaf


def digests(strings: Iterable[bytes]) -> NDArray[np.uint64]:
    """Return the MurmurHash3 (x64, 128 bit) of each string: uint64 [n, 2].

    This is not a cryptographic hash: different strings with equal hashes can be constructed.

    Args:
        strings: The strings, such as read ids or DNA.
    """
    return np.frombuffer(b"".join(map(mmh3_x64_128_digest, strings)), "<u8").reshape(-1, 2)


class LeafContent(NamedTuple):
    """The reads of a leaf (a group of reads that is hashed together), or some of them.

    Each field has the values of all reads, concatenated.
    """

    ids: bytes = b""
    bases: bytes = b""
    id_lengths: bytes = b""  # little-endian int64
    base_lengths: bytes = b""  # little-endian int64


_NO_READS: Final = LeafContent()


class Leaves(NamedTuple):
    """What one batch of reads contributes to the fingerprint.

    A leaf is a group of reads that is hashed together. Leaves that lie within the batch are hashed.
    The first and the last leaf may continue in the neighbouring batches, so their reads are kept.
    """

    head: LeafContent  # reads up to the first end of a leaf; all reads if no leaf ends here
    # Hashes of the leaves that lie within the batch, concatenated. None if no leaf ends here.
    hashes: bytes | None
    tail: LeafContent = _NO_READS  # reads after the last end of a leaf
    part: Part | None = None  # the position within a long read; None for whole reads


def hash_leaves(batch: ReadBatch, id_digests: NDArray[np.uint64] | None = None) -> Leaves:
    """Compute what a batch of reads contributes to the fingerprint.

    Reads are hashed in groups, called leaves. A leaf ends with a read whose id has a digest
    divisible by 64.

    Args:
        batch: Whole reads, or a part of a long read.
        id_digests: The digests of the ids if the caller has them: uint64 [reads, 2]. If None, they
            are computed.

    Returns:
        Hashes of the leaves that lie within the batch, and the reads before and after them. Pass it
        to `Fingerprint.add` in the order of the batches.
    """
    if id_digests is None:
        id_digests = digests(batch.ids)
    ends_leaf: NDArray[np.bool_] = id_digests[:, 0] % _LEAF_READS == 0
    if batch.part is not None:
        return _hash_part(batch, batch.part, bool(ends_leaf[0]))
    return _hash_reads(batch, ends_leaf)


def _hash_part(batch: ReadBatch, part: Part, ends_leaf: bool) -> Leaves:
    """Return what a part of a long read contributes to the fingerprint: its bases.

    The last part also contributes the id and the lengths, because only then the length is known.

    Args:
        batch: The part.
        part: Its position within the read.
        ends_leaf: Whether the read is the last read of a leaf (a group that is hashed together).
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
    # One read cannot hold a whole leaf, so there is no hash. It may be the last read of a leaf.
    hashes = b"" if ends_leaf else None
    return Leaves(content, hashes, part=part)


def _hash_reads(batch: ReadBatch, ends_leaf: NDArray[np.bool_]) -> Leaves:
    """Hash the leaves (groups of reads that are hashed together) within a batch of whole reads.

    Args:
        batch: The reads.
        ends_leaf: Which reads are the last read of a leaf: bool [reads].

    Returns:
        The hashes of the inner leaves, and the reads of the first and last leaf, which may continue
        in the neighbouring batches.
    """
    # Split the columns of the batch where leaves end.
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
    no_leaf_ends_here = len(contents) == 1
    if no_leaf_ends_here:
        return Leaves(contents[0], hashes=None)
    hashes = [_LeafHash(content).digest() for content in contents[1:-1]]
    return Leaves(contents[0], b"".join(hashes), contents[-1])


class _LeafHash:
    """Computes the hash of a leaf, a group of consecutive reads.

    Each column (ids, bases, lengths) has its own hash, so that the reads can be added step by step.
    """

    def __init__(self, content: LeafContent = _NO_READS) -> None:
        self._columns = [sha256(column) for column in content]

    def update(self, content: LeafContent) -> None:
        """Add the next reads of the group to its hash.

        Args:
            content: The reads. Some columns may be empty: a part of a long read has only bases.
        """
        for column_hash, column in zip(self._columns, content, strict=True):
            column_hash.update(column)

    def copy(self) -> "_LeafHash":
        """Return a copy of the current state, which later calls of `update` do not change."""
        duplicate = _LeafHash()
        duplicate._columns = [column_hash.copy() for column_hash in self._columns]
        return duplicate

    def digest(self) -> bytes:
        """Return the hash of the hashes of all columns."""
        return sha256(b"".join([column_hash.digest() for column_hash in self._columns])).digest()


class Fingerprint:
    """Computes the hash of all reads in order, and of the settings that change a store."""

    def __init__(self, settings: str) -> None:
        """Begin with no reads.

        Args:
            settings: The settings that change the contents of a store, as text.
        """
        self._root = sha256(settings.encode())
        self._leaf = _LeafHash()  # the group of reads that is not complete yet
        # The state of `_leaf` before the parts of the current long read were added.
        self._leaf_before_long_read: _LeafHash | None = None

    def add(self, leaves: Leaves) -> None:
        """Add what the next batch of reads contributes.

        Reads are hashed in groups, called leaves. `_leaf` is the group that is not complete yet. It
        goes on with the first reads of the batch, up to the first end of a leaf.

        If the last part of a long read is marked as dropped, the state before the first part of the
        read is restored, as if the read had never been there.

        Args:
            leaves: The result of `hash_leaves` for the batch.
        """
        part = leaves.part
        if part is not None:
            if part.is_first:
                self._leaf_before_long_read = self._leaf.copy()
            leaf_before = self._leaf_before_long_read
            if part.is_last:
                self._leaf_before_long_read = None
            if part.is_dropped:
                if leaf_before is not None:  # None: no part of this read was added
                    self._leaf = leaf_before
                return
        self._leaf.update(leaves.head)
        if leaves.hashes is not None:
            self._root.update(self._leaf.digest() + leaves.hashes)
            self._leaf = _LeafHash(leaves.tail)

    def hexdigest(self) -> str:
        """Return the fingerprint of the reads that were added so far, as hexadecimal digits.

        More reads can be added afterwards.
        """
        root = self._root.copy()
        root.update(self._leaf.digest())
        return root.hexdigest()


@dataclass(frozen=True)
class Repeats:
    """Strings of a list that are equal to an earlier string, as columns."""

    index: NDArray[np.int64]  # [n] index of the repeated string in the list
    first_index: NDArray[np.int64]  # [n] index of the first string that is equal
    number: NDArray[np.int64]  # [n] 2 for the second equal string, 3 for the third, …

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> "Repeats":
        return Repeats(self.index[rows], self.first_index[rows], self.number[rows])

    @classmethod
    def concatenate(cls, repeats: Sequence["Repeats"]) -> "Repeats":
        """Join the repeats that were found in several buckets, and sort them by `index`.

        Args:
            repeats: The repeats of each bucket, at least one bucket.
        """
        all_repeats = cls(
            np.concatenate([repeats_of_bucket.index for repeats_of_bucket in repeats]),
            np.concatenate([repeats_of_bucket.first_index for repeats_of_bucket in repeats]),
            np.concatenate([repeats_of_bucket.number for repeats_of_bucket in repeats]),
        )
        return all_repeats[np.argsort(all_repeats.index)]


class Bucket(NamedTuple):
    """A subset of the digests in a file, chosen by their last bits.

    Equal digests are always in the same bucket. So repeats can be searched in each bucket alone,
    and only the digests of one bucket must be in memory.
    """

    digests: Path  # the file: uint64 [n, 2]
    number: int  # the last bits of the digests in this bucket
    n_buckets: int  # a power of two

    @classmethod
    def all_of(cls, digests: Path) -> list[Self]:
        """Return the buckets of a file of digests: at least four, so that workers can share them.

        The number of buckets is a power of two, and a bucket has about `BUCKET` digests at most.

        Args:
            digests: The file: uint64 [n, 2].
        """
        n_digests = digests.stat().st_size // _DIGEST_BYTES
        n_needed = max(_MIN_BUCKETS, -(-n_digests // BUCKET))  # rounded up
        n_buckets = 1 << (n_needed - 1).bit_length()  # the next power of two
        return [cls(digests, number, n_buckets) for number in range(n_buckets)]


class _Digests(NamedTuple):
    """Digests and their positions in a file, as columns."""

    low: NDArray[np.int64]  # [n] first 8 bytes of each digest
    high: NDArray[np.int64]  # [n] last 8 bytes
    position: NDArray[np.int64]  # [n] index of each digest in the file

    def take(self, rows: NDArray[np.int64]) -> "_Digests":
        """Return the given rows of all columns."""
        return _Digests(self.low[rows], self.high[rows], self.position[rows])


def find_repeats(bucket: Bucket) -> Repeats:
    """Find the digests of a bucket that are equal to an earlier digest in the file.

    Args:
        bucket: The digests to compare with each other. Their file is read.

    Returns:
        The repeats, sorted by digest. Their indices count all digests of the file.
    """
    members = _read_bucket(bucket)

    # Most digests are unique. A fast sort by one half finds the few whose half occurs twice.
    order = np.argsort(members.low)
    equals_next = np.diff(members.low[order]) == 0
    is_candidate = np.zeros(len(order), bool)
    is_candidate[1:] |= equals_next
    is_candidate[:-1] |= equals_next
    candidates = members.take(order[is_candidate])

    # Sort only these by the whole digest, and equal digests by their position in the file.
    # `np.lexsort` takes the most important key last.
    candidates = candidates.take(np.lexsort((candidates.position, candidates.high, candidates.low)))

    # Equal digests are adjacent now. The first row of each group is not a repeat.
    n = len(candidates.position)
    is_first = np.ones(n, bool)
    is_first[1:] = (np.diff(candidates.low) != 0) | (np.diff(candidates.high) != 0)
    group_of_row = np.cumsum(is_first) - 1
    first_row = np.flatnonzero(is_first)[group_of_row]  # the first row of the group of each row
    number = np.arange(n) - first_row + 1
    is_repeat = ~is_first
    return Repeats(
        index=candidates.position[is_repeat],
        first_index=candidates.position[first_row][is_repeat],
        number=number[is_repeat],
    )


def _read_bucket(bucket: Bucket) -> _Digests:
    """Read the digests of a bucket and their positions in the file.

    The whole file is read in sections. Only the digests of the bucket are kept in memory.
    """
    n_digests = bucket.digests.stat().st_size // _DIGEST_BYTES
    # Each list begins with an empty array, because `np.concatenate` needs at least one.
    low = [np.empty(0, np.int64)]
    high = [np.empty(0, np.int64)]
    position = [np.empty(0, np.int64)]
    for start in range(0, n_digests, _READ_AT_ONCE):
        section = np.fromfile(
            bucket.digests, np.int64, 2 * _READ_AT_ONCE, offset=_DIGEST_BYTES * start
        ).reshape(-1, 2)  # a digest is read as two numbers of 8 bytes, the low and the high one
        # The number of buckets is a power of two, so this takes the last bits of the low number.
        bucket_of_digest = section[:, 0] & (bucket.n_buckets - 1)
        members = np.flatnonzero(bucket_of_digest == bucket.number)
        low.append(section[members, 0])
        high.append(section[members, 1])
        position.append(start + members)
    return _Digests(np.concatenate(low), np.concatenate(high), np.concatenate(position))
