"""Text cut where records end, as far as line ends tell, so that the pieces can be read apart from each other.

Cutting costs a fraction of reading: it counts line ends and looks no further. Whether a piece really is what its line
ends promise turns out when it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from virnuc_core.errors import InputError
from virnuc_core.reads.batch import Format, ReadBatch, batch_of, without_illegal
from virnuc_core.reads.blocks import cut_fasta, cut_fastq
from virnuc_core.reads.sources import DamagedInput, Source

_NEWLINE: Final = 10
_BLANK: Final = b" \t\r\n\v\f"


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive lines of one file that should be whole records."""

    file: int  # place of the file among the inputs
    name: str
    form: Format
    data: bytes
    line: int  # the first line's number in the file


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of a piece."""

    reads: int
    unnamed: int = 0  # reads that were given a name
    broken: tuple[InputError, ...] = ()  # one for each read left out
    unread: int = 0  # bytes at the end of the piece, from the first irregular record on
    next_line: int = 0  # where those begin


@dataclass(frozen=True, slots=True)
class Reading:
    """The reads of a piece."""

    batch: ReadBatch
    taken: Taken


def read(item: Piece | ReadBatch) -> Reading:
    """The reads of a piece; those of a batch are read already."""
    return _read_piece(item) if isinstance(item, Piece) else Reading(item, Taken(len(item), item.unnamed))


def _read_piece(piece: Piece) -> Reading:
    """The reads of a piece up to its first irregular record, without those that hold illegal letters."""
    block = (cut_fastq if piece.form == "fastq" else cut_fasta)(piece.data, piece.line, True)
    batch = batch_of(block, piece.file, piece.form, 0)
    if batch.unnamed:  # their names need the number of reads before, which is not known here
        return Reading(_no_reads(piece), Taken(0, unread=len(piece.data), next_line=piece.line))
    batch, broken = without_illegal(batch, piece.name)
    unread = len(piece.data) - block.consumed if block.irregular else 0
    return Reading(batch, Taken(len(batch), 0, broken, unread, block.next_line))


def _no_reads(piece: Piece) -> ReadBatch:
    return batch_of(cut_fasta(b"", piece.line, False), piece.file, piece.form, 0)


class Pieces:
    """The text of one file: pieces first, then whatever is left as plain bytes for a slower reader."""

    def __init__(self, file: int, source: Source, block_bytes: int) -> None:
        self.name = source.name
        self.is_empty = False  # nothing but blanks
        self.damage: DamagedInput | None = None  # where the file cannot be unpacked any further
        self._file, self._source, self._block_bytes = file, source, block_bytes
        self._held = b""  # drawn from the source, not given out
        self._line = 1
        self._form: Format | None = None
        self._ended = False

    def next(self) -> Piece | None:
        """The next piece; none at the end, or where the file is damaged.

        Errors: `InputError` for a file that is neither FASTA nor FASTQ.
        """
        if self._form is None:
            self._begin()
        while self._held or not self._ended:
            end, lines = self._complete()
            if end:
                return self._cut(end, lines)
            if self._ended:
                break  # damaged within a record
            # a record longer than a block doubles it, so that its bytes are looked at a bounded number of times
            more = self._draw(max(self._block_bytes, len(self._held)))
            self._ended = not more
            self._held += more
        return None

    def read(self, size: int) -> bytes:
        """What has not been given out; `b""` at the end. Errors: `DamagedInput`, once, where the file is damaged."""
        data, self._held = self._held, b""
        if data:
            return data
        if self.damage is not None:
            damage, self.damage = self.damage, None
            raise damage
        return self._source.read(size)

    def _draw(self, size: int) -> bytes:
        try:
            return self._source.read(size)
        except DamagedInput as damage:  # all that came whole before it has been given out
            self.damage, self._ended = damage, True
            return b""

    def _begin(self) -> None:
        """Skip blanks at the start, and tell the format by the first byte that is none."""
        data = self._draw(self._block_bytes).removeprefix(b"\xef\xbb\xbf")
        while True:
            kept = data.lstrip(_BLANK)
            self._line += data[: len(data) - len(kept)].count(b"\n")
            if kept or self._ended:
                break
            data = self._draw(self._block_bytes)
            self._ended = not data
        if kept:
            self._held, self._form = kept, _format(kept, self.name)
        else:
            self._form, self.is_empty = "fasta", self.damage is None

    def _complete(self) -> tuple[int, int]:
        """How many of the bytes held are whole records, if they are regular, and how many line ends those hold."""
        data = self._held
        if self._ended and self.damage is None:
            return len(data), _line_ends(data)
        if self._form == "fasta":
            end = data.rfind(b"\n>") + 1
            lines = _line_ends(data[:end])
        else:
            end, lines = _whole_fastq(data)
        if end == 0 and b"\r" in data.removesuffix(b"\r").replace(b"\r\n", b""):
            return len(data), _line_ends(data)  # lines end otherwise here: the reader will see it
        return end, lines

    def _cut(self, end: int, lines: int) -> Piece:
        assert self._form is not None
        data, self._held = self._held[:end], self._held[end:]
        piece = Piece(self._file, self.name, self._form, data, self._line)
        self._line += lines
        return piece


def _whole_fastq(data: bytes) -> tuple[int, int]:
    """How many bytes are whole records of four lines, and how many lines those are."""
    lines, end = _line_ends(data), len(data)
    if lines < 4:
        return 0, 0
    for _ in range(lines % 4 + 1):
        end = data.rfind(b"\n", 0, end)
    return end + 1, lines - lines % 4


def _line_ends(data: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == _NEWLINE))  # many times as fast as bytes.count


def _format(data: bytes, name: str) -> Format:
    first = data[:1]
    if first in (b">", b";"):
        return "fasta"
    if data.startswith((b"@HD\t", b"@SQ\t", b"@RG\t", b"@PG\t")):
        raise InputError("this is SAM, not FASTQ", file=name, hint="convert it: samtools fastq")
    if first == b"@":
        return "fastq"
    known = {b"BAM\1": "BAM; convert it: samtools fastq", b"PK\3\4": "a zip archive; unpack it first"}
    kind = known.get(data[:4], f"neither FASTA nor FASTQ: it starts with {data[:12]!r}, expected '>' or '@'")
    raise InputError(f"this is {kind}", file=name)
