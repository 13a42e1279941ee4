"""What the ORF store of a validation says of its counts: the rawest there is of reads, rows and tokens."""

from __future__ import annotations

from itertools import compress
from pathlib import Path

import numpy as np

from virnuc_core.baseline.files import choose_reads
from virnuc_core.errors import InputError
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.translate import AMBIGUOUS, DUPLICATE_ID, EMPTY, SHORT_FOR_MODEL
from virnuc_core.report.compare import load_results

ROWS_A_BLOCK = 1 << 16
ENDS = 2  # start and end tokens of a row


def count_store(store: OrfStore) -> dict[str, int]:
    """Reads, chunks, rows, uniques, and ESM-2 tokens of the uniques and of all rows, start and end tokens included."""
    lengths = np.diff(store.protein_offsets)
    return {
        "n_reads": len(store.read_length),
        "n_chunks": int(np.asarray(store.read_chunks).sum(dtype=np.int64)),
        "n_rows": len(store.row_read),
        "n_uniques": len(lengths),
        "protein_tokens": int(lengths.sum()) + ENDS * len(lengths),
        "row_tokens": int(lengths[store.row_unique].sum()) + ENDS * len(store.row_read),
    }


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
    ids = (
        name
        for lo in range(0, len(chosen), ROWS_A_BLOCK)
        for name in compress(store.row_ids(lo, min(lo + ROWS_A_BLOCK, len(chosen)), original=True), chosen[lo:])
    )
    if load_results(predictions)["id"].tolist() != list(ids):
        raise InputError("its rows are not those of the reads the baseline drew", file=predictions)
    rows = np.asarray(store.row_unique)[chosen]
    return int(np.diff(store.protein_offsets)[rows].sum()) + ENDS * len(rows)
