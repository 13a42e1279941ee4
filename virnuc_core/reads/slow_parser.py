"""Parse irregular FASTQ line by line: records with wrapped lines, and text after broken records."""

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
    mixed_formats_error,
    shorten,
)

# A record with more lines counts as broken. The limit bounds the search after a single error.
_MAX_RECORD_LINES: Final = 100_000
_RECORD_OVERHEAD_BYTES: Final = 32  # memory of a read besides its letters, for the size of a batch
_HINT: Final = "expected '@id', bases, '+', and as many quality letters as bases"


class _Record(NamedTuple):
    """One FASTQ record."""

    id: bytes  # first word of the header; it may be empty
    bases: bytes
    text: bytes  # the record, unwrapped to four lines
    line: int  # line number of the header


class _Parsed(NamedTuple):
    """The result of parsing a record that begins at a certain line."""

    n_lines: int  # the number of lines that belong to the record
    record: _Record | None = None  # None for a blank line, or if there is a problem
    problem: str = ""  # what is wrong with the record; empty if it is good


class _Quality(NamedTuple):
    """The quality lines of a record."""

    n_letters: int  # quality letters in all lines
    end: int  # offset of the line after the last quality line
    has_inner_mark: bool  # a line after the first begins with '@', like a header


def read_irregular(
    first_piece: Piece, later_pieces: Iterator[Piece], log: ParseLog, block_bytes: int
) -> Iterator[ReadBatch]:
    """Parse the rest of a FASTQ file line by line.

    Args:
        first_piece: The text of the file from its first irregular record on.
        later_pieces: All pieces after `first_piece`. Those of the same file are consumed.
        log: Is updated with the counts and the broken records.
        block_bytes: The approximate size of a batch.

    Yields:
        Batches of reads, each with one read or more.

    Raises:
        InputError: A record is broken or the file is damaged, if `log.on_error` is `stop`.
    """
    piece = first_piece

    def pieces_of_file() -> Iterator[Piece]:
        """Yield the pieces of this file, and set `piece` to the one that was yielded last."""
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
    # All records were drawn, so `piece` is the last piece of the file. It tells of any damage.
    if piece.damage is not None:
        log.skip_or_raise(piece.damage)


def _group_records(records: Iterable[_Record], block_bytes: int) -> Iterator[list[_Record]]:
    """Yield consecutive records in lists of about `block_bytes` of memory each."""
    group: list[_Record] = []
    group_number = 0
    n_bytes = 0  # of all records so far
    for record in records:
        n_bytes += len(record.bases) + len(record.id) + _RECORD_OVERHEAD_BYTES
        # A new group begins whenever the sum passes a multiple of the block size.
        number = n_bytes // block_bytes
        if group and number != group_number:
            yield group
            group = []
        group_number = number
        group.append(record)
    if group:
        yield group


class _LineReader:
    """Reads the lines of a file, without their line ends, and can look ahead.

    An offset is a number of lines after the next line, so offset 0 is the next line. `peek` looks
    at a line without consuming it, `skip` consumes lines.

    Attributes:
        line_number: The number of the next line in the file, from 1.
        is_damaged: The file is damaged, and the lines that were read last are its end.
    """

    def __init__(self, pieces: Iterable[Piece], line_number: int) -> None:
        """Begin at the first line of the pieces, which has the given number in the file."""
        self.line_number = line_number
        self.is_damaged = False
        self._peeked = deque[bytes]()  # lines that were read but not consumed
        self._later_lines = self._split_lines(pieces)

    def _split_lines(self, pieces: Iterable[Piece]) -> Iterator[bytes]:
        """Yield the lines of the pieces without blanks at their ends; sets `is_damaged`."""
        for piece in pieces:
            self.is_damaged = piece.damage is not None
            for line in piece.data.splitlines():
                yield line.rstrip(BLANKS)

    def peek(self, offset: int) -> bytes | None:
        """Return the line at an offset without consuming it; None after the end of the file.

        Args:
            offset: The number of lines after the next line; 0 is the next line.
        """
        while len(self._peeked) <= offset:
            line = next(self._later_lines, None)
            if line is None:
                return None
            self._peeked.append(line)
        return self._peeked[offset]

    def join(self, start: int, end: int) -> bytes:
        """Return the lines at offsets `start` to `end` (exclusive), concatenated."""
        return b"".join([self.peek(offset) or b"" for offset in range(start, end)])

    def skip(self, count: int) -> None:
        """Consume `count` lines.

        Args:
            count: The number of lines. `peek` must have been called for all of them before.
        """
        for _ in range(count):
            self._peeked.popleft()
        self.line_number += count

    def next_text(self, offset: int) -> bytes | None:
        """Return the first line at or after an offset that is not blank; None if there is none.

        Args:
            offset: The number of lines after the next line; 0 is the next line.
        """
        line = self.peek(offset)
        while line == b"":
            offset += 1
            line = self.peek(offset)
        return line

    def skip_to_record(self) -> bool:
        """Consume the next line, and then all lines before the next line that looks like a header.

        A line that begins with '@' looks like a header if a line of bases follows, or if the line
        after that begins with '+'. The '@' alone is not enough, because a quality line may begin
        with it.

        Returns:
            False if no header follows. All lines of the file were consumed then.
        """
        self.skip(1)
        while True:
            candidate, second_line, third_line = self.peek(0), self.peek(1), self.peek(2)
            if candidate is None or second_line is None or third_line is None:
                break
            letters = second_line.strip(BLANKS)
            is_before_bases = bool(letters) and not letters.translate(None, LEGAL_LETTERS)
            is_before_plus = third_line.startswith(b"+")
            if candidate.startswith(b"@") and (is_before_bases or is_before_plus):
                return True
            self.skip(1)
        # Fewer than three lines are left: too few for a record.
        self.skip(len(self._peeked))
        return False


