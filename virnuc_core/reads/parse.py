"""FASTA and FASTQ to columnar batches of reads; whatever is broken is named by file, line and read id.

Well-formed blocks (four-line FASTQ, FASTA of any wrapping) are cut by `blocks`, on whole blocks of bytes. At the first
thing that is not so regular the rest of that file goes through Biopython's iterators, which also read wrapped FASTQ;
both give the same reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from virnuc_core.errors import InputError
from virnuc_core.reads.blocks import Block, cut_fasta, cut_fastq
from virnuc_core.reads.slow import Record, iterate_fasta, iterate_fastq, shortened
from virnuc_core.reads.sources import DamagedInput, Source

OnError = Literal["stop", "skip"]
Format = Literal["fasta", "fastq"]

BLOCK_BYTES: Final = 1 << 20  # unpacked bytes of one batch; a few such arrays fit the second-level cache
LETTERS: Final = b"ACGTUNRYSWKMBDHVX"  # nucleotides, IUPAC codes, X for masked bases
GAPS: Final = b"-."
_LEGAL: Final = LETTERS + LETTERS.lower() + GAPS
_BLANK: Final = b" \t\r\n\v\f"


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Consecutive reads of one file, as columns. Ids are printable UTF-8 without blanks; bases keep their case."""

    file: int  # place of the file among the inputs
    ids: bytes  # end to end
    id_offsets: NDArray[np.int64]  # [n + 1]
    bases: bytes  # end to end
    base_offsets: NDArray[np.int64]  # [n + 1]
    lines: NDArray[np.int64]  # [n] line of each header in its file, from 1
    unnamed: int  # reads that had no id and were given one
    form: Format
    text: bytes  # the records as they stand in the file, end to end; wrapped FASTQ may be unwrapped
    text_offsets: NDArray[np.int64]  # [n + 1]

    def __len__(self) -> int:
        return len(self.id_offsets) - 1

    def id(self, index: int) -> str:
        """Id of one read."""
        return self.ids[self.id_offsets[index] : self.id_offsets[index + 1]].decode()

    def record(self, index: int) -> bytes:
        """One read as it stands in the file, header, quality and all."""
        return self.text[self.text_offsets[index] : self.text_offsets[index + 1]]


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
    skipped: int = 0
    unnamed: int = 0
    empty_files: int = 0
    slow_files: int = 0  # files of which a part went through Biopython

    def broken(self, error: InputError) -> None:
        """Stop at a broken record, or count it and go on, as was asked."""
        if self.on_error == "stop":
            raise error
        self.skipped += 1
        if self.report is not None:
            self.report(Skipped(str(error.file), error.line, error.read_id, str(error)))


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
            for block in _blocks(source, log, block_bytes):
                batch = _batch(number, name, block, log)
                if len(batch):
                    yield batch


def _blocks(source: Source, log: ParseLog, block_bytes: int) -> Iterator[Block]:
    """Blocks of one file: the fast cutters first, Biopython from the first irregular record on."""
    try:
        data, line = _start(source, block_bytes)
        if not data:
            log.empty_files += 1
            return
        form = _format(data, source.name)
        cut = cut_fastq if form == "fastq" else cut_fasta
        final = False
        while True:
            block = cut(data, line, final)
            if block.n:
                yield block
            line, data = block.next_line, data[block.consumed :]
            if block.irregular:
                log.slow_files += 1
                yield from _slow_blocks(source, form, data, line, log, block_bytes)
                return
            if final:
                return
            # a record longer than a block doubles it, so that its bytes are looked at a bounded number of times
            more = source.read(max(block_bytes, len(data)))
            final = not more
            data += more
    except DamagedInput as damage:  # all that came whole before the damage has been given out
        log.broken(damage)


def _start(source: Source, block_bytes: int) -> tuple[bytes, int]:
    """The first bytes that are not blank, and the line they stand on; no bytes if there are none."""
    line, first = 1, True
    while data := source.read(block_bytes):
        if first:
            data, first = data.removeprefix(b"\xef\xbb\xbf"), False
        kept = data.lstrip(_BLANK)
        line += data[: len(data) - len(kept)].count(b"\n")
        if kept:
            return kept, line
    return b"", line


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


