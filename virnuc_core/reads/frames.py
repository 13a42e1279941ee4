"""The work of one batch: chunk → translate → digest."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from virnuc_core.reads.batch import ReadBatch, offsets_of
from virnuc_core.reads.chunk import chunk
from virnuc_core.reads.digest import digest_each, digests
from virnuc_core.reads.translate import Orfs, translate

_ODD: Final = bytes(byte not in b"ACGTacgt" for byte in range(256))


@dataclass(frozen=True, slots=True)
class Frames:
    """Chunks and open frames of one batch of reads."""

    read_chunks: NDArray[np.int32]  # [reads]
    read_rows: NDArray[np.int32]  # [reads] open frames
    read_ambiguous: NDArray[np.bool_]  # [reads] holds a letter other than A, C, G, T
    row_chunk: NDArray[np.int32]  # [rows] within the read, from 0
    orfs: Orfs
    digests: NDArray[np.uint64]  # [rows, 2] of DNA and protein
    chunk_s: float
    translate_s: float


def frames_of(batch: ReadBatch, size: int) -> Frames:
    """Cut the reads of a batch, translate the chunks in six frames, digest the open ones."""
    started = time.perf_counter()
    offsets = batch.base_offsets
    lengths = np.diff(offsets)
    chunks = chunk(lengths, size)
    chunked = time.perf_counter()
    begin = offsets[chunks.read]
    orfs = translate(batch.bases, begin + chunks.start, begin + chunks.end)
    row_read = chunks.read[orfs.chunk]
    ambiguous = _ambiguous(batch.bases, offsets)
    return Frames(
        read_chunks=np.bincount(chunks.read, minlength=len(lengths)).astype(np.int32),
        read_rows=np.bincount(row_read, minlength=len(lengths)).astype(np.int32),
        read_ambiguous=ambiguous,
        row_chunk=chunks.number[orfs.chunk],
        orfs=orfs,
        digests=digest_rows(orfs, ambiguous[row_read]),
        chunk_s=chunked - started,
        translate_s=time.perf_counter() - chunked,
    )


def _ambiguous(bases: bytes, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    flags = np.zeros(len(offsets) - 1, bool)
    odd = np.flatnonzero(np.frombuffer(bases.translate(_ODD), np.bool_))
    flags[np.searchsorted(offsets, odd, side="right") - 1] = True
    return flags


def digest_rows(orfs: Orfs, ambiguous: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Digest of each row's DNA and protein: uint64 [rows, 2]. Rows with equal digests are taken as equal.

    DNA of A, C, G, T alone says what the protein is; elsewhere the protein goes into the digest too. `ambiguous` [rows]
    may be true for more rows than those.
    """
    dna_at = offsets_of(orfs.dna_lengths.astype(np.int64))
    made = digests(orfs.dna, dna_at)
    unclear = np.flatnonzero(ambiguous)
    if len(unclear):
        protein_at = offsets_of(orfs.protein_lengths.astype(np.int64))
        both = {}
        for i in unclear.tolist():
            sequence = orfs.dna[dna_at[i] : dna_at[i + 1]].tobytes()
            if sequence.translate(None, b"ACGT"):
                both[i] = sequence + b"|" + orfs.proteins[protein_at[i] : protein_at[i + 1]].tobytes()
        made[list(both)] = digest_each(list(both.values()))
    return made
