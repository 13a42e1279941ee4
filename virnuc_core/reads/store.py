"""The ORF store: one HDF5 file of plain columns, written once, then mapped into memory.

Every dataset is contiguous and uncompressed, so that a process reads only the stretches it needs. The same reads and
settings give the same bytes. `StoreWriter` makes one of segments, `OrfStore` is one.

HDF5 looks at a fraction of a file, and may crash on a changed bit of that. A seal is therefore checked before: a digest
of all bytes of the file, in HDF5's user block in front of them; here it is the digest of its blocks' digests."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from virnuc_core.errors import InputError
from virnuc_core.reads.fast_parser import Strings, offsets_from_lengths
from virnuc_core.reads.fingerprint import Bucket, digests, repeats_in
from virnuc_core.reads.translate import DUPLICATE_ID, FRAMES, Segment
from virnuc_core.reads.workers import Workers
from virnuc_core.rundir import atomic_file, check_room

FORMAT: Final = "virnuc-orfs"
SCHEMA_VERSION: Final = 2
STORES: Final = (
    f"{FORMAT} {SCHEMA_VERSION}"  # every fingerprint begins with it, and with the model's length
)
SEALED_AS: Final = f"ORF store {SCHEMA_VERSION}"
SEAL_BYTES: Final = 512  # HDF5's smallest user block
_BLOCK_BYTES: Final = 1 << 20
HEADERS_BYTES: Final = 1 << 14  # of the store's file, and what aligning takes
_ALIGNMENT: Final = 64  # bytes; mapped columns start where any processor can read them

_Place = tuple[int, np.dtype[Any]]  # byte at which a column begins, and what it is of


def sealed(what: str, body: Iterable[bytes | memoryview]) -> bytes:
    """What stands before the bytes of a file: what they are, and a digest of them, so that any changed bit is seen."""
    digest = blake2b(digest_size=32)
    for piece in body:
        digest.update(piece)
    return f"virnuc {what}\n{digest.hexdigest()}\n".encode().ljust(SEAL_BYTES, b"\0")


def _seal_of(path: Path) -> bytes:
    """The seal of a file: over the digests of its blocks, which several threads make."""
    with ThreadPoolExecutor() as threads, path.open("rb") as file:

        def digest(at: int) -> bytes:
            return blake2b(os.pread(file.fileno(), _BLOCK_BYTES, at), digest_size=32).digest()

        return sealed(
            SEALED_AS, threads.map(digest, range(SEAL_BYTES, path.stat().st_size, _BLOCK_BYTES))
        )


def seal(path: Path) -> None:
    """Write the seal of a file that has room for one before its bytes."""
    made = _seal_of(path)
    with path.open("rb+") as file:
        file.write(made)


def is_intact(path: Path) -> bool:
    """Whether all bytes of a file are those that were sealed."""
    with path.open("rb") as file:
        return file.read(SEAL_BYTES) == _seal_of(path)


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """What a store holds, as written in its attributes."""

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


class OrfStore:
    """Reads, rows and unique sequences of one `orfs.h5`, mapped read-only. A row is an open frame of one chunk of one
    read, in that order; a unique is a distinct pair of DNA and protein, in order of its first row."""

    path: Path
    fingerprint: str  # over the reads and the settings that change rows
    model_length: int
    duplicate_mark: (
        str  # stands between an id and its number when the id is not the first of its kind
    )
    counts: StoreCounts
    n_reads: int
    n_rows: int
    n_uniques: int
    paired: bool = False  # mates follow each other among the reads

    read_length: NDArray[np.int32]  # [n_reads] bases; int64 where one has more than that holds
    read_chunks: NDArray[np.int32]  # [n_reads]
    read_rows: NDArray[np.int32]  # [n_reads] open frames
    read_flags: NDArray[
        np.uint8
    ]  # [n_reads] EMPTY | SHORT_FOR_MODEL | AMBIGUOUS | DUPLICATE_ID | MATE
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
        """A mapped store; `check` reads all of it, as whoever did not just make or check it must. Errors: `InputError`
        when the file is absent or is not what was staged, with this version."""
        store = cls()
        store.path = path
        try:
            if check and not is_intact(path):
                raise InputError(
                    "not what was staged (checksum)", file=path, hint="stage the reads again"
                )
            with h5py.File(path, "r", locking=False) as file:
                told = dict(file.attrs)
                store.fingerprint, store.duplicate_mark = (
                    str(told["fingerprint"]),
                    str(told["duplicate_mark"]),
                )
                store.model_length, store.paired = int(told["model_length"]), "paired" in told
                store.counts = counts = StoreCounts(
                    **{name: int(told[name]) for name in StoreCounts.__slots__}
                )
                store.n_reads, store.n_rows, store.n_uniques = (
                    counts.n_reads,
                    counts.n_rows,
                    counts.n_uniques,
                )
                whole = np.memmap(path, np.uint8, "r")
                for name, column in ((name, file[name]) for name in COLUMNS):
                    at = column.id.get_offset()  # none where it is empty
                    setattr(
                        store,
                        name,
                        whole[at : at + column.nbytes].view(column.dtype) if at else column[:],
                    )
        except FileNotFoundError as error:
            raise InputError("no such file", file=path, hint="stage the reads first") from error
        except (OSError, KeyError) as error:
            raise InputError(
                "not a readable ORF store", file=path, hint="stage the reads again"
            ) from error
        return store

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(OrfStore.open, check=False), (self.path,)  # another process maps it, too

    def original_ids(self, low: int, high: int) -> list[str]:
        """Ids of reads `low` to `high` as they stand in the files; several reads may share one."""
        return [name.decode() for name in _cut(self.read_id_bytes, self.read_id_offsets, low, high)]

    def read_ids(self, low: int, high: int) -> list[str]:
        """Ids of reads `low` to `high`, no two alike: the second read called `r7` is `r7.2`."""
        ids = self.original_ids(low, high)
        copies = self.read_copy[low:high]
        for i in np.flatnonzero(copies).tolist():
            ids[i] = f"{ids[i]}{self.duplicate_mark}{copies[i]}"
        return ids

    def row_ids(self, low: int, high: int, *, original: bool = False) -> list[str]:
        """Ids of rows `low` to `high`, as `{read}_chunk_{k}F1` with k from 1; made of original read ids if asked."""
        if high <= low:
            return []
        reads = self.row_read[low:high]
        first = int(reads[0])
        names = (self.original_ids if original else self.read_ids)(first, int(reads[-1]) + 1)
        columns = (
            (reads - first).tolist(),
            self.row_chunk[low:high].tolist(),
            self.row_frame[low:high].tolist(),
        )
        return [f"{names[r]}_chunk_{c + 1}{FRAMES[f]}" for r, c, f in zip(*columns, strict=True)]

    def protein(self, low: int, high: int) -> list[bytes]:
        """Proteins of uniques `low` to `high`."""
        return _cut(self.protein_bytes, self.protein_offsets, low, high)

    def dna(self, low: int, high: int) -> list[bytes]:
        """DNA of uniques `low` to `high`, upper case."""
        return _cut(self.dna_bytes, self.dna_offsets, low, high)


def _cut(
    letters: NDArray[np.uint8], offsets: NDArray[np.int64], low: int, high: int
) -> list[bytes]:
    at = offsets[low : high + 1].tolist()
    data = letters[at[0] : at[-1]].tobytes()
    return [data[a - at[0] : b - at[0]] for a, b in pairwise(at)]


COLUMNS: Final[
    dict[str, type[np.generic]]
] = {  # of the file, in this order, by the hints of `OrfStore`
    name: getattr(np, kind[1])
    for name, hint in OrfStore.__annotations__.items()
    if (
        kind := re.fullmatch(r"NDArray\[np\.(\w+)\]", hint)
    )  # the text: what it stands for differs between numpys
}
_AXES: Final = {name: name.partition("_")[0] for name in COLUMNS}  # what a column has an entry for
_AXES.update(read_id_bytes="id", protein_offsets="unique", dna_offsets="unique")


class StoreWriter:
    """Takes segments in the order of the reads, then writes the store whole. What it holds grows by 24 bytes for each
    row or id that repeats an earlier one, and a little for each segment."""

    def __init__(self, folder: Path, model_length: int) -> None:
        self._folder, self._model_length = folder, model_length
        self._segments: list[Segment] = []
        self._counts: Counter[str] = Counter()
        self._kinds = dict(COLUMNS)
        self._repeats: dict[str, NDArray[np.int64]] = {}  # once they were found, by axis
        self._digests = {axis: folder / f"{axis}_digests" for axis in ("read", "row")}
        for path in self._digests.values():
            path.touch()

    def add(self, segment: Segment) -> None:
        """Take in the next segment."""
        self._segments.append(segment)
        self._counts.update(segment.counts)
        if segment.counts["n_bases"] > np.iinfo(np.int32).max:  # that of one long read, then
            self._kinds["read_length"] = np.int64
        for name, axis in (("read_id_digest", "read"), ("row_digest", "row")):
            with self._digests[axis].open("ab") as file:
                file.write(segment.read(name).data)

    def find_repeats(self, workers: Workers) -> tuple[int, int] | None:
        """Find what repeats among rows and ids; gives the first read whose id an earlier one has, and that one."""
        self._at = {  # entries of each axis before each segment, and in all
            axis: offsets_from_lengths(
                np.array([segment.sizes[name] for segment in self._segments], np.int64)
            )
            for axis, name in (
                ("read", "read_length"),
                ("row", "row_frame"),
                ("id", "read_id_bytes"),
            )
        }
        buckets = {axis: Bucket.all_of(path) for axis, path in self._digests.items()}
        found = workers.map(repeats_in, buckets["read"] + buckets["row"], may_start=False)
        for axis, some in buckets.items():
            repeats = np.concatenate([next(found) for _ in some])
            self._repeats[axis] = repeats[np.argsort(repeats[:, 0])]
        ids = self._repeats["read"]
        self._counts["n_duplicate_ids"] = len(ids)
        return (int(ids[0, 0]), int(ids[0, 1])) if len(ids) else None

    def _repeats_of(self, axis: str, number: int) -> NDArray[np.int64]:
        """Those within a segment, [n, 3] as of `repeats_in`, in order."""
        low, high = np.searchsorted(self._repeats[axis][:, 0], self._at[axis][number : number + 2])
        return self._repeats[axis][low:high]

    def place(self, read: int) -> tuple[str, int]:
        """Id of a read, and the line of its header."""
        number = int(np.searchsorted(self._at["read"], read, side="right")) - 1
        segment, i = self._segments[number], read - int(self._at["read"][number])
        return _ids(segment)[i].decode(), int(segment.read("read_line")[i])

    def write(
        self, path: Path, fingerprint: str, workers: Workers, *, paired: bool = False
    ) -> None:
        """Write the store to `path`, whole, once repeats have been found; `fingerprint` is that of all reads."""
        held = [(0, 0, 0)]  # uniques, and letters of them
        for number, segment in enumerate(self._segments):
            dropped = self._repeats_of("row", number)[:, 0] - self._at["row"][number]
            protein, dna = (
                np.delete(segment.read(f"{kind}_length"), dropped) for kind in ("protein", "dna")
            )
            held.append((len(dna), int(protein.sum()), int(dna.sum())))
        self._at |= zip(
            ("unique", "protein", "dna"), np.array(held, np.int64).cumsum(axis=0).T, strict=True
        )
        self._counts["n_uniques"] = int(self._at["unique"][-1])
        about: dict[str, str | int] = {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "fingerprint": fingerprint,
        }
        about |= {"model_length": self._model_length, "duplicate_mark": self._free_mark(workers)}
        about |= {name: self._counts[name] for name in StoreCounts.__slots__} | (
            {"paired": 1} if paired else {}
        )
        with atomic_file(path) as aside:
            starts = self._create(
                aside, about, {axis: int(at[-1]) for axis, at in self._at.items()}
            )
            for _ in workers.map(
                partial(_write_part, aside, starts), self._parts(), may_start=False
            ):
                pass
            seal(aside)

    def _free_mark(self, workers: Workers) -> str:
        """What stands between an id and its number: a dot, or as many as it takes that no such name is an id yet."""
        known = len(self._repeats["read"])
        for mark in map(".".__mul__, itertools.count(1)) if known else ():
            both = (
                self._folder / f"names{len(mark)}"
            )  # digests of ids, and of the names that those of repeats get
            shutil.copyfile(self._digests["read"], both)
            with both.open("ab") as out:
                for number, segment in enumerate(self._segments):
                    if len(repeats := self._repeats_of("read", number)):
                        places, ids = repeats[:, 0] - self._at["read"][number], _ids(segment)
                        named = zip(places.tolist(), repeats[:, 2].tolist(), strict=True)
                        out.write(
                            digests([b"%b%b%d" % (ids[i], mark.encode(), n) for i, n in named]).data
                        )
            if (
                sum(map(len, workers.map(repeats_in, Bucket.all_of(both), may_start=False)))
                == known
            ):
                return mark
        return "."

    def _create(
        self, path: Path, about: Mapping[str, str | int], entries: Mapping[str, int]
    ) -> dict[str, _Place]:
        """Make the file with room for all columns, as zeros; gives where each is."""
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_layout(h5py.h5d.CONTIGUOUS)
        layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        length_of = {name: entries[_AXES[name]] + name.endswith("_offsets") for name in COLUMNS}
        nbytes = (
            sum(length * self._kinds[name]().itemsize for name, length in length_of.items())
            + HEADERS_BYTES
        )
        check_room(path.parent, nbytes, "the staged reads")
        path.touch()
        os.truncate(path, nbytes)  # refused here and not in HDF5, which does not live through it
        starts: dict[str, _Place] = {}
        aligned = {"alignment_threshold": 1, "alignment_interval": _ALIGNMENT}
        with h5py.File(path, "w", userblock_size=SEAL_BYTES, track_times=False, **aligned) as file:
            file.attrs.update(about)
            for name, length in length_of.items():
                dataset = file.create_dataset(name, (length,), self._kinds[name], dcpl=layout)
                starts[name] = dataset.id.get_offset() if length else 0, dataset.dtype
        return starts

    def _parts(self) -> Iterator[_Part]:
        for number, segment in enumerate(self._segments):
            begin = {axis: int(at[number]) for axis, at in self._at.items()}
            copies, rows = (self._repeats_of(axis, number) for axis in ("read", "row"))
            before = np.searchsorted(
                self._repeats["row"][:, 0], rows[:, 1]
            )  # what repeats is no unique
            yield _Part(segment, begin, copies, np.column_stack([rows[:, 0], rows[:, 1] - before]))


class _Part(NamedTuple):
    """A segment, and all that whoever puts it into the store needs to know of the others."""

    segment: Segment
    begin: Mapping[str, int]  # entries of each axis before
    copies: NDArray[np.int64]  # [n, 3] repeats of ids: read, first read of that id, how many-th
    again: NDArray[np.int64]  # [n, 2] rows that repeat an earlier one, and their uniques


def _write_part(path: Path, starts: Mapping[str, _Place], part: _Part) -> None:
    """Copy the columns of a segment to their places in the store."""
    begin, low, of = part.begin, part.begin["read"], part.segment.read
    with path.open("rb+") as file:

        def put(name: str, values: NDArray[Any]) -> None:
            at, kind = starts[name]
            file.seek(at + begin[_AXES[name]] * kind.itemsize)
            file.write(np.ascontiguousarray(values, kind).data)

        for name in (
            "read_length",
            "read_chunks",
            "read_rows",
            "read_id_bytes",
            "row_chunk",
            "row_frame",
        ):
            put(name, of(name))
        copy = np.zeros(len(of("read_length")), np.int32)
        copy[part.copies[:, 0] - low] = part.copies[:, 2]
        put("read_copy", copy)
        put("read_flags", of("read_flags") | (copy > 0) * np.uint8(DUPLICATE_ID))
        put("read_id_offsets", begin["id"] + offsets_from_lengths(of("read_id_length")))
        put("row_read", low + of("row_read").astype(np.int64))
        firsts = np.ones(len(of("row_frame")), bool)
        firsts[part.again[:, 0] - begin["row"]] = False
        unique = begin["unique"] + np.cumsum(firsts) - 1
        unique[part.again[:, 0] - begin["row"]] = part.again[:, 1]
        put("row_unique", unique)
        put("unique_row", begin["row"] + np.flatnonzero(firsts))
        for kind in ("protein", "dna"):
            lengths = of(f"{kind}_length")
            put(f"{kind}_offsets", begin[kind] + offsets_from_lengths(lengths[firsts]))
            put(f"{kind}_bytes", _kept(of(f"{kind}_bytes"), offsets_from_lengths(lengths), firsts))


def _ids(segment: Segment) -> Strings:
    return Strings(
        segment.read("read_id_bytes").tobytes(),
        offsets_from_lengths(segment.read("read_id_length")),
    )


def _kept(
    letters: NDArray[np.uint8], offsets: NDArray[np.int64], keep: NDArray[np.bool_]
) -> NDArray[np.uint8]:
    """The sequences that are kept, end to end; neighbours are copied in one piece."""
    if keep.all():
        return letters
    at, data = (
        offsets[np.flatnonzero(np.diff(keep, prepend=False, append=False))].tolist(),
        letters.tobytes(),
    )
    return np.frombuffer(
        b"".join([data[a:b] for a, b in zip(at[::2], at[1::2], strict=True)]), np.uint8
    )
