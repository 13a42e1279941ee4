"""Translate reads into open reading frames, and write the columns of each batch to a scratch file.

Reads are cut into chunks of the model's length. Each chunk is translated in six reading frames, and
the frames without a stop codon are kept. `translate_batch` is the task of a worker.

Two peculiarities come from VirNucPro's method. A codon with a letter other than A, C, G, T is left
out of the protein. And the DNA of a frame is cut to the length of its protein plus one base, so it
is too short if codons were left out.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from virnuc_core.reads.fast_parser import Part, ReadBatch, Strings, offsets_from_lengths
from virnuc_core.reads.fingerprint import Leaves, digests, hash_leaves
from virnuc_core.reads.workers import Workers

IntArray = NDArray[np.int64]
Mask = NDArray[np.bool_]
Columns = dict[str, NDArray[Any]]  # of a segment, by the names of SEGMENT_COLUMNS

# Bits of the column `read_flags`.
EMPTY: Final = 1  # has no bases
SHORT_FOR_MODEL: Final = 2  # less than half of the model's length, but not empty
AMBIGUOUS: Final = 4  # holds a letter other than A, C, G, T
DUPLICATE_ID: Final = 8  # an earlier read has the same id
MATE: Final = 16  # the previous read is its mate

SEGMENT_COLUMNS: Final[dict[str, type[np.generic]]] = {
    "read_length": np.int64,
    "read_chunks": np.int32,
    "read_rows": np.int32,
    "read_flags": np.uint8,
    "read_line": np.int64,
    "read_id_length": np.int32,
    "read_id_bytes": np.uint8,
    "read_id_digest": np.uint64,  # two values for each
    # The index of the read in the segment. The rows of a long read are in segments without reads;
    # there it is 0, and the read is the first one of a later segment.
    "row_read": np.int32,
    "row_chunk": np.int32,
    "row_frame": np.uint8,
    "row_digest": np.uint64,  # two values for each
    "protein_length": np.int32,
    "dna_length": np.int32,
    "protein_bytes": np.uint8,
    "dna_bytes": np.uint8,
}
# The residue of each codon in the order AAA, AAC, AAG, AAT, ACA, …; * is a stop. This is NCBI's
# table 1. Biopython has it, too, but takes longer to import than a small file takes to read.
STANDARD_CODE: Final = "KNKNTTTTRSRSIIMIQHQHPPPPRRRRLLLLEDEDAAAAGGGGVVVV*Y*YSSSS*CWCLFLF"
FRAMES: Final = ("F1", "F2", "F3", "R1", "R2", "R3")

_WINDOW_BASES: Final = 1 << 22  # bases of a long read that are the work of one item for a worker
# Bases that are translated together. Arrays of about this many bytes fit into the processor cache.
_GROUP_BASES: Final = 1 << 20
# The code of a letter that is not A, C, G, T. A codon of bases a, b, c has the code 16 a + 4 b + c
# (0 to 63) in one byte. With this number for any of them, the code is always above 63, although
# sums above 255 overflow.
_NO_BASE: Final = 84
_STOP: Final = ord("*")
_ALL_BYTES: Final = bytes(range(256))
_UPPER: Final = _ALL_BYTES.upper()
_COMPLEMENT: Final = _UPPER.translate(bytes.maketrans(b"ACGT", b"TGCA"))
_IS_AMBIGUOUS: Final = bytes(byte not in b"ACGTacgt" for byte in range(256))


class Chunks(NamedTuple):
    """Chunks in order of read and position, as columns. A read without bases has no chunk."""

    read: IntArray  # [n] index of the read
    number: NDArray[np.int32]  # [n] from 0 within the read
    start: IntArray  # [n] first base within the read
    end: IntArray  # [n] one past the last base


def chunk(lengths: IntArray, size: int) -> Chunks:
    """Compute how reads are cut into chunks of at most `size` bases.

    Neighbouring chunks overlap so that all chunks but the last have `size` bases. The last chunk
    ends with the read. It may be shorter, but is never empty. A read of at most `size` bases is one
    chunk.

    Args:
        lengths: Bases of each read: int64 [reads].
        size: The model's length in bases.

    Returns:
        The chunks of all reads, in order of read and position.
    """
    n_chunks = _count_chunks(lengths, size)
    reads = np.arange(len(lengths), dtype=np.int64)
    read_of_chunk = np.repeat(reads, n_chunks)
    first_chunk = np.cumsum(n_chunks) - n_chunks  # of each read
    chunks = np.arange(len(read_of_chunk), dtype=np.int64)
    number = chunks - first_chunk[read_of_chunk]
    return _place_chunks(read_of_chunk, number, lengths[read_of_chunk], size)


def _count_chunks(lengths: IntArray, size: int) -> IntArray:
    """Return the number of chunks of each read: its length divided by the size, rounded up."""
    return -(-lengths // size)


def _place_chunks(read: IntArray, number: IntArray, length: IntArray, size: int) -> Chunks:
    """Compute the first and the last base of chunks within their reads.

    Args:
        read: The index of the read of each chunk: int64 [n].
        number: The number of each chunk within its read, from 0: int64 [n].
        length: The bases of the read of each chunk: int64 [n].
        size: The model's length in bases.
    """
    n_chunks = _count_chunks(length, size)
    # Full chunks side by side would have more bases than the read. So neighbours overlap, and the
    # overlaps use up this surplus. VirNucPro divides it by the number of chunks, although there is
    # one overlap fewer. That leaves `overlap + remainder` bases, which it gives to the first
    # overlaps, one base each. Example: 35 bases, 4 chunks of 10. The surplus is 5, the quotient 1
    # and the remainder 1. The 3 overlaps have 2, 2 and 1 bases: chunks begin at 0, 8, 16 and 25.
    surplus = n_chunks * size - length
    overlap, remainder = np.divmod(surplus, n_chunks)
    n_longer_overlaps = overlap + remainder
    # How many bases each chunk begins before the place that it would have side by side: the sum of
    # the overlaps before it.
    shift = overlap * number + np.minimum(number, n_longer_overlaps)
    start = number * size - shift
    end = np.minimum(start + size, length)
    return Chunks(read, number.astype(np.int32), start, end)


class Orfs(NamedTuple):
    """Open reading frames in order of chunk and frame, as columns."""

    chunk: IntArray  # [n] index of the chunk
    frame: NDArray[np.uint8]  # [n] 0..5, see FRAMES
    proteins: NDArray[np.uint8]  # letters of all proteins, end to end
    protein_lengths: NDArray[np.int32]  # [n] ≥ 1
    dna: NDArray[np.object_]  # [n] bytes, upper case
    dna_lengths: NDArray[np.int32]  # [n]

    @classmethod
    def concatenate(cls, groups: Sequence["Orfs"]) -> "Orfs":
        """Join the frames of several groups of chunks, in order.

        Args:
            groups: The frames of each group. Without groups, the result has no frames.
        """
        if not groups:
            no_letters = np.zeros(0, np.uint8)
            no_lengths = np.zeros(0, np.int32)
            return cls(
                chunk=np.zeros(0, np.int64),
                frame=no_letters,
                proteins=no_letters,
                protein_lengths=no_lengths,
                dna=np.zeros(0, object),
                dna_lengths=no_lengths,
            )
        if len(groups) == 1:
            return groups[0]
        return cls(*map(np.concatenate, zip(*groups, strict=True)))


class _CodeTables(NamedTuple):
    """Tables of 256 bytes for `bytes.translate`, which replaces each byte by its table entry."""

    base_codes: bytes  # by letter: 0..3 for A, C, G, T; _NO_BASE for all others
    forward: bytes  # by the code of a codon, 16 a + 4 b + c: its amino acid; 0 above 63
    reverse: bytes  # the same for the codon on the opposite strand


@cache
def _code_tables() -> _CodeTables:
    """Build the tables of the standard genetic code, once; stop codons become `*`."""
    base_codes = bytearray([_NO_BASE] * 256)
    for code, base in enumerate("ACGT"):
        base_codes[ord(base)] = code
        base_codes[ord(base.lower())] = code
    forward = np.frombuffer(STANDARD_CODE.encode("ascii"), np.uint8).reshape(4, 4, 4)
    # The codes of a base and its complement add up to 3, so reversing each axis complements a base.
    # Transposing reverses the order of the three bases.
    reverse = forward[::-1, ::-1, ::-1].T
    return _CodeTables(
        bytes(base_codes), forward.tobytes().ljust(256, b"\0"), reverse.tobytes().ljust(256, b"\0")
    )


def translate(bases: bytes, starts: IntArray, ends: IntArray) -> Orfs:
    """Translate chunks in six reading frames, and return the frames that are open.

    A frame is open if its protein has no stop codon and is not empty. Chunks are translated in
    groups of about one million bases, which bounds the memory.

    Args:
        bases: Nucleotide letters in either case.
        starts: The first base of each chunk, ascending: int64 [chunks].
        ends: One past its last base, ascending: int64 [chunks].

    Returns:
        The open frames, in order of chunk and frame.
    """
    groups: list[Orfs] = []
    first = 0
    while first < len(starts):
        end = _find_group_end(starts, ends, first)
        groups.append(_translate_group(bases, starts[first:end], ends[first:end], first))
        first = end
    return Orfs.concatenate(groups)


def translate_chunks(bases: Strings, chunks: Chunks) -> Orfs:
    """Translate the chunks of some reads in six reading frames, and return the open frames.

    Args:
        bases: The bases of the reads.
        chunks: How these reads are cut.
    """
    read_starts = bases.offsets[chunks.read]
    return translate(bases.data, read_starts + chunks.start, read_starts + chunks.end)


def _find_group_end(starts: IntArray, ends: IntArray, first: int) -> int:
    """Return the end of a group of chunks that are translated together.

    A group spans about `_GROUP_BASES` bases, and twice as many at most when each chunk is padded to
    the longest chunk. It has at least one chunk.

    Args:
        starts: The first base of each chunk, ascending.
        ends: One past the last base of each chunk, ascending.
        first: The first chunk of the group.

    Returns:
        One past the last chunk of the group.
    """
    last_base = starts[first] + _GROUP_BASES
    end = int(np.searchsorted(ends, last_base, side="right"))
    end = max(first + 1, end)
    lengths = ends[first:end] - starts[first:end]
    padded_length = int(lengths.max()) + 1  # of each chunk; never 0
    max_chunks = 2 * _GROUP_BASES // padded_length
    end = min(end, first + max_chunks)
    return max(first + 1, end)


def _translate_group(bases: bytes, starts: IntArray, ends: IntArray, first_chunk: int) -> Orfs:
    """Translate one group of chunks in six frames, and return the open frames.

    The bases from the first to the last chunk of the group, called the stretch here, are translated
    once per strand. A chunk is then a window of the result on each strand.

    Args:
        bases: The letters of all chunks.
        starts: The first base of each chunk of the group: int64 [chunks].
        ends: One past its last base: int64 [chunks].
        first_chunk: The index of the first chunk of the group among all chunks.
    """
    # On the reverse strand a chunk begins with its last base.
    stretch_start = int(starts[0])
    stretch_end = int(ends[-1])
    stretch = bases[stretch_start:stretch_end]
    lengths = ends - starts
    window_starts = (starts - stretch_start, stretch_end - ends)  # on the two strands
    translation = _translate_windows(stretch, window_starts, lengths)
    proteins = _open_proteins(translation)

    # The DNA of a frame goes one base beyond the codons of its protein, as in VirNucPro, if the
    # chunk is long enough.
    chunk = proteins.chunk
    strand, offset = np.divmod(proteins.frame, 3)
    dna_lengths = np.minimum(3 * proteins.lengths + 1, lengths[chunk] - offset)
    # The DNA is cut out of a string that has the forward strand and then the reverse strand.
    both_strands = stretch.translate(_UPPER) + stretch.translate(_COMPLEMENT)[::-1]
    forward_starts = window_starts[0][chunk]
    reverse_starts = window_starts[1][chunk] + len(stretch)
    dna_starts = offset + np.where(strand == 0, forward_starts, reverse_starts)
    dna_ends = dna_starts + dna_lengths
    spans = zip(dna_starts.tolist(), dna_ends.tolist(), strict=True)
    return Orfs(
        chunk=chunk + first_chunk,
        frame=proteins.frame.astype(np.uint8),
        proteins=proteins.letters,
        protein_lengths=proteins.lengths.astype(np.int32),
        dna=np.array([both_strands[start:end] for start, end in spans], object),
        dna_lengths=dna_lengths.astype(np.int32),
    )


class _Proteins(NamedTuple):
    """The proteins of the open frames of a group of chunks, in order of chunk and frame."""

    chunk: IntArray  # [open frames] index of the chunk in its group
    # [open frames] 0 to 2: the forward strand from its base 0, 1 or 2; 3 to 5: the reverse strand
    frame: IntArray
    letters: NDArray[np.uint8]  # amino acids of all proteins, one after the other
    lengths: IntArray  # [open frames] amino acids of each protein


def _open_proteins(translation: "_Translation") -> _Proteins:
    """Return the proteins of the open frames.

    A frame without any amino acid is left out: it is too short for a codon, or all its codons have
    ambiguous letters.
    """
    chunk, frame = np.nonzero(translation.is_open)
    strand, offset = np.divmod(frame, 3)
    codons = translation.residues[strand, chunk, :, offset]  # [open frames, codons]
    is_residue = codons != 0
    lengths = np.count_nonzero(is_residue, axis=1)
    letters = codons[is_residue]  # a frame without amino acids adds none
    has_protein = lengths > 0
    return _Proteins(chunk[has_protein], frame[has_protein], letters, lengths[has_protein])


class _Translation(NamedTuple):
    """The six reading frames of a group of chunks."""

    # [strands, chunks, codons, offsets] letters of amino acids; 0 where there is no codon
    residues: NDArray[np.uint8]
    is_open: NDArray[np.bool_]  # [chunks, frames] whether the frame has no stop codon


def _translate_windows(
    stretch: bytes, window_starts: tuple[IntArray, IntArray], lengths: IntArray
) -> _Translation:
    """Translate windows of a string of bases in six frames.

    Args:
        stretch: The letters.
        window_starts: The first base of each window, on the forward and on the reverse strand.
        lengths: The bases of each window.
    """
    n_codons = -(-int(lengths.max()) // 3)  # of the longest window, rounded up
    width = 3 * n_codons
    # A codon must begin at least three bases before the end of its window. `fits` marks the
    # positions where a codon may begin.
    n_codon_starts = lengths.astype(np.int32) - 2
    if lengths.min() == lengths.max():
        n_codon_starts = n_codon_starts[:1]  # equal lengths: one row of the mask is enough
    fits = np.arange(width, dtype=np.int32) < n_codon_starts[:, None]

    residues = np.empty((2, len(lengths), n_codons, 3), np.uint8)
    is_open = np.empty((len(lengths), 6), bool)
    residues_of_strands = _translate_codons(stretch, n_padding=width + 3)
    for strand in range(2):
        windows = sliding_window_view(residues_of_strands[strand], width)
        windows = windows[window_starts[strand]]  # a copy: [windows, width]
        windows *= fits  # codons that do not fit into the window become 0
        residues[strand] = windows.reshape(residues.shape[1:])
        is_stop = windows == _STOP
        for offset in range(3):  # every third position belongs to the same frame
            is_open[:, 3 * strand + offset] = ~is_stop[:, offset::3].any(axis=1)
    return _Translation(residues, is_open)


def _translate_codons(
    stretch: bytes, n_padding: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Translate the codon that begins at each base, on both strands.

    Args:
        stretch: The letters.
        n_padding: The number of zeros to add, so that windows may extend beyond the end.

    Returns:
        For the forward and for the reverse strand: the letter of the amino acid for each base, or 0
        if no codon begins there: uint8 [bases + padding].
    """
    tables = _code_tables()
    padding = bytes(n_padding)
    base_codes = (stretch + padding).translate(tables.base_codes)
    codes = np.frombuffer(base_codes, np.uint8)
    # 16 a + 4 b + c for a codon of the bases a, b, c; above 63 if one of them is not A, C, G, T.
    codon_codes = (codes[:-2] << 4) + (codes[1:-1] << 2) + codes[2:]
    codons = codon_codes.tobytes()
    forward = np.frombuffer(codons.translate(tables.forward), np.uint8)
    # Of n bases, the codon at base p covers p to p + 2. On the reverse strand this codon begins at
    # base n - 3 - p. So the reverse strand has the same codons in reverse order.
    n_codons = max(len(stretch) - 2, 0)
    # No codon begins at the last two bases, which get zeros.
    reverse_residues = codons[:n_codons].translate(tables.reverse)[::-1]
    reverse = np.frombuffer(reverse_residues + padding + bytes(2), np.uint8)
    return forward, reverse


