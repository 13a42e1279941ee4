"""FASTA and FASTQ to columnar batches of reads; whatever is broken is named by file, line and read id.

Well-formed text (four-line FASTQ, FASTA of any wrapping) is cut by `fast_parser`. At the first thing that is not so
regular the rest of that file goes through `biopython_parser`, which also reads wrapped FASTQ; both give the same reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from virnuc_core.errors import InputError
from virnuc_core.reads.fast_parser import Block, Format, ReadBatch, Strings, cut_fasta, cut_fastq, without_illegal
from virnuc_core.reads.sources import Source

if TYPE_CHECKING:
    from virnuc_core.reads.biopython_parser import Record

OnError = Literal["stop", "skip"]

BLOCK_BYTES: Final = 4_000_000  # of one batch, unpacked: a tenth less processor time than a million takes
_BLANK: Final = b" \t\r\n\v\f"


@dataclass(slots=True)
class ParseLog:
    """What was met on the way; filled while the batches are drawn."""

    on_error: OnError = "stop"
    report: Callable[[InputError], None] | None = None  # given each broken record that is left out
    left_out: int = 0  # reads with letters that are no nucleotides
    empty_files: int = 0
    reads_by_file: Counter[str] = field(default_factory=Counter)
    skipped_by_file: Counter[str] = field(default_factory=Counter)  # broken records, reads left out among them

    @property
    def reads(self) -> int:
        """Good ones so far."""
        return self.reads_by_file.total()

    def broken(self, error: InputError) -> None:
        """Stop at a broken record, or count it and go on, as was asked."""
        if self.on_error == "stop":
            raise error
        self.skipped_by_file[str(error.file)] += 1
        if self.report is not None:
            self.report(error)


def parse(
    files: tuple[str, ...], log: ParseLog | None = None, *, block_bytes: int = BLOCK_BYTES
) -> Iterator[ReadBatch]:
    """Batches of reads of all files, in order; an empty file gives none and is counted in `log`.

    Errors: `InputError` for a file that is neither FASTA nor FASTQ or cannot be read, and, unless `log.on_error` is
    `skip`, for the first broken record.
    """
    log = log if log is not None else ParseLog()
    for number, name in enumerate(files):
        with Source.open(name) as source:
            yield from _File(number, source, log, block_bytes).batches()


class _File:
    """One file on its way to batches."""

    def __init__(self, number: int, source: Source, log: ParseLog, block_bytes: int) -> None:
        self.name = source.name
        self._number, self._source, self._log, self._block_bytes = number, source, log, block_bytes
        self._line = 1  # of what comes next
        self._ended = False

    def batches(self) -> Iterator[ReadBatch]:
        data = self._first_text()
        if not data:
            self._log.empty_files += self._source.damage is None
        else:
            yield from self._quickly(data, _format(data, self.name))
        if self._source.damage is not None:
            self._log.broken(self._source.damage)

    def _draw(self, size: int) -> bytes:
        data = self._source.read(size)
        self._ended = not data
        return data

    def _first_text(self) -> bytes:
        """The first text that is not blank."""
        data = self._draw(self._block_bytes).removeprefix(b"\xef\xbb\xbf")
        while not (kept := data.lstrip(_BLANK)) and not self._ended:
            self._line += data.count(b"\n")
            data = self._draw(self._block_bytes)
        self._line += data[: len(data) - len(kept)].count(b"\n")
        return kept

    def _quickly(self, data: bytes, form: Format) -> Iterator[ReadBatch]:
        cut = cut_fastq if form == "fastq" else cut_fasta
        wanted = self._block_bytes
        while data or not self._ended:
            while len(data) < wanted and not self._ended:
                data += self._draw(wanted - len(data))
            block = cut(data, self._line, self._ended and self._source.damage is None)
            yield from self._batch(block, form)
            data, self._line = data[block.consumed :], block.next_line
            # where lines end otherwise no block is ever whole
            if block.irregular or (not block.consumed and b"\r" in data.removesuffix(b"\r").replace(b"\r\n", b"")):
                yield from self._slowly(data, form)
                return
            if self._ended and self._source.damage is not None:
                return  # within a record
            # a record longer than a block doubles it, so that its bytes are looked at a bounded number of times
            wanted = self._block_bytes if block.consumed else 2 * len(data)

    def _slowly(self, data: bytes, form: Format) -> Iterator[ReadBatch]:
        """The rest of the file through Biopython, from `data` on."""
        from virnuc_core.reads.biopython_parser import iterate_fasta, iterate_fastq  # few runs need it

        held: list[Record] = []
        size = 0
        iterate = iterate_fastq if form == "fastq" else iterate_fasta
        for record in iterate(self._source, data, self._line, self._log.broken):
            held.append(record)
            size += len(record.bases) + len(record.id) + 32
            if size >= self._block_bytes:
                yield from self._batch(_block_of(held), form)
                held, size = [], 0
        yield from self._batch(_block_of(held), form)

    def _batch(self, block: Block, form: Format) -> Iterator[ReadBatch]:
        """One batch, if any of the records is good."""
        log = self._log
        batch, broken = without_illegal(block.batch(self._number, form, log.reads + log.left_out), self.name)
        log.reads_by_file[self.name] += len(batch)
        for error in broken:
            log.left_out += 1
            log.broken(error)
        if len(batch):
            yield batch


def _block_of(records: list[Record]) -> Block:
    ids, bases, text = (Strings.of([getattr(one, name) for one in records]) for name in ("id", "bases", "text"))
    return Block(ids, bases, np.array([record.line for record in records], np.int64), text)


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
