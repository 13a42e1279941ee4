"""Drafts to one store: the jobs that find repeats among all rows and ids, and copy columns to their place.

The work is cut twice: by digest into buckets, where equal ones meet, and by order into stretches of sheets, each with
its own place in every column of the store. A bucket or a stretch is one job, and no job waits for another of its kind.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from virnuc_core.reads.batch import offsets_of
from virnuc_core.reads.columns import COLUMNS, DUPLICATE_ID
from virnuc_core.reads.digest import digest_each
from virnuc_core.reads.draft import BUCKETS, Draft, Sheet, number_and_index
from virnuc_core.reads.spool import Parts, read_all, repeats

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """Something that many jobs need, kept in a file of the scratch folder."""

    path: Path

    @classmethod
    def of(cls, path: Path, value: T) -> Kept[T]:
        """Keep a value."""
        path.write_bytes(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
        return cls(path)

    def get(self, draft: Draft) -> T:
        """The value; a worker reads it once."""
        return cast(T, draft.recall(self.path))


@dataclass(frozen=True, slots=True)
class Layout:
    """All sheets in the order of the reads, and where their reads and rows stand among all."""

    sheets: tuple[Sheet, ...]
    sheet_of: NDArray[np.int64]  # by number; -1 for numbers whose sheets are dropped
    first_read: NDArray[np.int64]  # [sheets + 1]
    first_row: NDArray[np.int64]  # [sheets + 1]
    bounds: NDArray[np.int64]  # [stretches + 1] the first sheet of each stretch
    row_digests: tuple[Parts, ...]
    id_digests: tuple[Parts, ...]

    @classmethod
    def of(
        cls,
        sheets: tuple[Sheet, ...],
        numbers: int,
        row_digests: tuple[Parts, ...],
        id_digests: tuple[Parts, ...],
        stretch_bytes: int,
    ) -> Layout:
        """Cut the sheets into stretches of at least `stretch_bytes`; their numbers are below `numbers`."""
        sheet_of = np.full(numbers, -1, np.int64)
        sheet_of[[sheet.number for sheet in sheets]] = np.arange(len(sheets))
        bounds, size = [0], 0
        for i, sheet in enumerate(sheets):
            size += sheet.nbytes
            if size >= stretch_bytes or i == len(sheets) - 1:
                bounds.append(i + 1)
                size = 0
        return cls(
            sheets=sheets,
            sheet_of=sheet_of,
            first_read=offsets_of(np.array([sheet.reads for sheet in sheets], np.int64)),
            first_row=offsets_of(np.array([sheet.rows for sheet in sheets], np.int64)),
            bounds=np.array(bounds, np.int64),
            row_digests=row_digests,
            id_digests=id_digests,
        )

    @property
    def stretches(self) -> int:
        return len(self.bounds) - 1

    def read(self, stretch: int, *names: str) -> list[NDArray[Any]]:
        """The named columns of a stretch."""
        pieces = [sheet.read(*names) for sheet in self.sheets[self.bounds[stretch] : self.bounds[stretch + 1]]]
        return [np.concatenate(column) for column in zip(*pieces, strict=True)]

    def reads(self, stretch: int) -> tuple[int, int]:
        """The first read of a stretch, and the first after it."""
        return int(self.first_read[self.bounds[stretch]]), int(self.first_read[self.bounds[stretch + 1]])

    def rows(self, stretch: int) -> tuple[int, int]:
        """The first row of a stretch, and the first after it."""
        return int(self.first_row[self.bounds[stretch]]), int(self.first_row[self.bounds[stretch + 1]])

    def stretch_of_row(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self.first_row[self.bounds[1:]], rows, side="right").astype(np.int64)

    def stretch_of_read(self, reads: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self.first_read[self.bounds[1:]], reads, side="right").astype(np.int64)

    def records(self, digests: tuple[Parts, ...], first: NDArray[np.int64], bucket: int) -> NDArray[np.uint64]:
        """A bucket's digests with the index of their row or read among all; `first` [sheets + 1]. [n, 3]"""
        records = read_all(digests, bucket, 3)
        number, index = number_and_index(records[:, 2])
        sheet = self.sheet_of[number]
        records[:, 2] = first[sheet] + index
        return records if (sheet >= 0).all() else records[sheet >= 0]


@dataclass(frozen=True, slots=True)
class FindRows:
    """Find the rows of a bucket that repeat an earlier one: (row, first of its kind), by stretch of the row."""

    layout: Kept[Layout]
    bucket: int

    def run(self, draft: Draft) -> None:
        layout = self.layout.get(draft)
        row, first, _ = repeats(layout.records(layout.row_digests, layout.first_row, self.bucket))
        draft.partition("again", 2).add(layout.stretch_of_row(row), row, first)