@dataclass(frozen=True)
class SegmentCounts:
    """How much one or several segments contain. Counts can be added."""

    n_reads: int = 0
    n_chunks: int = 0
    n_rows: int = 0
    n_bases: int = 0
    n_open_reads: int = 0  # reads with at least one row
    n_empty: int = 0
    n_short: int = 0
    n_ambiguous: int = 0

    def __add__(self, other: "SegmentCounts") -> "SegmentCounts":
        """Return the sum of each count."""
        sums = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in fields(SegmentCounts)
        }
        return SegmentCounts(**sums)


class Segment(NamedTuple):
    """The part of a store that comes from one batch of reads. The columns are in a scratch file."""

    path: str  # the scratch file: all columns of SEGMENT_COLUMNS, one after the other
    sizes: Mapping[str, int]  # number of values of each column, by name
    counts: SegmentCounts

    def column(self, name: str) -> NDArray[Any]:
        """Read one column from the scratch file.

        Args:
            name: The name of the column in SEGMENT_COLUMNS.

        Returns:
            All its values, of the type that SEGMENT_COLUMNS names: [values].
        """
        # A column begins after all earlier ones.
        offset = 0
        for earlier_name, kind in SEGMENT_COLUMNS.items():
            if earlier_name == name:
                break
            offset += self.sizes[earlier_name] * np.dtype(kind).itemsize
        values: NDArray[Any] = np.fromfile(
            self.path, SEGMENT_COLUMNS[name], self.sizes[name], offset=offset
        )
        return values


