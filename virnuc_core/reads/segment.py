"""What a worker makes of one batch of reads: chunk → translate → digest, as columns of the store to come."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from virnuc_core.reads.dedup import digest_rows, digests
from virnuc_core.reads.fast_parser import ReadBatch
from virnuc_core.reads.fingerprint import Leaves, leaves_of
from virnuc_core.reads.translate import chunk, translate

EMPTY: Final = 1  # bits of read_flags: no bases
SHORT_FOR_MODEL: Final = 2  # less than half of the model's length, but not empty
AMBIGUOUS: Final = 4  # holds a letter other than A, C, G, T
DUPLICATE_ID: Final = 8  # an earlier read has the same id

SEGMENT_COLUMNS: Final[dict[str, type[np.generic]]] = {
    "read_length": np.int32,
    "read_chunks": np.int32,
    "read_rows": np.int32,
    "read_flags": np.uint8,
    "read_line": np.int64,
    "read_id_length": np.int32,
    "read_id_bytes": np.uint8,
    "read_id_digest": np.uint64,  # two each
    "row_chunk": np.int32,
    "row_frame": np.uint8,
    "row_digest": np.uint64,  # two each
    "protein_length": np.int32,
    "dna_length": np.int32,
    "protein_bytes": np.uint8,
    "dna_bytes": np.uint8,
}
_ODD: Final = bytes(byte not in b"ACGTacgt" for byte in range(256))


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a store that one batch makes."""

    columns: Mapping[str, NDArray[Any]]  # by the names of `SEGMENT_COLUMNS`
    leaves: Leaves
    chunk_s: float
    translate_s: float
    digest_s: float


def process(batch: ReadBatch, model_length: int) -> Segment:
    """Cut the reads of a batch, translate the chunks in six frames, digest ids and open frames."""
    started = time.perf_counter()
    offsets = batch.base_offsets
    lengths = np.diff(offsets)
    chunks = chunk(lengths, model_length)
    chunked = time.perf_counter()
    begin = offsets[chunks.read]
    orfs = translate(batch.bases, begin + chunks.start, begin + chunks.end)
    translated = time.perf_counter()
    row_read = chunks.read[orfs.chunk]
    ambiguous = np.zeros(len(batch), bool)
    odd = np.flatnonzero(np.frombuffer(batch.bases.translate(_ODD), np.bool_))
    ambiguous[np.searchsorted(offsets, odd, side="right") - 1] = True
    short = (lengths > 0) & (2 * lengths < model_length)
    id_digests = digest_ids(batch)
    columns = {
        "read_length": lengths,
        "read_chunks": np.bincount(chunks.read, minlength=len(batch)),
        "read_rows": np.bincount(row_read, minlength=len(batch)),
        "read_flags": (lengths == 0) * EMPTY + short * SHORT_FOR_MODEL + ambiguous * AMBIGUOUS,
        "read_line": batch.lines,
        "read_id_length": np.diff(batch.id_offsets),
        "read_id_bytes": np.frombuffer(batch.ids, np.uint8),
        "read_id_digest": id_digests.reshape(-1),
        "row_chunk": chunks.number[orfs.chunk],
        "row_frame": orfs.frame,
        "row_digest": digest_rows(orfs, ambiguous[row_read]).reshape(-1),
        "protein_length": orfs.protein_lengths,
        "dna_length": orfs.dna_lengths,
        "protein_bytes": orfs.proteins,
        "dna_bytes": orfs.dna,
    }
    return Segment(
        columns={name: columns[name].astype(kind, copy=False) for name, kind in SEGMENT_COLUMNS.items()},
        leaves=leaves_of(batch, id_digests),
        chunk_s=chunked - started,
        translate_s=translated - chunked,
        digest_s=time.perf_counter() - translated,
    )


def fingerprint_batch(batch: ReadBatch) -> Leaves:
    """What a batch adds to the fingerprint of all reads."""
    return leaves_of(batch, digest_ids(batch))


def digest_ids(batch: ReadBatch) -> NDArray[np.uint64]:
    """Digest of each id: uint64 [reads, 2]."""
    return digests(np.frombuffer(batch.ids, np.uint8), batch.id_offsets)
