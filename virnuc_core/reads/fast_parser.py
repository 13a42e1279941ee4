"""Regular FASTQ and FASTA cut into columnar batches of reads on whole blocks of bytes, without a step per line.

A cutter takes what it is sure of from the front of a block and leaves the rest: an unfinished record waits for more
bytes; anything unusual is flagged `irregular` and left to `biopython_parser`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
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
class ReadBatch:
    """Consecutive reads of one file, as columns. Ids are printable UTF-8 without blanks; bases keep their case."""

    file: int  # place of the file among the inputs
    form: Format
    ids: bytes  # end to end
    id_offsets: NDArray[np.int64]  # [n + 1]
    bases: bytes  # end to end
    base_offsets: NDArray[np.int64]  # [n + 1]
    lines: NDArray[np.int64]  # [n] line of each header in its file, from 1
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

    def nbytes(self) -> int:
        """Bytes of ids and bases."""
        return len(self.ids) + len(self.bases)

    def without_text(self) -> ReadBatch:
        """The same for whoever needs ids and bases only."""
        return replace(self, text=b"", text_offsets=np.zeros(1, np.int64))


@dataclass(frozen=True, slots=True)
class Block:
    """Records cut from the front of a block of bytes, as they stand in the file."""

    ids: bytes  # end to end; some may be missing or unprintable
    id_lengths: NDArray[np.int64]  # [n]
    bases: bytes  # end to end
    base_lengths: NDArray[np.int64]  # [n]
    lines: NDArray[np.int64]  # [n] line of each header
    text: bytes  # end to end
    text_lengths: NDArray[np.int64]  # [n]
    consumed: int = 0  # bytes of the block that are dealt with
    next_line: int = 0  # line on which the rest begins
    irregular: bool = False  # the rest begins with something the cutter does not handle

    def batch(self, file: int, form: Format, reads_before: int) -> tuple[ReadBatch, int]:
        """The reads, and how many had no id: those are named by their number, counted from `reads_before`."""
        ids, id_lengths, unnamed = _clean_ids(self, reads_before)
        offsets = (offsets_of(lengths) for lengths in (id_lengths, self.base_lengths, self.text_lengths))
        id_at, base_at, text_at = offsets
        return ReadBatch(file, form, ids, id_at, self.bases, base_at, self.lines, self.text, text_at), unnamed


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


def _clean_ids(block: Block, reads_before: int) -> tuple[bytes, NDArray[np.int64], int]:
    """Ids as printable UTF-8 words, and how many were missing; nearly always they are just that already."""
    raw = np.frombuffer(block.ids, np.uint8)
    if block.id_lengths.all() and not ((raw < 33) | (raw > 126)).any():
        return block.ids, block.id_lengths, 0
    texts = (block.ids[a:b].decode("utf-8", "backslashreplace") for a, b in pairwise(offsets_of(block.id_lengths)))
    words = [_printable("".join(text.split(None, 1)[:1])).encode() for text in texts]
    named = [word or f"unnamed_{reads_before + i + 1}".encode() for i, word in enumerate(words)]
    return b"".join(named), np.fromiter(map(len, named), np.int64, len(named)), words.count(b"")


def without_illegal(batch: ReadBatch, name: str) -> tuple[ReadBatch, list[InputError]]:
    """The batch without reads that hold other letters than nucleotides, and what is to be said of those."""
    if not batch.bases.translate(None, _LEGAL):
        return batch, []
    legal = np.isin(np.arange(256), list(_LEGAL))
    bad_at = np.flatnonzero(~legal[np.frombuffer(batch.bases, np.uint8)])
    owners, first = np.unique(np.searchsorted(batch.base_offsets, bad_at, side="right") - 1, return_index=True)
    errors = [
        InputError(
            f"{batch.bases[place : place + 1].decode('latin-1')!r} at base {place - batch.base_offsets[owner] + 1}"
            " is no nucleotide letter",
            file=name,
            line=int(batch.lines[owner]),
            read_id=shortened(batch.id(owner)),
            hint="expected A C G T U N, IUPAC codes or gaps; is this a protein file?",
        )
        for owner, place in zip(owners.tolist(), bad_at[first].tolist(), strict=True)
    ]
    kept = np.setdiff1d(np.arange(len(batch)), owners)
    ids, id_offsets = _pick(batch.ids, batch.id_offsets, kept)
    bases, base_offsets = _pick(batch.bases, batch.base_offsets, kept)
    text, text_offsets = _pick(batch.text, batch.text_offsets, kept)
    lines = batch.lines[kept]
    return ReadBatch(batch.file, batch.form, ids, id_offsets, bases, base_offsets, lines, text, text_offsets), errors


def _pick(data: bytes, offsets: NDArray[np.int64], kept: NDArray[np.intp]) -> tuple[bytes, NDArray[np.int64]]:
    pieces = [data[offsets[i] : offsets[i + 1]] for i in kept]
    return b"".join(pieces), offsets_of(np.fromiter(map(len, pieces), np.int64, len(pieces)))


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

    def pick(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> bytes:
        """The bytes of the given stretches, end to end."""
        lengths = ends - starts
        longest = int(lengths.max(initial=0))
        if longest * len(lengths) > 2 * int(lengths.sum()) or longest == 0 or starts[-1] + longest > len(self.data):
            data = self.data
            return b"".join([data[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])
        table = sliding_window_view(self.letters, longest)[starts]  # much faster where the lengths are much alike
        if longest * len(lengths) == int(lengths.sum()):
            return table.tobytes()
        return table[np.arange(longest, dtype=np.int32) < lengths.astype(np.int32)[:, None]].tobytes()

    def id_ends(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the first word after `starts` ends."""
        blanks = self.low[_SPLITS[self.letters[self.low]]]
        following = np.append(blanks, len(self.data))[np.searchsorted(blanks, starts)]
        firsts: NDArray[np.int64] = np.minimum(following, ends)
        return firsts


def _nothing(line: int, *, consumed: int = 0, irregular: bool = False) -> Block:
    none = np.zeros(0, np.int64)
    return Block(b"", none, b"", none, none, b"", none, consumed, line, irregular)


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
    base_starts, base_ends = starts[:whole, 1], ends[:whole, 1]
    consumed = int(lines.nexts[4 * whole - 1]) if whole else 0
    rest = data[consumed:]
    blank = final and not rest.strip()
    return Block(
        ids=lines.pick(id_starts[:whole], id_ends[:whole]),
        id_lengths=id_ends[:whole] - id_starts[:whole],
        bases=lines.pick(base_starts, base_ends),
        base_lengths=base_ends - base_starts,
        lines=line + 4 * np.arange(whole, dtype=np.int64),
        text=data[:consumed],
        text_lengths=np.diff(lines.nexts[3 : 4 * whole : 4], prepend=0),
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
    return Block(
        ids=lines.pick(id_starts, id_ends),
        id_lengths=id_ends - id_starts,
        bases=lines.pick(starts, ends),
        base_lengths=np.bincount(owners, weights=ends - starts, minlength=n).astype(np.int64),
        lines=line + np.flatnonzero(is_header),
        text=data,
        text_lengths=np.diff(np.append(lines.starts[is_header][1:], len(data)), prepend=0),
        consumed=min(len(data), size),
        next_line=line + len(lines.starts),
        irregular=False,
    )