class LongPart(NamedTuple):
    """A part of a long read. Its bases are in a scratch file, where all parts are collected."""

    part: Part  # the position within the read
    path: str  # the scratch file of the read
    n_bases: int
    is_ambiguous: bool  # the part has letters other than A, C, G, T
    id: Strings  # the printable id of the read, as a column of one value


class BatchResult(NamedTuple):
    """The result of a worker for one batch."""

    output: Segment | LongPart
    leaves: Leaves  # what the batch contributes to the fingerprint of all reads
    chunk_s: float  # seconds spent on cutting reads into chunks
    translate_s: float  # seconds spent on translating and writing


def translate_batch(batch: ReadBatch, model_length: int, folder: Path) -> BatchResult:
    """Cut a batch of reads into chunks, translate them, and write the result to a scratch file.

    A part of a long read is only saved, because chunks depend on the length of the whole read. This
    runs in the worker processes.

    Args:
        batch: The reads, or a part of a long read.
        model_length: The size of a chunk in bases.
        folder: The folder for scratch files.

    Returns:
        The scratch file (a segment of the store, or the saved part), what the batch contributes to
        the fingerprint, and times.
    """
    start_s = time.perf_counter()
    if batch.part is not None:
        long_part = keep_part(batch, batch.part, folder)
        leaves = hash_leaves(batch)
        return BatchResult(long_part, leaves, 0.0, time.perf_counter() - start_s)
    bases = batch.bases
    chunks = chunk(bases.lengths, model_length)
    chunked_s = time.perf_counter()

    orfs = translate_chunks(bases, chunks)
    is_ambiguous = find_ambiguous(bases)
    n_rows = np.bincount(chunks.read[orfs.chunk], minlength=len(batch))
    read_columns = _read_columns(
        batch.ids, batch.lines, bases.lengths, model_length, n_rows, is_ambiguous
    )
    if batch.follows_mate is not None:
        # Each flag is a bit of its own, so adding the flag MATE sets this bit.
        read_columns["read_flags"] = read_columns["read_flags"] + batch.follows_mate * MATE
    row_columns = _row_columns(orfs, chunks, is_ambiguous)
    segment = _write_segment(folder, read_columns | row_columns, len(chunks.read))
    leaves = hash_leaves(batch, read_columns["read_id_digest"].reshape(-1, 2))
    return BatchResult(segment, leaves, chunked_s - start_s, time.perf_counter() - chunked_s)


