"""The ORF store: one HDF5 file of plain columns, written once, then mapped into memory.

Every dataset is contiguous and uncompressed, so that a process reads only the stretches it needs.
The same reads and settings give the same bytes. `StoreWriter` builds a store from segments,
`OrfStore` reads it.

HDF5 checks only a fraction of a file, and may crash on a changed bit elsewhere. So a seal is
checked before HDF5 opens the file. The seal is a digest of all bytes of the file, and stands in
HDF5's user block in front of them. It is computed over the digests of the file's blocks.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from virnuc_core.errors import InputError
from virnuc_core.reads.fast_parser import Strings, offsets_from_lengths
from virnuc_core.reads.fingerprint import Bucket, Repeats, digests, find_repeats
from virnuc_core.reads.translate import DUPLICATE_ID, FRAMES, Segment, SegmentCounts
from virnuc_core.reads.workers import Workers
from virnuc_core.rundir import atomic_file, check_room
from virnuc_core.system_errors import read_with_retries

FORMAT: Final = "virnuc-orfs"
SCHEMA_VERSION: Final = 2
# every fingerprint begins with it, and with the model's length
STORES: Final = f"{FORMAT} {SCHEMA_VERSION}"
SEALED_AS: Final = f"ORF store {SCHEMA_VERSION}"
SEAL_BYTES: Final = 512  # HDF5's smallest user block
HEADERS_BYTES: Final = 1 << 14  # of the store's file, and what aligning takes
_BLOCK_BYTES: Final = 1 << 20
_ALIGNMENT: Final = 64  # bytes; mapped columns start where any processor can read them

# what a column has one value for each of; the last three are bytes
Axis = Literal["read", "row", "unique", "id", "protein", "dna"]


def sealed(what: str, body: Iterable[bytes | memoryview]) -> bytes:
    """Return the block that stands in front of a file: its kind, and a digest of its bytes.

    Args:
        what: The kind of file.
        body: The bytes of the file behind the block.
    """
    digest = blake2b(digest_size=32)
    for piece in body:
        digest.update(piece)
    return f"virnuc {what}\n{digest.hexdigest()}\n".encode().ljust(SEAL_BYTES, b"\0")


def _compute_seal(path: Path) -> bytes:
    """Compute the seal of a store; several threads digest its blocks."""
    with ThreadPoolExecutor() as threads, path.open("rb") as file:

        def digest_block(offset: int) -> bytes:
            block = os.pread(file.fileno(), _BLOCK_BYTES, offset)
            return blake2b(block, digest_size=32).digest()

        offsets = range(SEAL_BYTES, path.stat().st_size, _BLOCK_BYTES)
        return sealed(SEALED_AS, threads.map(digest_block, offsets))


def seal(path: Path) -> None:
    """Write the seal of a store into the room in front of its bytes."""
    block = _compute_seal(path)
    with path.open("rb+") as file:
        file.write(block)


def is_intact(path: Path) -> bool:
    """Return true if a store has exactly the bytes that were written when it was staged.

    Raises:
        FileNotFoundError: There is no such file.
        UnreadableError: The system cannot read the file, so that nothing is known about it.
    """

    def check() -> bool:
        """Read the file once, and compare the seal at its beginning with its content."""
        with path.open("rb") as file:
            return file.read(SEAL_BYTES) == _compute_seal(path)

    return read_with_retries(path, check)


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """The contents of a store, as written in its attributes."""

    n_reads: int
    n_chunks: int
    n_rows: int
    n_uniques: int
    n_bases: int
    n_open_reads: int  # reads with at least one row
    n_empty: int
    n_short: int
    n_ambiguous: int
    n_duplicate_ids: int  # reads whose id an earlier read has


class _Column(NamedTuple):
    """The type of a column, and the number of its values."""

    kind: type[np.generic]
    axis: Axis  # it has a value for each of these
    is_offsets: bool = False  # and one more, for the end of the last


# the columns of the file, in their order; `OrfStore` describes them
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

    A row is an open frame of one chunk of one read, in that order. A unique is a distinct pair of
    DNA and protein, in order of its first row.
    """

    path: Path
    fingerprint: str  # over the reads and the settings that change rows
    model_length: int
    duplicate_mark: str  # stands between an id and its number, if an earlier read has the id
    counts: StoreCounts
    n_reads: int
    n_rows: int
    n_uniques: int
    paired: bool = False  # mates follow each other among the reads

    read_length: NDArray[np.int32]  # [n_reads] bases; int64 if a read has more than that holds
    read_chunks: NDArray[np.int32]  # [n_reads]
    read_rows: NDArray[np.int32]  # [n_reads] open frames
    read_flags: NDArray[np.uint8]  # [n_reads] bits, see `translate`: EMPTY … MATE
    read_copy: NDArray[np.int32]  # [n_reads] 0, or how many-th read of the same id this is (from 2)
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

        Raises:
            InputError: The file is absent, or is not what was staged, with this version.
            UnreadableError: The system cannot read the file, so that nothing is known about it.
        """
        store = cls()
        store.path = path

        def load() -> None:
            """Read the attributes, and map the columns, once."""
            # HDF5 need not lock the file: nobody writes to a store that is complete.
            with h5py.File(path, "r", locking=False) as file:
                store._read_attributes(dict(file.attrs))
                store._map_columns(file)

        try:
            if check and not is_intact(path):
                raise InputError(
                    "not what was staged (checksum)", file=path, hint="stage the reads again"
                )
            read_with_retries(path, load)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise InputError("no such file", file=path, hint="stage the reads first") from error
        except (OSError, KeyError) as error:
            raise InputError(
                "not a readable ORF store", file=path, hint="stage the reads again"
            ) from error
        return store

    def _read_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Take the counts and settings over."""
        self.fingerprint = str(attributes["fingerprint"])
        self.duplicate_mark = str(attributes["duplicate_mark"])
        self.model_length = int(attributes["model_length"])
        self.paired = "paired" in attributes
        counts = {name: int(attributes[name]) for name in StoreCounts.__slots__}
        self.counts = StoreCounts(**counts)
        self.n_reads = self.counts.n_reads
        self.n_rows = self.counts.n_rows
        self.n_uniques = self.counts.n_uniques

    def _map_columns(self, file: h5py.File) -> None:
        """Map the stretch of the file that each column takes up."""
        whole_file = np.memmap(self.path, np.uint8, "r")
        for name in COLUMNS:
            dataset = file[name]
            start = dataset.id.get_offset()
            if start:
                column = whole_file[start : start + dataset.nbytes].view(dataset.dtype)
            else:  # an empty one has no place in the file
                column = dataset[:]
            setattr(self, name, column)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(OrfStore.open, check=False), (self.path,)  # another process maps it, too

    def original_ids(self, low: int, high: int) -> list[str]:
        """Return the ids of reads `low` to `high` as in the files; several reads may share one."""
        ids = _cut_strings(self.read_id_bytes, self.read_id_offsets, low, high)
        return [read_id.decode() for read_id in ids]

    def read_ids(self, low: int, high: int) -> list[str]:
        """Return unique ids of reads `low` to `high`: the second read called `r7` is `r7.2`."""
        ids = self.original_ids(low, high)
        copies = self.read_copy[low:high]
        for i in np.flatnonzero(copies).tolist():
            ids[i] = f"{ids[i]}{self.duplicate_mark}{copies[i]}"
        return ids

    def row_ids(self, low: int, high: int, *, original: bool = False) -> list[str]:
        """Return the ids of rows `low` to `high`, as `{read}_chunk_{k}F1` with k from 1.

        Args:
            low: The first row.
            high: One past the last row.
            original: Use the ids of reads as in the files, which several reads may share.
        """
        if high <= low:
            return []
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
        """Return the proteins of uniques `low` to `high`."""
        return _cut_strings(self.protein_bytes, self.protein_offsets, low, high)

    def dna(self, low: int, high: int) -> list[bytes]:
        """Return the DNA of uniques `low` to `high`, upper case."""
        return _cut_strings(self.dna_bytes, self.dna_offsets, low, high)


