"""Regular FASTQ and FASTA cut into reads on whole blocks of bytes, without a Python step per line.

A cutter takes what it is sure of from the front of a block and leaves the rest: an unfinished record waits for more
bytes; anything unusual is flagged `irregular` and left to `slow`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

_NEWLINE, _RETURN = 10, 13
_HEADER_FASTA, _COMMENT, _HEADER_FASTQ, _PLUS = b">;@+"
_SPLITS: Final = np.isin(np.arange(33), [9, 10, 11, 12, 13, 28, 29, 30, 31, 32])  # what str.split() takes as blank


@dataclass(frozen=True, slots=True)
class Block:
    """Reads cut from the front of a block of bytes."""

    n: int
    ids: bytes  # end to end, as they stand in the file
    id_lengths: NDArray[np.int64]  # [n]
    bases: bytes  # end to end
    base_lengths: NDArray[np.int64]  # [n]
    lines: NDArray[np.int64]  # [n] line of each header
    text: bytes  # the records as they stand in the file, end to end
    text_ends: NDArray[np.int64]  # [n]
    consumed: int  # bytes of the block that are dealt with
    next_line: int  # line on which the rest begins
    irregular: bool  # the rest begins with something the cutter does not handle


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
    return Block(0, b"", none, b"", none, none, b"", none, consumed, line, irregular)


def cut_fastq(data: bytes, line: int, final: bool) -> Block:
    """Four-line records from the front of `data`, which begins on line `line`; `final`: nothing follows."""
    size = len(data)
    if final and not data.endswith(b"\n"):
        data += b"\n"
    lines = _Lines.of(data)
    n = len(lines.starts) // 4
    if lines.stray_return:
        return _nothing(line, irregular=True)
    if n == 0:
        return _last_of_fastq(data, line, final)
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
        n=whole,
        ids=lines.pick(id_starts[:whole], id_ends[:whole]),
        id_lengths=id_ends[:whole] - id_starts[:whole],
        bases=lines.pick(base_starts, base_ends),
        base_lengths=base_ends - base_starts,
        lines=line + 4 * np.arange(whole, dtype=np.int64),
        text=data[:consumed],
        text_ends=lines.nexts[3 : 4 * whole : 4],
        consumed=size if blank else min(consumed, size),
        next_line=line + 4 * whole,
        irregular=not blank and (whole < n or final),
    )


def _last_of_fastq(data: bytes, line: int, final: bool) -> Block:
    if final and not data.strip():
        return _nothing(line, consumed=len(data))
    return _nothing(line, irregular=final)


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
        n=n,
        ids=lines.pick(id_starts, id_ends),
        id_lengths=id_ends - id_starts,
        bases=lines.pick(starts, ends),
        base_lengths=np.bincount(owners, weights=ends - starts, minlength=n).astype(np.int64),
        lines=line + np.flatnonzero(is_header),
        text=data,
        text_ends=np.append(lines.starts[is_header][1:], len(data)),
        consumed=min(len(data), size),
        next_line=line + len(lines.starts),
        irregular=False,
    )
