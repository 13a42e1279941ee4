"""Regular FASTQ and FASTA cut into columnar batches of reads on whole blocks of bytes, without a step per line.

A cutter takes what it is sure of from the front of a block and leaves the rest: an unfinished record waits for more
bytes; anything unusual is flagged `irregular` and left to `biopython_parser`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from virnuc_core.errors import InputError

Format = Literal["fasta", "fastq"]

LETTERS: Final = "ACGTUNRYSWKMBDHVX-."  # nucleotides, IUPAC codes, X for masked bases, gaps
_LEGAL: Final = f"{LETTERS}{LETTERS.lower()}".encode()
_LONGEST_SHOWN: Final = 200
_NEWLINE, _RETURN = 10, 13
_HEADER_FASTA, _COMMENT, _HEADER_FASTQ, _PLUS = b">;@+"
_SPLITS: Final = np.isin(np.arange(33), [9, 10, 11, 12, 13, 28, 29, 30, 31, 32])  # what str.split() takes as blank


@dataclass(frozen=True, slots=True)
class Strings:
    """Byte strings, end to end."""

    data: bytes
    offsets: NDArray[np.int64]  # [n + 1]

    @classmethod
    def of(cls, strings: Sequence[bytes]) -> Strings:
        """Those given."""
        return cls(b"".join(strings), offsets_of(np.fromiter(map(len, strings), np.int64, len(strings))))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        return self.data[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n]"""
        return np.diff(self.offsets)


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Consecutive reads of one file, as columns. Ids are printable UTF-8 without blanks; bases keep their case."""

    file: int  # place of the file among the inputs
    form: Format
    ids: Strings
    bases: Strings
    lines: NDArray[np.int64]  # [n] line of each header in its file, from 1
    text: Strings  # the records as they stand in the file; wrapped FASTQ may be unwrapped

    def __len__(self) -> int:
        return len(self.ids)

    def id(self, index: int) -> str:
        """Id of one read."""
        return self.ids[index].decode()

    def nbytes(self) -> int:
        """Bytes of ids and bases."""
        return len(self.ids.data) + len(self.bases.data)

    def without_text(self) -> ReadBatch:
        """The same for whoever needs ids and bases only."""
        return replace(self, text=Strings.of([]))


@dataclass(frozen=True, slots=True)
class Block:
    """Records cut from the front of a block of bytes, as they stand in the file."""

    ids: Strings  # some may be missing or unprintable
    bases: Strings
    lines: NDArray[np.int64]  # [n] line of each header
    text: Strings
    consumed: int = 0  # bytes of the block that are dealt with
    next_line: int = 0  # line on which the rest begins
    irregular: bool = False  # the rest begins with something the cutter does not handle

    def batch(self, file: int, form: Format, reads_before: int) -> ReadBatch:
        """The reads; those without an id are named by their number, counted from `reads_before`."""
        return ReadBatch(file, form, _clean_ids(self.ids, reads_before), self.bases, self.lines, self.text)


def offsets_of(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Where each of the segments starts, and the end of the last: int64 [n + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def shortened(text: str) -> str:
    """Printable, and no longer than people read: what stands in a broken file may be anything."""
    return _printable(text[:_LONGEST_SHOWN]) + "…" * (len(text) > _LONGEST_SHOWN)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _clean_ids(ids: Strings, reads_before: int) -> Strings:
    """Ids as printable UTF-8 words; nearly always they are just that already."""
    raw = np.frombuffer(ids.data, np.uint8)
    if ids.lengths.all() and not ((raw < 33) | (raw > 126)).any():
        return ids
    texts = (ids[i].decode("utf-8", "backslashreplace") for i in range(len(ids)))
    words = [_printable("".join(text.split(None, 1)[:1])) for text in texts]
    return Strings.of([(word or f"unnamed_{reads_before + i}").encode() for i, word in enumerate(words, 1)])


def without_illegal(batch: ReadBatch, name: str) -> tuple[ReadBatch, list[InputError]]:
    """The batch without reads that hold other letters than nucleotides, and what is to be said of those."""
    bases = batch.bases
    if not bases.data.translate(None, _LEGAL):
        return batch, []
    legal = np.isin(np.arange(256), list(_LEGAL))
    bad_at = np.flatnonzero(~legal[np.frombuffer(bases.data, np.uint8)])
    owners, first = np.unique(np.searchsorted(bases.offsets, bad_at, side="right") - 1, return_index=True)
    errors = [
        InputError(
            f"{bases.data[place : place + 1].decode('latin-1')!r} at base {place - bases.offsets[owner] + 1}"
            " is no nucleotide letter",
            file=name,
            line=int(batch.lines[owner]),
            read_id=shortened(batch.id(owner)),
            hint="expected A C G T U N, IUPAC codes or gaps; is this a protein file?",
        )
        for owner, place in zip(owners.tolist(), bad_at[first].tolist(), strict=True)
    ]
    kept = np.setdiff1d(np.arange(len(batch)), owners).tolist()
    ids, bases, text = (Strings.of([column[i] for i in kept]) for column in (batch.ids, bases, batch.text))
    return ReadBatch(batch.file, batch.form, ids, bases, batch.lines[kept], text), errors


@dataclass(frozen=True, slots=True)
class _Lines:
    """Whole lines of a block: `data[start:end]`, without line ends."""

    data: bytes
    letters: NDArray[np.uint8]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    nexts: NDArray[np.int64]  # where the following line starts
    low: NDArray[np.int64]  # places of blanks and control characters inside lines
    stray_return: bool  # a carriage return that is not part of a line end

    @classmethod
    def of(cls, data: bytes) -> _Lines:
        letters = np.frombuffer(data, np.uint8)
        low = np.flatnonzero(letters <= 32)
        kinds = letters[low]
        is_newline = kinds == _NEWLINE
        newlines = low[is_newline]
        starts = np.empty_like(newlines)
        starts[:1] = 0
        starts[1:] = newlines[:-1] + 1
        ends = newlines
        low = low[~is_newline]
        stray = False
        if b"\r" in data:
            ends = newlines - ((newlines > starts) & (letters[newlines - 1] == _RETURN))
            before = len(low)
            low = low[~np.isin(low, ends)]
            stray = bool((letters[low] == _RETURN).any()) or before == len(low)
        return cls(data, letters, starts, ends, newlines + 1, low, stray)

    def pick(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Strings:
        """The bytes of the given stretches."""
        offsets = offsets_of(ends - starts)
        longest, total = int((ends - starts).max(initial=0)), int(offsets[-1])
        even = longest * len(starts)
        if even > 2 * total or longest == 0 or starts[-1] + longest > len(self.data):
            data = self.data
            return Strings(b"".join([data[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]), offsets)
        table = sliding_window_view(self.letters, longest)[starts]  # much faster where the lengths are much alike
        if even > total:
            table = table[np.arange(longest, dtype=np.int32) < (ends - starts).astype(np.int32)[:, None]]
        return Strings(table.tobytes(), offsets)

    def id_ends(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the first word after `starts` ends."""
        blanks = self.low[_SPLITS[self.letters[self.low]]]
        following = np.append(blanks, len(self.data))[np.searchsorted(blanks, starts)]
        firsts: NDArray[np.int64] = np.minimum(following, ends)
        return firsts


