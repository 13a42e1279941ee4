"""Count what is in batches of reads: lengths, letters, repeats, and open reading frames.

Reads are cut and translated by the functions that staging uses, but nothing is stored. So the
memory does not grow with the number of reads.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from virnuc_core.reads.fast_parser import ReadBatch, Strings
from virnuc_core.reads.fingerprint import digests
from virnuc_core.reads.translate import (
    LongPart,
    Mask,
    chunk,
    count_ambiguous,
    digest_rows,
    find_ambiguous,
    find_short,
    keep_part,
    translate_chunks,
    translate_long_read,
)
from virnuc_core.reads.workers import Workers

# Digests that are kept to count distinct values. Up to so many distinct values the count is exact.
MAX_KEPT_DIGESTS: Final = 1 << 20
_ALL_DIGESTS: Final = (1 << 64) - 1

Digests = NDArray[np.uint64]  # the first halves of 128-bit digests


class DistinctCounter:
    """Counts distinct values by their digests, with bounded memory.

    If there are too many to keep them all, only digests below a limit are kept, and the count is
    estimated from their number: digests are spread evenly over all 64-bit numbers. The error is
    about 0.1 %.
    """

    def __init__(self) -> None:
        """Begin without any value."""
        self.n_values = 0  # that were added, equal ones included
        self._limit = _ALL_DIGESTS  # digests above it are not kept
        self._kept = np.empty(0, np.uint64)  # distinct, ascending
        self._pending: list[Digests] = []  # not compared with the others yet
        self._n_pending = 0

    def add(self, values: Digests) -> None:
        """Add values. Equal values are counted once.

        Args:
            values: Their digests: uint64 [n].
        """
        self.n_values += len(values)
        values = self._below_limit(values)
        self._pending.append(values)
        self._n_pending += len(values)
        if self._n_pending > MAX_KEPT_DIGESTS:
            self._merge()

    def count(self) -> int:
        """Return the number of distinct values, exactly or estimated."""
        self._merge()
        share_kept = (self._limit + 1) / (_ALL_DIGESTS + 1)
        return round(len(self._kept) / share_kept)

    def _below_limit(self, values: Digests) -> Digests:
        """Return the values that are kept."""
        if self._limit == _ALL_DIGESTS:
            return values
        return values[values <= np.uint64(self._limit)]

    def _merge(self) -> None:
        """Move the pending digests to those that are kept, and lower the limit if need be."""
        # Sorting takes a tenth of the time of `np.unique`, which fills a hash table.
        values = np.concatenate([self._kept, *self._pending])
        values.sort()
        is_first = np.ones(len(values), bool)  # of equal values
        is_first[1:] = values[1:] != values[:-1]
        self._kept = values[is_first]
        self._pending = []
        self._n_pending = 0
        while len(self._kept) > MAX_KEPT_DIGESTS:
            self._limit >>= 1
            self._kept = self._below_limit(self._kept)


@dataclass(frozen=True)
class FrameCounts:
    """The open reading frames of a batch of reads for one model length.

    Attributes:
        n_open_reads: Reads with at least one open frame. Only these get a verdict.
        n_short: Reads with bases that are too short for the model.
        n_rows: Open frames.
        n_residues: Amino acids of all open frames.
        row_digests: A digest of each open frame.
    """

    n_open_reads: int
    n_short: int
    n_rows: int
    n_residues: int
    row_digests: Digests


@dataclass(frozen=True)
class BatchCounts:
    """What one batch of reads contains.

    Attributes:
        lengths: The different lengths of the reads: int64 [n].
        n_of_length: How many reads have each of them: int64 [n].
        n_ambiguous_letters: Letters other than A, C, G, T.
        n_ambiguous_reads: Reads with such letters.
        read_digests: A digest of the bases of each read.
        frames: The open frames by model length.
    """

    lengths: NDArray[np.int64]
    n_of_length: NDArray[np.int64]
    n_ambiguous_letters: int
    n_ambiguous_reads: int
    read_digests: Digests
    frames: dict[int, FrameCounts]


@dataclass(frozen=True)
class PartCounts:
    """A part of a long read. Its frames are known only when all its parts are there."""

    long_part: LongPart
    n_ambiguous_letters: int


def count_batch(
    batch: ReadBatch, model_lengths: tuple[int, ...], folder: Path
) -> BatchCounts | PartCounts:
    """Count what a batch of reads contains. This runs in the worker processes.

    Args:
        batch: The reads, or a part of a long read.
        model_lengths: The model lengths in bases, ascending.
        folder: The folder for scratch files, where long reads are collected.
    """
    n_ambiguous_letters = count_ambiguous(batch.bases.data)
    if batch.part is not None:
        return PartCounts(keep_part(batch, batch.part, folder), n_ambiguous_letters)
    is_ambiguous = np.zeros(len(batch), bool)
    if n_ambiguous_letters > 0:
        is_ambiguous = find_ambiguous(batch.bases)
    lengths, n_of_length = np.unique(batch.bases.lengths, return_counts=True)
    upper_bases = Strings(batch.bases.data.upper(), batch.bases.offsets)
    frames: dict[int, FrameCounts] = {}
    for size in model_lengths:
        n_short = int(np.count_nonzero(find_short(batch.bases.lengths, size)))
        is_uncut = lengths[-1] <= model_lengths[0]  # then no model cuts a read
        if frames and is_uncut:
            frames[size] = replace(frames[model_lengths[0]], n_short=n_short)
        else:
            frames[size] = _count_frames(batch.bases, is_ambiguous, size, n_short)
    return BatchCounts(
        lengths=lengths,
        n_of_length=n_of_length,
        n_ambiguous_letters=n_ambiguous_letters,
        n_ambiguous_reads=int(np.count_nonzero(is_ambiguous)),
        read_digests=digests(upper_bases)[:, 0],
        frames=frames,
    )


def _count_frames(bases: Strings, is_ambiguous: Mask, size: int, n_short: int) -> FrameCounts:
    """Cut and translate reads for one model length, and count their open reading frames.

    Args:
        bases: The bases of the reads.
        is_ambiguous: Which reads have letters other than A, C, G, T: bool [reads].
        size: The model's length in bases.
        n_short: Reads that are too short for the model.
    """
    chunks = chunk(bases.lengths, size)
    orfs = translate_chunks(bases, chunks)
    reads = chunks.read[orfs.chunk]
    return FrameCounts(
        n_open_reads=int(np.count_nonzero(np.bincount(reads))),
        n_short=n_short,
        n_rows=len(orfs.chunk),
        n_residues=len(orfs.proteins),
        row_digests=digest_rows(orfs, is_ambiguous[reads])[:, 0],
    )


@dataclass
class FrameTotals:
    """The sums of `FrameCounts` over many batches."""

    n_open_reads: int = 0
    n_short: int = 0
    n_rows: int = 0
    n_residues: int = 0

    def add(self, counts: FrameCounts) -> None:
        """Add the counts of a batch."""
        self.n_open_reads += counts.n_open_reads
        self.n_short += counts.n_short
        self.n_rows += counts.n_rows
        self.n_residues += counts.n_residues


@dataclass
class ReadTotals:
    """The sums of `BatchCounts` over many batches.

    Attributes:
        n_of_length: Number of reads by length.
        n_ambiguous_letters: Letters other than A, C, G, T.
        n_ambiguous_reads: Reads with such letters.
        frames: The open frames by model length.
    """

    n_of_length: Counter[int] = field(default_factory=Counter)
    n_ambiguous_letters: int = 0
    n_ambiguous_reads: int = 0
    frames: dict[int, FrameTotals] = field(default_factory=dict)

    @property
    def n_reads(self) -> int:
        """Return the number of reads."""
        return self.n_of_length.total()

    @property
    def n_bases(self) -> int:
        """Return the number of bases of all reads."""
        return sum(length * count for length, count in self.n_of_length.items())

    def add(self, counts: BatchCounts) -> None:
        """Add the counts of a batch."""
        pairs = zip(counts.lengths.tolist(), counts.n_of_length.tolist(), strict=True)
        for length, n_reads in pairs:
            self.n_of_length[length] += n_reads
        self.n_ambiguous_letters += counts.n_ambiguous_letters
        self.n_ambiguous_reads += counts.n_ambiguous_reads
        for size, frames in counts.frames.items():
            self.frames.setdefault(size, FrameTotals()).add(frames)


@dataclass
class Repeats:
    """The distinct reads and rows (open reading frames) of one sample.

    A run embeds equal rows once. Runs of different samples do not share embeddings.

    Attributes:
        reads: The distinct sequences of reads.
        rows: The distinct rows by model length.
    """

    reads: DistinctCounter = field(default_factory=DistinctCounter)
    rows: dict[int, DistinctCounter] = field(default_factory=dict)

    def add(self, counts: BatchCounts) -> None:
        """Add the reads and rows of a batch."""
        self.reads.add(counts.read_digests)
        for size, frames in counts.frames.items():
            self.rows.setdefault(size, DistinctCounter()).add(frames.row_digests)


class LongReads:
    """Counts long reads, which come in parts, when their last parts are there."""

    def __init__(self, model_lengths: tuple[int, ...], folder: Path, workers: Workers) -> None:
        """Begin without a read.

        Args:
            model_lengths: The model lengths in bases.
            folder: The folder for scratch files.
            workers: The processes that translate.
        """
        self._model_lengths = model_lengths
        self._folder = folder
        self._workers = workers
        self._n_ambiguous_letters = 0  # of the current read

    def add(self, counts: PartCounts) -> Iterator[BatchCounts]:
        """Add the next part of a long read, and yield the counts of the read after its last part.

        A read that is marked as dropped is not counted. Its scratch file is removed in any case.

        Args:
            counts: The part. Its bases are already in the scratch file of the read.
        """
        long_part = counts.long_part
        part = long_part.part
        if part.is_first:
            self._n_ambiguous_letters = 0
        self._n_ambiguous_letters += counts.n_ambiguous_letters
        if not part.is_last:
            return
        if not part.is_dropped:
            yield self._count_read(long_part)
        Path(long_part.path).unlink()

    def _count_read(self, last_part: LongPart) -> BatchCounts:
        """Return the counts of a long read, all of whose bases are in its scratch file."""
        length = np.array([last_part.part.n_bases_before + last_part.n_bases])
        is_ambiguous = self._n_ambiguous_letters > 0
        frames: dict[int, FrameCounts] = {}
        for size in self._model_lengths:
            n_short = int(np.count_nonzero(find_short(length, size)))
            frames[size] = self._count_frames(last_part, is_ambiguous, size, n_short)
        # Long reads are compared by their frames, because their bases are never in memory together.
        content = b"".join([counts.row_digests.tobytes() for counts in frames.values()])
        return BatchCounts(
            lengths=length,
            n_of_length=np.ones(1, np.int64),
            n_ambiguous_letters=self._n_ambiguous_letters,
            n_ambiguous_reads=int(is_ambiguous),
            read_digests=digests([b"%d " % length[0] + content])[:, 0],
            frames=frames,
        )

    def _count_frames(
        self, last_part: LongPart, is_ambiguous: bool, size: int, n_short: int
    ) -> FrameCounts:
        """Cut and translate a long read for one model length, and count its open reading frames."""
        n_rows = 0
        n_residues = 0
        row_digests = [np.empty(0, np.uint64)]
        segments = translate_long_read(last_part, is_ambiguous, size, self._folder, self._workers)
        for segment in segments:
            n_rows += segment.counts.n_rows
            n_residues += segment.sizes["protein_bytes"]
            row_digests.append(segment.column("row_digest").reshape(-1, 2)[:, 0])
            Path(segment.path).unlink()
        return FrameCounts(
            int(n_rows > 0), n_short, n_rows, n_residues, np.concatenate(row_digests)
        )
