"""Building an ORF store: columns and digests go to disk as the batches come, duplicates are found bucket by bucket.

Nothing is held that grows with the number of reads. The duplicates of 5 million reads are found in 64 buckets of
digests, each small; results are carried to where they belong by partitions on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Final

import h5py
import numpy as np
from numpy.typing import NDArray

from virnuc_core.errors import InputError
from virnuc_core.reads.frames import Frames, digest_each
from virnuc_core.reads.parse import ReadBatch, offsets_of
from virnuc_core.reads.spool import Column, Partition, repeats
from virnuc_core.reads.store import (
    AMBIGUOUS,
    COLUMNS,
    DUPLICATE_ID,
    EMPTY,
    FORMAT,
    SCHEMA_VERSION,
    SHORT_FOR_MODEL,
    StoreCounts,
)
from virnuc_core.rundir import whole_file

_SCRATCH: Final[dict[str, type[np.generic]]] = {
    "length": np.int32,
    "chunks": np.int32,
    "rows": np.int32,
    "flags": np.uint8,
    "id_bytes": np.uint8,
    "id_length": np.int32,
    "file": np.int32,
    "line": np.int64,
    "row_chunk": np.int32,
    "row_frame": np.uint8,
    "protein_length": np.int32,
    "dna_length": np.int32,
    "protein": np.uint8,
    "dna": np.uint8,
}
_BUCKETS: Final = 64
_ROWS: Final = 1 << 16  # reads or rows of one stretch when the columns are put together
_ALIGNMENT: Final = 64  # bytes; mapped columns start where any processor can read them


class Fingerprint:
    """SHA-256 over ids and bases of the reads, in order, and the model length: what decides the content of a store."""

    def __init__(self, model_length: int) -> None:
        self._parts = [sha256(f"{FORMAT} {SCHEMA_VERSION} {model_length}".encode())] + [sha256() for _ in range(4)]

    def add(self, batch: ReadBatch) -> None:
        """Take in the next reads; how they are cut into batches makes no difference."""
        lengths = [np.diff(offsets).astype("<i8").tobytes() for offsets in (batch.id_offsets, batch.base_offsets)]
        for part, data in zip(self._parts[1:], (batch.ids, batch.bases, *lengths), strict=True):
            part.update(data)

    def hexdigest(self) -> str:
        """The fingerprint of what was taken in so far."""
        return sha256(b"".join(part.digest() for part in self._parts)).hexdigest()


class StoreWriter:
    """Takes batches with their frames, then writes the store whole.

    `folder` is scratch space for this writer alone. When `strict`, a second read of the same id is refused at the end.
    """

    def __init__(self, folder: Path, model_length: int, files: tuple[str, ...], *, strict: bool = False) -> None:
        self._model_length = model_length
        self._files = files
        self._strict = strict
        self._columns = {name: Column(folder / name, kind) for name, kind in _SCRATCH.items()}
        self._id_digests = Partition(folder / "id_digests", 3)
        self._row_digests = Partition(folder / "row_digests", 3)
        self._copies = Partition(folder / "copies", 2)  # (read, how many-th of its id), by stretch of reads
        self._id_offset = Column(folder / "id_offset", np.int64)  # of the first read of each stretch
        self._scratch = folder
        self._fingerprint = Fingerprint(model_length)
        self._n_chunks = self._n_bases = self._n_open = 0
        self._first_repeat: tuple[int, int] | None = None  # the first read with an id seen before, and the one before

    def add(self, batch: ReadBatch, frames: Frames) -> None:
        """Append one batch."""
        columns = self._columns
        lengths = np.diff(batch.base_offsets)
        id_lengths = np.diff(batch.id_offsets)
        first_read, first_row = len(columns["length"]), len(columns["row_frame"])
        short = (lengths > 0) & (2 * lengths < self._model_length)
        flags = (lengths == 0) * EMPTY + short * SHORT_FOR_MODEL + frames.read_ambiguous * AMBIGUOUS
        orfs = frames.orfs
        columns["length"].append(lengths)
        columns["chunks"].append(frames.read_chunks)
        columns["rows"].append(frames.read_rows)
        columns["flags"].append(flags)
        columns["id_bytes"].append(batch.ids)
        columns["id_length"].append(id_lengths)
        columns["row_chunk"].append(frames.row_chunk)
        columns["row_frame"].append(orfs.frame)
        columns["protein_length"].append(orfs.protein_lengths)
        columns["dna_length"].append(orfs.dna_lengths)
        columns["protein"].append(orfs.proteins)
        columns["dna"].append(orfs.dna)
        if self._strict:
            columns["line"].append(batch.lines)
            columns["file"].append(np.full(len(batch), batch.file))
        _into_buckets(self._row_digests, frames.digests, first_row)
        _into_buckets(self._id_digests, frames.id_digests, first_read)
        self._fingerprint.add(batch)
        self._n_chunks += int(frames.read_chunks.sum())
        self._n_bases += int(lengths.sum())
        self._n_open += int(np.count_nonzero(frames.read_rows))

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the reads so far."""
        return self._fingerprint.hexdigest()

    def finish(self, path: Path) -> None:
        """Find the duplicates and write the store to `path`, whole.

        Errors: `InputError` naming the first id that stands twice, and where, if strict.
        """
        self._number_copies()
        if self._strict and self._first_repeat is not None:
            raise self._twice(*self._first_repeat)
        mark = self._free_mark()
        with closing(_Uniques(self._scratch, self._row_digests, self._columns)) as uniques:
            counts = self._counts(uniques.count)
            with (
                whole_file(path) as aside,
                h5py.File(aside, "w", alignment_threshold=1, alignment_interval=_ALIGNMENT, track_times=False) as file,
            ):
                file.attrs.update({"format": FORMAT, "schema_version": SCHEMA_VERSION, "fingerprint": self.fingerprint})
                file.attrs.update({"model_length": self._model_length, "duplicate_mark": mark})
                file.attrs.update({name: getattr(counts, name) for name in StoreCounts.__slots__})
                self._write_reads(file, counts)
                uniques.write(file)

    def _counts(self, n_uniques: int) -> StoreCounts:
        flags = self._columns["flags"]
        flagged = dict.fromkeys((EMPTY, SHORT_FOR_MODEL, AMBIGUOUS), 0)
        for low, high in _stretches(len(flags)):
            values = flags.read(low, high)
            for bit in flagged:
                flagged[bit] += int(np.count_nonzero(values & bit))
        return StoreCounts(
            n_reads=len(flags),
            n_chunks=self._n_chunks,
            n_rows=len(self._columns["row_frame"]),
            n_uniques=n_uniques,
            n_bases=self._n_bases,
            n_open_reads=self._n_open,
            n_empty=flagged[EMPTY],
            n_short=flagged[SHORT_FOR_MODEL],
            n_ambiguous=flagged[AMBIGUOUS],
            n_duplicate_ids=len(self._copies),
        )

    def close(self) -> None:
        """Close the scratch files."""
        for column in (*self._columns.values(), self._id_offset):
            column.close()
        for partition in (self._id_digests, self._row_digests, self._copies):
            partition.close()

    def _number_copies(self) -> None:
        """Number the reads whose id an earlier read has, and note where the ids of each stretch of reads begin."""
        for bucket in self._id_digests.parts():
            read, first, number = repeats(self._id_digests.read(bucket))
            self._copies.add(read // _ROWS, read, number)
            if len(read):
                i = int(np.argmin(read))
                if self._first_repeat is None or int(read[i]) < self._first_repeat[0]:
                    self._first_repeat = int(read[i]), int(first[i])
        offset = 0
        for low, high in _stretches(len(self._columns["id_length"])):
            self._id_offset.append(np.array([offset]))
            offset += int(self._columns["id_length"].read(low, high).sum(dtype=np.int64))

    def _ids(self, low: int, high: int) -> tuple[bytes, NDArray[np.int64]]:
        """Ids of a stretch of reads, end to end, and where each begins."""
        begin = int(self._id_offset.read(low // _ROWS, low // _ROWS + 1)[0])
        offsets = offsets_of(self._columns["id_length"].read(low, high).astype(np.int64))
        return self._columns["id_bytes"].read(begin, begin + int(offsets[-1])).tobytes(), offsets

    def _free_mark(self) -> str:
        """What stands between an id and its number: a dot, or as many as it takes that no such name is an id yet."""
        mark = "."
        while len(self._copies) and self._is_taken(mark):
            mark += "."
        return mark

    def _is_taken(self, mark: str) -> bool:
        names = Partition(self._scratch / "names", 2)
        try:
            for stretch in self._copies.parts():
                low = stretch * _ROWS
                data, offsets = self._ids(low, min(low + _ROWS, len(self._columns["length"])))
                made = [
                    data[offsets[read - low] : offsets[read - low + 1]] + f"{mark}{number}".encode()
                    for read, number in self._copies.read(stretch).tolist()
                ]
                digests = digest_each(made)
                names.add((digests[:, 0] % _BUCKETS).astype(np.int64), digests[:, 0], digests[:, 1])
            return any(_common(names.read(part), self._id_digests.read(part)[:, :2]) for part in names.parts())
        finally:
            names.close()

    def _twice(self, read: int, first: int) -> InputError:
        def place(index: int) -> tuple[str, int]:
            file = self._files[int(self._columns["file"].read(index, index + 1)[0])]
            return file, int(self._columns["line"].read(index, index + 1)[0])

        (file, line), (first_file, first_line) = place(read), place(first)
        low = read - read % _ROWS
        data, offsets = self._ids(low, read + 1)
        return InputError(
            f"this id stands also on {first_file}:{first_line}",
            file=file,
            line=line,
            read_id=data[offsets[-2] : offsets[-1]].decode(),
            hint="ids must be unique in strict mode, rename one",
        )

    def _write_reads(self, file: h5py.File, counts: StoreCounts) -> None:
        n = counts.n_reads
        parts = {
            name: _dataset(file, name, n)
            for name in ("read_length", "read_chunks", "read_rows", "read_flags", "read_copy")
        }
        id_offsets = _dataset(file, "read_id_offsets", n + 1)
        id_bytes = _dataset(file, "read_id_bytes", len(self._columns["id_bytes"]))
        row_read = _dataset(file, "row_read", counts.n_rows)
        end = rows_end = 0
        for low, high in _stretches(n):
            copy = np.zeros(high - low, np.int32)
            records = self._copies.read(low // _ROWS)
            copy[records[:, 0].astype(np.int64) - low] = records[:, 1]
            for name in ("length", "chunks"):
                parts[f"read_{name}"][low:high] = self._columns[name].read(low, high)
            rows = self._columns["rows"].read(low, high)
            parts["read_rows"][low:high] = rows
            owners = np.repeat(np.arange(low, high), rows)
            row_read[rows_end : rows_end + len(owners)] = owners
            rows_end += len(owners)
            parts["read_flags"][low:high] = self._columns["flags"].read(low, high) | (copy > 0) * np.uint8(DUPLICATE_ID)
            parts["read_copy"][low:high] = copy
            ids, offsets = self._ids(low, high)
            id_offsets[low + 1 : high + 1] = offsets[1:] + end
            id_bytes[end : end + len(ids)] = np.frombuffer(ids, np.uint8)
            end += len(ids)


class _Uniques:
    """Which rows repeat which, carried from buckets of digests to stretches of rows; then the row columns."""

    def __init__(self, folder: Path, digests: Partition, columns: dict[str, Column]) -> None:
        self._columns = columns
        self._again = Partition(folder / "again", 1)  # rows that repeat, by stretch of rows
        self._wanted = Partition(folder / "wanted", 2)  # (row, first row of the kind), by stretch of the first row
        self._known = Partition(folder / "known", 2)  # (row, unique), by stretch of rows
        for bucket in digests.parts():
            row, first, _ = repeats(digests.read(bucket))
            self._again.add(row // _ROWS, row)
            self._wanted.add(first // _ROWS, row, first)
        self.count = len(columns["row_frame"]) - len(self._again)

    def _firsts(self, low: int, high: int) -> NDArray[np.bool_]:
        """Which rows of a stretch are the first of their kind."""
        firsts = np.ones(high - low, bool)
        firsts[self._again.read(low // _ROWS)[:, 0].astype(np.int64) - low] = False
        return firsts

    def write(self, file: h5py.File) -> None:
        """Write the columns of rows and uniques."""
        columns, n = self._columns, len(self._columns["row_frame"])
        names = ("row_chunk", "row_frame")
        rows = {name: _dataset(file, name, n) for name in (*names, "row_unique")}
        unique_row = _dataset(file, "unique_row", self.count)
        offsets = {kind: _dataset(file, f"{kind}_offsets", self.count + 1) for kind in ("protein", "dna")}
        done = 0
        totals = {"protein": 0, "dna": 0}
        for low, high in _stretches(n):
            for name in names:
                rows[name][low:high] = columns[name].read(low, high)
            firsts = self._firsts(low, high)
            unique = done + np.cumsum(firsts) - 1
            wanted = self._wanted.read(low // _ROWS).astype(np.int64)
            self._known.add(wanted[:, 0] // _ROWS, wanted[:, 0], unique[wanted[:, 1] - low])
            known = self._known.read(low // _ROWS).astype(
                np.int64
            )  # complete: a first row never comes after its copies
            unique[known[:, 0] - low] = known[:, 1]
            rows["row_unique"][low:high] = unique
            new = int(np.count_nonzero(firsts))
            unique_row[done : done + new] = low + np.flatnonzero(firsts)
            for kind, total in totals.items():
                lengths = columns[f"{kind}_length"].read(low, high)[firsts]
                ends = total + np.cumsum(lengths, dtype=np.int64)
                offsets[kind][done + 1 : done + new + 1] = ends
                totals[kind] = int(ends[-1]) if new else total
            done += new
        for kind, total in totals.items():
            self._write_letters(kind, _dataset(file, f"{kind}_bytes", total), n)

    def close(self) -> None:
        """Close the scratch files."""
        for part in (self._again, self._wanted, self._known):
            part.close()

    def _write_letters(self, kind: str, target: h5py.Dataset, n: int) -> None:
        """Copy the letters of first rows, leaving out those of repeats."""
        source, done, at = self._columns[kind], 0, 0
        for low, high in _stretches(n):
            offsets = offsets_of(self._columns[f"{kind}_length"].read(low, high).astype(np.int64))
            letters = source.read(at, at + int(offsets[-1]))
            at += len(letters)
            kept = _without(letters, offsets, self._firsts(low, high))
            target[done : done + len(kept)] = kept
            done += len(kept)


def _without(letters: NDArray[np.uint8], offsets: NDArray[np.int64], keep: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """The segments that are kept, end to end; neighbours are copied in one piece."""
    if keep.all():
        return letters
    edges = np.flatnonzero(np.diff(keep, prepend=False, append=False))
    at = offsets[edges].tolist()
    data = memoryview(letters.data)
    return np.frombuffer(b"".join([data[a:b] for a, b in zip(at[::2], at[1::2], strict=True)]), np.uint8)


def _stretches(n: int) -> Iterator[tuple[int, int]]:
    for low in range(0, n, _ROWS):
        yield low, min(low + _ROWS, n)


def _dataset(file: h5py.File, name: str, length: int) -> h5py.Dataset:
    dataset = file.create_dataset(name, (length,), COLUMNS[name])
    if name.endswith("_offsets"):
        dataset[0] = 0
    return dataset


def _common(some: NDArray[np.uint64], others: NDArray[np.uint64]) -> bool:
    """Whether a digest stands on both sides."""
    some, others = some[np.isin(some[:, 0], others[:, 0])], others[np.isin(others[:, 0], some[:, 0])]
    return not {tuple(pair) for pair in some.tolist()}.isdisjoint(tuple(pair) for pair in others.tolist())


def _into_buckets(buckets: Partition, digests: NDArray[np.uint64], first: int) -> None:
    bucket = (digests[:, 0] % _BUCKETS).astype(np.int64)
    buckets.add(bucket, digests[:, 0], digests[:, 1], np.arange(first, first + len(digests)))
