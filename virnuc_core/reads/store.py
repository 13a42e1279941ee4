"""The store of open reading frames (ORFs): one HDF5 file of columns, mapped into memory.

Every dataset is contiguous and uncompressed, so that a process reads only the parts it needs. The
same reads and settings give the same bytes. `StoreWriter` builds a store from segments (scratch
files with the columns of one batch of reads), and `OrfStore` reads a store.

HDF5 checks only a fraction of a file, and may crash on a changed bit elsewhere. So the file begins
with a seal, which is checked before HDF5 opens the file. The seal is a digest of all bytes after
it. HDF5 leaves room for it at the start of the file (the user block). For speed, several threads
digest blocks of the file, and the seal is the digest of these digests.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from virnuc_core.checked_files import (
    SEAL_BYTES,
    ComputedSeal,
    open_checked,
    open_checked_hdf5,
    seal_text,
)
from virnuc_core.errors import DamagedFileError, InputError, UnsafeFileError
from virnuc_core.reads.fast_parser import Strings, offsets_from_lengths
from virnuc_core.reads.fingerprint import Bucket, Repeats, digests, find_repeats
from virnuc_core.reads.translate import DUPLICATE_ID, FRAMES, Segment, SegmentCounts
from virnuc_core.reads.workers import Workers
from virnuc_core.rundir import atomic_file, check_room
from virnuc_core.safe_files import open_file, open_hdf5, open_to_update
from virnuc_core.system_errors import read_with_retries

FORMAT: Final = "virnuc-orfs"
SCHEMA_VERSION: Final = 2
# Part of the settings over which a fingerprint is computed: a new format is another fingerprint.
STORES: Final = f"{FORMAT} {SCHEMA_VERSION}"
SEALED_AS: Final = f"ORF store {SCHEMA_VERSION}"  # the kind of file that the seal names
HEADERS_BYTES: Final = 1 << 14  # room for HDF5's own headers and for aligning the columns
_BLOCK_BYTES: Final = 1 << 20  # that one thread digests at a time
_ALIGNMENT: Final = 64  # bytes; every processor can read mapped columns that begin at multiples

# A column has one value for each read, row or unique; or one byte for each letter of all ids,
# proteins or DNA sequences.
Axis = Literal["read", "row", "unique", "id", "protein", "dna"]


def _compute_seal(file: BinaryIO) -> bytes:
    """Compute the seal of an open store from all bytes after the room for the seal.

    Several threads digest blocks of the file. The seal is computed over these digests, in order.
    """
    with ThreadPoolExecutor() as threads:

        def digest_block(offset: int) -> bytes:
            """Return the digest of the block at an offset of the file."""
            block = os.pread(file.fileno(), _BLOCK_BYTES, offset)
            return blake2b(block, digest_size=32).digest()

        offsets = range(SEAL_BYTES, os.fstat(file.fileno()).st_size, _BLOCK_BYTES)
        return seal_text(SEALED_AS, threads.map(digest_block, offsets))


STORE_SEAL: Final = ComputedSeal(SEALED_AS, _compute_seal)


def seal(path: Path) -> None:
    """Compute the seal of a store and write it into the first 512 bytes of the file.

    Args:
        path: The file. Its first 512 bytes are kept free for the seal.
    """
    with path.open("rb+") as file:
        block = _compute_seal(file)
        file.write(block)


def is_intact(path: Path) -> bool:
    """Return true if a store has exactly the bytes that were written when it was staged.

    Args:
        path: The file. All of it is read.

    Raises:
        FileNotFoundError: There is no such file.
        UnreadableError: The system cannot read the file, so that nothing is known about it.
    """

    try:
        read_with_retries(path, lambda: open_checked(path, STORE_SEAL).close())
    except DamagedFileError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """How much a store contains, as written in the attributes of its file."""

    n_reads: int
    n_chunks: int
    n_rows: int  # open reading frames
    n_uniques: int  # distinct sequences
    n_bases: int
    n_open_reads: int  # reads with at least one row
    n_empty: int
    n_short: int
    n_ambiguous: int
    n_duplicate_ids: int  # reads whose id an earlier read has


class _Column(NamedTuple):
    """The type of a column, and what determines the number of its values."""

    kind: type[np.generic]
    axis: Axis  # the column has one value for each of these
    is_offsets: bool = False  # the column has one more value: the end of the last string


# The columns in the order of the file. `OrfStore` describes their meaning.
_COLUMNS: Final = {
    "read_length": _Column(np.int32, "read"),
    "read_chunks": _Column(np.int32, "read"),
    "read_rows": _Column(np.int32, "read"),
    "read_flags": _Column(np.uint8, "read"),
    "read_copy": _Column(np.int32, "read"),
    "read_id_offsets": _Column(np.int64, "read", is_offsets=True),
    "read_id_bytes": _Column(np.uint8, "id"),
    "row_read": _Column(np.int64, "row"),
    "row_chunk": _Column(np.int32, "row"),
    "row_frame": _Column(np.uint8, "row"),
    "row_unique": _Column(np.int64, "row"),
    "unique_row": _Column(np.int64, "unique"),
    "protein_offsets": _Column(np.int64, "unique", is_offsets=True),
    "dna_offsets": _Column(np.int64, "unique", is_offsets=True),
    "protein_bytes": _Column(np.uint8, "protein"),
    "dna_bytes": _Column(np.uint8, "dna"),
}
COLUMNS: Final = {name: column.kind for name, column in _COLUMNS.items()}


class OrfStore:
    """Reads, rows and distinct sequences of one `orfs.h5`, mapped read-only.

    A row is an open reading frame. Rows are sorted by read, chunk and frame. A unique is a distinct
    pair of DNA and protein. Uniques are sorted by the first row that has them.
    """

    path: Path
    fingerprint: str  # hash of the reads and of the settings that change rows
    model_length: int
    duplicate_mark: str  # separates a repeated id from its number, as in `r7.2`
    counts: StoreCounts
    n_reads: int
    n_rows: int
    n_uniques: int
    paired: bool = False  # mates follow each other among the reads

    read_length: NDArray[np.int32]  # [n_reads] bases; int64 if a read has more than that holds
    read_chunks: NDArray[np.int32]  # [n_reads]
    read_rows: NDArray[np.int32]  # [n_reads] open frames
    read_flags: NDArray[np.uint8]  # [n_reads] bits, see `translate`: EMPTY … MATE
    # [n_reads] 0 for the first read with an id, 2 for the second read with the same id, 3, …
    read_copy: NDArray[np.int32]
    read_id_offsets: NDArray[np.int64]  # [n_reads + 1]
    read_id_bytes: NDArray[np.uint8]
    row_read: NDArray[np.int64]  # [n_rows]
    row_chunk: NDArray[np.int32]  # [n_rows] from 0 within the read
    row_frame: NDArray[np.uint8]  # [n_rows] 0..5 = F1 F2 F3 R1 R2 R3
    row_unique: NDArray[np.int64]  # [n_rows]
    unique_row: NDArray[np.int64]  # [n_uniques] the first row with this sequence
    protein_offsets: NDArray[np.int64]  # [n_uniques + 1]
    dna_offsets: NDArray[np.int64]  # [n_uniques + 1]
    protein_bytes: NDArray[np.uint8]
    dna_bytes: NDArray[np.uint8]

    @classmethod
    def open(cls, path: Path, *, check: bool = True) -> OrfStore:
        """Map a store into memory.

        Args:
            path: The file.
            check: Read all of it to check its seal. Needed unless it was just written or checked.

        Returns:
            The store. Its columns are read from the file when they are used.

        Raises:
            InputError: The file is absent or damaged, or another version of virnuc has staged it.
            UnreadableError: The system cannot read the file, so that nothing is known about it.
            UnsafeFileError: It is no regular file, or leads to other files.
        """
        store = cls()
        store.path = path

        def load() -> None:
            """Read the attributes, and map the columns. This is one attempt."""
            with open_checked_hdf5(path, STORE_SEAL) if check else open_hdf5(path) as file:
                store._read_attributes(dict(file.attrs))
                store._map_columns(file)

        try:
            read_with_retries(path, load)
        except DamagedFileError as error:
            raise InputError(
                "not what was staged (checksum)", file=path, hint="stage the reads again"
            ) from error
        except (FileNotFoundError, NotADirectoryError) as error:
            raise InputError("no such file", file=path, hint="stage the reads first") from error
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise InputError(
                "not a readable ORF store", file=path, hint="stage the reads again"
            ) from error
        return store

    def _read_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Set the counts and settings of this object from the attributes of the file."""
        self.fingerprint = str(attributes["fingerprint"])
        self.duplicate_mark = str(attributes["duplicate_mark"])
        self.model_length = int(attributes["model_length"])
        self.paired = "paired" in attributes  # a store of single reads does not have it
        counts = {name: int(attributes[name]) for name in StoreCounts.__slots__}
        self.counts = StoreCounts(**counts)
        self.n_reads = self.counts.n_reads
        self.n_rows = self.counts.n_rows
        self.n_uniques = self.counts.n_uniques

    def _map_columns(self, file: h5py.File) -> None:
        """Map each column into memory, and set the attribute of this object with its name.

        Args:
            file: The opened store. It tells the offset and type of each column.

        Raises:
            ValueError: A column has another type or another number of values than it should have.
        """
        with open_file(self.path) as mapped_file:
            whole_file = np.memmap(mapped_file, np.uint8, "r")
        for name, column_type in _COLUMNS.items():
            dataset = file[name]
            allowed_types: list[type[np.generic]] = [column_type.kind]
            if name == "read_length":
                allowed_types.append(np.int64)  # a very long read needs 64 bits
            if dataset.ndim != 1 or dataset.dtype not in allowed_types:
                raise ValueError(f"{name} is not a column of {column_type.kind.__name__}")
            start = dataset.id.get_offset()
            if start:
                column = whole_file[start : start + dataset.nbytes].view(dataset.dtype)
            else:
                # HDF5 gives an empty dataset no room in the file, and so no offset.
                column = dataset[:]
            setattr(self, name, column)
        self._require_lengths()

    def _require_lengths(self) -> None:
        """Check that the columns have as many values as the attributes and the other columns say.

        Raises:
            ValueError: Names the first column that has not.
        """
        lengths: dict[Axis, int] = {
            "read": self.n_reads,
            "row": self.n_rows,
            "unique": self.n_uniques,
            "id": len(self.read_id_bytes),
            "protein": len(self.protein_bytes),
            "dna": len(self.dna_bytes),
        }
        for name, column_type in _COLUMNS.items():
            expected_length = lengths[column_type.axis]
            if column_type.is_offsets:
                expected_length += 1
            if len(getattr(self, name)) != expected_length:
                raise ValueError(f"{name} does not have {expected_length} values")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the path: a process that receives the store maps the same file."""
        return partial(OrfStore.open, check=False), (self.path,)

    def original_ids(self, low: int, high: int) -> list[str]:
        """Return the ids of reads as in the input files.

        Several reads may have the same id. See `read_ids` for unique ids.

        Args:
            low: The first read.
            high: One past the last read.
        """
        ids = _cut_strings(self.read_id_bytes, self.read_id_offsets, low, high)
        return [read_id.decode() for read_id in ids]

    def read_ids(self, low: int, high: int) -> list[str]:
        """Return unique ids of reads.

        A number is added to repeated ids: the second read with the id `r7` is `r7.2`.

        Args:
            low: The first read.
            high: One past the last read.
        """
        ids = self.original_ids(low, high)
        copies = self.read_copy[low:high]
        for i in np.flatnonzero(copies).tolist():
            ids[i] = f"{ids[i]}{self.duplicate_mark}{copies[i]}"
        return ids

    def row_ids(self, low: int, high: int, *, original: bool = False) -> list[str]:
        """Return the ids of rows (open reading frames), such as `r7_chunk_1F2`.

        An id consists of the id of the read, the number of the chunk from 1, and the frame.

        Args:
            low: The first row.
            high: One past the last row.
            original: Use the ids of reads as in the input files, which may not be unique.
        """
        if high <= low:
            return []
        # Rows are sorted by read, so their reads are one range.
        reads = self.row_read[low:high]
        first_read = int(reads[0])
        end_read = int(reads[-1]) + 1
        if original:
            names = self.original_ids(first_read, end_read)
        else:
            names = self.read_ids(first_read, end_read)
        return [
            f"{names[read]}_chunk_{chunk + 1}{FRAMES[frame]}"
            for read, chunk, frame in zip(
                (reads - first_read).tolist(),
                self.row_chunk[low:high].tolist(),
                self.row_frame[low:high].tolist(),
                strict=True,
            )
        ]

    def protein(self, low: int, high: int) -> list[bytes]:
        """Return the proteins of distinct sequences `low` to `high` (exclusive)."""
        return _cut_strings(self.protein_bytes, self.protein_offsets, low, high)

    def dna(self, low: int, high: int) -> list[bytes]:
        """Return the DNA of distinct sequences `low` to `high` (exclusive), in upper case."""
        return _cut_strings(self.dna_bytes, self.dna_offsets, low, high)


def _cut_strings(
    letters: NDArray[np.uint8], offsets: NDArray[np.int64], low: int, high: int
) -> list[bytes]:
    """Return strings `low` to `high` (exclusive) of a column of strings.

    Args:
        letters: The bytes of all strings, concatenated.
        offsets: The start of each string, and the end of the last: int64 [n + 1].
        low: The first string.
        high: One past the last string. Equal to `low`: no string is returned.
    """
    edges = offsets[low : high + 1].tolist()
    start = edges[0]
    data = letters[start : edges[-1]].tobytes()
    return [data[a - start : b - start] for a, b in pairwise(edges)]


class DuplicateId(NamedTuple):
    """A read that has the same id as an earlier read."""

    read: int  # number of the read
    first_read: int  # number of the first read with this id


class ReadLocation(NamedTuple):
    """The id of a read and its line in the input file."""

    id: str
    line: int  # line number of the header


class _ColumnLocation(NamedTuple):
    """Where a column is in the file of a store."""

    start: int  # offset of its first byte; 0 for an empty column
    dtype: np.dtype[Any]


class _SegmentPlan(NamedTuple):
    """How a segment must be copied into the store.

    A segment is a scratch file with the columns of one batch of reads. A plan has all that a worker
    needs to copy the segment without looking at the other segments.
    """

    segment: Segment
    start: Mapping[Axis, int]  # number of values of each axis in all earlier segments
    duplicate_ids: Repeats  # reads of the segment with the id of an earlier read
    repeated_rows: NDArray[np.int64]  # [n] rows whose sequence an earlier row has
    repeated_uniques: NDArray[np.int64]  # [n] the distinct sequences of these rows


class StoreWriter:
    """Collects segments in the order of the reads, then writes the whole store.

    A segment is a scratch file with the columns of one batch of reads. Call `add` for each segment,
    then `find_repeats`, then `write`. The memory of a writer grows by 24 bytes for each repeated
    row or id, and by a little for each segment.
    """

    def __init__(self, folder: Path, model_length: int) -> None:
        """Begin a store without reads; creates two scratch files for digests.

        Args:
            folder: The folder for scratch files.
            model_length: The size of a chunk in bases.
        """
        self._folder = folder
        self._model_length = model_length
        self._segments: list[Segment] = []
        self._counts = SegmentCounts()
        self._kinds = dict(COLUMNS)  # the type of each column; `add` may widen one
        # For each axis: the number of values before each segment, and in all segments.
        self._starts: dict[Axis, NDArray[np.int64]] = {}
        self._id_digests = folder / "read_digests"
        self._row_digests = folder / "row_digests"
        self._id_digests.touch()
        self._row_digests.touch()
        self._duplicate_ids: Repeats  # reads with the id of an earlier read
        self._repeated_rows: Repeats  # rows with the sequence of an earlier row

    def add(self, segment: Segment) -> None:
        """Add the next segment, and append its digests of ids and rows to the scratch files.

        Args:
            segment: The columns of the next batch of reads.
        """
        self._segments.append(segment)
        self._counts += segment.counts
        # Only a segment of a single long read has so many bases. Then lengths need 64 bits.
        if segment.counts.n_bases > np.iinfo(np.int32).max:
            self._kinds["read_length"] = np.int64
        with self._id_digests.open("ab") as file:
            file.write(segment.column("read_id_digest").data)
        with self._row_digests.open("ab") as file:
            file.write(segment.column("row_digest").data)

    def find_repeats(self, workers: Workers) -> DuplicateId | None:
        """Find all rows and ids that are equal to earlier ones. Call it after the last `add`.

        Args:
            workers: The processes that search.

        Returns:
            The first read with the id of an earlier read; None if all ids are unique.
        """
        self._starts["read"] = self._sum_up("read_length")
        self._starts["row"] = self._sum_up("row_frame")
        self._starts["id"] = self._sum_up("read_id_bytes")
        id_buckets = Bucket.all_of(self._id_digests)
        row_buckets = Bucket.all_of(self._row_digests)
        # `may_start`: if the reads were too few to start processes, this is done here, too.
        repeats = list(workers.map(find_repeats, id_buckets + row_buckets, may_start=False))
        self._duplicate_ids = Repeats.concatenate(repeats[: len(id_buckets)])
        self._repeated_rows = Repeats.concatenate(repeats[len(id_buckets) :])
        if len(self._duplicate_ids) == 0:
            return None
        return DuplicateId(
            int(self._duplicate_ids.index[0]), int(self._duplicate_ids.first_index[0])
        )

    def _sum_up(self, column: str) -> NDArray[np.int64]:
        """Return the number of values of a column before each segment, and in all segments.

        Returns:
            int64 [segments + 1].
        """
        sizes = [segment.sizes[column] for segment in self._segments]
        return offsets_from_lengths(np.array(sizes, np.int64))

    def _repeats_within(self, axis: Axis, segment_number: int) -> Repeats:
        """Return the repeated rows or the duplicate ids that lie in one segment, in order.

        Args:
            axis: `row` for repeated rows, `read` for duplicate ids.
            segment_number: The number of the segment.
        """
        repeats = self._duplicate_ids if axis == "read" else self._repeated_rows
        edges = self._starts[axis][segment_number : segment_number + 2]
        low, high = np.searchsorted(repeats.index, edges)
        return repeats[low:high]

    def locate(self, read: int) -> ReadLocation:
        """Return the id of a read and its line in the input file.

        Args:
            read: The number of the read.
        """
        # The last segment that starts at or before the read.
        number = int(np.searchsorted(self._starts["read"], read, side="right")) - 1
        segment = self._segments[number]
        index = read - int(self._starts["read"][number])  # of the read within the segment
        read_id = _ids_of(segment)[index].decode()
        line = int(segment.column("read_line")[index])
        return ReadLocation(read_id, line)

    def write(
        self, path: Path, fingerprint: str, workers: Workers, *, paired: bool = False
    ) -> None:
        """Write the whole store. `find_repeats` must have been called before.

        The file is written under a temporary name, sealed, and renamed when it is complete.

        Args:
            path: The file.
            fingerprint: The fingerprint of all reads.
            workers: The processes that copy the segments.
            paired: The reads are pairs whose mates follow each other.
        """
        self._count_uniques()
        n_uniques = int(self._starts["unique"][-1])
        # The order of the attributes must not change: equal reads give equal bytes.
        attributes: dict[str, str | int] = {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "fingerprint": fingerprint,
            "model_length": self._model_length,
            "duplicate_mark": self._find_free_mark(workers),
        }
        counts = StoreCounts(
            **asdict(self._counts), n_uniques=n_uniques, n_duplicate_ids=len(self._duplicate_ids)
        )
        attributes |= asdict(counts)
        if paired:
            attributes["paired"] = 1
        with atomic_file(path) as temp_path:
            locations = self._create(temp_path, path.parent, attributes)
            plans = self._plan_segments()
            # The workers are other processes, in which `temp_path` is not valid.
            file = _NamedFile(temp_path.readlink(), temp_path.stat().st_ino)
            write_part = partial(_write_part, file, locations)
            # `may_start`: few reads are not worth the start of processes for this.
            for _ in workers.map(write_part, plans, may_start=False):
                pass  # the workers write; there is no result
            seal(temp_path)

    def _count_uniques(self) -> None:
        """Compute how many distinct sequences, and letters of them, come before each segment.

        A sequence belongs to the segment of the first row that has it. The results are stored in
        `_starts`.
        """
        n_uniques: list[int] = []
        protein_letters: list[int] = []
        dna_letters: list[int] = []
        for number, segment in enumerate(self._segments):
            # Rows are numbered in the whole store. Here they are needed within the segment.
            first_row = self._starts["row"][number]
            repeated_rows = self._repeats_within("row", number).index - first_row
            protein_lengths = np.delete(segment.column("protein_length"), repeated_rows)
            dna_lengths = np.delete(segment.column("dna_length"), repeated_rows)
            n_uniques.append(len(dna_lengths))
            protein_letters.append(int(protein_lengths.sum()))
            dna_letters.append(int(dna_lengths.sum()))
        self._starts["unique"] = offsets_from_lengths(np.array(n_uniques, np.int64))
        self._starts["protein"] = offsets_from_lengths(np.array(protein_letters, np.int64))
        self._starts["dna"] = offsets_from_lengths(np.array(dna_letters, np.int64))

    def _find_free_mark(self, workers: Workers) -> str:
        """Find the separator between a repeated id and its number, as in `r7.2`.

        A name such as `r7.2` must not be the id of another read. So the separator is a dot, or as
        many dots as are needed to make all names unique.

        Args:
            workers: The processes that search for equal names.
        """
        n_duplicates = len(self._duplicate_ids)
        if n_duplicates == 0:
            return "."
        for n_dots in itertools.count(1):
            mark = "." * n_dots
            # Write the digests of all ids, and of the names that repeated ids would get, to a file.
            # The ids alone have `n_duplicates` repeats. If there are more, a new name is equal to
            # an id or to another name, and the next separator is tried.
            digests_file = self._folder / f"names{n_dots}"
            shutil.copyfile(self._id_digests, digests_file)
            self._append_name_digests(digests_file, mark)
            # `may_start`: few reads are not worth the start of processes for this.
            repeats = workers.map(find_repeats, Bucket.all_of(digests_file), may_start=False)
            if sum(map(len, repeats)) == n_duplicates:
                break
        return mark

    def _append_name_digests(self, path: Path, mark: str) -> None:
        """Append the digests of the names that reads with duplicate ids would get to a file.

        Args:
            path: The file of digests.
            mark: The separator between the id and the number in such a name.
        """
        with path.open("ab") as file:
            for segment_number, segment in enumerate(self._segments):
                duplicates = self._repeats_within("read", segment_number)
                if len(duplicates) == 0:
                    continue
                ids = _ids_of(segment)
                indices = duplicates.index - self._starts["read"][segment_number]
                names: list[bytes] = []
                for index, number in zip(indices.tolist(), duplicates.number.tolist(), strict=True):
                    names.append(b"%b%b%d" % (ids[index], mark.encode(), number))
                file.write(digests(names).data)

    def _create(
        self, path: Path, folder: Path, attributes: Mapping[str, str | int]
    ) -> dict[str, _ColumnLocation]:
        """Create the file of the store with its attributes and with columns that are all zero.

        Args:
            path: The file.
            attributes: The attributes, in their order in the file.

        Returns:
            The location of each column in the file, so that workers can write values there.

        Raises:
            OSError: The disk has too little room.
        """
        # Give each column one contiguous range of the file now, and do not fill it with zeros.
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_layout(h5py.h5d.CONTIGUOUS)
        layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        lengths: dict[str, int] = {}
        n_bytes = HEADERS_BYTES
        for name, column in _COLUMNS.items():
            lengths[name] = int(self._starts[column.axis][-1])
            if column.is_offsets:
                lengths[name] += 1
            n_bytes += lengths[name] * self._kinds[name]().itemsize
        # HDF5 may crash if the file cannot grow, for example because of a limit on file sizes. So
        # let the system refuse the size here.
        check_room(folder, n_bytes, "the staged reads")
        path.touch()
        os.truncate(path, n_bytes)
        locations: dict[str, _ColumnLocation] = {}
        with h5py.File(
            path,
            "w",
            userblock_size=SEAL_BYTES,
            track_times=False,
            alignment_threshold=1,
            alignment_interval=_ALIGNMENT,
            locking=False,  # the lease of the directory protects the file
        ) as file:
            file.attrs.update(attributes)
            for name, length in lengths.items():
                dataset = file.create_dataset(name, (length,), self._kinds[name], dcpl=layout)
                start = dataset.id.get_offset() if length > 0 else 0
                locations[name] = _ColumnLocation(start, dataset.dtype)
        return locations

    def _plan_segments(self) -> Iterator[_SegmentPlan]:
        """Yield a plan for each segment: where its values go in the store.

        A plan also tells which distinct sequence each repeated row has.
        """
        for number, segment in enumerate(self._segments):
            repeated_rows = self._repeats_within("row", number)
            # `first_index` is the number, in the whole store, of the first row with the same
            # sequence. Distinct sequences are numbered in the order of their first rows. So the
            # number of a sequence is the number of its first row less the repeats before this row.
            n_repeats_before = np.searchsorted(self._repeated_rows.index, repeated_rows.first_index)
            yield _SegmentPlan(
                segment=segment,
                start={axis: int(starts[number]) for axis, starts in self._starts.items()},
                duplicate_ids=self._repeats_within("read", number),
                repeated_rows=repeated_rows.index,
                repeated_uniques=repeated_rows.first_index - n_repeats_before,
            )


class _NamedFile(NamedTuple):
    """A file that another process opens by its name."""

    path: Path
    inode: int  # tells whether the name still belongs to the same file

    def open(self) -> BinaryIO:
        """Open the file to change it.

        Raises:
            UnsafeFileError: Somebody has given its name to another file.
        """
        file = open_to_update(self.path)
        if os.fstat(file.fileno()).st_ino != self.inode:
            file.close()
            raise UnsafeFileError(
                f"{self.path}: was replaced while it was written; use a folder that nobody else "
                "can write to"
            )
        return file


def _write_part(
    named_file: _NamedFile, locations: Mapping[str, _ColumnLocation], plan: _SegmentPlan
) -> None:
    """Copy the columns of one segment into the file of the store; this runs in the workers.

    Numbers that count from the start of the segment are changed to count from the start of the
    store. Sequences that an earlier row has are left out.

    Args:
        named_file: The file of the store, in which all columns have their full size already.
        locations: Where each column is in the file.
        plan: The segment, and where its values begin.
    """
    start = plan.start
    segment = plan.segment
    with named_file.open() as file:

        def put(name: str, values: NDArray[Any]) -> None:
            """Write the values of a column that belong to this segment to their place in the store.

            Args:
                name: The name of the column.
                values: Its values, which are converted to the type of the column.
            """
            location = locations[name]
            index = start[_COLUMNS[name].axis]
            file.seek(location.start + index * location.dtype.itemsize)
            file.write(np.ascontiguousarray(values, location.dtype).data)

        # The columns of reads.
        for name in ("read_length", "read_chunks", "read_rows", "read_id_bytes"):
            put(name, segment.column(name))
        copies = np.zeros(segment.sizes["read_length"], np.int32)
        copies[plan.duplicate_ids.index - start["read"]] = plan.duplicate_ids.number
        put("read_copy", copies)
        duplicate_flags = (copies > 0) * np.uint8(DUPLICATE_ID)
        put("read_flags", segment.column("read_flags") | duplicate_flags)
        id_offsets = offsets_from_lengths(segment.column("read_id_length"))
        put("read_id_offsets", start["id"] + id_offsets)

        # The columns of rows. The first rows with a sequence are numbered, in order. Repeated rows
        # get the number of their earlier sequence.
        put("row_read", start["read"] + segment.column("row_read").astype(np.int64))
        put("row_chunk", segment.column("row_chunk"))
        put("row_frame", segment.column("row_frame"))
        repeated_rows = plan.repeated_rows - start["row"]
        is_first = np.ones(segment.sizes["row_frame"], bool)
        is_first[repeated_rows] = False
        row_unique = start["unique"] + np.cumsum(is_first) - 1
        row_unique[repeated_rows] = plan.repeated_uniques
        put("row_unique", row_unique)

        # The columns of distinct sequences.
        put("unique_row", start["row"] + np.flatnonzero(is_first))
        for kind in ("protein", "dna"):
            lengths = segment.column(f"{kind}_length")
            unique_offsets = offsets_from_lengths(lengths[is_first])
            letters = segment.column(f"{kind}_bytes")
            unique_letters = _select_strings(letters, offsets_from_lengths(lengths), is_first)
            put(f"{kind}_offsets", start[kind] + unique_offsets)
            put(f"{kind}_bytes", unique_letters)


def _ids_of(segment: Segment) -> Strings:
    """Read the ids of the reads of a segment from its scratch file."""
    data = segment.column("read_id_bytes").tobytes()
    return Strings(data, offsets_from_lengths(segment.column("read_id_length")))


def _select_strings(
    letters: NDArray[np.uint8], offsets: NDArray[np.int64], is_selected: NDArray[np.bool_]
) -> NDArray[np.uint8]:
    """Return the letters of the selected strings of a column, concatenated.

    Args:
        letters: The letters of all strings, concatenated.
        offsets: The start of each string, and the end of the last: int64 [n + 1].
        is_selected: Which strings to return: bool [n].
    """
    if is_selected.all():
        return letters
    # Copy runs of adjacent selected strings at once. A run begins or ends where the selection
    # changes, so the edges are start, end, start, end, …
    is_edge_of_run = np.diff(is_selected, prepend=False, append=False)
    edges = offsets[np.flatnonzero(is_edge_of_run)].tolist()
    data = letters.tobytes()
    runs = [data[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return np.frombuffer(b"".join(runs), np.uint8)
