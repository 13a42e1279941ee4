"""What the ORF store of a validation says of its counts: the rawest there is of reads, rows and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from virnuc_core.reads.store import AMBIGUOUS, DUPLICATE_ID, EMPTY, SHORT_FOR_MODEL, OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.validation.compare import load_frames

READS_A_BLOCK = 1 << 16
ENDS = 2  # start and end tokens of a row


@dataclass(frozen=True, slots=True)
class Stored:
    """Counts of a store."""

    fingerprint: str
    n_reads: int
    n_chunks: int
    n_rows: int
    n_uniques: int
    protein_tokens: int  # of the uniques, start and end tokens included
    row_tokens: int  # of all rows, likewise


def count_store(store: OrfStore) -> Stored:
    """Add up what a store holds."""
    lengths = np.diff(store.protein_offsets)
    return Stored(
        fingerprint=store.fingerprint,
        n_reads=len(store.read_length),
        n_chunks=int(np.asarray(store.read_chunks).sum(dtype=np.int64)),
        n_rows=len(store.row_read),
        n_uniques=len(lengths),
        protein_tokens=int(lengths.sum()) + ENDS * len(lengths),
        row_tokens=int(lengths[store.row_unique].sum()) + ENDS * len(store.row_read),
    )


def staging_tally(store: OrfStore) -> dict[str, int]:
    """What staging counts of the reads, under its names, counted anew from their flags."""
    flags = np.asarray(store.read_flags)
    bits = {"empty": EMPTY, "duplicate_ids": DUPLICATE_ID, "ambiguous": AMBIGUOUS, "short_for_model": SHORT_FOR_MODEL}
    return {"reads": len(flags), **{name: int(((flags & bit) > 0).sum()) for name, bit in bits.items()}}


def baseline_tokens(store: OrfStore, predictions: Path) -> int:
    """ESM-2 tokens of the rows that a baseline on some of the reads computed."""
    reads = set(load_frames(predictions)["id"].str.replace(r"_chunk_\d+..$", "", regex=True))
    lengths = np.diff(store.protein_offsets)
    chosen = np.concatenate([*_chosen(store, reads), np.empty(0, dtype=np.bool_)])
    rows = np.asarray(store.row_unique)[chosen[np.asarray(store.row_read)]]
    return int(lengths[rows].sum()) + ENDS * len(rows)


def _chosen(store: OrfStore, reads: set[str]) -> Iterator[NDArray[np.bool_]]:
    """Whether each read of the store is among `reads`, block by block."""
    for lo in range(0, len(store.read_length), READS_A_BLOCK):
        hi = min(lo + READS_A_BLOCK, len(store.read_length))
        yield np.array([name in reads for name in store.read_ids(lo, hi)], dtype=np.bool_)


def open_beside(out: Path) -> OrfStore | None:
    """The store of a validate directory; `None` when it is not there. Raises `InputError` for one that is none."""
    path = RunDir(out).store
    return OrfStore.open(path) if path.is_file() else None
