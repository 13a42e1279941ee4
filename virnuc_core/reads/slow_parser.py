"""Read irregular FASTQ line by line: wrapped records, and what follows broken ones."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np

from virnuc_core.errors import InputError
from virnuc_core.reads.fast_parser import (
    BLANKS,
    LEGAL_LETTERS,
    ParseLog,
    Piece,
    ReadBatch,
    Strings,
    first_word,
    shorten,
)

# a longer record counts as broken; this bounds what a single error costs
_MAX_RECORD_LINES: Final = 100_000
_RECORD_OVERHEAD_BYTES: Final = 32  # of a read, besides its letters, when batches are measured
_HINT: Final = "expected '@id', bases, '+', and as many quality letters as bases"


class _Record(NamedTuple):
    """One read with the text of its record in the file."""

    id: bytes  # first word of the header; it may be empty
    bases: bytes
    text: bytes  # the record, unwrapped to four lines
    line: int  # of the header


class _Parsed(NamedTuple):
    """The outcome of reading a record from a certain line on."""

    n_lines: int  # that it takes up
    record: _Record | None = None  # None for a blank line, and if there is a problem
    problem: str = ""


class _Quality(NamedTuple):
    """The quality lines of a record."""

    n_letters: int
    end: int  # offset of the line after them
    has_inner_mark: bool  # a line after the first begins with '@', as a header would


def read_irregular(
    first_piece: Piece, later_pieces: Iterator[Piece], log: ParseLog, block_bytes: int
) -> Iterator[ReadBatch]:
    """Parse the rest of a FASTQ file line by line.

    Args:
        first_piece: The text of the file, beginning with the first irregular record.
        later_pieces: Iterator over the following pieces. The pieces of the same file are taken.
        log: Receives the counts and the broken records while the caller iterates.
        block_bytes: Approximate size of a batch.

    Yields:
        Batches of reads, each with one read or more.

    Raises:
        InputError: A record is broken or the file is damaged, if `log.on_error` is `stop`.
    """
    piece = first_piece

    def pieces_of_file() -> Iterator[Piece]:
        nonlocal piece
        yield piece
        while not piece.is_last:
            piece = next(later_pieces)
            yield piece

    all_records = _read_records(pieces_of_file(), first_piece, log.skip_or_raise)
    for records in _group_records(all_records, block_bytes):
        ids = Strings.from_strings([record.id for record in records])
        whole_batch = ReadBatch(
            file_index=first_piece.file_index,
            format=first_piece.format,
            ids=ids.printable_ids().fill_empty_ids(log.n_records),
            bases=Strings.from_strings([record.bases for record in records]),
            lines=np.array([record.line for record in records], np.int64),
            records=Strings.from_strings([record.text for record in records]),
        )
        batch, illegal = whole_batch.drop_illegal(first_piece.name)
        log.count_reads(first_piece.name, None, len(batch), illegal)
        if len(batch) > 0:
            yield batch
    if piece.damage is not None:
        log.skip_or_raise(piece.damage)


def _group_records(records: Iterable[_Record], block_bytes: int) -> Iterator[list[_Record]]:
    """Yield lists of consecutive records, each with about `block_bytes` of text."""
    group: list[_Record] = []
    group_number = 0
    n_bytes = 0
    for record in records:
        n_bytes += len(record.bases) + len(record.id) + _RECORD_OVERHEAD_BYTES
        number = n_bytes // block_bytes
        if group and number != group_number:
            yield group
            group = []
        group_number = number
        group.append(record)
    if group:
        yield group


class _LineReader:
    """An iterator over the lines of the rest of a file that can look ahead.

    An offset counts lines from the next line: 0 is the next line, 1 the one after it. Lines that
    were looked at stay in a buffer until they are skipped. Line ends are removed.
    """

    def __init__(self, pieces: Iterable[Piece], line_number: int) -> None:
        """Begin with the first line of the pieces, which is line `line_number` of the file."""
        self.line_number = line_number  # of the next line, from 1
        self.is_damaged = False  # the piece that was read last is the end of a damaged file
        self._peeked = deque[bytes]()
        self._later_lines = self._split_lines(pieces)

    def _split_lines(self, pieces: Iterable[Piece]) -> Iterator[bytes]:
        """Yield the lines of all pieces without line ends and blanks at their ends."""
        for piece in pieces:
            self.is_damaged = piece.damage is not None
            for line in piece.data.splitlines():
                yield line.rstrip(BLANKS)

    def peek(self, offset: int) -> bytes | None:
        """Return the line at an offset; None beyond the end of the file."""
        while len(self._peeked) <= offset:
            line = next(self._later_lines, None)
            if line is None:
                return None
            self._peeked.append(line)
        return self._peeked[offset]

    def join(self, start: int, end: int) -> bytes:
        """Return the lines with the offsets `start` to `end` - 1, joined to one byte string."""
        return b"".join([self.peek(offset) or b"" for offset in range(start, end)])

    def skip(self, count: int) -> None:
        """Skip the next `count` lines, which must be in the buffer."""
        for _ in range(count):
            self._peeked.popleft()
        self.line_number += count

    def next_text(self, offset: int) -> bytes | None:
        """Return the first line at this offset or later that is not blank, or None."""
        line = self.peek(offset)
        while line == b"":
            offset += 1
            line = self.peek(offset)
        return line

    def skip_to_record(self) -> bool:
        """Skip the next line, and then all lines up to the next header of a record.

        A line that begins with '@' counts as a header only if a line of bases or a '+' line
        follows, because a line of qualities may begin with '@', too.

        Returns:
            False if no record follows. All lines of the file were skipped then.
        """
        self.skip(1)
        while (line_after_next := self.peek(2)) is not None:
            letters = (self.peek(1) or b"").strip(BLANKS)
            is_before_bases = bool(letters) and not letters.translate(None, LEGAL_LETTERS)
            is_before_plus = line_after_next.startswith(b"+")
            if self._peeked[0].startswith(b"@") and (is_before_bases or is_before_plus):
                return True
            self.skip(1)
        self.skip(len(self._peeked))
        return False


def _read_records(
    pieces: Iterable[Piece], first_piece: Piece, on_broken: Callable[[InputError], None]
) -> Iterator[_Record]:
    """Yield the records of the rest of a file. Bases and qualities may span several lines.

    For each broken record, `on_broken` is called with the error. Parsing continues at the next
    line that looks like the header of a record.
    """
    lines = _LineReader(pieces, first_piece.first_line)
    while (header := lines.peek(0)) is not None:
        parsed = _read_record(header, lines)
        if not parsed.problem:
            if parsed.record is not None:
                yield parsed.record
            lines.skip(parsed.n_lines)
            continue
        line_number = lines.line_number
        is_cut_off = lines.next_text(parsed.n_lines) is None and lines.is_damaged
        swallowed_a_record = lines.skip_to_record()
        # If a damaged file ends within this record, the damage is reported elsewhere and explains
        # the broken record. If lines of other records were skipped as well, the record itself was
        # broken.
        if not is_cut_off or swallowed_a_record:
            on_broken(_broken_record_error(first_piece.name, line_number, header, parsed.problem))


def _broken_record_error(file: str, line_number: int, header: bytes, problem: str) -> InputError:
    """Return the error for a broken record, with its file, line and id."""
    read_id = ""
    if header.startswith(b"@"):
        read_id = first_word(header[1:]).decode("utf-8", "backslashreplace")
    return InputError(
        f"broken FASTQ record: {problem}",
        file=file,
        line=line_number,
        read_id=shorten(read_id),
        hint=_HINT,
    )


def _read_record(header: bytes, lines: _LineReader) -> _Parsed:
    """Parse the record that begins with the next line, which is `header`. No line is skipped."""
    if not header:
        return _Parsed(n_lines=1)
    if not header.startswith(b"@"):
        return _Parsed(n_lines=1, problem="it does not begin with '@'")
    plus_offset = _find_plus_line(lines)
    bases = lines.join(1, plus_offset)
    quality = _find_quality(lines, plus_offset + 1, len(bases))
    problem = _find_problem(header, lines, plus_offset, bases, quality)
    if problem:
        return _Parsed(quality.end, problem=problem)
    quality_letters = lines.join(plus_offset + 1, quality.end)
    text = b"%b\n%b\n+\n%b\n" % (header, bases, quality_letters)
    record = _Record(first_word(header[1:]), bases, text, lines.line_number)
    return _Parsed(quality.end, record)


def _find_plus_line(lines: _LineReader) -> int:
    """Return the offset of the record's '+' line, or of the line at which the search ended."""
    offset = 1
    while offset < _MAX_RECORD_LINES:
        line = lines.peek(offset)
        if line is None or line.startswith(b"+"):
            break
        offset += 1
    return offset


