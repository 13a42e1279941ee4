"""What a worker does with a piece of text: read it, cut and translate its reads, keep all of it in its draft."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from virnuc_core.reads.batch import ReadBatch
from virnuc_core.reads.digest import digests
from virnuc_core.reads.draft import Draft, Sheet
from virnuc_core.reads.fingerprint import Leaves, leaves_of
from virnuc_core.reads.frames import frames_of
from virnuc_core.reads.pieces import Piece, Taken, read


@dataclass(frozen=True, slots=True)
class Laid:
    """What became of a piece or batch."""

    taken: Taken
    leaves: Leaves
    sheet: Sheet
    parse_s: float
    chunk_s: float
    translate_s: float
    store_s: float


@dataclass(frozen=True, slots=True)
class Lay:
    """Make a sheet of a piece, or of a batch that is read already."""

    number: int  # of the sheet
    item: Piece | ReadBatch
    model_length: int

    def run(self, draft: Draft) -> Laid:
        started = time.perf_counter()
        reading = read(self.item)
        batch = reading.batch
        parsed = time.perf_counter()
        frames = frames_of(batch, self.model_length)
        translated = time.perf_counter()
        id_digests = digests(np.frombuffer(batch.ids, np.uint8), batch.id_offsets)
        leaves = leaves_of(batch, id_digests)
        sheet = draft.add(self.number, batch, frames, id_digests, self.model_length)
        return Laid(
            taken=reading.taken,
            leaves=leaves,
            sheet=sheet,
            parse_s=parsed - started,
            chunk_s=frames.chunk_s,
            translate_s=translated - parsed - frames.chunk_s,
            store_s=time.perf_counter() - translated,
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """What a piece or batch holds."""

    taken: Taken
    leaves: Leaves


@dataclass(frozen=True, slots=True)
class Look:
    """Read a piece for its fingerprint alone."""

    item: Piece | ReadBatch

    def run(self, draft: Draft) -> Seen:
        reading = read(self.item)
        batch = reading.batch
        return Seen(reading.taken, leaves_of(batch, digests(np.frombuffer(batch.ids, np.uint8), batch.id_offsets)))


def to_send(item: Piece | ReadBatch) -> Piece | ReadBatch:
    """The same, without what a worker has no use for."""
    return item if isinstance(item, Piece) else replace(item, text=b"", text_offsets=np.zeros(1, np.int64))