def _nothing(line: int, *, consumed: int = 0, irregular: bool = False) -> Block:
    none = Strings.of([])
    return Block(none, none, np.zeros(0, np.int64), none, consumed, line, irregular)


def cut_fastq(data: bytes, line: int, final: bool) -> Block:
    """Four-line records from the front of `data`, which begins on line `line`; `final`: nothing follows."""
    size = len(data)
    if not final:
        data = data[: data.rfind(b"\n") + 1]
    elif not data.endswith(b"\n"):
        data += b"\n"
    lines = _Lines.of(data)
    n = len(lines.starts) // 4
    if lines.stray_return:
        return _nothing(line, irregular=True)
    if n == 0:
        blank = final and not data.strip()
        return _nothing(line, consumed=size if blank else 0, irregular=final and not blank)
    starts, ends = lines.starts[: 4 * n].reshape(n, 4), lines.ends[: 4 * n].reshape(n, 4)
    fits = _regular_fastq(lines, starts, ends)
    id_starts = starts[:, 0] + 1
    id_ends = lines.id_ends(id_starts, ends[:, 0])
    fits &= id_ends > id_starts
    whole = n if fits.all() else int(np.argmin(fits))
    consumed = int(lines.nexts[4 * whole - 1]) if whole else 0
    rest = data[consumed:]
    blank = final and not rest.strip()
    return Block(
        ids=lines.pick(id_starts[:whole], id_ends[:whole]),
        bases=lines.pick(starts[:whole, 1], ends[:whole, 1]),
        lines=line + 4 * np.arange(whole, dtype=np.int64),
        text=Strings(data[:consumed], np.append(0, lines.nexts[3 : 4 * whole : 4])),
        consumed=size if blank else min(consumed, size),
        next_line=line + 4 * whole,
        irregular=not blank and (whole < n or final),
    )


