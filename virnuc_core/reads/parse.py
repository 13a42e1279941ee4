"""FASTA and FASTQ to columnar batches of reads; whatever is broken is named by file, line and read id.

Files are cut into pieces where records end, as far as line ends tell: that costs a fraction of reading, and pieces can
be read apart from each other. `fast_parser` reads FASTA and four-line FASTQ. From the first record of FASTQ that is not
of four lines, or broken, `slow_parser` reads the rest of that file, here and line after line; both give the same reads.
A FASTA record that is longer than a block comes in parts."""

import re
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Final, Generic, NamedTuple, TypeVar, cast

import numpy as np

from virnuc_core.errors import InputError
from virnuc_core.reads.fast_parser import (
    BLANKS,
    Format,
    ParseLog,
    Part,
    Piece,
    ReadBatch,
    cut_fasta,
    cut_fastq,
)
from virnuc_core.reads.sources import Source
from virnuc_core.reads.workers import Workers

O = TypeVar("O")  # noqa: E741  # what comes of a batch

_BLANK: Final = b" \t\r\n\v\f"
_LONE_RETURN: Final = re.compile(rb"\r(?!\n|\Z)")  # a line's end on old Macs
_COMMENT: Final = re.compile(rb";(?<![^\r\n];)[^\r\n]*")
LONGEST_LINE: Final = 1 << 26  # letters of a header, or of a line of FASTQ
BLOCK_BYTES: Final = 4_000_000  # of one piece: a tenth less processor time than a million takes


class _Made(NamedTuple, Generic[O]):
    """What a worker made of a piece, or of a batch that is read and counted already."""

    value: O | None  # none where there are no reads
    reads: int = 0
    illegal: tuple[InputError, ...] = ()  # one for each read left out
    irregular: int = 0  # bytes at the end of the piece that are left for the slow parser
    nameless: bool = False  # names of reads without an id need the number of reads before
    parse_s: float = 0.0


def parse(
    files: tuple[str, ...], log: ParseLog | None = None, *, block_bytes: int = BLOCK_BYTES
) -> Iterator[ReadBatch]:
    """Batches of reads of all files, in order; what was met is counted in `log`. A FASTA record of over `block_bytes`
    comes in parts, each a batch of its own. Errors: `InputError` for a file that is neither FASTA nor FASTQ or cannot
    be read, and, unless `log.on_error` is `skip`, for a broken record."""
    with Workers(1) as here:
        yield from parse_by(
            here, lambda batch: batch, files, log or ParseLog(), block_bytes=block_bytes
        )


def parse_by(
    workers: Workers,
    work: Callable[[ReadBatch], O],
    files: tuple[str, ...],
    log: ParseLog,
    *,
    block_bytes: int,
) -> Iterator[O]:
    """What `work` makes of the batches of all files, in order; `workers` read the pieces. Where a file turns out
    irregular, what was made of its later pieces is dropped. Errors: as of `parse`, the first in the order of the files
    whatever was met first; those of `workers`."""
    with closing(
        _pieces_of(files, log, block_bytes)
    ) as cut:  # so that no file stays open where an error ends this
        again = deque[Piece]()

        def pieces() -> Iterator[Piece]:
            while (piece := again.popleft() if again else next(cut, None)) is not None:
                yield piece

        def noted(
            items: Iterator[Piece | ReadBatch], given: deque[Piece | ReadBatch]
        ) -> Iterator[Piece | ReadBatch]:
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
            for done in workers.map(
                partial(_work_on, work),
                items,
                lambda item: len(item.data if isinstance(item, Piece) else item.bases.data),
            ):
                item = given.popleft()
                made = _work_on(work, item, log.reads + log.left_out) if done.nameless else done
                value = made.value
                if isinstance(item, Piece):
                    log.parse_s += made.parse_s
                    part = item.part
                    if not log.take(item.name, part, made.reads, made.illegal) and part is not None:
                        value = work(item.dropped(part)) if part.last else None
                if value is not None:
                    yield value
                if isinstance(item, ReadBatch):
                    continue
                if made.irregular:
                    again.extendleft(piece for piece in reversed(given) if isinstance(piece, Piece))
                    read = item.data[: -made.irregular].count(b"\n")
                    rest = item._replace(data=item.data[-made.irregular :], line=item.line + read)
                    from virnuc_core.reads.slow_parser import read_irregular  # few runs need it

                    irregular = read_irregular(rest, pieces(), log, block_bytes)
                    break
                if item.refused:
                    raise cast(InputError, item.damage)
                if item.damage is not None:
                    log.broken(item.damage)


def _work_on(
    work: Callable[[ReadBatch], O], item: Piece | ReadBatch, before: int | None = None
) -> _Made[O]:
    """What a worker does with a piece: read it up to the first irregular record, without illegal letters. The number of
    reads `before` is needed where one has no id."""
    if isinstance(item, ReadBatch):
        return _Made(work(item))
    if item.damage is not None or not (item.data or item.part):
        return _Made(None)
    started = time.perf_counter()
    read, irregular = cut_fastq(item) if item.form == "fastq" else (cut_fasta(item), 0)
    if read is None:
        return _Made(None, irregular=irregular)
    ids = read.ids.printable()
    if before is None and not ids.lengths.all():
        return _Made(None, nameless=True)
    batch, illegal = replace(read, ids=ids.named(before or 0)).without_illegal(item.name)
    parse_s = time.perf_counter() - started
    return _Made(
        work(batch) if len(batch) else None, len(batch), tuple(illegal), irregular, parse_s=parse_s
    )