def keep_part(batch: ReadBatch, part: Part, folder: Path) -> LongPart:
    """Save the bases of a part of a long read in the scratch file of the read.

    All parts of a read are written to the same file, each at its position. Workers may write them
    in any order.

    Args:
        batch: The part, as a batch of one read.
        part: Its position within the read.
        folder: The folder for scratch files.
    """
    bases = batch.bases.data
    path = folder / f"long_{batch.file_index}_{part.line}"
    path.touch()  # for the mode below, which keeps what other workers have written
    with path.open("rb+") as file:
        file.seek(part.n_bases_before)
        file.write(bases)
    is_ambiguous = any(bases.translate(_IS_AMBIGUOUS))
    return LongPart(part, str(path), len(bases), is_ambiguous, batch.ids)


def find_ambiguous(bases: Strings) -> Mask:
    """Return which reads have letters other than A, C, G, T: bool [reads]."""
    is_ambiguous = np.zeros(len(bases), bool)
    positions = np.flatnonzero(_mark_ambiguous(bases.data))
    is_ambiguous[np.searchsorted(bases.offsets, positions, side="right") - 1] = True
    return is_ambiguous


def count_ambiguous(bases: bytes) -> int:
    """Return the number of letters other than A, C, G, T, in either case."""
    return int(np.count_nonzero(_mark_ambiguous(bases)))