@dataclass(frozen=True, slots=True)
class FindIds:
    """Find the reads of a bucket whose id an earlier read has: (read, how many-th of its id), by stretch of the read.

    Gives the first of them, and the first read of that id.
    """

    layout: Kept[Layout]
    bucket: int

    def run(self, draft: Draft) -> tuple[int, int] | None:
        layout = self.layout.get(draft)
        read, first, number = repeats(layout.records(layout.id_digests, layout.first_read, self.bucket))
        draft.partition("copies", 2).add(layout.stretch_of_read(read), read, number)
        earliest = int(np.argmin(read)) if len(read) else None
        return None if earliest is None else (int(read[earliest]), int(first[earliest]))


@dataclass(frozen=True, slots=True)
class NameCopies:
    """Digests of the names that the copies of a stretch would get, by bucket."""

    layout: Kept[Layout]
    copies: Kept[tuple[Parts, ...]]
    stretch: int
    mark: str

    def run(self, draft: Draft) -> None:
        layout = self.layout.get(draft)
        low, _ = layout.reads(self.stretch)
        id_lengths, letters = layout.read(self.stretch, "id_length", "id_bytes")
        data, offsets = letters.tobytes(), offsets_of(id_lengths.astype(np.int64))
        made = [
            data[offsets[read - low] : offsets[read - low + 1]] + f"{self.mark}{number}".encode()
            for read, number in read_all(self.copies.get(draft), self.stretch, 2).tolist()
        ]
        digests = digest_each(made)
        draft.partition("names", 2).add((digests[:, 0] % BUCKETS).astype(np.int64), digests[:, 0], digests[:, 1])


@dataclass(frozen=True, slots=True)
class IsTaken:
    """Whether one of the new names of a bucket is an id already."""

    layout: Kept[Layout]
    names: Kept[tuple[Parts, ...]]
    bucket: int

    def run(self, draft: Draft) -> bool:
        layout = self.layout.get(draft)
        some = read_all(self.names.get(draft), self.bucket, 2)
        others = layout.records(layout.id_digests, layout.first_read, self.bucket)
        some, others = some[np.isin(some[:, 0], others[:, 0])], others[np.isin(others[:, 0], some[:, 0])]
        return not {tuple(pair) for pair in some.tolist()}.isdisjoint(tuple(pair) for pair in others[:, :2].tolist())


@dataclass(frozen=True, slots=True)
class Firsts:
    """Which rows of a stretch are the first of their kind."""

    words: NDArray[np.uint64]  # a bit for each row, lowest first
    rows: int
    protein: int  # letters of them
    dna: int


