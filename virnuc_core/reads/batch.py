"""Batches of reads as columns: what parsing gives, whatever the reads came in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from virnuc_core.errors import InputError
from virnuc_core.reads.blocks import Block

Format = Literal["fasta", "fastq"]

LETTERS: Final = "ACGTUNRYSWKMBDHVX-."  # nucleotides, IUPAC codes, X for masked bases, gaps
_LEGAL: Final = f"{LETTERS}{LETTERS.lower()}".encode()
_LONGEST_SHOWN: Final = 200


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Consecutive reads of one file, as columns. Ids are printable UTF-8 without blanks; bases keep their case."""

    file: int  # place of the file among the inputs
    ids: bytes  # end to end
    id_offsets: NDArray[np.int64]  # [n + 1]
    bases: bytes  # end to end
    base_offsets: NDArray[np.int64]  # [n + 1]
    lines: NDArray[np.int64]  # [n] line of each header in its file, from 1
    unnamed: int  # reads that had no id and were given one
    form: Format
    text: bytes  # the records as they stand in the file, end to end; wrapped FASTQ may be unwrapped
    text_offsets: NDArray[np.int64]  # [n + 1]

    def __len__(self) -> int:
        return len(self.id_offsets) - 1

    def id(self, index: int) -> str:
        """Id of one read."""
        return self.ids[self.id_offsets[index] : self.id_offsets[index + 1]].decode()

    def record(self, index: int) -> bytes:
        """One read as it stands in the file, header, quality and all."""
        return self.text[self.text_offsets[index] : self.text_offsets[index + 1]]


def batch_of(block: Block, file: int, form: Format, reads_before: int) -> ReadBatch:
    """The reads of a block; one without an id is named by its number, counted from `reads_before`."""
    ids, id_lengths, unnamed = _clean_ids(block, reads_before)
    return ReadBatch(
        file=file,
        ids=ids,
        id_offsets=offsets_of(id_lengths),
        bases=block.bases,
        base_offsets=offsets_of(block.base_lengths),
        lines=block.lines,
        unnamed=unnamed,
        form=form,
        text=block.text,
        text_offsets=np.append(0, block.text_ends),
    )


def offsets_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of the segments starts, and the end of the last: int64 [n + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def shortened(text: str) -> str:
    """Printable, and no longer than people read: what stands in a broken file may be anything."""
    clean = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:_LONGEST_SHOWN])
    return clean + "…" * (len(text) > _LONGEST_SHOWN)


def _clean_ids(block: Block, reads_before: int) -> tuple[bytes, NDArray[np.int64], int]:
    """Ids as printable UTF-8 words, and how many were missing; nearly always they are just that already."""
    raw = np.frombuffer(block.ids, np.uint8)
    if block.id_lengths.all() and not ((raw < 33) | (raw > 126)).any():
        return block.ids, block.id_lengths, 0
    offsets = offsets_of(block.id_lengths).tolist()
    words = [_printable(block.ids[a:b]) for a, b in pairwise(offsets)]
    unnamed = sum(not word for word in words)
    named = [word or f"unnamed_{reads_before + i + 1}".encode() for i, word in enumerate(words)]
    return b"".join(named), np.fromiter(map(len, named), np.int64, len(named)), unnamed


def _printable(word: bytes) -> bytes:
    first = word.decode("utf-8", "backslashreplace").split(None, 1)[:1]
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in "".join(first)).encode()


def without_illegal(batch: ReadBatch, name: str) -> tuple[ReadBatch, tuple[InputError, ...]]:
    """The batch without reads that hold other letters than nucleotides, and what is to be said of those."""
    if not batch.bases.translate(None, _LEGAL):
        return batch, ()
    legal = np.zeros(256, bool)
    legal[np.frombuffer(_LEGAL, np.uint8)] = True
    bad_at = np.flatnonzero(~legal[np.frombuffer(batch.bases, np.uint8)])
    owners, first = np.unique(np.searchsorted(batch.base_offsets, bad_at, side="right") - 1, return_index=True)
    errors = []
    for owner, place in zip(owners.tolist(), bad_at[first].tolist(), strict=True):
        letter = batch.bases[place : place + 1].decode("latin-1")
        errors.append(
            InputError(
                f"{letter!r} at base {place - int(batch.base_offsets[owner]) + 1} is no nucleotide letter",
                file=name,
                line=int(batch.lines[owner]),
                read_id=shortened(batch.id(owner)),
                hint="expected A C G T U N, IUPAC codes or gaps; is this a protein file?",
            )
        )
    keep = np.ones(len(batch), bool)
    keep[owners] = False
    return _select(batch, np.flatnonzero(keep)), tuple(errors)


def _select(batch: ReadBatch, kept: NDArray[np.intp]) -> ReadBatch:
    ids, id_offsets = _pick(batch.ids, batch.id_offsets, kept)
    bases, base_offsets = _pick(batch.bases, batch.base_offsets, kept)
    text, text_offsets = _pick(batch.text, batch.text_offsets, kept)
    return replace(
        batch,
        ids=ids,
        id_offsets=id_offsets,
        bases=bases,
        base_offsets=base_offsets,
        lines=batch.lines[kept],
        text=text,
        text_offsets=text_offsets,
    )


def _pick(data: bytes, offsets: NDArray[np.int64], kept: NDArray[np.intp]) -> tuple[bytes, NDArray[np.int64]]:
    pieces = [data[offsets[i] : offsets[i + 1]] for i in kept]
    return b"".join(pieces), offsets_of(np.fromiter(map(len, pieces), np.int64, len(pieces)))
