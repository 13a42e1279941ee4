"""Reads that are not regular, through Biopython, record after record: wrapped FASTQ, comments, broken records."""

from __future__ import annotations

import io
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import IO, Final, cast

import numpy as np
from Bio.SeqIO.QualityIO import FastqGeneralIterator

from virnuc_core.errors import InputError
from virnuc_core.reads.fast_parser import (
    LETTERS,
    LONGEST_LINE,
    ParseLog,
    Part,
    Piece,
    ReadBatch,
    Strings,
    dropped,
    printable_ids,
    shortened,
    without_illegal,
)

_LONGEST_RECORD_LINES: Final = 100_000  # a record of more lines is taken for broken: bounds what one error costs


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
    lines = _Lines(first, later, block_bytes)
    if first.form == "fastq":
        records = _fastq_records(lines, first.name, log.broken)
    else:
        records = _fasta_records(lines, first, log.broken)
    for held in _lists(records, block_bytes):
        ids, bases, text = (Strings.of([getattr(one, name) for one in held]) for name in ("id", "bases", "text"))
        ids, before, part = printable_ids(ids), log.reads + log.left_out, held[0].part
        if not ids.lengths.all():
            ids = Strings.of([ids[i] or f"unnamed_{before + i + 1}".encode() for i in range(len(held))])
        at = np.array([record.line for record in held], np.int64)
        batch, illegal = without_illegal(ReadBatch(first.file, first.form, ids, bases, at, text, part), first.name)
        if part is None:
            log.take(first.name, len(batch), illegal)
        elif not log.take_part(first.name, part, illegal):
            if part.last:
                yield dropped(first, part)
            continue
        if len(batch):
            yield batch
    if lines.damage is not None:
        log.broken(lines.damage)


def _lists(records: Iterator[_Record], block_bytes: int) -> Iterator[list[_Record]]:
    held: list[_Record] = []
    size = 0
    for record in records:
        if record.part is not None:
            yield from ([held] if held else [])
            yield [record]
            held, size = [], 0
            continue
        held.append(record)
        size += len(record.bases) + len(record.id) + 32
        if size >= block_bytes:
            yield held
            held, size = [], 0
    if held:
        yield held


class _Lines:
    """Text lines of one file with a counter, and those of the current record to go back to.

    Looks like a text file to Biopython.
    """

    def __init__(self, first: Piece, later: Iterator[Piece], longest: int) -> None:
        self.longest = longest  # letters; of a longer line of FASTA more than one piece is given out
        self._text = self._split(first, later)
        self._again: deque[str] = deque()
        self.number = first.line - 1  # of the last line given out
        self.last = ""
        self._ended = True  # the line before, so that the next one counts
        self.since: list[str] = []  # lines of the current record; its header first
        self.damage: InputError | None = None  # why no line follows, once none does

    def _split(self, piece: Piece, later: Iterator[Piece]) -> Iterator[str]:
        """Any line end will do, old Mac ones too; bytes that are not UTF-8 survive as they are."""
        decoder = io.IncrementalNewlineDecoder(getincrementaldecoder("utf-8")("surrogateescape"), translate=True)
        begun = ""
        while True:
            *lines, begun = (begun + decoder.decode(piece.data, final=piece.last)).split("\n")
            yield from (f"{line}\n" for line in lines)
            if piece.last:
                break
            if piece.form == "fasta" and len(begun) > self.longest:
                yield begun
                begun = ""
            elif len(begun) > LONGEST_LINE:
                problem = f"a line of more than {LONGEST_LINE:,} letters"
                raise InputError(problem, file=piece.name, line=self.number + 1, hint="only FASTA may have such")
            piece = next(later)
        self.damage = piece.damage
        if begun:
            yield begun

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else next(self._text)
        if len(self.since) >= _LONGEST_RECORD_LINES:
            self._again.appendleft(line)
            raise ValueError(f"A record does not end within {_LONGEST_RECORD_LINES} lines.")
        self.number += self._ended
        self._ended = line.endswith("\n")
        self.last = line
        self.since.append(line)
        return line

    def readline(self) -> str:
        return next(self, "")

    def read(self, size: int) -> str:
        """Biopython asks for nothing, to see whether it gets text."""
        return "" if size == 0 else "".join(self)

    def back(self, lines: list[str]) -> None:
        """Give out `lines`, the last ones, again."""
        self._again.extendleft(reversed(lines))
        self.number -= len(lines)
        self._ended = True
        self.since = []


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _id(title: str) -> bytes:
    return _bytes("".join(title.split(None, 1)[:1]))