def _cut_strings(
    letters: NDArray[np.uint8], offsets: NDArray[np.int64], low: int, high: int
) -> list[bytes]:
    """Return strings `low` to `high` of a column."""
    edges = offsets[low : high + 1].tolist()
    start = edges[0]
    data = letters[start : edges[-1]].tobytes()
    return [data[a - start : b - start] for a, b in pairwise(edges)]


class DuplicateId(NamedTuple):
    """A read whose id an earlier read has."""

    read: int  # number of the read
    first_read: int  # number of the first read with the id


class ReadLocation(NamedTuple):
    """The place where a read comes from."""

    id: str
    line: int  # of its header in its file


class _Place(NamedTuple):
    """The place of a column in the store's file."""

    start: int  # first byte; 0 for an empty column
    dtype: np.dtype[Any]


class _SegmentPlan(NamedTuple):
    """A segment, and all that its worker needs to know of the others to put it into the store."""

    segment: Segment
    start: Mapping[Axis, int]  # number of values of each axis before the segment
    duplicate_ids: Repeats  # by the numbers of reads
    repeated_rows: NDArray[np.int64]  # [n] rows that repeat an earlier one
    repeated_uniques: NDArray[np.int64]  # [n] the uniques that they repeat


class StoreWriter:
    """Takes segments in the order of the reads, then writes the whole store.

    Its memory grows by 24 bytes for each row or id that repeats an earlier one, and by a little for
    each segment.
    """

    def __init__(self, folder: Path, model_length: int) -> None:
        """Begin a store.

        Args:
            folder: The folder for scratch files.
            model_length: Bases of a chunk.
        """
        self._folder = folder
        self._model_length = model_length
        self._segments: list[Segment] = []
        self._counts = SegmentCounts()
        self._kinds = dict(COLUMNS)
        self._starts: dict[Axis, NDArray[np.int64]] = {}  # values before each segment, and in all
        self._id_digests = folder / "read_digests"
        self._row_digests = folder / "row_digests"
        self._id_digests.touch()
        self._row_digests.touch()
        self._duplicate_ids: Repeats  # by the numbers of reads
        self._repeated_rows: Repeats

    def add(self, segment: Segment) -> None:
        """Take in the next segment."""
        self._segments.append(segment)
        self._counts += segment.counts
        if segment.counts.n_bases > np.iinfo(np.int32).max:  # then a single read is that long
            self._kinds["read_length"] = np.int64
        with self._id_digests.open("ab") as file:
            file.write(segment.column("read_id_digest").data)
        with self._row_digests.open("ab") as file:
            file.write(segment.column("row_digest").data)

    def find_repeats(self, workers: Workers) -> DuplicateId | None:
        """Find the rows and ids that repeat earlier ones, when all segments are there.

        Returns:
            The first read with the id of an earlier one; None if all ids are unique.
        """
        self._starts["read"] = self._sum_up("read_length")
        self._starts["row"] = self._sum_up("row_frame")
        self._starts["id"] = self._sum_up("read_id_bytes")
        id_buckets = Bucket.all_of(self._id_digests)
        row_buckets = Bucket.all_of(self._row_digests)
        repeats = list(workers.map(find_repeats, id_buckets + row_buckets, may_start=False))
        self._duplicate_ids = Repeats.concatenate(repeats[: len(id_buckets)])
        self._repeated_rows = Repeats.concatenate(repeats[len(id_buckets) :])
        if len(self._duplicate_ids) == 0:
            return None
        return DuplicateId(
            int(self._duplicate_ids.index[0]), int(self._duplicate_ids.first_index[0])
        )

    def _sum_up(self, column: str) -> NDArray[np.int64]:
        """Return how many values of a column the segments before each one have, and all have."""
        sizes = [segment.sizes[column] for segment in self._segments]
        return offsets_from_lengths(np.array(sizes, np.int64))

    def _repeats_within(self, axis: Axis, segment_number: int) -> Repeats:
        """Return the repeated rows, or the duplicate ids of reads, of a segment, in order."""
        repeats = self._duplicate_ids if axis == "read" else self._repeated_rows
        edges = self._starts[axis][segment_number : segment_number + 2]
        low, high = np.searchsorted(repeats.index, edges)
        return repeats[low:high]

    def locate(self, read: int) -> ReadLocation:
        """Return the id and the line of a read."""
        number = int(np.searchsorted(self._starts["read"], read, side="right")) - 1
        segment = self._segments[number]
        index = read - int(self._starts["read"][number])
        return ReadLocation(
            _ids_of(segment)[index].decode(), int(segment.column("read_line")[index])
        )

    def write(
        self, path: Path, fingerprint: str, workers: Workers, *, paired: bool = False
    ) -> None:
        """Write the whole store after `find_repeats`.

        Args:
            path: The file. It appears when it is complete.
            fingerprint: That of all reads.
            workers: Copy the segments.
            paired: Mates follow each other among the reads.
        """
        self._count_uniques()
        n_uniques = int(self._starts["unique"][-1])
        attributes: dict[str, str | int] = {  # their order is part of the file's bytes
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
            places = self._create(temp_path, attributes)
            plans = self._plan_segments()
            for _ in workers.map(partial(_write_part, temp_path, places), plans, may_start=False):
                pass
            seal(temp_path)

    def _count_uniques(self) -> None:
        """Sum up the uniques of the segments, and the letters of their sequences."""
        n_uniques: list[int] = []
        protein_letters: list[int] = []
        dna_letters: list[int] = []
        for number, segment in enumerate(self._segments):
            repeated_rows = self._repeats_within("row", number).index - self._starts["row"][number]
            protein_lengths = np.delete(segment.column("protein_length"), repeated_rows)
            dna_lengths = np.delete(segment.column("dna_length"), repeated_rows)
            n_uniques.append(len(dna_lengths))
            protein_letters.append(int(protein_lengths.sum()))
            dna_letters.append(int(dna_lengths.sum()))
        self._starts["unique"] = offsets_from_lengths(np.array(n_uniques, np.int64))
        self._starts["protein"] = offsets_from_lengths(np.array(protein_letters, np.int64))
        self._starts["dna"] = offsets_from_lengths(np.array(dna_letters, np.int64))

    def _find_free_mark(self, workers: Workers) -> str:
        """Find what to put between an id and its number, so that no name is the id of a read.

        It is a dot, or as many dots as it takes.
        """
        n_duplicates = len(self._duplicate_ids)
        if n_duplicates == 0:
            return "."
        for n_dots in itertools.count(1):
            mark = "." * n_dots
            # digests of all ids, and of the names that reads with duplicate ids would get
            names = self._folder / f"names{n_dots}"
            shutil.copyfile(self._id_digests, names)
            self._append_name_digests(names, mark)
            repeats = workers.map(find_repeats, Bucket.all_of(names), may_start=False)
            if sum(map(len, repeats)) == n_duplicates:
                break
        return mark

    def _append_name_digests(self, path: Path, mark: str) -> None:
        """Append the digests of the names of reads with duplicate ids to a file."""
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

    def _create(self, path: Path, attributes: Mapping[str, str | int]) -> dict[str, _Place]:
        """Create the file with room for all columns, as zeros; return where each of them is."""
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
        check_room(path.parent, n_bytes, "the staged reads")
        path.touch()
        os.truncate(path, n_bytes)  # refused here and not in HDF5, which does not survive it
        places: dict[str, _Place] = {}
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
                places[name] = _Place(start, dataset.dtype)
        return places

    def _plan_segments(self) -> Iterator[_SegmentPlan]:
        """Plan where each segment goes, and which unique each repeated row belongs to."""
        for number, segment in enumerate(self._segments):
            repeated_rows = self._repeats_within("row", number)
            # `first_index` is the number of the earlier row, over the whole store, that a row
            # repeats. Repeats get no number as uniques, so that a first row's number as a unique
            # is its row number less the repeats before it.
            n_repeats_before = np.searchsorted(self._repeated_rows.index, repeated_rows.first_index)
            yield _SegmentPlan(
                segment=segment,
                start={axis: int(starts[number]) for axis, starts in self._starts.items()},
                duplicate_ids=self._repeats_within("read", number),
                repeated_rows=repeated_rows.index,
                repeated_uniques=repeated_rows.first_index - n_repeats_before,
            )


def _write_part(path: Path, places: Mapping[str, _Place], plan: _SegmentPlan) -> None:
    """Copy the columns of a segment to their places in the store."""
    start = plan.start
    segment = plan.segment
    with path.open("rb+") as file:

        def put(name: str, values: NDArray[Any]) -> None:
            place = places[name]
            index = start[_COLUMNS[name].axis]
            file.seek(place.start + index * place.dtype.itemsize)
            file.write(np.ascontiguousarray(values, place.dtype).data)

        for name in ("read_length", "read_chunks", "read_rows", "read_id_bytes"):
            put(name, segment.column(name))
        copies = np.zeros(segment.sizes["read_length"], np.int32)
        copies[plan.duplicate_ids.index - start["read"]] = plan.duplicate_ids.number
        put("read_copy", copies)
        duplicate_flags = (copies > 0) * np.uint8(DUPLICATE_ID)
        put("read_flags", segment.column("read_flags") | duplicate_flags)
        id_offsets = offsets_from_lengths(segment.column("read_id_length"))
        put("read_id_offsets", start["id"] + id_offsets)

        put("row_read", start["read"] + segment.column("row_read").astype(np.int64))
        put("row_chunk", segment.column("row_chunk"))
        put("row_frame", segment.column("row_frame"))
        repeated_rows = plan.repeated_rows - start["row"]
        is_first = np.ones(segment.sizes["row_frame"], bool)
        is_first[repeated_rows] = False
        row_unique = start["unique"] + np.cumsum(is_first) - 1
        row_unique[repeated_rows] = plan.repeated_uniques
        put("row_unique", row_unique)

        put("unique_row", start["row"] + np.flatnonzero(is_first))
        for kind in ("protein", "dna"):
            lengths = segment.column(f"{kind}_length")
            unique_offsets = offsets_from_lengths(lengths[is_first])
            letters = segment.column(f"{kind}_bytes")
            unique_letters = _select_strings(letters, offsets_from_lengths(lengths), is_first)
            put(f"{kind}_offsets", start[kind] + unique_offsets)
            put(f"{kind}_bytes", unique_letters)


def _ids_of(segment: Segment) -> Strings:
    """Read the ids of a segment."""
    data = segment.column("read_id_bytes").tobytes()
    return Strings(data, offsets_from_lengths(segment.column("read_id_length")))


def _select_strings(
    letters: NDArray[np.uint8], offsets: NDArray[np.int64], is_selected: NDArray[np.bool_]
) -> NDArray[np.uint8]:
    """Return the letters of the selected strings, end to end; neighbours are copied together."""
    if is_selected.all():
        return letters
    is_edge_of_run = np.diff(is_selected, prepend=False, append=False)
    edges = offsets[np.flatnonzero(is_edge_of_run)].tolist()
    data = letters.tobytes()
    runs = [data[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return np.frombuffer(b"".join(runs), np.uint8)