@dataclass(frozen=True, slots=True)
class CountFirsts:
    """Tell the first rows of a stretch, and how much they hold."""

    layout: Kept[Layout]
    again: Kept[tuple[Parts, ...]]
    stretch: int

    def run(self, draft: Draft) -> Firsts:
        layout = self.layout.get(draft)
        low, high = layout.rows(self.stretch)
        firsts = _first_rows(read_all(self.again.get(draft), self.stretch, 2).astype(np.int64), low, high)
        protein, dna = layout.read(self.stretch, "protein_length", "dna_length")
        padded = np.zeros(-(-len(firsts) // 64) * 64, bool)
        padded[: len(firsts)] = firsts
        return Firsts(
            words=np.packbits(padded, bitorder="little").view("<u8"),
            rows=int(np.count_nonzero(firsts)),
            protein=int(protein[firsts].sum(dtype=np.int64)),
            dna=int(dna[firsts].sum(dtype=np.int64)),
        )


def _first_rows(again: NDArray[np.int64], low: int, high: int) -> NDArray[np.bool_]:
    """Which of the rows `low` to `high` do not stand in `again` [n, 2]."""
    firsts = np.ones(high - low, bool)
    firsts[again[:, 0] - low] = False
    return firsts


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everything goes in the file of the store."""

    path: Path
    at: Mapping[str, int]  # byte at which each column that is not empty begins
    unique: NDArray[np.int64]  # [stretches] uniques before each stretch; and so on
    id_bytes: NDArray[np.int64]
    protein: NDArray[np.int64]
    dna: NDArray[np.int64]
    first_word: NDArray[np.int64]  # of the bits that tell first rows
    bits: Path  # of all rows, uint64; a stretch begins with a word of its own
    ranks: Path  # first rows of the stretch before each word, uint32
    again: tuple[Parts, ...]
    copies: tuple[Parts, ...]

    def unique_of(self, layout: Layout, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The unique of each row; they must be first rows."""
        if not len(rows):
            return rows
        bits, ranks = np.memmap(self.bits, np.uint64, "r"), np.memmap(self.ranks, np.uint32, "r")
        stretch = layout.stretch_of_row(rows)
        place = rows - layout.first_row[layout.bounds[stretch]]
        word = self.first_word[stretch] + (place >> 6)
        before = (np.uint64(1) << (place & 63).astype(np.uint64)) - np.uint64(1)
        return self.unique[stretch] + ranks[word] + np.bitwise_count(bits[word] & before)


@dataclass(frozen=True, slots=True)
class WriteStretch:
    """Copy everything of a stretch of sheets to its place in the store."""

    layout: Kept[Layout]
    plan: Kept[Plan]
    stretch: int

    def run(self, draft: Draft) -> None:
        layout, plan = self.layout.get(draft), self.plan.get(draft)
        with plan.path.open("rb+", buffering=0) as file:
            store = _Store(file.fileno(), plan.at)
            self._write_reads(store, layout, plan)
            self._write_rows(store, layout, plan)

    def _write_reads(self, store: _Store, layout: Layout, plan: Plan) -> None:
        low, high = layout.reads(self.stretch)
        length, chunks, rows, id_length, flags, ids = layout.read(
            self.stretch, "length", "chunks", "rows", "id_length", "flags", "id_bytes"
        )
        copy = np.zeros(high - low, np.int32)
        records = read_all(plan.copies, self.stretch, 2)
        copy[records[:, 0].astype(np.int64) - low] = records[:, 1]
        store.put("read_length", low, length)
        store.put("read_chunks", low, chunks)
        store.put("read_rows", low, rows)
        store.put("read_flags", low, flags | (copy > 0) * np.uint8(DUPLICATE_ID))
        store.put("read_copy", low, copy)
        begin = int(plan.id_bytes[self.stretch])
        store.put("read_id_offsets", low, begin + offsets_of(id_length.astype(np.int64)))
        store.put("read_id_bytes", begin, ids)
        store.put("row_read", layout.rows(self.stretch)[0], np.repeat(np.arange(low, high), rows))

    def _write_rows(self, store: _Store, layout: Layout, plan: Plan) -> None:
        low, high = layout.rows(self.stretch)
        row_chunk, row_frame = layout.read(self.stretch, "row_chunk", "row_frame")
        again = read_all(plan.again, self.stretch, 2).astype(np.int64)
        firsts = _first_rows(again, low, high)
        begin = int(plan.unique[self.stretch])
        unique = begin + np.cumsum(firsts) - 1
        unique[again[:, 0] - low] = plan.unique_of(layout, again[:, 1])
        store.put("row_chunk", low, row_chunk)
        store.put("row_frame", low, row_frame)
        store.put("row_unique", low, unique)
        store.put("unique_row", begin, low + np.flatnonzero(firsts))
        for kind, done in (("protein", plan.protein), ("dna", plan.dna)):
            lengths, letters = layout.read(self.stretch, f"{kind}_length", kind)
            at = int(done[self.stretch])
            store.put(f"{kind}_offsets", begin, at + offsets_of(lengths[firsts].astype(np.int64)))
            store.put(f"{kind}_bytes", at, _kept(letters, offsets_of(lengths.astype(np.int64)), firsts))


@dataclass(frozen=True, slots=True)
class _Store:
    """The file of the store, written at many places at once."""

    handle: int
    at: Mapping[str, int]

    def put(self, name: str, first: int, values: NDArray[Any]) -> None:
        """Write values of a column, from the entry `first` on."""
        if not len(values):
            return
        kind = np.dtype(COLUMNS[name])
        data = memoryview(np.ascontiguousarray(values.astype(kind, copy=False)).data).cast("B")
        place = self.at[name] + first * kind.itemsize
        while data:
            written = os.pwrite(self.handle, data, place)
            data, place = data[written:], place + written


def _kept(letters: NDArray[np.uint8], offsets: NDArray[np.int64], keep: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """The segments that are kept, end to end; neighbours are copied in one piece."""
    if keep.all():
        return letters
    edges = np.flatnonzero(np.diff(keep, prepend=False, append=False))
    at = offsets[edges].tolist()
    data = memoryview(letters.data)
    return np.frombuffer(b"".join([data[a:b] for a, b in zip(at[::2], at[1::2], strict=True)]), np.uint8)
