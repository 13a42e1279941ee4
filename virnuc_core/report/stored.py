"""What the ORF store of a validation says of its counts: the rawest there is of reads, rows and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from virnuc_core.baseline.files import choose_reads
from virnuc_core.errors import InputError
from virnuc_core.reads.store import AMBIGUOUS, DUPLICATE_ID, EMPTY, SHORT_FOR_MODEL, OrfStore
from virnuc_core.report.compare import load_frames
from virnuc_core.rundir import RunDir

ROWS_A_BLOCK = 1 << 16
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


def baseline_tokens(store: OrfStore, predictions: Path, reads: int, seed: int) -> int:
    """ESM-2 tokens of the rows of the `reads` reads that a baseline drew by `seed`.

    Raises `InputError` when its predictions are of other rows.
    """
    drawn = np.zeros(store.n_reads, dtype=np.bool_)
    drawn[choose_reads(store.n_reads, reads, seed)] = True  # drawn again: ids may stand twice, as those of mates do
    chosen = drawn[np.asarray(store.row_read)]
    if load_frames(predictions)["id"].tolist() != list(_original_ids(store, chosen)):
        raise InputError("its rows are not those of the reads the baseline drew", file=predictions)
    rows = np.asarray(store.row_unique)[chosen]
    return int(np.diff(store.protein_offsets)[rows].sum()) + ENDS * len(rows)


def _original_ids(store: OrfStore, chosen: NDArray[np.bool_]) -> Iterator[str]:
    """Ids of the chosen rows as the result files have them, block by block."""
    for lo in range(0, len(chosen), ROWS_A_BLOCK):
        hi = min(lo + ROWS_A_BLOCK, len(chosen))
        names = store.row_ids(lo, hi, original=True)
        yield from (names[place] for place in np.flatnonzero(chosen[lo:hi]).tolist())


def open_beside(out: Path) -> OrfStore | None:
    """The store of a validate directory; `None` when it is not there. Raises `InputError` for one that is none."""
    path = RunDir(out).store
    return OrfStore.open(path) if path.is_file() else None
