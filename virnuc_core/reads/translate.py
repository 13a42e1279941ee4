"""Reads to open frames: chunks of the model's length, six reading frames of each, those without a stop kept.

`process` is what a worker does with one batch of reads: it writes the batch's part of the store.

Letters other than A, C, G, T make their codons vanish (the protein closes up), and the DNA of a frame is cut by the
length of its protein plus one base: both are part of the method."""

import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import cache, partial
from itertools import product, takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from Bio.Data import CodonTable
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from virnuc_core.reads.fast_parser import Part, ReadBatch, Strings, offsets_from_lengths
from virnuc_core.reads.fingerprint import Leaves, digests, leaves_of
from virnuc_core.reads.workers import Workers

Places = NDArray[np.int64]
Mask = NDArray[np.bool_]
Columns = dict[str, NDArray[Any]]  # of a segment

EMPTY: Final = 1  # bits of read_flags: no bases
SHORT_FOR_MODEL: Final = 2  # less than half of the model's length, but not empty
AMBIGUOUS: Final = 4  # holds a letter other than A, C, G, T
DUPLICATE_ID: Final = 8  # an earlier read has the same id
MATE: Final = 16  # the read before is its mate

SEGMENT_COLUMNS: Final[dict[str, type[np.generic]]] = {
    "read_length": np.int64,
    "read_chunks": np.int32,
    "read_rows": np.int32,
    "read_flags": np.uint8,
    "read_line": np.int64,
    "read_id_length": np.int32,
    "read_id_bytes": np.uint8,
    "read_id_digest": np.uint64,  # two each
    "row_read": np.int32,  # from 0 within the segment; that of rows without a read in it is the next to come
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
_GROUP_BASES: Final = (
    1 << 20
)  # bases looked at together: arrays of this many bytes stay in the cache
_NO_BASE: Final = 84  # code of a letter that is no base: 16 a + 4 b + c with one of it is no codon, also modulo 256
_STOP: Final = ord("*")
_BYTES: Final = bytes(range(256))
_UPPER: Final = _BYTES.upper()
_COMPLEMENT: Final = _UPPER.translate(bytes.maketrans(b"ACGT", b"TGCA"))
_ODD: Final = bytes(byte not in b"ACGTacgt" for byte in range(256))


class Chunks(NamedTuple):
    """Chunks in order of read and position, as columns; a read without bases has none."""

    read: Places  # [n] index of the read
    number: NDArray[np.int32]  # [n] from 0 within the read
    start: Places  # [n] first base within the read
    end: Places  # [n] one past the last base


def chunk(lengths: Places, size: int) -> Chunks:
    """Cut reads of the given lengths into chunks of at most `size` bases. Neighbours overlap so that all but the last
    are full; the last ends with the read and may be shorter, never empty. A read of at most `size` bases is one
    chunk."""
    counts = -(-lengths // size)
    read = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    number = np.arange(len(read), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return _chunks(read, number, lengths[read], size)


def _chunks(read: Places, number: Places, length: Places, size: int) -> Chunks:
    """The chunks of these numbers, of reads of these lengths: all are of one shape."""
    count = -(-length // size)
    lower, extra = np.divmod(count * size - length, count)
    start = number * size - (lower * number + np.minimum(number, lower + extra))
    return Chunks(read, number.astype(np.int32), start, np.minimum(start + size, length))


class Orfs(NamedTuple):
    """Open frames in order of chunk and frame, as columns."""

    chunk: Places  # [n] index of the chunk
    frame: NDArray[np.uint8]  # [n] 0..5, see FRAMES
    proteins: NDArray[np.uint8]  # end to end
    protein_lengths: NDArray[np.int32]  # [n] ≥ 1
    dna: NDArray[np.object_]  # [n] bytes, upper case
    dna_lengths: NDArray[np.int32]  # [n]


@cache
def _tables() -> tuple[bytes, bytes, bytes]:
    """Code of a letter; amino acid of a codon's code 16 a + 4 b + c on either strand, 0 for none."""
    codes = bytearray([_NO_BASE] * 256)
    for code, base in enumerate("ACGT"):
        codes[ord(base)] = codes[ord(base.lower())] = code
    standard, codons = (
        CodonTable.unambiguous_dna_by_id[1].forward_table,
        map("".join, product("ACGT", repeat=3)),
    )
    forward = np.array([ord(standard.get(codon, "*")) for codon in codons], np.uint8).reshape(
        4, 4, 4
    )
    reverse = forward[::-1, ::-1, ::-1].T  # a base and its opposite are 3 together
    return bytes(codes), forward.tobytes().ljust(256, b"\0"), reverse.tobytes().ljust(256, b"\0")


def translate(bases: bytes, starts: Places, ends: Places) -> Orfs:
    """Open frames of the chunks `bases[start:end]`, both ascending: whose protein has no stop and is not empty."""
    if not len(starts):
        letters, lengths = np.zeros(0, np.uint8), np.zeros(0, np.int32)
        return Orfs(np.zeros(0, np.int64), letters, letters, lengths, np.zeros(0, object), lengths)
    parts, a = list[Orfs](), 0
    while a < len(starts):
        # a group spans a bounded number of bases, and a bounded one when each chunk is padded to the longest
        b = max(a + 1, int(np.searchsorted(ends, starts[a] + _GROUP_BASES, side="right")))
        widest = int((ends[a:b] - starts[a:b]).max()) + 1
        b = max(a + 1, min(b, a + 2 * _GROUP_BASES // widest))
        parts.append(_translate_group(bases, starts[a:b], ends[a:b], a))
        a = b
    return parts[0] if len(parts) == 1 else Orfs(*map(np.concatenate, zip(*parts, strict=True)))


def _translate_group(bases: bytes, starts: Places, ends: Places, first_chunk: int) -> Orfs:
    low, high = int(starts[0]), int(ends[-1])
    lengths = ends - starts
    width = -(-int(lengths.max()) // 3)  # codons of the longest chunk, rounded up
    # both strands as one string each, so that every chunk is a window that begins at its own first base
    segment = bases[low:high]
    strands = (segment.translate(_UPPER), segment.translate(_COMPLEMENT)[::-1])
    begins = (starts - low, high - ends)
    codons = (lengths[:1] if lengths.min() == lengths.max() else lengths).astype(np.int32) - 2
    inside = np.arange(3 * width, dtype=np.int32) < codons[:, None]
    residues = np.empty((2, len(starts), width, 3), np.uint8)
    is_open = np.empty((len(starts), 6), bool)
    for number, (letters, begin) in enumerate(
        zip(_residues(segment, bytes(3 * width + 3)), begins, strict=True)
    ):
        of_strand = sliding_window_view(letters, 3 * width)[begin]  # a copy: [n, letters]
        of_strand *= inside  # a codon that runs over the end of the chunk is none
        residues[number] = of_strand.reshape(residues.shape[1:])
        stops = of_strand == _STOP
        for place in range(3):
            is_open[:, 3 * number + place] = ~stops[:, place::3].any(axis=1)
    chunk, frame = np.nonzero(is_open)
    table = residues[frame // 3, chunk, :, frame % 3]
    filled = table != 0
    protein_lengths = np.count_nonzero(filled, axis=1)
    if not protein_lengths.all():  # too short for a codon, or nothing but ambiguous letters
        kept = protein_lengths > 0
        chunk, frame, table, filled = (column[kept] for column in (chunk, frame, table, filled))
        protein_lengths = protein_lengths[kept]
    strand, offset = np.divmod(frame, 3)
    dna_lengths = np.minimum(3 * protein_lengths + 1, lengths[chunk] - offset)
    both = b"".join(strands)
    at = np.where(strand == 0, begins[0][chunk], begins[1][chunk] + len(strands[0])) + offset
    dna = np.array(
        [both[a:b] for a, b in zip(at.tolist(), (at + dna_lengths).tolist(), strict=True)], object
    )
    sizes = (lengths.astype(np.int32) for lengths in (protein_lengths, dna_lengths))
    return Orfs(
        chunk + first_chunk, frame.astype(np.uint8), table[filled], next(sizes), dna, next(sizes)
    )


def _residues(segment: bytes, pad: bytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The amino acid of the codon that begins at each base, of both strands; 0 for none."""
    table, forward, reverse = _tables()
    codes = np.frombuffer((segment + pad).translate(table), np.uint8)
    codons = ((codes[:-2] << 4) + (codes[1:-1] << 2) + codes[2:]).tobytes()
    n = len(segment)
    ahead = np.frombuffer(codons.translate(forward), np.uint8)
    # the reverse codon at forward base p begins, on the other strand, at base n - 3 - p
    back = codons[: max(n - 2, 0)].translate(reverse)[::-1] + pad + bytes(2)
    return ahead, np.frombuffer(back, np.uint8)


class Segment(NamedTuple):
    """The part of a store that one batch makes; its columns are in a scratch file."""

    path: str
    sizes: Mapping[str, int]  # values of each of the `SEGMENT_COLUMNS`, as they follow each other
    counts: Mapping[str, int]  # by the names of `StoreCounts`, as far as one batch tells

    def read(self, name: str) -> NDArray[Any]:
        """One column."""
        before = takewhile(name.__ne__, SEGMENT_COLUMNS)
        at = sum(self.sizes[other] * np.dtype(SEGMENT_COLUMNS[other]).itemsize for other in before)
        values: NDArray[Any] = np.fromfile(
            self.path, SEGMENT_COLUMNS[name], self.sizes[name], offset=at
        )
        return values


def process(
    batch: ReadBatch, model_length: int, folder: Path
) -> tuple["Segment | LongPart", Leaves, dict[str, float]]:
    """The batch's part of a store, in a file of `folder`; its part of the fingerprint; seconds of staging's stages.
    Reads are cut, their chunks translated in six frames, ids and open frames digested. A part of a long read is kept
    until the length of all is known."""
    started, bases, offsets = time.perf_counter(), batch.bases.data, batch.bases.offsets
    if batch.part is not None:
        path = folder / f"long_{batch.file_index}_{batch.part.line}"
        path.touch()
        with path.open("rb+") as file:
            file.seek(batch.part.n_bases_before)
            file.write(bases)
        kept = LongPart(batch.part, str(path), len(bases), any(bases.translate(_ODD)), batch.ids)
        return kept, leaves_of(batch), {"translate_s": time.perf_counter() - started}
    chunks = chunk(batch.bases.lengths, model_length)
    chunked = time.perf_counter()
    begin = offsets[chunks.read]
    orfs = translate(bases, begin + chunks.start, begin + chunks.end)
    ambiguous = np.zeros(len(batch), bool)
    odd = np.flatnonzero(np.frombuffer(bases.translate(_ODD), np.bool_))
    ambiguous[np.searchsorted(offsets, odd, side="right") - 1] = True
    rows = np.bincount(chunks.read[orfs.chunk], minlength=len(batch))
    reads = _reads(batch.ids, batch.lines, batch.bases.lengths, model_length, rows, ambiguous)
    if batch.follows_mate is not None:
        reads["read_flags"] = reads["read_flags"] + batch.follows_mate * MATE
    segment = _write(folder, reads | _rows(orfs, chunks, ambiguous), len(chunks.read))
    leaves = leaves_of(batch, reads["read_id_digest"].reshape(-1, 2))
    return (
        segment,
        leaves,
        {"chunk_s": chunked - started, "translate_s": time.perf_counter() - chunked},
    )


def _reads(
    ids: Strings, lines: Places, lengths: Places, size: int, rows: Places, ambiguous: Mask
) -> Columns:
    """A segment's columns of reads; `rows` [reads] counts their open frames."""
    short = (lengths > 0) & (2 * lengths < size)
    return {
        "read_length": lengths,
        "read_chunks": -(-lengths // size),
        "read_rows": rows,
        "read_flags": (lengths == 0) * EMPTY + short * SHORT_FOR_MODEL + ambiguous * AMBIGUOUS,
        "read_line": lines,
        "read_id_length": ids.lengths,
        "read_id_bytes": np.frombuffer(ids.data, np.uint8),
        "read_id_digest": digests(ids).reshape(-1),
    }


def _rows(orfs: Orfs, chunks: Chunks, ambiguous: Mask) -> Columns:
    """A segment's columns of rows; `ambiguous` [reads] may be true for more than those with odd letters. Rows with
    equal digests are taken as equal: of their DNA, which of A, C, G, T alone says what the protein is; elsewhere the
    protein goes into the digest too."""
    reads, texts = chunks.read[orfs.chunk], orfs.dna.tolist()
    proteins = Strings(orfs.proteins.tobytes(), offsets_from_lengths(orfs.protein_lengths))
    for i in np.flatnonzero(ambiguous[reads]).tolist():
        if texts[i].translate(None, b"ACGT"):
            texts[i] += b"|" + proteins[i]
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


def _write(folder: Path, columns: Mapping[str, NDArray[Any]], chunks: int) -> Segment:
    """A segment of these columns; those that are not given are empty."""
    whole = {name: columns.get(name, np.empty(0, kind)) for name, kind in SEGMENT_COLUMNS.items()}
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        for name, kind in SEGMENT_COLUMNS.items():
            file.write(np.ascontiguousarray(whole[name], kind).data)
    marks = {"n_empty": EMPTY, "n_short": SHORT_FOR_MODEL, "n_ambiguous": AMBIGUOUS}
    counts = {name: int(np.count_nonzero(whole["read_flags"] & bit)) for name, bit in marks.items()}
    counts |= {
        "n_reads": len(whole["read_length"]),
        "n_rows": len(whole["row_frame"]),
        "n_chunks": chunks,
    }
    counts |= {
        "n_bases": int(whole["read_length"].sum()),
        "n_open_reads": int(np.count_nonzero(whole["read_rows"])),
    }
    return Segment(file.name, {name: len(column) for name, column in whole.items()}, counts)


class LongPart(NamedTuple):
    """A part of a long read, whose bases lie in a scratch file until all are there."""

    part: Part
    path: str  # of the file
    bases: int
    ambiguous: bool
    id: Strings  # of the read, printable


def long_segments(
    last: LongPart, ambiguous: bool, size: int, folder: Path, workers: Workers
) -> Iterator[Segment]:
    """A long read's part of a store: segments of rows, each of a stretch of its chunks, and one of the read itself."""
    length, rows = last.part.n_bases_before + last.bases, 0
    count, step = -(-length // size), max(1, _WINDOW_BASES // size)
    work = partial(_window, last.path, length=length, size=size, ambiguous=ambiguous, folder=folder)
    for segment in workers.map(
        work, (range(low, min(low + step, count)) for low in range(0, count, step))
    ):
        rows += segment.counts["n_rows"]
        yield segment
    Path(last.path).unlink()
    line, lengths, n_rows, odd = (
        np.array([value]) for value in (last.part.line, length, rows, ambiguous)
    )
    yield _write(folder, _reads(last.id, line, lengths, size, n_rows, odd), 0)


def _window(
    path: str, numbers: range, *, length: int, size: int, ambiguous: bool, folder: Path
) -> Segment:
    number = np.array(numbers)
    chunks = _chunks(np.zeros_like(number), number, np.full_like(number, length), size)
    low, high = int(chunks.start[0]), int(chunks.end[-1])
    with Path(path).open("rb") as file:
        file.seek(low)
        orfs = translate(file.read(high - low), chunks.start - low, chunks.end - low)
    return _write(folder, _rows(orfs, chunks, np.array([ambiguous])), len(number))
