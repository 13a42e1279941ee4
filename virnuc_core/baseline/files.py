"""The originals' way of cutting work: files of 10,000 rows, batches within a file, files over devices."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from virnuc_core.config import BaselineName
from virnuc_core.engine.process import Message
from virnuc_core.errors import InputError

FILE_ROWS: Final = 10_000
TOKENS_PER_BATCH: Final = 2_048
HEAD_BATCH_ROWS: Final = 256

Operation = Literal["dnabert_s", "esm2", "merge", "predict"]
Kind = Literal["nucleotide.fa", "protein.fa", "dnabert_s.npy", "esm2.npy", "merged.npy", "scores.npy"]


class FileTask(Message):
    """A file for the baseline's worker."""

    op: Operation
    algorithm: BaselineName
    folder: str
    file: int  # its number in the folder


class RowsDone(Message):
    """Rows the baseline's worker embedded since it last said so."""

    rows: int


class FileDone(Message):
    """One operation on one file."""

    file: int
    rows: int
    load_s: float  # getting the model ready
    compute_s: float  # the rest


@dataclass(frozen=True, slots=True)
class Folder:
    """Where the intermediate files of a baseline lie."""

    root: Path

    def path(self, kind: Kind, number: int) -> Path:
        """The file of a kind and a number."""
        return self.root / f"{number:05d}_{kind}"


def write_fasta(path: Path, ids: Sequence[str], sequences: Sequence[bytes]) -> None:
    """Write rows as FASTA, one line each."""
    heads = [f">{name}\n".encode() for name in ids]
    path.write_bytes(b"".join(head + line + b"\n" for head, line in zip(heads, sequences, strict=True)))


def read_fasta(path: Path) -> tuple[list[str], list[bytes]]:
    """The ids and sequences that `write_fasta` wrote; `InputError` when it is not that."""
    lines = path.read_bytes().split(b"\n")
    if len(lines) % 2 == 0 or any(not head.startswith(b">") for head in lines[:-1:2]):
        raise InputError("not rows of one line each", file=path, hint="delete the folder and start over")
    return [head[1:].decode() for head in lines[:-1:2]], lines[1::2]


def sorted_batches(lengths: Sequence[int], budget: int = TOKENS_PER_BATCH) -> list[list[int]]:
    """Vanilla ESM-2 batches: shortest first, each as wide as its longest row plus one token, within the budget.

    >>> sorted_batches([1000, 10, 1040])
    [[1, 0], [2]]
    """
    batches: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        size = lengths[row] + 1
        if batches and max(longest, size) * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(row)
            longest = max(longest, size)
        else:
            batches.append([row])
            longest = size
    return batches


def filled_batches(sizes: Sequence[int], budget: int = TOKENS_PER_BATCH) -> list[list[int]]:
    """Batches of v1.0: file order, each closed before its sizes add up to more than the budget.

    >>> filled_batches([1000, 1000, 100, 3000])
    [[0, 1], [2], [3]]
    """
    batches: list[list[int]] = []
    filled = 0
    for row, size in enumerate(sizes):
        if batches and filled + size <= budget:
            batches[-1].append(row)
            filled += size
        else:
            batches.append([row])
            filled = size
    return batches


def dna_token_estimate(length: int) -> int:
    """How v1.0 guesses the DNABERT-S tokens of `length` bases."""
    return length // 6 + 2


def assign(sizes: Sequence[float], devices: int) -> list[list[int]]:
    """Files to devices: the largest first, each to the device that has least; files by index, in the order given out.

    >>> assign([5, 9, 4, 1], 2)
    [[1, 3], [0, 2]]
    """
    loads = [(0.0, device) for device in range(devices)]
    plan: list[list[int]] = [[] for _ in range(devices)]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, device = heapq.heappop(loads)
        plan[device].append(index)
        heapq.heappush(loads, (load + sizes[index], device))
    return plan


def choose_reads(total: int, wanted: int | None, seed: int) -> NDArray[np.int64]:
    """`wanted` reads that stand for all: one at random from each of as many equal stretches of the input, ascending.

    A fixed step would follow any pattern of the input (mates in turn, tiles of a flow cell); a random pick does not.
    """
    if wanted is None or wanted >= total:
        return np.arange(total, dtype=np.int64)
    bounds = np.arange(wanted + 1, dtype=np.int64) * total // wanted
    return np.random.default_rng(seed).integers(bounds[:-1], bounds[1:])


def cut(rows: int, file_rows: int) -> Iterator[tuple[int, int]]:
    """The ranges of rows of each file."""
    for low in range(0, rows, file_rows):
        yield low, min(low + file_rows, rows)


def merge_file(folder: Folder, number: int) -> int:
    """Join the two embeddings of each row of a file, DNA first, in place of the two; returns the rows.

    Errors: `InputError` when the two files do not hold the same rows in the same order.
    """
    nucleotide, protein = folder.path("nucleotide.fa", number), folder.path("protein.fa", number)
    parts = folder.path("dnabert_s.npy", number), folder.path("esm2.npy", number)
    names, others = read_fasta(nucleotide)[0], read_fasta(protein)[0]
    arrays = [np.load(part) for part in parts]
    if names != others or any(len(array) != len(names) for array in arrays):
        raise InputError("the nucleotide and the protein file hold different rows", file=nucleotide)
    np.save(folder.path("merged.npy", number), np.concatenate(arrays, axis=1))
    for part in parts:
        part.unlink()
    return len(names)