def _pieces_of(files: tuple[str, ...], log: ParseLog, block_bytes: int) -> Generator[Piece]:
    """The text of all files; one that cannot be read is a piece too, so that it is told of in its turn."""
    for number, name in enumerate(files):
        try:
            with Source.open(name, log.read_group) as source:
                yield from _pieces_of_one(number, source, block_bytes)
                log.contents[name], log.not_primary[name] = source.content(), source.left_out
        except InputError as error:
            yield Piece(number, name, "fasta", b"", 1, last=True, damage=error, refused=True)


def _pieces_of_one(number: int, source: Source, block_bytes: int) -> Iterator[Piece]:
    opened = _Text(source, block_bytes)
    text, line, form, ended, wanted = opened.begin, opened.line, opened.form, False, block_bytes
    part: Part | None = None
    while text or not ended:
        while len(text) < wanted and not ended:
            more = opened.read(wanted - len(text))
            text, ended = text + more, not more
        if b"\r" in text:
            text = _LONE_RETURN.sub(b"\n", text + b"\n" * (ended and text.endswith(b"\r")))
        end, after = 0, None
        if part is not None:
            end = text.find(b"\n>") + 1
            if ended and not end:
                break
            part, after = part._replace(last=end > 0), None if end else part
            # line ends are left for the next part, where it can be seen whether a header follows
            end = end or len(text.rstrip(b"\r\n")) or len(text) - 1
        elif ended and source.damage is None:
            break
        else:
            end = _whole_records(text, form)
        if end:
            yield Piece(number, source.name, form, text[:end], line, part=part)
            if after is not None:
                bases = text[text.index(b"\n") if after.first else 0 : end].translate(None, BLANKS)
                after = after._replace(first=False, before=after.before + len(bases))
            part, text, line, wanted = after, text[end:], line + _newlines(text[:end]), block_bytes
        elif ended:
            break
        elif part is None and form == "fasta" and b"\n" in text:
            part = Part(b"".join(text[1 : text.index(b"\n")].split(None, 1)[:1]), line, first=True)
        elif len(text) - (last_line := text.rfind(b"\n") + 1) > LONGEST_LINE:
            problem = (
                f"a record with lines too long to be read: {LONGEST_LINE:,} letters and no end"
            )
            raise InputError(
                problem, file=source.name, line=line, hint="only sequences of FASTA may be as long"
            )
        else:
            # a record longer than a block doubles it, so that its bytes are looked at a bounded number of times
            wanted = min(2 * len(text), last_line + LONGEST_LINE + 1)
    part = part._replace(last=True, dropped=source.damage is not None) if part else None
    yield Piece(number, source.name, form, text, line, True, source.damage, part=part)


class _Text:
    """A file's text from its first record on; in FASTA blanks stand for comments. Errors: `InputError` for another."""

    def __init__(self, source: Source, block_bytes: int) -> None:
        self._source, self._begun = (
            source,
            b"",
        )  # the first letter of the line that the next text goes on with
        self.form: Format = "fastq"  # until it is known nothing is a comment
        self.line = 1
        self.begin = self._from_first_letter(
            self.read(block_bytes).removeprefix(b"\xef\xbb\xbf"), block_bytes
        )
        if self.begin[:1] in (b">", b";"):
            self.form = "fasta"
            self.begin = self._from_first_letter(self._without_comments(self.begin), block_bytes)
            if self.begin and not self.begin.startswith(b">"):
                problem, hint = (
                    "text stands before the first header",
                    "expected a line that starts with '>'",
                )
                raise InputError(problem, file=source.name, line=self.line, hint=hint)
        elif self.begin and self.begin[:1] != b"@":
            other = "neither FASTA nor FASTQ: it does not start with '>' or '@'"
            zipped = self.begin.startswith(b"PK")
            raise InputError(
                f"this is {'a zip archive; unpack it first' if zipped else other}", file=source.name
            )

    def _from_first_letter(self, text: bytes, block_bytes: int) -> bytes:
        while True:
            kept = text.lstrip(_BLANK)
            self.line += text[: len(text) - len(kept)].count(b"\n")
            if kept or not (text := self.read(block_bytes)):
                return kept

    def read(self, size: int) -> bytes:
        """At least `size` bytes, fewer only before the end; `b""` at the end."""
        text = self._source.read(size)
        return self._without_comments(text) if text and self.form == "fasta" else text

    def _without_comments(self, text: bytes) -> bytes:
        begun, whole = self._begun, self._begun + text
        last = max(whole.rfind(b"\n"), whole.rfind(b"\r")) + 1
        self._begun = whole[last : last + 1]
        return _COMMENT.sub(b" ", whole).removeprefix(begun) if b";" in whole else text


def _whole_records(text: bytes, form: Format) -> int:
    """How many bytes of `text` are whole records, if they are regular."""
    if form == "fasta":
        return text.rfind(b"\n>") + 1
    end, lines = len(text), _newlines(text)
    for _ in range(lines % 4 + 1):
        end = text.rfind(b"\n", 0, end)
    return end + 1 if lines >= 4 else 0


def _newlines(text: bytes) -> int:
    return int(
        np.count_nonzero(np.frombuffer(text, np.uint8) == ord("\n"))
    )  # many times as fast as bytes.count