def _read_records(
    pieces: Iterable[Piece], first_piece: Piece, on_broken: Callable[[InputError], None]
) -> Iterator[_Record]:
    """Yield the good records of the rest of a file; their lines may be wrapped.

    After a broken record, parsing continues at the next line that looks like a header.

    Args:
        pieces: The text of the file, beginning with `first_piece`.
        first_piece: Tells the name of the file and the first line number.
        on_broken: Is called with an error for each broken record. It may raise the error.
    """
    lines = _LineReader(pieces, first_piece.first_line)
    while True:
        header = lines.peek(0)
        if header is None:
            return
        result = _read_record(header, lines)
        if not result.problem:
            if result.record is not None:
                yield result.record
            lines.skip(result.n_lines)
            continue

        line_number = lines.line_number
        if _begins_fasta(header, lines):
            raise mixed_formats_error(first_piece.name, line_number, "FASTA", "FASTQ")
        is_cut_off = lines.next_text(result.n_lines) is None and lines.is_damaged
        has_next_record = lines.skip_to_record()
        # If the file is damaged and ends within this record, the error for the damage is enough.
        # But if another header follows the first line, this record itself is broken.
        if not is_cut_off or has_next_record:
            on_broken(_broken_record_error(first_piece.name, line_number, header, result.problem))


def _begins_fasta(header: bytes, lines: _LineReader) -> bool:
    """Return whether the next two lines look like a record of FASTA.

    Args:
        header: The next line.
        lines: The lines of the file.
    """
    bases = lines.peek(1)
    if not header.startswith(b">") or not bases:
        return False
    return not bases.translate(None, LEGAL_LETTERS)


def _broken_record_error(file: str, line_number: int, header: bytes, problem: str) -> InputError:
    """Return an error that names the file, line and id of a broken record and its problem.

    The id is empty if the first line of the record is not a header.
    """
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
    """Parse the record that begins at the next line, without consuming any line.

    Args:
        header: The next line.
        lines: The lines of the file.

    Returns:
        The record, or what is wrong with it, and how many lines it has. A blank line gives neither
        a record nor a problem.
    """
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
    """Return the offset of the '+' line of the record that begins at the next line.

    Returns:
        If there is no '+' line, the offset of the line after the end of the file, or
        `_MAX_RECORD_LINES`.
    """
    offset = 1
    while offset < _MAX_RECORD_LINES:  # a broken record must not make us read the whole file
        line = lines.peek(offset)
        if line is None or line.startswith(b"+"):
            break
        offset += 1
    return offset


def _find_quality(lines: _LineReader, start: int, n_bases: int) -> _Quality:
    """Find the quality lines of a record: as many lines as are needed for one letter per base.

    Args:
        lines: The lines of the file.
        start: The offset of the first quality line.
        n_bases: The number of bases of the record.

    Returns:
        The quality lines. They have fewer letters than bases if the file ends, and more if the last
        line is too long.
    """
    n_letters = 0
    has_inner_mark = False
    end = start
    # The limit: a broken record must not make us read the whole file.
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
    """Return what is wrong with a record; an empty text if it is good.

    Args:
        header: The header line.
        lines: The lines of the file; the header is the next line.
        plus_offset: The offset of the '+' line.
        bases: The bases of the record.
        quality: Its quality lines.
    """
    plus_line = lines.peek(plus_offset)
    if plus_line is None or not plus_line.startswith(b"+"):
        return "no '+' line follows the bases"
    if plus_line[1:] not in (b"", header[1:]):
        return "the name after '+' is not the name of the header"
    if bases.translate(None, BLANKS) != bases:
        return "there is a blank within the bases"
    # A read without bases has no quality letters, but it must have an empty line for them.
    has_quality_line = lines.peek(plus_offset + 1) is not None
    if not has_quality_line and not bases:
        return "it has no bases, and the file ends before its quality line"
    if quality.n_letters != len(bases) or not has_quality_line:
        return f"{len(bases):,} bases, but {quality.n_letters:,} quality letters"
    # If quality letters or the '+' line are missing, the record seems to include lines of the next
    # record. Then it has illegal bases or a quality line that begins with '@', and what follows is
    # the middle of a record instead of a header.
    has_illegal_letters = bool(bases.translate(None, LEGAL_LETTERS))
    if quality.has_inner_mark or has_illegal_letters:
        following = lines.next_text(quality.end)
        if following is not None and not following.startswith(b"@"):
            return "lines are missing, so it includes lines of the next record"
    return ""
