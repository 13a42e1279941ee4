"""Translate reads into open reading frames, and write each batch's part of the store.

Reads are cut into chunks of the model's length. Each chunk is translated in six reading frames, and
the frames without a stop codon are kept. `translate_batch` is what a worker does with a batch.

Two oddities are part of VirNucPro's method. Codons with letters other than A, C, G, T vanish, so
that the protein closes up. The DNA of a frame is cut to the length of its protein plus one base.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from Bio.Data import CodonTable
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from virnuc_core.reads.fast_parser import Part, ReadBatch, Strings, offsets_from_lengths
from virnuc_core.reads.fingerprint import Leaves, digests, hash_leaves
from virnuc_core.reads.workers import Workers

Places = NDArray[np.int64]
Mask = NDArray[np.bool_]
Columns = dict[str, NDArray[Any]]  # of a segment, by the names of SEGMENT_COLUMNS

EMPTY: Final = 1  # bits of read_flags: no bases
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
    "read_id_digest": np.uint64,  # two each
    "row_read": np.int32,  # from 0 within the segment; the next read to come, if it is not in it
    "row_chunk": np.int32,
    "row_frame": np.uint8,
    "row_digest": np.uint64,  # two each
    "protein_length": np.int32,
    "dna_length": np.int32,
    "protein_bytes": np.uint8,
    "dna_bytes": np.uint8,
}
FRAMES: Final = ("F1", "F2", "F3", "R1", "R2", "R3")

_WINDOW_BASES: Final = 1 << 22  # of a long read that are translated together
_GROUP_BASES: Final = 1 << 20  # translated together: arrays of this many bytes fit into the cache
# code of a letter that is no base: 16 a + 4 b + c with one of it is no codon, also modulo 256
_NO_BASE: Final = 84
_STOP: Final = ord("*")
_ALL_BYTES: Final = bytes(range(256))
_UPPER: Final = _ALL_BYTES.upper()
_COMPLEMENT: Final = _UPPER.translate(bytes.maketrans(b"ACGT", b"TGCA"))
_IS_AMBIGUOUS: Final = bytes(byte not in b"ACGTacgt" for byte in range(256))


class Chunks(NamedTuple):
    """Chunks in order of read and position, as columns; a read without bases has none."""

    read: Places  # [n] index of the read
    number: NDArray[np.int32]  # [n] from 0 within the read
    start: Places  # [n] first base within the read
    end: Places  # [n] one past the last base


def chunk(lengths: Places, size: int) -> Chunks:
    """Cut reads into chunks of at most `size` bases.

    Neighbouring chunks overlap so that all but the last are full. The last chunk ends with the read
    and may be shorter, but is never empty. A read of at most `size` bases is one chunk.

    Args:
        lengths: Bases of each read: int64 [reads].
        size: The model's length in bases.
    """
    n_chunks = _count_chunks(lengths, size)
    reads = np.arange(len(lengths), dtype=np.int64)
    read = np.repeat(reads, n_chunks)
    first_chunk = np.cumsum(n_chunks) - n_chunks
    chunks = np.arange(len(read), dtype=np.int64)
    number = chunks - first_chunk[read]
    return _place_chunks(read, number, lengths[read], size)


def _count_chunks(lengths: Places, size: int) -> Places:
    """Return the number of chunks of reads: their lengths over the size, rounded up."""
    return -(-lengths // size)


def _place_chunks(read: Places, number: Places, length: Places, size: int) -> Chunks:
    """Compute where chunks lie within their reads.

    Args:
        read: The index of the read of each chunk: int64 [n].
        number: The number of each chunk within its read, from 0: int64 [n].
        length: The bases of its read: int64 [n].
        size: The model's length in bases.
    """
    n_chunks = _count_chunks(length, size)
    surplus = n_chunks * size - length  # bases that chunks of full size have more than the read
    lower, remainder = np.divmod(surplus, n_chunks)
    # as in VirNucPro: each chunk begins `lower` bases earlier, the first ones one base more
    shift = lower * number + np.minimum(number, lower + remainder)
    start = number * size - shift
    end = np.minimum(start + size, length)
    return Chunks(read, number.astype(np.int32), start, end)


class Orfs(NamedTuple):
    """Open reading frames in order of chunk and frame, as columns."""

    chunk: Places  # [n] index of the chunk
    frame: NDArray[np.uint8]  # [n] 0..5, see FRAMES
    proteins: NDArray[np.uint8]  # letters of all proteins, end to end
    protein_lengths: NDArray[np.int32]  # [n] ≥ 1
    dna: NDArray[np.object_]  # [n] bytes, upper case
    dna_lengths: NDArray[np.int32]  # [n]

    @classmethod
    def concatenate(cls, groups: Sequence["Orfs"]) -> "Orfs":
        """Join the frames of several groups of chunks."""
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
    """Tables for `bytes.translate`."""

    base_codes: bytes  # 0..3 by the letter of a base, _NO_BASE for all others
    forward: bytes  # amino acid by the code of a codon, 16 a + 4 b + c; 0 for none
    reverse: bytes  # the same for the codon on the opposite strand


@cache
def _code_tables() -> _CodeTables:
    """Build the tables of the standard genetic code."""
    base_codes = bytearray([_NO_BASE] * 256)
    for code, base in enumerate("ACGT"):
        base_codes[ord(base)] = code
        base_codes[ord(base.lower())] = code
    standard = CodonTable.unambiguous_dna_by_id[1].forward_table
    codons = ["".join(bases) for bases in product("ACGT", repeat=3)]
    residues = [ord(standard.get(codon, "*")) for codon in codons]
    forward = np.array(residues, np.uint8).reshape(4, 4, 4)
    reverse = forward[::-1, ::-1, ::-1].T  # the codes of a base and its complement add up to 3
    return _CodeTables(
        bytes(base_codes), forward.tobytes().ljust(256, b"\0"), reverse.tobytes().ljust(256, b"\0")
    )


def translate(bases: bytes, starts: Places, ends: Places) -> Orfs:
    """Translate chunks in six frames, and return the frames that are open.

    A frame is open if its protein has no stop and is not empty.

    Args:
        bases: Nucleotide letters in either case.
        starts: The first base of each chunk, ascending: int64 [chunks].
        ends: One past its last base, ascending: int64 [chunks].
    """
    groups: list[Orfs] = []
    first = 0
    while first < len(starts):
        end = _find_group_end(starts, ends, first)
        groups.append(_translate_group(bases, starts[first:end], ends[first:end], first))
        first = end
    return Orfs.concatenate(groups)


def _find_group_end(starts: Places, ends: Places, first: int) -> int:
    """Return where a group of chunks that are translated together ends, if it begins at `first`.

    A group spans a bounded number of bases, also if each chunk is padded to the longest.
    """
    end = int(np.searchsorted(ends, starts[first] + _GROUP_BASES, side="right"))
    end = max(first + 1, end)
    widest = int((ends[first:end] - starts[first:end]).max()) + 1
    return max(first + 1, min(end, first + 2 * _GROUP_BASES // widest))


def _translate_group(bases: bytes, starts: Places, ends: Places, first_chunk: int) -> Orfs:
    """Translate a group of chunks; arguments as of `translate`.

    Each strand of the stretch that the group spans is one string. So each chunk is a window of it,
    on either strand, that begins with the chunk's own first base.

    Args:
        bases: Letters.
        starts: The first base of each chunk.
        ends: One past its last base.
        first_chunk: The index of the first chunk of the group.
    """
    stretch_start = int(starts[0])
    stretch_end = int(ends[-1])
    stretch = bases[stretch_start:stretch_end]
    lengths = ends - starts
    window_starts = (starts - stretch_start, stretch_end - ends)  # on each strand
    residues, is_open = _translate_windows(stretch, window_starts, lengths)

    chunk, frame = np.nonzero(is_open)
    table = residues[frame // 3, chunk, :, frame % 3]  # [open frames, codons]
    is_residue = table != 0
    protein_lengths = np.count_nonzero(is_residue, axis=1)
    if not protein_lengths.all():  # too short for a codon, or nothing but ambiguous letters
        has_protein = protein_lengths > 0
        chunk = chunk[has_protein]
        frame = frame[has_protein]
        table = table[has_protein]
        is_residue = is_residue[has_protein]
        protein_lengths = protein_lengths[has_protein]

    strand, offset = np.divmod(frame, 3)
    dna_lengths = np.minimum(3 * protein_lengths + 1, lengths[chunk] - offset)
    both_strands = stretch.translate(_UPPER) + stretch.translate(_COMPLEMENT)[::-1]
    reverse_start = len(stretch)
    dna_starts = offset + np.where(
        strand == 0, window_starts[0][chunk], reverse_start + window_starts[1][chunk]
    )
    spans = zip(dna_starts.tolist(), (dna_starts + dna_lengths).tolist(), strict=True)
    return Orfs(
        chunk=chunk + first_chunk,
        frame=frame.astype(np.uint8),
        proteins=table[is_residue],
        protein_lengths=protein_lengths.astype(np.int32),
        dna=np.array([both_strands[start:end] for start, end in spans], object),
        dna_lengths=dna_lengths.astype(np.int32),
    )


class _Translation(NamedTuple):
    """All six frames of a group of chunks."""

    residues: NDArray[np.uint8]  # [strands, chunks, codons, offsets] letters; 0 for none
    is_open: NDArray[np.bool_]  # [chunks, frames] without a stop


def _translate_windows(
    stretch: bytes, window_starts: tuple[Places, Places], lengths: Places
) -> _Translation:
    """Translate windows of a stretch of bases on both strands.

    Args:
        stretch: Letters.
        window_starts: The first base of each window on the forward and on the reverse strand.
        lengths: The bases of each window.
    """
    n_codons = -(-int(lengths.max()) // 3)  # of the longest window, rounded up
    width = 3 * n_codons
    n_codon_starts = lengths.astype(np.int32) - 2
    if lengths.min() == lengths.max():
        n_codon_starts = n_codon_starts[:1]  # one row of the mask serves all windows
    fits = np.arange(width, dtype=np.int32) < n_codon_starts[:, None]

    residues = np.empty((2, len(lengths), n_codons, 3), np.uint8)
    is_open = np.empty((len(lengths), 6), bool)
    residues_of_strands = _translate_codons(stretch, n_padding=width + 3)
    for strand in range(2):
        windows = sliding_window_view(residues_of_strands[strand], width)
        windows = windows[window_starts[strand]]  # a copy: [windows, width]
        windows *= fits  # a codon that runs over the end of the window is none
        residues[strand] = windows.reshape(residues.shape[1:])
        is_stop = windows == _STOP
        for offset in range(3):
            is_open[:, 3 * strand + offset] = ~is_stop[:, offset::3].any(axis=1)
    return _Translation(residues, is_open)


def _translate_codons(
    stretch: bytes, n_padding: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the amino acid of the codon that begins at each base, or 0, on both strands.

    Args:
        stretch: Letters.
        n_padding: The number of zeros to add.
    """
    tables = _code_tables()
    padding = bytes(n_padding)
    base_codes = (stretch + padding).translate(tables.base_codes)
    codes = np.frombuffer(base_codes, np.uint8)
    codon_codes = (codes[:-2] << 4) + (codes[1:-1] << 2) + codes[2:]
    codons = codon_codes.tobytes()
    forward = np.frombuffer(codons.translate(tables.forward), np.uint8)
    # the opposite of the codon at base p begins, on its own strand, at base n - 3 - p
    n_codons = max(len(stretch) - 2, 0)
    reverse_residues = codons[:n_codons].translate(tables.reverse)[::-1]
    reverse = np.frombuffer(reverse_residues + padding + bytes(2), np.uint8)
    return forward, reverse


