"""The ORF store: one HDF5 file of plain columns, written once, then mapped into memory.

Every dataset is contiguous and uncompressed, so that a process reads only the stretches it needs. The same reads and
settings give the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import h5py
import numpy as np
from numpy.typing import NDArray

from virnuc_core.errors import InputError
from virnuc_core.reads.translate import FRAMES

FORMAT: Final = "virnuc-orfs"
SCHEMA_VERSION: Final = 2

COLUMNS: Final[dict[str, type[np.generic]]] = {
    "read_length": np.int32,
    "read_chunks": np.int32,
    "read_rows": np.int32,
    "read_flags": np.uint8,
    "read_copy": np.int32,
    "read_id_offsets": np.int64,
    "read_id_bytes": np.uint8,
    "row_read": np.int64,
    "row_chunk": np.int32,
    "row_frame": np.uint8,
    "row_unique": np.int64,
    "unique_row": np.int64,
    "protein_offsets": np.int64,
    "dna_offsets": np.int64,
    "protein_bytes": np.uint8,
    "dna_bytes": np.uint8,
}


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
    """Reads, rows and unique sequences of one `orfs.h5`, mapped read-only. Open with `OrfStore.open`.

    A row is an open frame of one chunk of one read, in order of read, chunk, frame. A unique is a distinct pair of DNA
    and protein, in order of its first row.
    """

    path: Path
    fingerprint: str  # over the reads and the settings that change rows
    model_length: int
    duplicate_mark: str  # stands between an id and its number when the id is not the first of its kind
    counts: StoreCounts

    read_length: NDArray[np.int32]  # [n_reads] bases
    read_chunks: NDArray[np.int32]  # [n_reads]
    read_rows: NDArray[np.int32]  # [n_reads] open frames
    read_flags: NDArray[np.uint8]  # [n_reads] EMPTY | SHORT_FOR_MODEL | AMBIGUOUS | DUPLICATE_ID
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
    def open(cls, path: Path) -> OrfStore:
        """Map a store. Errors: `InputError` when the file is absent or no store of this version."""
        store = cls()
        store.path = path
        try:
            with h5py.File(path, "r", locking=False) as file:
                if file.attrs.get("format") != FORMAT or file.attrs.get("schema_version") != SCHEMA_VERSION:
                    raise InputError("no ORF store of this version", file=path, hint="stage the reads again")
                store.fingerprint = str(file.attrs["fingerprint"])
                store.model_length = int(file.attrs["model_length"])
                store.duplicate_mark = str(file.attrs["duplicate_mark"])
                store.counts = StoreCounts(**{name: int(file.attrs[name]) for name in StoreCounts.__slots__})
                for name in COLUMNS:
                    setattr(store, name, _mapped(path, file[name]))
        except FileNotFoundError as error:
            raise InputError("no such file", file=path, hint="stage the reads first") from error
        except (OSError, KeyError) as error:
            raise InputError("not a readable ORF store", file=path, hint="stage the reads again") from error
        return store

    @property
    def n_reads(self) -> int:
        return self.counts.n_reads

    @property
    def n_chunks(self) -> int:
        return self.counts.n_chunks

    @property
    def n_rows(self) -> int:
        return self.counts.n_rows

    @property
    def n_uniques(self) -> int:
        return self.counts.n_uniques

    def original_ids(self, low: int, high: int) -> list[str]:
        """Ids of reads `low` to `high` as they stand in the files; several reads may share one."""
        offsets = self.read_id_offsets[low : high + 1].tolist()
        data = self.read_id_bytes[offsets[0] : offsets[-1]].tobytes() if high > low else b""
        return [data[a - offsets[0] : b - offsets[0]].decode() for a, b in pairwise(offsets)]

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
        columns = ((reads - first).tolist(), self.row_chunk[low:high].tolist(), self.row_frame[low:high].tolist())
        return [f"{names[r]}_chunk_{c + 1}{FRAMES[f]}" for r, c, f in zip(*columns, strict=True)]

    def protein(self, low: int, high: int) -> list[bytes]:
        """Proteins of uniques `low` to `high`."""
        return _cut(self.protein_bytes, self.protein_offsets, low, high)

    def dna(self, low: int, high: int) -> list[bytes]:
        """DNA of uniques `low` to `high`, upper case."""
        return _cut(self.dna_bytes, self.dna_offsets, low, high)


def _cut(letters: NDArray[np.uint8], offsets: NDArray[np.int64], low: int, high: int) -> list[bytes]:
    if high <= low:
        return []
    at = offsets[low : high + 1].tolist()
    data = letters[at[0] : at[-1]].tobytes()
    return [data[a - at[0] : b - at[0]] for a, b in pairwise(at)]


def _mapped(path: Path, dataset: h5py.Dataset) -> NDArray[np.generic]:
    if dataset.size == 0:
        return np.zeros(dataset.shape, dataset.dtype)
    return np.memmap(path, dataset.dtype, "r", dataset.id.get_offset(), dataset.shape)
