"""Writing an ORF store: segments are appended to columns on disk, repeats are found, columns become one file.

Repeats of ids and sequences are looked for in one bucket of their digests after the other: memory is bounded.
"""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
from numpy.typing import NDArray

from virnuc_core.reads.fast_parser import Strings, offsets_of
from virnuc_core.reads.fingerprint import Fingerprint, digests
from virnuc_core.reads.store import COLUMNS, FORMAT, SCHEMA_VERSION, StoreCounts
from virnuc_core.reads.translate import AMBIGUOUS, DUPLICATE_ID, EMPTY, SEGMENT_COLUMNS, SHORT_FOR_MODEL, Segment
from virnuc_core.reads.workers import Workers
from virnuc_core.rundir import whole_file

STRETCH: Final = 1 << 17  # entries of a column treated together
BUCKET: Final = 1 << 21  # digests looked for repeats at a time, about
_ALIGNMENT: Final = 64  # bytes; mapped columns start where any processor can read them
_ENTRIES: Final = {  # how many entries a column has that has not one for each read, row or unique
    "read_id_offsets": "reads_and_end",
    "read_id_bytes": "id_bytes",
    "protein_offsets": "uniques_and_end",
    "dna_offsets": "uniques_and_end",
    "protein_bytes": "protein_bytes",
    "dna_bytes": "dna_bytes",
}