@dataclass(frozen=True)
class SegmentCounts:
    """The contents of a segment, or of several ones."""

    n_reads: int = 0
    n_chunks: int = 0
    n_rows: int = 0
    n_bases: int = 0
    n_open_reads: int = 0  # reads with at least one row
    n_empty: int = 0
    n_short: int = 0
    n_ambiguous: int = 0

    def __add__(self, other: "SegmentCounts") -> "SegmentCounts":
        sums = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in fields(SegmentCounts)
        }
        return SegmentCounts(**sums)


class Segment(NamedTuple):
    """A part of a store, made of one batch of reads; its columns are in a scratch file."""

    path: str
    sizes: Mapping[str, int]  # number of values of each column, in the order of the file
    counts: SegmentCounts

    def column(self, name: str) -> NDArray[Any]:
        """Read one of the SEGMENT_COLUMNS."""
        offset = 0
        for other, kind in SEGMENT_COLUMNS.items():
            if other == name:
                break
            offset += self.sizes[other] * np.dtype(kind).itemsize
        values: NDArray[Any] = np.fromfile(
            self.path, SEGMENT_COLUMNS[name], self.sizes[name], offset=offset
        )
        return values


class LongPart(NamedTuple):
    """A part of a long read; its bases are in a scratch file until all parts are there."""

    part: Part
    path: str  # of the file, which all parts share
    n_bases: int
    is_ambiguous: bool
    id: Strings  # the printable id of the read, alone