def _mark_ambiguous(bases: bytes) -> Mask:
    """Return which letters are not A, C, G, T: bool [bases]."""
    # `translate` replaces each letter by 1 if it is ambiguous and by 0 otherwise.
    return np.frombuffer(bases.translate(_IS_AMBIGUOUS), np.bool_)


def find_short(lengths: IntArray, size: int) -> Mask:
    """Return which reads are too short for the model: bool [reads].

    Such a read has less than half of the model's length. A read without bases is not one of them.

    Args:
        lengths: The bases of each read: int64 [reads].
        size: The model's length in bases.
    """
    return (lengths > 0) & (2 * lengths < size)


def _read_columns(
    ids: Strings,
    lines: IntArray,
    lengths: IntArray,
    size: int,
    n_rows: IntArray,
    is_ambiguous: Mask,
) -> Columns:
    """Return the columns of a segment that have one value per read, by name.

    Args:
        ids: The printable ids of the reads.
        lines: The line number of each header: int64 [reads].
        lengths: The bases of each read: int64 [reads].
        size: The model's length in bases.
        n_rows: The open reading frames of each read: int64 [reads].
        is_ambiguous: Which reads have letters other than A, C, G, T: bool [reads].
    """
    is_empty = lengths == 0
    is_short = find_short(lengths, size)
    return {
        "read_length": lengths,
        "read_chunks": _count_chunks(lengths, size),
        "read_rows": n_rows,
        "read_flags": is_empty * EMPTY + is_short * SHORT_FOR_MODEL + is_ambiguous * AMBIGUOUS,
        "read_line": lines,
        "read_id_length": ids.lengths,
        "read_id_bytes": np.frombuffer(ids.data, np.uint8),
        "read_id_digest": digests(ids).reshape(-1),
    }


