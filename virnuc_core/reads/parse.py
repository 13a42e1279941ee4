"""FASTA and FASTQ to columnar batches of reads; whatever is broken is named by file, line and read id.

Files are cut into pieces where records end, as far as line ends tell: that costs a fraction of reading, and pieces can
be read apart from each other. `fast_parser` reads what is regular (four-line FASTQ, FASTA of any wrapping). From the
first thing that is not, the rest of that file goes through Biopython, which also reads wrapped FASTQ, here and one
record after the other; both give the same reads.
"""

from __future__ import annotations

import io
import time
from codecs import getincrementaldecoder
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import IO, Final, Generic, Literal, TypeVar, cast

import numpy as np

from virnuc_core.errors import InputError
from virnuc_core.reads.fast_parser import (
    LETTERS,
    Piece,
    ReadBatch,
    Strings,
    cut_fasta,
    cut_fastq,
    pieces_of,
    printable_ids,
    shortened,
    without_illegal,
)
from virnuc_core.reads.workers import Workers

OnError = Literal["stop", "skip"]
O = TypeVar("O")  # noqa: E741  # what comes of a batch

BLOCK_BYTES: Final = 4_000_000  # of one piece: a tenth less processor time than a million takes
_LONGEST_RECORD_LINES: Final = 100_000  # a record of more lines is taken for broken: bounds what one error costs


@dataclass(slots=True)
class ParseLog:
    """What was met on the way; filled while the batches are drawn."""

    on_error: OnError = "stop"
    report: Callable[[InputError], None] | None = None  # given each broken record that is left out
    left_out: int = 0  # reads with letters that are no nucleotides
    empty_files: int = 0
    reads_by_file: Counter[str] = field(default_factory=Counter)
    skipped_by_file: Counter[str] = field(default_factory=Counter)  # broken records, reads left out among them
    cut_s: float = 0.0  # unpacking, cutting, and reading through Biopython
    parse_s: float = 0.0  # reading pieces, of all workers

    @property
    def reads(self) -> int:
        """Good ones so far."""
        return self.reads_by_file.total()

    def take(self, name: str, reads: int, illegal: Iterable[InputError]) -> None:
        """Count the reads of a piece or batch of the file `name`, and those that are left out."""
        self.reads_by_file[name] += reads
        for error in illegal:
            self.left_out += 1
            self.broken(error)

    def broken(self, error: InputError) -> None:
        """Stop at a broken record, or count it and go on, as was asked."""
        if self.on_error == "stop":
            raise error
        self.skipped_by_file[str(error.file)] += 1
        if self.report is not None:
            self.report(error)


@dataclass(frozen=True, slots=True)
class _Made(Generic[O]):
    """What a worker made of a piece, or of a batch that is read and counted already."""

    value: O | None  # none where there are no reads
    reads: int = 0
    illegal: tuple[InputError, ...] = ()  # one for each read left out
    irregular: int = 0  # bytes at the end of the piece that are left for Biopython
    parse_s: float = 0.0


def parse(
    files: tuple[str, ...], log: ParseLog | None = None, *, block_bytes: int = BLOCK_BYTES
) -> Iterator[ReadBatch]:
    """Batches of reads of all files, in order; an empty file gives none and is counted in `log`.

    Errors: `InputError` for a file that is neither FASTA nor FASTQ or cannot be read, and, unless `log.on_error` is
    `skip`, for the first broken record.
    """
    with Workers(1) as here:
        yield from parse_by(here, lambda batch: batch, files, log or ParseLog(), block_bytes=block_bytes)