def _slow_blocks(
    source: Source, form: Format, data: bytes, line: int, log: ParseLog, block_bytes: int
) -> Iterator[Block]:
    """The rest of a file through Biopython, gathered into blocks."""
    iterate = iterate_fastq if form == "fastq" else iterate_fasta
    held: list[Record] = []
    size = 0
    for record in iterate(source, data, line, log.broken):
        held.append(record)
        size += len(record.bases) + len(record.id) + 32
        if size >= block_bytes:
            yield _block_of(held)
            held, size = [], 0
    if held:
        yield _block_of(held)


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


def _batch(file: int, name: str, block: Block, log: ParseLog) -> ReadBatch:
    ids, id_lengths, unnamed = _clean_ids(block, log.reads)
    batch = ReadBatch(
        file=file,
        ids=ids,
        id_offsets=offsets_of(id_lengths),
        bases=block.bases,
        base_offsets=offsets_of(block.base_lengths),
        lines=block.lines,
        unnamed=unnamed,
        form="fastq" if block.text.startswith(b"@") else "fasta",
        text=block.text,
        text_offsets=np.append(0, block.text_ends),
    )
    if block.bases.translate(None, _LEGAL):
        batch = _without_illegal(batch, name, log)
    log.reads += len(batch)
    log.unnamed += batch.unnamed
    return batch


def offsets_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of the segments starts, and the end of the last: int64 [n + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _clean_ids(block: Block, reads_before: int) -> tuple[bytes, NDArray[np.int64], int]:
    """Ids as printable UTF-8 words, and how many were missing; nearly always they are just that already."""
    raw = np.frombuffer(block.ids, np.uint8)
    if block.id_lengths.all() and not ((raw < 33) | (raw > 126)).any():
        return block.ids, block.id_lengths, 0
    offsets = offsets_of(block.id_lengths).tolist()
    words = [_printable(block.ids[a:b]) for a, b in pairwise(offsets)]
    unnamed = sum(not word for word in words)
    named = [word or f"unnamed_{reads_before + i + 1}".encode() for i, word in enumerate(words)]
    return b"".join(named), np.fromiter(map(len, named), np.int64, len(named)), unnamed


def _printable(word: bytes) -> bytes:
    first = word.decode("utf-8", "backslashreplace").split(None, 1)[:1]
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in "".join(first)).encode()


def _without_illegal(batch: ReadBatch, name: str, log: ParseLog) -> ReadBatch:
    """The batch without reads that hold other letters than nucleotides; each one goes to the log."""
    legal = np.zeros(256, bool)
    legal[np.frombuffer(_LEGAL, np.uint8)] = True
    bad_at = np.flatnonzero(~legal[np.frombuffer(batch.bases, np.uint8)])
    owners, first = np.unique(np.searchsorted(batch.base_offsets, bad_at, side="right") - 1, return_index=True)
    for owner, place in zip(owners.tolist(), bad_at[first].tolist(), strict=True):
        letter = batch.bases[place : place + 1].decode("latin-1")
        log.broken(
            InputError(
                f"{letter!r} at base {place - int(batch.base_offsets[owner]) + 1} is no nucleotide letter",
                file=name,
                line=int(batch.lines[owner]),
                read_id=shortened(batch.id(owner)),
                hint="expected A C G T U N, IUPAC codes or gaps; is this a protein file?",
            )
        )
    keep = np.ones(len(batch), bool)
    keep[owners] = False
    return _select(batch, np.flatnonzero(keep))


def _select(batch: ReadBatch, kept: NDArray[np.intp]) -> ReadBatch:
    ids, id_offsets = _pick(batch.ids, batch.id_offsets, kept)
    bases, base_offsets = _pick(batch.bases, batch.base_offsets, kept)
    text, text_offsets = _pick(batch.text, batch.text_offsets, kept)
    return replace(
        batch,
        ids=ids,
        id_offsets=id_offsets,
        bases=bases,
        base_offsets=base_offsets,
        lines=batch.lines[kept],
        text=text,
        text_offsets=text_offsets,
    )


def _pick(data: bytes, offsets: NDArray[np.int64], kept: NDArray[np.intp]) -> tuple[bytes, NDArray[np.int64]]:
    pieces = [data[offsets[i] : offsets[i + 1]] for i in kept]
    return b"".join(pieces), offsets_of(np.fromiter(map(len, pieces), np.int64, len(pieces)))
