"""Made-up reads with scored frames, as a store and scores: input for the vote and the results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from virnuc_core.reads.store import OrfStore


@dataclass(frozen=True)
class Frame:
    """One row of a made-up read: its chunk, frame and scores; `None` where it failed."""

    chunk: int
    frame: int
    scores: tuple[float, float] | None


@dataclass(frozen=True)
class Read:
    """A made-up read."""

    name: str
    length: int
    chunks: int
    frames: tuple[Frame, ...] = ()
    flags: int = 0
    copy: int = 0


@dataclass(frozen=True)
class Made:
    """An ORF store of made-up reads with the scores of its rows; every row is its own unique."""

    store: OrfStore
    scores: NDArray[np.float32]
    failed: NDArray[np.bool_]


def make(reads: list[Read]) -> Made:
    """Columns of a store, set by hand."""
    pairs = [(i, frame) for i, scored_read in enumerate(reads) for frame in scored_read.frames]
    store = OrfStore()
    store.path = Path("made-up")
    store.duplicate_mark = "."
    store.n_reads, store.n_rows, store.n_uniques = len(reads), len(pairs), len(pairs)
    store.read_length = np.array([r.length for r in reads], dtype=np.int32)
    store.read_chunks = np.array([r.chunks for r in reads], dtype=np.int32)
    store.read_rows = np.array([len(r.frames) for r in reads], dtype=np.int32)
    store.read_flags = np.array([r.flags for r in reads], dtype=np.uint8)
    store.read_copy = np.array([r.copy for r in reads], dtype=np.int32)
    names = [r.name.encode() for r in reads]
    store.read_id_offsets = np.cumsum([0, *map(len, names)], dtype=np.int64)
    store.read_id_bytes = np.frombuffer(b"".join(names), dtype=np.uint8)
    store.row_read = np.array([i for i, _ in pairs], dtype=np.int64)
    store.row_chunk = np.array([f.chunk for _, f in pairs], dtype=np.int32)
    store.row_frame = np.array([f.frame for _, f in pairs], dtype=np.uint8)
    store.row_unique = np.arange(len(pairs), dtype=np.int64)
    is_failed = np.array([f.scores is None for _, f in pairs], dtype=bool)
    scores = np.array([f.scores or (np.nan, np.nan) for _, f in pairs], dtype=np.float32).reshape(
        -1, 2
    )
    return Made(store, scores, is_failed)