def parse_by(
    workers: Workers,
    work: Callable[[ReadBatch], O],
    files: tuple[str, ...],
    log: ParseLog,
    *,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[O]:
    """What `work` makes of the batches of all files, in order; `workers` read the pieces.

    Where a file turns out irregular, what was made of its later pieces is dropped. Errors: as of `parse`, the first in
    the order of the files whatever was met first; those of `workers`.
    """
    cut, again = pieces_of(files, block_bytes), deque[Piece]()

    def pieces() -> Iterator[Piece]:
        while (piece := again.popleft() if again else next(cut, None)) is not None:
            yield piece

    def noted(items: Iterator[Piece | ReadBatch], given: deque[Piece | ReadBatch]) -> Iterator[Piece | ReadBatch]:
        while True:
            started = time.perf_counter()
            item = next(items, None)
            log.cut_s += time.perf_counter() - started
            if item is None:
                return
            given.append(item)
            yield item

    irregular: Iterator[ReadBatch] | None = iter(())
    while irregular is not None:
        given = deque[Piece | ReadBatch]()
        items = noted(chain(irregular, pieces()), given)
        irregular = None
        for made in workers.map(
            partial(_work_on, work), items, lambda item: len(item.data if isinstance(item, Piece) else item.bases.data)
        ):
            item = given.popleft()
            if isinstance(item, Piece):
                log.take(item.name, made.reads, made.illegal)
                log.parse_s += made.parse_s
            if made.value is not None:
                yield made.value
            if isinstance(item, ReadBatch):
                continue
            log.empty_files += item.is_empty_file
            if made.irregular:
                again.extendleft(piece for piece in reversed(given) if isinstance(piece, Piece))
                read = item.data[: -made.irregular].count(b"\n")
                rest = replace(item, data=item.data[-made.irregular :], line=item.line + read)
                irregular = _through_biopython(rest, pieces(), log, block_bytes)
                break
            if item.refused:
                raise cast(InputError, item.damage)
            if item.damage is not None:
                log.broken(item.damage)


def _work_on(work: Callable[[ReadBatch], O], item: Piece | ReadBatch) -> _Made[O]:
    """What a worker does with a piece: read it up to the first irregular record, without illegal letters."""
    if isinstance(item, ReadBatch):
        return _Made(work(item))
    if item.damage is not None or not item.data:
        return _Made(None)
    started = time.perf_counter()
    read, irregular = (cut_fastq if item.form == "fastq" else cut_fasta)(item)
    if read is None:
        return _Made(None, irregular=irregular)
    ids = printable_ids(read.ids)
    if not ids.lengths.all():  # their names need the number of reads before, which is not known here
        return _Made(None, irregular=len(item.data))
    batch, illegal = without_illegal(replace(read, ids=ids), item.name)
    parse_s = time.perf_counter() - started
    return _Made(work(batch) if len(batch) else None, len(batch), tuple(illegal), irregular, parse_s)


@dataclass(frozen=True, slots=True)
class _Record:
    """One read as it stands in the file; the id is the first word of the header, possibly empty."""

    id: bytes
    bases: bytes
    line: int
    text: bytes  # the record in its plain form: unwrapped FASTQ, FASTA on two lines


def _through_biopython(first: Piece, later: Iterator[Piece], log: ParseLog, block_bytes: int) -> Iterator[ReadBatch]:
    """The rest of a file from `first` on; its reads are counted as they are drawn."""
    lines = _Lines(chain([first], later))
    records = (_fastq_records if first.form == "fastq" else _fasta_records)(lines, first.name, log.broken)
    for held in _lists(records, block_bytes):
        ids, bases, text = (Strings.of([getattr(one, name) for one in held]) for name in ("id", "bases", "text"))
        ids, before = printable_ids(ids), log.reads + log.left_out
        if not ids.lengths.all():
            ids = Strings.of([ids[i] or f"unnamed_{before + i + 1}".encode() for i in range(len(held))])
        at = np.array([record.line for record in held], np.int64)
        batch, illegal = without_illegal(ReadBatch(first.file, first.form, ids, bases, at, text), first.name)
        log.take(first.name, len(batch), illegal)
        if len(batch):
            yield batch
    if lines.damage is not None:
        log.broken(lines.damage)


def _lists(records: Iterator[_Record], block_bytes: int) -> Iterator[list[_Record]]:
    held: list[_Record] = []
    size = 0
    for record in records:
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

    def __init__(self, pieces: Iterator[Piece]) -> None:
        first = next(pieces)
        self._text = self._split(chain([first], pieces))
        self._again: deque[str] = deque()
        self.number = first.line - 1  # of the last line given out
        self.last = ""
        self.since: list[str] = []  # lines of the current record; its header first
        self.damage: InputError | None = None  # why no line follows, once none does

    def _split(self, pieces: Iterator[Piece]) -> Iterator[str]:
        """Any line end will do, old Mac ones too; bytes that are not UTF-8 survive as they are."""
        decoder = io.IncrementalNewlineDecoder(getincrementaldecoder("utf-8")("surrogateescape"), translate=True)
        begun, last = "", False
        while not last:
            piece = next(pieces)
            last = piece.last
            *lines, begun = (begun + decoder.decode(piece.data, final=last)).split("\n")
            yield from (f"{line}\n" for line in lines)
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
        self.number += 1
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
        self.since = []


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _id(title: str) -> bytes:
    return _bytes("".join(title.split(None, 1)[:1]))


def _fasta_records(lines: _Lines, name: str, broken: Callable[[InputError], None]) -> Iterator[_Record]:
    """Records of the rest of a FASTA file; `;` lines are comments wherever they stand.

    Text before the first header is given to `broken`; the record at a damaged end is left out.
    """
    from Bio.SeqIO.FastaIO import SimpleFastaParser  # few runs need it, and it takes its time

    headers: deque[int] = deque()
    held: _Record | None = None
    for title, bases in SimpleFastaParser(_fasta_lines(lines, headers, name, broken)):  # type: ignore[no-untyped-call]
        if held is not None:
            yield held
        letters = "".join(bases.split())
        held = _Record(_id(title), _bytes(letters), headers.popleft(), _bytes(f">{title}\n{letters}\n"))
    if lines.damage is None and held is not None:
        yield held


def _fasta_lines(lines: _Lines, headers: deque[int], name: str, broken: Callable[[InputError], None]) -> Iterator[str]:
    """Lines without comments; notes the line of each header, and whatever text no header stands before."""
    headed = told = False
    for text in lines:
        lines.since = []
        if text.startswith(";"):
            continue
        if text.startswith(">"):
            headers.append(lines.number)
            headed = True
        elif not headed:
            if text.strip() and not told:
                told = True
                problem = f"'{shortened(text.strip())}' stands before the first header"
                broken(InputError(problem, file=name, line=lines.number, hint="expected a line that starts with '>'"))
            continue
        yield text


def _fastq_records(lines: _Lines, name: str, broken: Callable[[InputError], None]) -> Iterator[_Record]:
    """Records of the rest of a FASTQ file, wrapped or not; each broken one is given to `broken` and left out.

    After a broken record reading goes on at the next lines that look like a record.
    """
    from Bio.SeqIO.QualityIO import FastqGeneralIterator

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