def _row_columns(orfs: Orfs, chunks: Chunks, is_ambiguous: Mask) -> Columns:
    """Return the columns of a segment that have one value per row (open reading frame), by name.

    Args:
        orfs: The open reading frames.
        chunks: The chunks in which they were found.
        is_ambiguous: Which reads may have ambiguous letters: bool [reads]. False means certainly
            none.
    """
    reads = chunks.read[orfs.chunk]
    return {
        "row_read": reads,
        "row_chunk": chunks.number[orfs.chunk],
        "row_frame": orfs.frame,
        "row_digest": digest_rows(orfs, is_ambiguous[reads]).reshape(-1),
        "protein_length": orfs.protein_lengths,
        "dna_length": orfs.dna_lengths,
        "protein_bytes": orfs.proteins,
        "dna_bytes": np.frombuffer(b"".join(orfs.dna), np.uint8),
    }


def digest_rows(orfs: Orfs, is_ambiguous: Mask) -> NDArray[np.uint64]:
    """Return the digest of each row (open reading frame): uint64 [rows, 2].

    Rows with equal digests are embedded only once. The digest is computed from the DNA. If the DNA
    has ambiguous letters, it is computed from the DNA and the protein: codons with these letters
    are left out of the protein, so equal DNA may give different proteins.

    Args:
        orfs: The open reading frames.
        is_ambiguous: Which rows may have ambiguous letters: bool [rows]. False means certainly
            none.
    """
    texts = orfs.dna.tolist()  # from which digests are computed
    if is_ambiguous.any():
        proteins = Strings(orfs.proteins.tobytes(), offsets_from_lengths(orfs.protein_lengths))
        for row in np.flatnonzero(is_ambiguous).tolist():
            has_ambiguous_letters = bool(texts[row].translate(None, b"ACGT"))
            if has_ambiguous_letters:
                texts[row] += b"|" + proteins[row]
    return digests(texts)


