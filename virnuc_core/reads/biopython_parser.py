"""Irregular reads, record after record: FASTA comments, broken records and, through Biopython, wrapped FASTQ."""

import io
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import IO, Final, cast

import numpy as np
from Bio.SeqIO.QualityIO import FastqGeneralIterator

from virnuc_core.errors import InputError
from virnuc_core.reads.fast_parser import (
    BLANKS,
    LETTERS,
    ParseLog,
    Part,
    Piece,
    ReadBatch,
    Strings,
    shortened,
)

_LONGEST_RECORD_LINES: Final = 100_000  # a record of more lines is taken for broken: bounds what one error costs
_LONGEST_BEGUN: Final = 1000  # more than is shown of a line
_HEADERS: Final = re.compile(rb"^(?=>)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Record:
    """One read, or a part of one, as it stands in the file; the id is the first word of the header, possibly empty."""

    id: bytes
    bases: bytes
    line: int
    text: bytes  # the record in its plain form: unwrapped FASTQ, FASTA on two lines
    part: Part | None = None


def read_irregular(first: Piece, later: Iterator[Piece], log: ParseLog, block_bytes: int) -> Iterator[ReadBatch]:
    """The rest of a file from `first` on; its reads are counted as they are drawn."""
    piece = first

    def pieces() -> Iterator[Piece]:
        nonlocal piece
        yield piece
        while not piece.last:
            piece = next(later)
            yield piece

    records = (_fastq_records if first.form == "fastq" else _fasta_records)(pieces(), first, log.broken)
    for held in _lists(records, block_bytes):
        ids, bases, text = (Strings.of([getattr(one, name) for one in held]) for name in ("id", "bases", "text"))
        ids, before, part = ids.printable(), log.reads + log.left_out, held[0].part
        if not ids.lengths.all():
            ids = Strings.of([name or f"unnamed_{before + i}".encode() for i, name in enumerate(ids, 1)])
        at = np.array([record.line for record in held], np.int64)
        batch, illegal = ReadBatch(first.file, first.form, ids, bases, at, text, part).without_illegal(first.name)
        if not log.take(first.name, part, len(batch), illegal) and part is not None:
            if part.last:
                yield first.dropped(part)
        elif len(batch):
            yield batch
    if piece.damage is not None:
        log.broken(piece.damage)


def _lists(records: Iterator[_Record], block_bytes: int) -> Iterator[list[_Record]]:
    """Records for a batch each; a part of a long one is alone."""
    held: list[_Record] = []
    size = 0
    for record in records:
        if held and (size >= block_bytes or record.part or held[0].part):
            yield held
            held, size = [], 0
        held.append(record)
        size += len(record.bases) + len(record.id) + 32
    if held:
        yield held


def _id(title: bytes) -> bytes:
    return b"".join(title.split(None, 1)[:1])


def _fasta_records(pieces: Iterable[Piece], first: Piece, broken: Callable[[InputError], None]) -> Iterator[_Record]:
    """Records of the rest of a FASTA file, and parts of long ones; `;` lines are comments wherever they stand.

    Text before the first header is given to `broken`. What a damaged end leaves of a record is left out.
    """
    headed, before = (True, first.part.before) if first.part and not first.part.first else (False, 0)
    told, begun = False, b""  # what stands for the line within which the next part begins
    for piece in pieces:
        part, data, ahead, records = piece.part, piece.data, b"", list[bytes]()
        if part and not part.first:  # begins within a line
            data = begun + data
            ahead, records = (b"", [b"\n" + data]) if headed else (data, [])
        else:
            ahead, *records = _HEADERS.split(data)
            before = 0
        for line, text in enumerate(ahead.split(b"\n")[: None if piece.last else -1], piece.line):
            words = text.decode("utf-8", "replace").strip()
            if words and not text.startswith(b";") and not told:
                told, problem = True, f"'{shortened(words)}' stands before the first header"
                broken(InputError(problem, file=first.name, line=line, hint="expected a line that starts with '>'"))
        at = piece.line + ahead.count(b"\n")
        for text in records if part or piece.damage is None else ():
            headed = True
            title, _, lines = text.partition(b"\n")
            bases = b"".join(line.translate(None, BLANKS) for line in lines.split(b"\n") if line[:1] != b";")
            if part is None:
                yield _Record(_id(title[1:]), bases, at, b"%b\n%b\n" % (title.rstrip(), bases))
            else:
                plain = (title.rstrip() + b"\n") * part.first + bases + b"\n" * part.last
                yield _Record(part.id, bases, part.line, plain, replace(part, before=before))
            before += len(bases)
            at += text.count(b"\n")
        begun = data[data.rfind(b"\n") + 1 :][:_LONGEST_BEGUN]
        begun = b" " if headed and not begun.startswith(b";") else begun


class _Lines:
    """A text file, to Biopython: lines with a counter, and those of the current record to go back to."""

    def __init__(self, pieces: Iterable[Piece], line: int) -> None:
        self._text = self._split(pieces)
        self._again: deque[str] = deque()
        self.number = line - 1  # of the last line given out
        self.since: list[str] = []  # lines of the current record; its header first
        self.damaged = False  # the file ends in its last lines, within a record perhaps

    def _split(self, pieces: Iterable[Piece]) -> Iterator[str]:
        """Bytes that are not UTF-8 survive as they are."""
        for piece in pieces:
            self.damaged = piece.damage is not None
            yield from io.StringIO(piece.data.decode("utf-8", "surrogateescape"), newline=None)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else next(self._text)
        if len(self.since) >= _LONGEST_RECORD_LINES:
            self._again.appendleft(line)
            raise ValueError(f"A record does not end within {_LONGEST_RECORD_LINES} lines.")
        self.number += 1
        self.since.append(line)
        return line

    def readline(self) -> str:
        return next(self, "")

    def read(self, size: int) -> str:
        """Biopython asks for nothing, to see whether it gets text."""
        return ""

    def back(self, lines: list[str]) -> None:
        """Give out `lines`, the last ones, again."""
        self._again.extendleft(reversed(lines))
        self.number -= len(lines)
        self.since = []


def _fastq_records(pieces: Iterable[Piece], first: Piece, broken: Callable[[InputError], None]) -> Iterator[_Record]:
    """Records of the rest of a FASTQ file, wrapped or not. Each broken one is given to `broken` and left out; reading
    goes on at the next lines that look like a record."""
    lines = _Lines(pieces, first.line)
    while _skip_blank(lines):
        start = lines.number + 1
        try:
            for title, bases, quality in FastqGeneralIterator(cast(IO[str], lines)):
                yield _fastq_record(start, title, bases, quality)
                start = lines.number
                lines.since = lines.since[-1:]  # the header of the next
        except ValueError as error:
            taken = lines.since
            at_the_cut = lines.damaged and not _skip_blank(lines)
            if (whole := _complete(taken, start)) is not None:  # what is broken stands behind it, without a header
                record, ends = whole
                yield record
                lines.back(taken[ends:])
                continue
            lines.back(taken[1:])
            # a record at the cut is told of by the damage, unless it swallowed whole records on its way there
            if _find_record(lines) or not at_the_cut:
                words = taken[0][1:].split(None, 1) if taken[0].startswith("@") else []
                problem = f"broken FASTQ record: {shortened(str(error).rstrip('.'))}"
                hint = "expected '@id', bases, '+', and as many quality letters as bases"
                read_id = shortened(words[0]) if words else None
                broken(InputError(problem, file=first.name, line=start, read_id=read_id, hint=hint))


def _fastq_record(line: int, *texts: str) -> _Record:
    title, bases, quality = (text.encode("utf-8", "surrogateescape") for text in texts)
    return _Record(_id(title), bases, line, b"@%b\n%b\n+\n%b\n" % (title, bases, quality))


def _complete(lines: list[str], start: int) -> tuple[_Record, int] | None:
    """The record that `lines` begin with and how many lines it has, if it is a good one and other lines follow."""
    plus = next((i for i, line in enumerate(lines) if i and line.startswith("+")), len(lines))
    if plus == len(lines) or not lines[0].startswith("@"):
        return None
    title, again = lines[0][1:].rstrip(), lines[plus][1:].rstrip()
    bases = "".join(line.rstrip() for line in lines[1:plus])
    quality = [line.rstrip() for line in lines[plus + 1 :]]
    letters = [*accumulate(map(len, quality), initial=0)]
    count = bisect_left(letters, len(bases))
    swallowed = any(line.startswith("@") for line in quality[1:count])  # too few quality letters, and a header
    if count >= len(quality) or letters[count] != len(bases) or swallowed:
        return None
    if again not in ("", title) or set(bases.upper()) - set(LETTERS):
        return None
    return _fastq_record(start, title, bases, "".join(quality[:count])), plus + 1 + count


def _skip_blank(lines: _Lines) -> bool:
    """Go to the next line that is not blank; false at the end."""
    for text in lines:
        if text.strip():
            lines.back([text])
            return True
        lines.since = []
    return False


def _find_record(lines: _Lines) -> bool:
    """Go to the next header that bases or a `+` line follow, if there is one; quality lines may start with `@` too."""
    window: deque[str] = deque(maxlen=3)
    for text in lines:
        lines.since = []
        window.append(text)
        if len(window) == 3 and window[0].startswith("@"):
            letters = window[1].strip()
            if window[2].startswith("+") or (letters and not letters.upper().strip(LETTERS)):
                lines.back(list(window))
                return True
    return False