class BatchResult(NamedTuple):
    """The result of a worker for one batch."""

    output: Segment | LongPart
    leaves: Leaves  # for the fingerprint
    chunk_s: float  # seconds spent
    translate_s: float


def translate_batch(batch: ReadBatch, model_length: int, folder: Path) -> BatchResult:
    """Cut reads into chunks, translate them, and write the batch's part of the store.

    A part of a long read is kept until the length of the whole read is known.

    Args:
        batch: The reads, or a part of a long one.
        model_length: The size of a chunk in bases.
        folder: The folder for scratch files.
    """
    start_s = time.perf_counter()
    if batch.part is not None:
        long_part = _keep_part(batch, batch.part, folder)
        leaves = hash_leaves(batch)
        return BatchResult(long_part, leaves, 0.0, time.perf_counter() - start_s)
    bases = batch.bases
    chunks = chunk(bases.lengths, model_length)
    chunked_s = time.perf_counter()

    read_starts = bases.offsets[chunks.read]
    orfs = translate(bases.data, read_starts + chunks.start, read_starts + chunks.end)
    is_ambiguous = _find_ambiguous(bases)
    n_rows = np.bincount(chunks.read[orfs.chunk], minlength=len(batch))
    read_columns = _read_columns(
        batch.ids, batch.lines, bases.lengths, model_length, n_rows, is_ambiguous
    )
    if batch.follows_mate is not None:
        read_columns["read_flags"] = read_columns["read_flags"] + batch.follows_mate * MATE
    row_columns = _row_columns(orfs, chunks, is_ambiguous)
    segment = _write_segment(folder, read_columns | row_columns, len(chunks.read))
    leaves = hash_leaves(batch, read_columns["read_id_digest"].reshape(-1, 2))
    return BatchResult(segment, leaves, chunked_s - start_s, time.perf_counter() - chunked_s)


