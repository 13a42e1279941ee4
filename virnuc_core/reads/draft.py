"""Drafts of a store: each worker keeps what it made of its batches in files of its own, to be put together later."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from virnuc_core.reads.batch import ReadBatch
from virnuc_core.reads.columns import AMBIGUOUS, EMPTY, SHORT_FOR_MODEL
from virnuc_core.reads.frames import Frames
from virnuc_core.reads.spool import Partition, Parts

Axis = Literal["reads", "rows", "id_bytes", "protein", "dna"]

BUCKETS: Final = 64  # of digests: the repeats of 5 million rows are looked for in 80,000 at a time
_NUMBER_BITS: Final = np.uint64(32)
_COLUMNS: Final[dict[str, tuple[Axis, type[np.generic]]]] = {  # as they follow each other within a sheet
    "line": ("reads", np.int64),
    "length": ("reads", np.int32),
    "chunks": ("reads", np.int32),
    "rows": ("reads", np.int32),
    "id_length": ("reads", np.int32),
    "row_chunk": ("rows", np.int32),
    "protein_length": ("rows", np.int32),
    "dna_length": ("rows", np.int32),
    "flags": ("reads", np.uint8),
    "row_frame": ("rows", np.uint8),
    "id_bytes": ("id_bytes", np.uint8),
    "protein": ("protein", np.uint8),
    "dna": ("dna", np.uint8),
}


@dataclass(frozen=True, slots=True)
class Sheet:
    """Where one batch lies in a draft, and how much of everything it holds."""

    number: int  # given by the caller; no two sheets of any draft share one
    path: Path
    offset: int  # bytes
    file: int  # place among the inputs
    reads: int
    rows: int
    id_bytes: int
    protein: int
    dna: int
    chunks: int
    bases: int
    open_reads: int
    empty: int
    short: int
    ambiguous: int

    def read(self, *names: str) -> list[NDArray[Any]]:
        """The named columns."""
        at, spans = self.offset, {}
        for name, (axis, kind) in _COLUMNS.items():
            nbytes = getattr(self, axis) * np.dtype(kind).itemsize
            spans[name] = (at, at + nbytes)
            at += nbytes
        low, high = min(spans[name][0] for name in names), max(spans[name][1] for name in names)
        with self.path.open("rb") as file:
            file.seek(low)
            data = file.read(high - low)
        return [
            np.frombuffer(data, _COLUMNS[name][1], getattr(self, _COLUMNS[name][0]), spans[name][0] - low)
            for name in names
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(getattr(self, axis) * np.dtype(kind).itemsize for axis, kind in _COLUMNS.values())


class Draft:
    """The files of one worker. `folder` is scratch space of all workers; `worker` tells theirs apart."""

    def __init__(self, folder: Path, worker: int) -> None:
        self._folder, self._worker = folder, worker
        self._path = folder / f"sheets.{worker}"
        self._sheets = self._path.open("ab", buffering=0)
        self._offset = 0
        self._partitions: dict[str, Partition] = {}
        self._recalled: dict[Path, Any] = {}

    def add(
        self, number: int, batch: ReadBatch, frames: Frames, id_digests: NDArray[np.uint64], model_length: int
    ) -> Sheet:
        """Keep one batch with its frames; `id_digests` [reads, 2]."""
        lengths, orfs = np.diff(batch.base_offsets), frames.orfs
        short = (lengths > 0) & (2 * lengths < model_length)
        flags = (lengths == 0) * EMPTY + short * SHORT_FOR_MODEL + frames.read_ambiguous * AMBIGUOUS
        sheet = Sheet(
            number=number,
            path=self._path,
            offset=self._offset,
            file=batch.file,
            reads=len(batch),
            rows=len(orfs),
            id_bytes=len(batch.ids),
            protein=len(orfs.proteins),
            dna=len(orfs.dna),
            chunks=int(frames.read_chunks.sum()),
            bases=len(batch.bases),
            open_reads=int(np.count_nonzero(frames.read_rows)),
            empty=int(np.count_nonzero(lengths == 0)),
            short=int(np.count_nonzero(short)),
            ambiguous=int(np.count_nonzero(frames.read_ambiguous)),
        )
        self._write(
            {
                "line": batch.lines,
                "length": lengths,
                "chunks": frames.read_chunks,
                "rows": frames.read_rows,
                "id_length": np.diff(batch.id_offsets),
                "row_chunk": frames.row_chunk,
                "protein_length": orfs.protein_lengths,
                "dna_length": orfs.dna_lengths,
                "flags": flags,
                "row_frame": orfs.frame,
                "id_bytes": np.frombuffer(batch.ids, np.uint8),
                "protein": orfs.proteins,
                "dna": orfs.dna,
            }
        )
        for kind, digests in (("id_digests", id_digests), ("row_digests", frames.digests)):
            bucket = (digests[:, 0] % BUCKETS).astype(np.int64)
            place = (np.uint64(number) << _NUMBER_BITS) + np.arange(len(digests), dtype=np.uint64)
            self.partition(kind, 3).add(bucket, digests[:, 0], digests[:, 1], place)
        return sheet

    def _write(self, columns: dict[str, NDArray[Any]]) -> None:
        data = [columns[name].astype(kind, copy=False).tobytes() for name, (_, kind) in _COLUMNS.items()]
        left = memoryview(b"".join(data))
        self._offset += len(left)
        while left:  # an unbuffered file may take less than all
            left = left[self._sheets.write(left) :]

    def partition(self, name: str, width: int) -> Partition:
        """This worker's part of the partition `name`, begun when it is first asked for."""
        if name not in self._partitions:
            self._partitions[name] = Partition(self._folder / f"{name}.{self._worker}", width)
        return self._partitions[name]

    def finish(self, name: str) -> Parts | None:
        """What this worker put into a partition; none if it put nothing. It can be begun anew afterwards."""
        partition = self._partitions.pop(name, None)
        return None if partition is None else partition.finish()

    def recall(self, path: Path) -> Any:
        """What was pickled to a file; it is read once."""
        if path not in self._recalled:
            self._recalled[path] = pickle.loads(path.read_bytes())
        return self._recalled[path]

    def close(self) -> None:
        """Close the files."""
        self._sheets.close()
        for partition in self._partitions.values():
            partition.close()

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def number_and_index(place: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The number of the sheet and the index within it, of places as they stand in the partitions of digests."""
    mask = (np.uint64(1) << _NUMBER_BITS) - np.uint64(1)
    return (place >> _NUMBER_BITS).astype(np.int64), (place & mask).astype(np.int64)
