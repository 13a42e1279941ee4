"""The columns of an ORF store, what its flags mean and what is counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

FORMAT: Final = "virnuc-orfs"
SCHEMA_VERSION: Final = 2

EMPTY: Final = 1  # bits of read_flags: no bases
SHORT_FOR_MODEL: Final = 2  # less than half of the model's length, but not empty
AMBIGUOUS: Final = 4  # holds a letter other than A, C, G, T
DUPLICATE_ID: Final = 8  # an earlier read has the same id

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