@dataclass(frozen=True, slots=True)
class Column:
    """Values in a file, read by stretches: none are held."""

    path: Path
    kind: type[np.generic]
    width: int = 1  # values of one entry

    def __len__(self) -> int:
        return self.path.stat().st_size // (np.dtype(self.kind).itemsize * self.width)

    def read(self, low: int, high: int) -> NDArray[Any]:
        """The entries `low` to `high`, fewer at the end: [n], or [n, width] where an entry has several values."""
        offset = low * self.width * np.dtype(self.kind).itemsize
        values: NDArray[Any] = np.fromfile(self.path, self.kind, max(high - low, 0) * self.width, offset=offset)
        return values if self.width == 1 else values.reshape(-1, self.width)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Those of a column of digests that equal ones can be among."""

    digests: Column  # [n, 2]
    number: int
    buckets: int  # a power of two

    @classmethod
    def all_of(cls, digests: Column) -> list[Bucket]:
        """All buckets of a column; every digest is in one."""
        buckets = 1 << max(0, -(-len(digests) // BUCKET) - 1).bit_length()
        return [cls(digests, number, buckets) for number in range(buckets)]

    def records(self) -> NDArray[np.uint64]:
        """Both halves of the digests and their places in the column: uint64 [n, 3]."""
        records = [np.empty((0, 3), np.uint64)]
        for low in range(0, len(self.digests), STRETCH):
            found = self.digests.read(low, low + STRETCH)
            own = np.flatnonzero(found[:, 0] & np.uint64(self.buckets - 1) == self.number)
            records.append(np.column_stack([found[own], (low + own).astype(np.uint64)]))
        return np.concatenate(records)


def repeats_in(bucket: Bucket) -> NDArray[np.int64]:
    """The entries of a bucket that equal an earlier one, in order: int64 [n, 3].

    Each is its place in the column, the place of the first of its kind, and how many-th of the kind it is, from 2.
    """
    records = bucket.records()
    # most are one of a kind: a quick sort by one half finds the rest, and only they are sorted with care
    order = np.argsort(records[:, 0])
    low = records[order, 0]
    same = low[1:] == low[:-1]
    in_company = np.zeros(len(order), bool)
    in_company[1:] |= same
    in_company[:-1] |= same
    records = records[order[in_company]]
    low, high, place = records[np.lexsort((records[:, 2], records[:, 1], records[:, 0]))].T
    begins = np.ones(len(place), bool)
    begins[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    first = np.maximum.accumulate(np.where(begins, np.arange(len(place)), 0))
    again = np.flatnonzero(~begins)
    found = np.column_stack([place[again], place[first[again]], again - first[again] + 1]).astype(np.int64)
    return found[np.argsort(found[:, 0])]


class Repeats:
    """What repeats in a whole column, kept in a file by stretches of the column."""

    def __init__(self, path: Path) -> None:
        self._column = Column(path, np.int64, 3)
        self._bounds: list[NDArray[np.int64]] = []  # of each bucket: where its repeats of each stretch begin
        path.touch()

    def __len__(self) -> int:
        return len(self._column)

    def add(self, bucket: Bucket, found: NDArray[np.int64]) -> None:
        """Keep the repeats of one more bucket."""
        edges = np.arange(0, len(bucket.digests) + STRETCH, STRETCH)
        self._bounds.append(len(self) + np.searchsorted(found[:, 0], edges))
        with self._column.path.open("ab") as file:
            file.write(found.data)

    def of(self, stretch: int) -> NDArray[np.int64]:
        """The repeats within the stretch of this number: [n, 3] as of `repeats_in`, in order of their buckets."""
        read = self._column.read
        return np.concatenate([read(at[stretch], at[stretch + 1]) for at in self._bounds])

    def first(self) -> NDArray[np.int64] | None:
        """The first of all repeats: [3]; none where nothing repeats."""
        found = [self._column.read(at[0], at[0] + 1)[0] for at in self._bounds if at[-1] > at[0]]
        return min(found, key=lambda repeat: int(repeat[0]), default=None)


def share_a_digest(pair: tuple[Bucket, Bucket]) -> bool:
    """Whether a digest stands in the same bucket of both columns."""
    one, other = (bucket.records() for bucket in pair)
    one, other = one[np.isin(one[:, 0], other[:, 0])], other[np.isin(other[:, 0], one[:, 0])]
    return not {*map(tuple, one[:, :2].tolist())}.isdisjoint(map(tuple, other[:, :2].tolist()))


def fingerprint_for(model_length: int) -> Fingerprint:
    """The fingerprint of a store that holds no reads yet."""
    return Fingerprint(f"{FORMAT} {SCHEMA_VERSION} {model_length}")


class StoreWriter:
    """Takes segments in the order of the reads, then writes the store whole; to be closed.

    Columns go to files of `folder` as they come. Nothing is held that grows with the number of reads, but two bits for
    each row.
    """

    def __init__(self, folder: Path, model_length: int) -> None:
        self._folder, self._model_length = folder, model_length
        widths = {"read_id_digest": 2, "row_digest": 2}
        self._columns = {n: Column(folder / n, kind, widths.get(n, 1)) for n, kind in SEGMENT_COLUMNS.items()}
        with ExitStack() as stack:
            self._files = {n: stack.enter_context(c.path.open("wb")) for n, c in self._columns.items()}
            self._opened = stack.pop_all()
        self._fingerprint = fingerprint_for(model_length)
        self._ids, self._rows = Repeats(folder / "same_ids"), Repeats(folder / "same_rows")

    def add(self, segment: Segment) -> None:
        """Append one segment."""
        for name, values in segment.columns.items():
            self._files[name].write(np.ascontiguousarray(values).data)
        self._fingerprint.add(segment.leaves)

    def find_repeats(self, workers: Workers) -> tuple[int, int] | None:
        """Find what repeats among rows and ids; gives the first read whose id an earlier one has, and that one."""
        self.close()
        ids, rows = (Bucket.all_of(self._columns[name]) for name in ("read_id_digest", "row_digest"))
        buckets = ids + rows
        for number, found in enumerate(workers.map(repeats_in, buckets)):
            (self._ids if number < len(ids) else self._rows).add(buckets[number], found)
        first = self._ids.first()
        return None if first is None else (int(first[0]), int(first[1]))

    def write(self, path: Path, workers: Workers) -> None:
        """Write the store to `path`, whole, once repeats have been found."""
        mark = self._free_mark(workers)
        ranks, counts = self._count_firsts()
        with (
            whole_file(path) as aside,
            h5py.File(aside, "w", alignment_threshold=1, alignment_interval=_ALIGNMENT, track_times=False) as file,
        ):
            for name, kind in COLUMNS.items():
                file.create_dataset(name, (counts[_ENTRIES.get(name, f"n_{name.partition('_')[0]}s")],), kind)
            for name in ("read_id_offsets", "protein_offsets", "dna_offsets"):
                _put(file, name, 0, np.zeros(1, np.int64))  # there also where nothing follows
            counts |= self._write_reads(file)
            self._write_rows(file, ranks)
            about = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "fingerprint": self._fingerprint.hexdigest()}
            about |= {"model_length": self._model_length, "duplicate_mark": mark}
            file.attrs.update(about | {name: counts[name] for name in StoreCounts.__slots__})

    def place(self, read: int) -> tuple[str, int]:
        """Id of a read, and the line of its header."""
        low = read - read % STRETCH
        begin = sum(int(self._read("read_id_length", at, at + STRETCH).sum()) for at in range(0, low, STRETCH))
        begin += int(self._read("read_id_length", low, read).sum())
        end = begin + int(self._read("read_id_length", read, read + 1)[0])
        name = self._read("read_id_bytes", begin, end).tobytes().decode()
        return name, int(self._read("read_line", read, read + 1)[0])

    def close(self) -> None:
        """Close the files of columns; nothing can be appended any more."""
        self._opened.close()

    def _read(self, name: str, low: int, high: int) -> NDArray[Any]:
        return self._columns[name].read(low, high)

    def _free_mark(self, workers: Workers) -> str:
        """What stands between an id and its number: a dot, or as many as it takes that no such name is an id yet."""
        for mark in map(".".__mul__, itertools.count(1)):
            names = self._digests_of_names(mark)
            ids = Bucket.all_of(self._columns["read_id_digest"])
            pairs = [(Bucket(names, bucket.number, bucket.buckets), bucket) for bucket in ids]
            if not len(names) or not any([*workers.map(share_a_digest, pairs)]):
                return mark
        raise AssertionError

    def _digests_of_names(self, mark: str) -> Column:
        """Digests of the names that reads with an earlier one's id would get."""
        names = Column(self._folder / f"names{len(mark)}", np.uint64, 2)
        begin = 0
        with names.path.open("wb") as file:
            for low in range(0, len(self._columns["read_length"]), STRETCH):
                at = begin + offsets_of(self._read("read_id_length", low, low + STRETCH))
                letters = self._read("read_id_bytes", begin, int(at[-1])).tobytes()
                repeats = self._ids.of(low // STRETCH)
                place = repeats[:, 0] - low
                begins, ends, numbers = at[place] - begin, at[place + 1] - begin, repeats[:, 2]
                made = [
                    letters[a:b] + f"{mark}{number}".encode()
                    for a, b, number in zip(begins.tolist(), ends.tolist(), numbers.tolist(), strict=True)
                ]
                named = Strings.of(made)
                file.write(digests(named.data, named.offsets).data)
                begin = int(at[-1])
        return names

    def _count_firsts(self) -> tuple[_Ranks, Counter[str]]:
        """Which rows are the first of their kind, and how many entries the columns will have."""
        n_rows = len(self._columns["row_frame"])
        counts = Counter(n_reads=len(self._columns["read_length"]), n_rows=n_rows, n_duplicate_ids=len(self._ids))
        counts["id_bytes"] = len(self._columns["read_id_bytes"])
        words = [np.zeros(0, np.uint64)]
        for low in range(0, n_rows, STRETCH):
            firsts = self._firsts(low)
            padded = np.zeros(-(-len(firsts) // 64) * 64, bool)
            padded[: len(firsts)] = firsts
            words.append(np.packbits(padded, bitorder="little").view("<u8"))
            counts["n_uniques"] += int(np.count_nonzero(firsts))
            for kind in ("protein", "dna"):
                lengths = self._read(f"{kind}_length", low, low + STRETCH)
                counts[f"{kind}_bytes"] += int(lengths[firsts].sum(dtype=np.int64))
        counts["reads_and_end"], counts["uniques_and_end"] = counts["n_reads"] + 1, counts["n_uniques"] + 1
        return _Ranks(np.concatenate(words)), counts

    def _firsts(self, low: int) -> NDArray[np.bool_]:
        """Which rows of the stretch from `low` on are the first of their kind."""
        firsts = np.ones(min(STRETCH, len(self._columns["row_frame"]) - low), bool)
        firsts[self._rows.of(low // STRETCH)[:, 0] - low] = False
        return firsts

    def _write_reads(self, file: h5py.File) -> Counter[str]:
        """Write all columns of reads; gives what is counted on the way."""
        counts: Counter[str] = Counter()
        row = letter = 0
        for low in range(0, len(self._columns["read_length"]), STRETCH):
            length, chunks, rows, flags, id_length = (
                self._read(f"read_{name}", low, low + STRETCH)
                for name in ("length", "chunks", "rows", "flags", "id_length")
            )
            copy = np.zeros(len(length), np.int32)
            repeats = self._ids.of(low // STRETCH)
            copy[repeats[:, 0] - low] = repeats[:, 2]
            id_at = letter + offsets_of(id_length)
            _put(file, "read_length", low, length)
            _put(file, "read_chunks", low, chunks)
            _put(file, "read_rows", low, rows)
            _put(file, "read_flags", low, flags | (copy > 0) * np.uint8(DUPLICATE_ID))
            _put(file, "read_copy", low, copy)
            _put(file, "read_id_offsets", low, id_at)
            _put(file, "read_id_bytes", letter, self._read("read_id_bytes", letter, int(id_at[-1])))
            _put(file, "row_read", row, np.repeat(np.arange(low, low + len(rows)), rows))
            row, letter = row + int(rows.sum(dtype=np.int64)), int(id_at[-1])
            counts["n_chunks"] += int(chunks.sum(dtype=np.int64))
            counts["n_bases"] += int(length.sum(dtype=np.int64))
            counts["n_open_reads"] += int(np.count_nonzero(rows))
            for name, bit in (("n_empty", EMPTY), ("n_short", SHORT_FOR_MODEL), ("n_ambiguous", AMBIGUOUS)):
                counts[name] += int(np.count_nonzero(flags & bit))
        return counts

    def _write_rows(self, file: h5py.File, ranks: _Ranks) -> None:
        """Write all columns of rows and of distinct sequences."""
        read, written = Counter[str](), Counter[str]()  # letters of either kind so far
        for low in range(0, len(self._columns["row_frame"]), STRETCH):
            firsts, repeats = self._firsts(low), self._rows.of(low // STRETCH)
            unique = ranks.of(np.arange(low, low + len(firsts)))
            first_unique = int(unique[0])
            unique[repeats[:, 0] - low] = ranks.of(repeats[:, 1])
            _put(file, "row_chunk", low, self._read("row_chunk", low, low + STRETCH))
            _put(file, "row_frame", low, self._read("row_frame", low, low + STRETCH))
            _put(file, "row_unique", low, unique)
            _put(file, "unique_row", first_unique, low + np.flatnonzero(firsts))
            for kind in ("protein", "dna"):
                lengths = self._read(f"{kind}_length", low, low + STRETCH)
                at = offsets_of(lengths)
                letters = _kept(self._read(f"{kind}_bytes", read[kind], read[kind] + int(at[-1])), at, firsts)
                ends = written[kind] + offsets_of(lengths[firsts])
                _put(file, f"{kind}_offsets", first_unique, ends)
                _put(file, f"{kind}_bytes", written[kind], letters)
                read[kind], written[kind] = read[kind] + int(at[-1]), int(ends[-1])


class _Ranks:
    """Which rows are the first of their kind, in two bits for each row."""

    def __init__(self, words: NDArray[np.uint64]) -> None:
        self._words = words  # a bit for each row, lowest first
        self._before = offsets_of(np.bitwise_count(words))  # first rows before each word

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many first rows stand before each of `rows`: the unique of a row that is one itself."""
        word = rows >> 6
        lower = (np.uint64(1) << (rows & 63).astype(np.uint64)) - np.uint64(1)
        ranks: NDArray[np.int64] = self._before[word] + np.bitwise_count(self._words[word] & lower)
        return ranks


def _put(file: h5py.File, name: str, low: int, values: NDArray[Any]) -> None:
    if len(values):
        file[name][low : low + len(values)] = values


def _kept(letters: NDArray[np.uint8], offsets: NDArray[np.int64], keep: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """The segments that are kept, end to end; neighbours are copied in one piece."""
    if keep.all():
        return letters
    at = offsets[np.flatnonzero(np.diff(keep, prepend=False, append=False))].tolist()
    return np.concatenate([np.empty(0, np.uint8), *(letters[a:b] for a, b in zip(at[::2], at[1::2], strict=True))])
