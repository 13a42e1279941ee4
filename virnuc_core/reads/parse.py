"""FASTA and FASTQ to columnar batches of reads; whatever is broken is named by file, line and read id.

Well-formed text (four-line FASTQ, FASTA of any wrapping) is cut by `blocks`, on whole blocks of bytes. At the first
thing that is not so regular the rest of that file goes through Biopython's iterators, which also read wrapped FASTQ;
both give the same reads.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, Literal, Protocol, TypeVar

import numpy as np

from virnuc_core.errors import InputError
from virnuc_core.reads.batch import ReadBatch, batch_of, without_illegal
from virnuc_core.reads.blocks import Block
from virnuc_core.reads.pieces import Piece, Pieces, Reading, Taken, read
from virnuc_core.reads.slow import Record, iterate_fasta, iterate_fastq
from virnuc_core.reads.sources import Source

OnError = Literal["stop", "skip"]

_MOST_HELD_BYTES: Final = 64_000_000  # of pieces under way: few whole chromosomes at a time
BLOCK_BYTES: Final = 1_000_000  # of one batch, unpacked; a few such arrays fit the second-level cache


@dataclass(frozen=True, slots=True)
class Skipped:
    """A broken record that was left out because the caller asked to go on."""

    file: str
    line: int | None
    read_id: str | None
    problem: str


@dataclass(slots=True)
class ParseLog:
    """What was met on the way; filled while the batches are drawn."""

    on_error: OnError = "stop"
    report: Callable[[Skipped], None] | None = None
    reads: int = 0
    left_out: int = 0  # reads with letters that are no nucleotides
    skipped: int = 0  # broken records, those reads among them
    unnamed: int = 0
    empty_files: int = 0
    slow_files: int = 0  # files of which a part went through Biopython
    cut_s: float = 0.0  # seconds of unpacking and cutting, which one process does for all
    reads_by_file: Counter[str] = field(default_factory=Counter)
    skipped_by_file: Counter[str] = field(default_factory=Counter)

    def take(self, taken: Taken, file: str) -> None:
        """Count what came of a piece. Errors: as of `broken`."""
        self.reads += taken.reads
        self.reads_by_file[file] += taken.reads
        self.unnamed += taken.unnamed
        for error in taken.broken:
            self.left_out += 1
            self.broken(error)

    def broken(self, error: InputError) -> None:
        """Stop at a broken record, or count it and go on, as was asked."""
        if self.on_error == "stop":
            raise error
        self.skipped += 1
        self.skipped_by_file[str(error.file)] += 1
        if self.report is not None:
            self.report(Skipped(str(error.file), error.line, error.read_id, str(error)))


class Answer(Protocol):
    """What the work on a piece gives."""

    @property
    def taken(self) -> Taken: ...


A = TypeVar("A", bound=Answer)
A_co = TypeVar("A_co", bound=Answer, covariant=True)


class Pending(Protocol[A_co]):
    """An answer that is perhaps still being worked out."""

    def result(self) -> A_co: ...


Work = Callable[[Piece | ReadBatch], Pending[A]]


def parse(
    files: tuple[str, ...], log: ParseLog | None = None, *, block_bytes: int = BLOCK_BYTES
) -> Iterator[ReadBatch]:
    """Batches of reads of all files, in order; an empty file gives none and is counted in `log`.

    Errors: `InputError` for a file that is neither FASTA nor FASTQ or cannot be read, and, unless `log.on_error` is
    `skip`, for the first broken record.
    """
    log = log if log is not None else ParseLog()
    for reading in in_order(files, log, _Read, ahead=0, block_bytes=block_bytes):
        yield reading.batch


@dataclass(frozen=True, slots=True)
class _Read:
    """Reading as the work: done when asked for."""

    item: Piece | ReadBatch

    def result(self) -> Reading:
        return read(self.item)


def in_order(
    files: tuple[str, ...], log: ParseLog, work: Work[A], *, ahead: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[A]:
    """What `work` makes of all files, in the order of the reads; what holds no reads is left out.

    `work` is given pieces, up to `ahead` of them before the first one's answer is needed; where a file turns out
    irregular it is given batches instead, and what it made of later pieces of that file is dropped. Errors: as of
    `parse`; what `work` raises. The first in the order of the files is raised, whatever was found first.
    """
    return _Passage(log, work, ahead, block_bytes).run(files)


@dataclass(frozen=True, slots=True)
class _Sent(Generic[A]):
    """A piece that is worked on, or the damage that stands in its place."""

    pieces: Pieces
    piece: Piece | None
    pending: Pending[A] | None


class _Passage(Generic[A]):
    """The way of all files through `work`."""

    def __init__(self, log: ParseLog, work: Work[A], ahead: int, block_bytes: int) -> None:
        self._log, self._work, self._ahead, self._block_bytes = log, work, ahead, block_bytes
        self._waiting: deque[_Sent[A]] = deque()

    def run(self, files: tuple[str, ...]) -> Iterator[A]:
        for number, name in enumerate(files):
            try:
                source = Source.open(name)
            except InputError:
                yield from self._settle(0)  # troubles of earlier files come first
                raise
            with source:
                yield from self._through(Pieces(number, source, self._block_bytes))
        yield from self._settle(0)

    def _through(self, pieces: Pieces) -> Iterator[A]:
        while True:
            started = time.perf_counter()
            try:
                piece = pieces.next()
            except InputError:
                yield from self._settle(0)
                raise
            self._log.cut_s += time.perf_counter() - started
            if piece is None:
                break
            self._waiting.append(_Sent(pieces, piece, self._work(piece)))
            yield from self._settle(self._ahead)
        self._log.empty_files += pieces.is_empty
        if pieces.damage is not None:
            self._waiting.append(_Sent(pieces, None, None))
            yield from self._settle(self._ahead)

    def _held_bytes(self) -> int:
        return sum(len(sent.piece.data) for sent in self._waiting if sent.piece is not None)

    def _settle(self, left: int) -> Iterator[A]:
        """Answers of the oldest pieces, until no more than `left` are waited for, nor many bytes."""
        while len(self._waiting) > left or (left and self._held_bytes() > _MOST_HELD_BYTES):
            sent = self._waiting.popleft()
            if sent.piece is None or sent.pending is None:
                assert sent.pieces.damage is not None
                self._log.broken(sent.pieces.damage)
                continue
            answer = sent.pending.result()
            self._log.take(answer.taken, sent.piece.name)
            if answer.taken.reads:
                yield answer
            if answer.taken.unread:
                yield from self._slowly(sent.pieces, sent.piece, answer.taken)

    def _slowly(self, pieces: Pieces, piece: Piece, taken: Taken) -> Iterator[A]:
        """The rest of a file through Biopython, from within a piece on."""
        self._log.slow_files += 1
        later = [sent for sent in self._waiting if sent.pieces is pieces]
        self._waiting = deque(sent for sent in self._waiting if sent.pieces is not pieces)
        rest = [piece.data[len(piece.data) - taken.unread :]]
        for sent in later:
            if sent.piece is not None and sent.pending is not None:
                sent.pending.result()  # dropped: these lines are no records of their own
                rest.append(sent.piece.data)
        waiting: deque[Pending[A]] = deque()
        trouble: InputError | None = None
        try:
            for batch in self._slow_batches(pieces, piece, b"".join(rest), taken.next_line):
                waiting.append(self._work(batch))
                while len(waiting) > self._ahead:
                    yield waiting.popleft().result()
        except InputError as error:
            trouble = error
        while waiting:  # what stands before the trouble comes before it
            yield waiting.popleft().result()
        if trouble is not None:
            raise trouble

    def _slow_batches(self, pieces: Pieces, piece: Piece, data: bytes, line: int) -> Iterator[ReadBatch]:
        iterate = iterate_fastq if piece.form == "fastq" else iterate_fasta
        held: list[Record] = []
        size = 0
        log = self._log
        for record in iterate(pieces, data, line, log.broken):
            held.append(record)
            size += len(record.bases) + len(record.id) + 32
            if size >= self._block_bytes:
                yield from self._slow_batch(held, piece)
                held, size = [], 0
        if held:
            yield from self._slow_batch(held, piece)

    def _slow_batch(self, records: list[Record], piece: Piece) -> Iterator[ReadBatch]:
        """One batch, if any of the records is good."""
        log = self._log
        batch = batch_of(_block_of(records), piece.file, piece.form, log.reads + log.left_out)
        batch, broken = without_illegal(batch, piece.name)
        log.take(Taken(len(batch), batch.unnamed, broken), piece.name)
        if len(batch):
            yield batch


def _block_of(records: list[Record]) -> Block:
    return Block(
        n=len(records),
        ids=b"".join(record.id for record in records),
        id_lengths=np.fromiter((len(record.id) for record in records), np.int64, len(records)),
        bases=b"".join(record.bases for record in records),
        base_lengths=np.fromiter((len(record.bases) for record in records), np.int64, len(records)),
        lines=np.fromiter((record.line for record in records), np.int64, len(records)),
        text=b"".join(record.text for record in records),
        text_ends=np.cumsum(np.fromiter((len(record.text) for record in records), np.int64, len(records))),
        consumed=0,
        next_line=0,
        irregular=False,
    )
