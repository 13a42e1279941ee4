"""FASTQ that is not regular, line after line: wrapped records, broken ones, and where reading goes on after those."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np

from virnuc_core.errors import InputError
from virnuc_core.reads.fast_parser import (
    BLANKS,
    LEGAL,
    ParseLog,
    Piece,
    ReadBatch,
    Strings,
    first_word,
    shortened,
)

_MOST_LINES: Final = (
    100_000  # of a record; one of more is taken for broken: bounds what one error costs
)
_HINT: Final = "expected '@id', bases, '+', and as many quality letters as bases"


class _Record(NamedTuple):
    """One read as it stands in the file; the id is the first word of the header, possibly empty."""

    id: bytes
    bases: bytes
    text: bytes  # unwrapped
    line: int


def read_irregular(
    first: Piece, later: Iterator[Piece], log: ParseLog, block_bytes: int
) -> Iterator[ReadBatch]:
    """The rest of a file from `first` on; its reads are counted as they are drawn."""
    piece = first

    def pieces() -> Iterator[Piece]:
        nonlocal piece
        yield piece
        while not piece.last:
            piece = next(later)
            yield piece

    size = 0

    def block(record: _Record) -> int:
        nonlocal size
        size += len(record.bases) + len(record.id) + 32
        return size // block_bytes

    for _, held in groupby(_records(pieces(), first, log.broken), block):
        *columns, at = zip(*held, strict=True)
        ids, bases, text = map(Strings.of, columns)
        ids = ids.printable().named(log.reads + log.left_out)
        batch = ReadBatch(first.file, first.form, ids, bases, np.array(at, np.int64), text)
        batch, illegal = batch.without_illegal(first.name)
        log.take(first.name, None, len(batch), illegal)
        if len(batch):
            yield batch
    if piece.damage is not None:
        log.broken(piece.damage)


class _Lines:
    """The rest of a file as lines without their ends; those are held that were looked at and not passed yet."""

    def __init__(self, pieces: Iterable[Piece], number: int) -> None:
        self.number = number  # of the line that is next
        self.damaged = False  # the file ends in its last lines, within a record perhaps
        self._held = deque[bytes]()
        self._later = self._split(pieces)

    def _split(self, pieces: Iterable[Piece]) -> Iterator[bytes]:
        for piece in pieces:
            self.damaged = piece.damage is not None
            yield from (line.rstrip(BLANKS) for line in piece.data.splitlines())

    def at(self, place: int) -> bytes | None:
        """The line so many after the next one; None beyond the end."""
        while len(self._held) <= place:
            if (line := next(self._later, None)) is None:
                return None
            self._held.append(line)
        return self._held[place]

    def skip(self, count: int) -> None:
        """Pass so many lines."""
        for _ in range(count):
            self._held.popleft()
        self.number += count

    def text_from(self, place: int) -> bytes | None:
        """The first line from this place on that is not blank; None where there is none."""
        while (line := self.at(place)) == b"":
            place += 1
        return line

    def find_record(self) -> bool:
        """Go to the next header that bases or a `+` line follow, if there is one; a quality line may begin alike."""
        self.skip(1)
        while (third := self.at(2)) is not None:
            letters = (self.at(1) or b"").strip(BLANKS)
            follows = third.startswith(b"+") or (letters and not letters.translate(None, LEGAL))
            if follows and self._held[0].startswith(b"@"):
                return True
            self.skip(1)
        self.skip(len(self._held))
        return False


def _records(
    pieces: Iterable[Piece], first: Piece, broken: Callable[[InputError], None]
) -> Iterator[_Record]:
    """Records of the rest of a file, wrapped or not. Each broken one is given to `broken` and left out; reading goes on
    at the next lines that look like a record."""
    lines = _Lines(pieces, first.line)
    while (header := lines.at(0)) is not None:
        found, taken = _record(header, lines) if header else (None, 1)
        if not isinstance(found, str):
            if found is not None:
                yield found
            lines.skip(taken)
            continue
        number, at_the_cut = lines.number, lines.text_from(taken) is None and lines.damaged
        # a record at the cut is told of by the damage, unless it swallowed whole records on its way there
        if lines.find_record() or not at_the_cut:
            word = (
                first_word(header[1:]).decode("utf-8", "backslashreplace")
                if header.startswith(b"@")
                else ""
            )
            read_id, problem = shortened(word), f"broken FASTQ record: {found}"
            broken(InputError(problem, file=first.name, line=number, read_id=read_id, hint=_HINT))


def _record(header: bytes, lines: _Lines) -> tuple[_Record | str, int]:
    """The record that begins with the next line, or what is wrong with it; and how many lines it takes."""
    if not header.startswith(b"@"):
        return "it does not begin with '@'", 1
    plus, letters = 1, 0
    while (line := lines.at(plus)) is not None and not line.startswith(b"+") and plus < _MOST_LINES:
        plus += 1
    bases = b"".join(lines.at(place) or b"" for place in range(1, plus))
    end, wraps = plus + 1, False
    while letters < len(bases) and end < _MOST_LINES and (more := lines.at(end)) is not None:
        wraps |= letters > 0 and more.startswith(b"@")
        letters, end = letters + len(more), end + 1
    if line is None or not line.startswith(b"+"):
        problem = "no '+' line follows its bases"
    elif line[1:] not in (b"", header[1:]):
        problem = "another name stands after its '+'"
    elif bases.translate(None, BLANKS) != bases:
        problem = "a blank stands within its bases"
    elif letters != len(bases) or lines.at(plus + 1) is None:
        problem = f"{len(bases):,} bases, but {letters:,} quality letters"
    elif (wraps or bases.translate(None, LEGAL)) and not (lines.text_from(end) or b"@").startswith(
        b"@"
    ):
        problem = "it runs into the next one"  # too few quality letters, or no '+' line
    else:
        quality = b"".join(lines.at(place) or b"" for place in range(plus + 1, end))
        return _Record(
            first_word(header[1:]),
            bases,
            b"%b\n%b\n+\n%b\n" % (header, bases, quality),
            lines.number,
        ), end
    return problem, end