def _find_quality(lines: _LineReader, start: int, n_bases: int) -> _Quality:
    """Find the quality lines, which begin at the offset `start`.

    Lines are added until there are at least as many quality letters as bases.
    """
    n_letters = 0
    has_inner_mark = False
    end = start
    while n_letters < n_bases and end < _MAX_RECORD_LINES:
        line = lines.peek(end)
        if line is None:
            break
        if n_letters > 0 and line.startswith(b"@"):
            has_inner_mark = True
        n_letters += len(line)
        end += 1
    return _Quality(n_letters, end, has_inner_mark)


def _find_problem(
    header: bytes, lines: _LineReader, plus_offset: int, bases: bytes, quality: _Quality
) -> str:
    """Return what is wrong with a record, or an empty string if it is correct."""
    plus_line = lines.peek(plus_offset)
    if plus_line is None or not plus_line.startswith(b"+"):
        return "no '+' line follows its bases"
    if plus_line[1:] not in (b"", header[1:]):
        return "another name stands after its '+'"
    if bases.translate(None, BLANKS) != bases:
        return "a blank stands within its bases"
    has_quality_line = lines.peek(plus_offset + 1) is not None
    if quality.n_letters != len(bases) or not has_quality_line:
        return f"{len(bases):,} bases, but {quality.n_letters:,} quality letters"
    has_illegal_letters = bool(bases.translate(None, LEGAL_LETTERS))
    if quality.has_inner_mark or has_illegal_letters:
        # A record with too few quality letters, or without a '+' line, takes over lines of the next
        # record. Then the line after it is not a header.
        following = lines.next_text(quality.end)
        if following is not None and not following.startswith(b"@"):
            return "it runs into the next one"
    return ""
