"""FASTA and FASTQ to columnar batches of reads; whatever is broken is named by file, line and read id.

Files are cut into pieces where records end, as far as line ends tell: that costs a fraction of reading, and pieces can
be read apart from each other. `fast_parser` reads what is regular (four-line FASTQ, FASTA of any wrapping). From the
first thing that is not, the rest of that file goes through Biopython, which also reads wrapped FASTQ, here and one
record after the other; both give the same reads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Final, Generic, TypeVar, cast

from virnuc_core.errors import InputError
from virnuc_core.reads.fast_parser import (
    ParseLog,
    Piece,
    ReadBatch,
    cut_fasta,
    cut_fastq,
    pieces_of,
    printable_ids,
    without_illegal,
)
from virnuc_core.reads.workers import Workers

O = TypeVar("O")  # noqa: E741  # what comes of a batch

BLOCK_BYTES: Final = 4_000_000  # of one piece: a tenth less processor time than a million takes


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
                from virnuc_core.reads.biopython_parser import read_irregular  # few runs need it

                irregular = read_irregular(rest, pieces(), log, block_bytes)
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