def _keep_part(batch: ReadBatch, part: Part, folder: Path) -> LongPart:
    """Write the bases of a part to their place in the scratch file of its read."""
    bases = batch.bases.data
    path = folder / f"long_{batch.file_index}_{part.line}"
    path.touch()
    with path.open("rb+") as file:
        file.seek(part.n_bases_before)
        file.write(bases)
    is_ambiguous = any(bases.translate(_IS_AMBIGUOUS))
    return LongPart(part, str(path), len(bases), is_ambiguous, batch.ids)


def _find_ambiguous(bases: Strings) -> Mask:
    """Find the reads with letters other than A, C, G, T: bool [reads]."""
    is_ambiguous = np.zeros(len(bases), bool)
    positions = np.flatnonzero(np.frombuffer(bases.data.translate(_IS_AMBIGUOUS), np.bool_))
    is_ambiguous[np.searchsorted(bases.offsets, positions, side="right") - 1] = True
    return is_ambiguous


def _read_columns(
    ids: Strings, lines: Places, lengths: Places, size: int, n_rows: Places, is_ambiguous: Mask
) -> Columns:
    """Return a segment's columns of reads.

    Args:
        ids: Printable ids.
        lines: The line of each header: int64 [reads].
        lengths: Bases: int64 [reads].
        size: The model's length in bases.
        n_rows: Open frames: int64 [reads].
        is_ambiguous: Whether other letters than A, C, G, T occur: bool [reads].
    """
    is_empty = lengths == 0
    is_short = ~is_empty & (2 * lengths < size)
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
    """Return a segment's columns of rows.

    Rows are deduplicated by a digest of their DNA. If the DNA has ambiguous letters, the protein is
    part of the digest, because the DNA alone does not determine it.

    Args:
        orfs: The open frames.
        chunks: Their chunks.
        is_ambiguous: Which reads may have ambiguous letters: bool [reads]. May be true for others.
    """
    reads = chunks.read[orfs.chunk]
    texts = orfs.dna.tolist()
    proteins = Strings(orfs.proteins.tobytes(), offsets_from_lengths(orfs.protein_lengths))
    for row in np.flatnonzero(is_ambiguous[reads]).tolist():
        has_ambiguous_letters = bool(texts[row].translate(None, b"ACGT"))
        if has_ambiguous_letters:
            texts[row] += b"|" + proteins[row]
    return {
        "row_read": reads,
        "row_chunk": chunks.number[orfs.chunk],
        "row_frame": orfs.frame,
        "row_digest": digests(texts).reshape(-1),
        "protein_length": orfs.protein_lengths,
        "dna_length": orfs.dna_lengths,
        "protein_bytes": orfs.proteins,
        "dna_bytes": np.frombuffer(b"".join(orfs.dna), np.uint8),
    }