def _fasta_records(lines: _Lines, first: Piece, broken: Callable[[InputError], None]) -> Iterator[_Record]:
    """_Records of the rest of a FASTA file from `first` on; `;` lines are comments wherever they stand.

    One that is longer than a piece comes in parts. Text before the first header is given to `broken`; the record at a
    damaged end is left out, or its last part says so.
    """
    part, at_start = first.part, first.part is None or first.part.first
    if part is not None and part.first:
        part = None  # its header is still to come
    kind, title, told, held, size = ("" if part is None else "bases"), "", False, list[str](), 0

    def record(last: bool, dropped: bool = False) -> _Record:
        assert part is not None  # a header was read
        letters = "".join("".join(held).split())
        text = (f">{title[1:].rstrip()}\n" if part.first else "") + letters + "\n" * last
        now = None if part.first and last else replace(part, last=last, dropped=dropped)
        return _Record(part.id or _id(title[1:]), _bytes(letters), part.line, _bytes(text), now)

    for text in lines:
        lines.since = []
        begins, at_start = at_start, text.endswith("\n")
        if begins and text.startswith(">"):
            if part is not None:
                yield record(last=True)
            kind, title, held, size = "title", "", [], 0
            part = Part(b"", lines.number, first=True)
        elif begins:
            kind = "comment" if text.startswith(";") else "bases"
        if kind == "title":
            title += text
        elif kind == "bases" and part is None:
            if text.strip() and not told:
                told = True
                problem = f"'{shortened(text.strip())}' stands before the first header"
                broken(
                    InputError(problem, file=first.name, line=lines.number, hint="expected a line that starts with '>'")
                )
        elif kind == "bases" and part is not None:
            held.append(text)
            size += len(text)
            if size > lines.longest:
                made = record(last=False)
                yield made
                part, held, size = replace(part, first=False, before=part.before + len(made.bases)), [], 0
    if part is not None and (lines.damage is None or not part.first):
        yield record(last=True, dropped=lines.damage is not None)


def _fastq_records(lines: _Lines, name: str, broken: Callable[[InputError], None]) -> Iterator[_Record]:
    """_Records of the rest of a FASTQ file, wrapped or not; each broken one is given to `broken` and left out.

    After a broken record reading goes on at the next lines that look like a record.
    """
    while _skip_blank(lines):
        start = lines.number + 1
        try:
            for title, bases, quality in FastqGeneralIterator(cast(IO[str], lines)):
                yield _Record(_id(title), _bytes(bases), start, _bytes(f"@{title}\n{bases}\n+\n{quality}\n"))
                start = lines.number
                lines.since = [lines.last]  # the header of the next
        except ValueError as error:
            taken = lines.since
            at_the_cut = lines.damage is not None and not _skip_blank(lines)
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
                broken(InputError(problem, file=name, line=start, read_id=read_id, hint=hint))


def _complete(lines: list[str], start: int) -> tuple[_Record, int] | None:
    """The record that `lines` begin with and how many lines it has, if it is a good one and other lines follow."""
    plus = next((i for i, line in enumerate(lines) if i and line.startswith("+")), len(lines))
    if plus == len(lines) or not lines[0].startswith("@"):
        return None
    title, again = lines[0][1:].rstrip(), lines[plus][1:].rstrip()
    bases = "".join(line.rstrip() for line in lines[1:plus])
    ends, letters = plus + 1, 0
    while ends < len(lines) and letters < len(bases):
        letters += len(lines[ends].rstrip())
        ends += 1
    swallowed = any(line.startswith("@") for line in lines[plus + 2 : ends])  # too few quality letters, and a header
    if letters != len(bases) or swallowed or ends == len(lines):
        return None
    if again not in ("", title) or set(bases.upper()) - set(LETTERS):
        return None
    quality = "".join(line.rstrip() for line in lines[plus + 1 : ends])
    return _Record(_id(title), _bytes(bases), start, _bytes(f"@{title}\n{bases}\n+\n{quality}\n")), ends


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
                break
    else:
        return False
    lines.back(list(window))
    return True