def _regular_fastq(lines: _Lines, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of the four-line groups are plain records, by the rules of Biopython's parser. [n]"""
    letters, lengths = lines.letters, ends - starts
    fits: NDArray[np.bool_] = (
        (letters[starts[:, 0]] == _HEADER_FASTQ)
        & (letters[starts[:, 2]] == _PLUS)
        & (lengths[:, 1] == lengths[:, 3])
        & (lengths[:, 2] >= 1)
    )
    for i in np.flatnonzero(fits & (lengths[:, 2] > 1)).tolist():  # "+" may repeat the header, and nothing else
        header = lines.data[starts[i, 0] + 1 : ends[i, 0]].rstrip()
        fits[i] = lines.data[starts[i, 2] + 1 : ends[i, 2]].rstrip() in (header, b"")
    # blanks belong into headers only; elsewhere a parser may strip them, so they are not ours to judge
    line_of = np.searchsorted(lines.nexts, lines.low, side="right")
    odd = line_of[(line_of % 2 == 1) & (line_of < starts.size)]
    fits[odd // 4] = False
    return fits


def cut_fasta(data: bytes, line: int, final: bool) -> Block:
    """Records from the front of `data`, which begins on line `line`; the last one only if `final`. No comments."""
    size = len(data)
    if not final:
        data = data[: data.rfind(b"\n>") + 1]
        if not data:
            return _nothing(line)
    elif not data.endswith(b"\n"):
        data += b"\n"
    lines = _Lines.of(data)
    first = lines.letters[lines.starts]
    is_header = first == _HEADER_FASTA
    is_sequence = ~is_header & (lines.ends > lines.starts)
    record_of = np.cumsum(is_header) - 1
    n = int(record_of[-1]) + 1
    line_of = np.searchsorted(lines.nexts, lines.low, side="right")
    id_starts, id_ends = lines.starts[is_header] + 1, lines.ends[is_header]
    id_ends = lines.id_ends(id_starts, id_ends)
    regular = (
        not lines.stray_return
        and not (first == _COMMENT).any()
        and not is_sequence[line_of].any()
        and not (is_sequence & (record_of < 0)).any()
        and bool((id_ends > id_starts).all())
    )
    if not regular:
        return _nothing(line, irregular=True)
    starts, ends, owners = lines.starts[is_sequence], lines.ends[is_sequence], record_of[is_sequence]
    base_lengths = np.bincount(owners, weights=ends - starts, minlength=n).astype(np.int64)
    return Block(
        ids=lines.pick(id_starts, id_ends),
        bases=Strings(lines.pick(starts, ends).data, offsets_of(base_lengths)),
        lines=line + np.flatnonzero(is_header),
        text=Strings(data, np.concatenate([[0], lines.starts[is_header][1:], [len(data)]])),
        consumed=min(len(data), size),
        next_line=line + len(lines.starts),
    )