def _write_segment(folder: Path, columns: Mapping[str, NDArray[Any]], n_chunks: int) -> Segment:
    """Write the columns of a segment to a new scratch file, and count its contents.

    Args:
        folder: The folder for scratch files.
        columns: The columns by name. Columns of SEGMENT_COLUMNS that are missing are empty.
        n_chunks: The number of chunks that were translated, which no column tells.
    """
    values: Columns = {}
    sizes: dict[str, int] = {}
    for name, kind in SEGMENT_COLUMNS.items():
        column = columns.get(name, np.empty(0, kind))
        values[name] = np.ascontiguousarray(column, kind)
        sizes[name] = len(column)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        for column in values.values():
            file.write(column.data)
    flags = values["read_flags"]
    counts = SegmentCounts(
        n_reads=sizes["read_length"],
        n_chunks=n_chunks,
        n_rows=sizes["row_frame"],
        n_bases=int(values["read_length"].sum()),
        n_open_reads=int(np.count_nonzero(values["read_rows"])),
        n_empty=int(np.count_nonzero(flags & EMPTY)),
        n_short=int(np.count_nonzero(flags & SHORT_FOR_MODEL)),
        n_ambiguous=int(np.count_nonzero(flags & AMBIGUOUS)),
    )
    return Segment(file.name, sizes, counts)


def translate_long_read(
    last_part: LongPart, is_ambiguous: bool, size: int, folder: Path, workers: Workers
) -> Iterator[Segment]:
    """Translate a long read whose parts are all in its scratch file. The file stays.

    Args:
        last_part: The last part of the read.
        is_ambiguous: Whether any part has letters other than A, C, G, T.
        size: The model's length in bases.
        folder: The folder for scratch files.
        workers: The processes that translate.

    Yields:
        Segments with the rows of the read, one for each range of chunks; and at last a segment with
        the columns of the read itself, because they count its rows.
    """
    # Divide the chunks into ranges of about `_WINDOW_BASES` bases.
    length = last_part.part.n_bases_before + last_part.n_bases
    n_chunks = -(-length // size)  # rounded up
    step = max(1, _WINDOW_BASES // size)
    stretches: list[range] = []
    for first in range(0, n_chunks, step):
        stretches.append(range(first, min(first + step, n_chunks)))
    work = partial(
        _translate_stretch,
        last_part.path,
        length=length,
        size=size,
        is_ambiguous=is_ambiguous,
        folder=folder,
    )
    n_rows = 0
    for segment in workers.map(work, stretches):
        n_rows += segment.counts.n_rows
        yield segment
    columns = _read_columns(
        last_part.id,
        np.array([last_part.part.line]),
        np.array([length]),
        size,
        np.array([n_rows]),
        np.array([is_ambiguous]),
    )
    yield _write_segment(folder, columns, n_chunks=0)


def _translate_stretch(
    path: str, numbers: range, *, length: int, size: int, is_ambiguous: bool, folder: Path
) -> Segment:
    """Translate consecutive chunks of a long read, and write a segment with their rows.

    This runs in the worker processes.

    Args:
        path: The scratch file with the bases of the read.
        numbers: The numbers of the chunks.
        length: The bases of the read.
        size: The model's length in bases.
        is_ambiguous: Whether the read has letters other than A, C, G, T.
        folder: The folder for scratch files.
    """
    number = np.array(numbers)
    read = np.zeros_like(number)  # all chunks are of the only read of this segment
    chunks = _place_chunks(read, number, np.full_like(number, length), size)
    start = int(chunks.start[0])
    end = int(chunks.end[-1])
    with Path(path).open("rb") as file:
        file.seek(start)
        bases = file.read(end - start)
    orfs = translate(bases, chunks.start - start, chunks.end - start)
    columns = _row_columns(orfs, chunks, np.array([is_ambiguous]))
    return _write_segment(folder, columns, len(number))