def _write_segment(folder: Path, columns: Mapping[str, NDArray[Any]], n_chunks: int) -> Segment:
    """Write a segment. Columns that are not given are empty."""
    values: Columns = {}
    sizes: dict[str, int] = {}
    for name, kind in SEGMENT_COLUMNS.items():
        values[name] = np.ascontiguousarray(columns.get(name, np.empty(0, kind)), kind)
        sizes[name] = len(values[name])
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
    """Translate a long read when all of its parts are there.

    Args:
        last_part: The last part.
        is_ambiguous: Whether any part has letters other than A, C, G, T.
        size: The model's length in bases.
        folder: The folder for scratch files.
        workers: Translate stretches of its chunks.

    Yields:
        Segments of rows, one for each stretch of chunks, and then a segment of the read itself.
    """
    length = last_part.part.n_bases_before + last_part.n_bases
    n_chunks = -(-length // size)
    step = max(1, _WINDOW_BASES // size)
    stretches = [range(first, min(first + step, n_chunks)) for first in range(0, n_chunks, step)]
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
    Path(last_part.path).unlink()
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
    """Translate consecutive chunks of a long read, and write them as a segment of rows.

    Args:
        path: The file with the read's bases.
        numbers: The numbers of the chunks.
        length: The bases of the read.
        size: The model's length in bases.
        is_ambiguous: Whether the read has letters other than A, C, G, T.
        folder: The folder for scratch files.
    """
    number = np.array(numbers)
    chunks = _place_chunks(np.zeros_like(number), number, np.full_like(number, length), size)
    start = int(chunks.start[0])
    end = int(chunks.end[-1])
    with Path(path).open("rb") as file:
        file.seek(start)
        bases = file.read(end - start)
    orfs = translate(bases, chunks.start - start, chunks.end - start)
    columns = _row_columns(orfs, chunks, np.array([is_ambiguous]))
    return _write_segment(folder, columns, len(number))
