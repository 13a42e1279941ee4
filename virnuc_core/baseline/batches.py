"""How the original programs cut work into batches, files and shares of devices."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from virnuc_core.config import BaselineName
from virnuc_core.encoders.registry import EncoderName

FILE_ROWS: Final = 10_000
TOKENS_PER_BATCH: Final = 2_048
V1_BASES_PER_TOKEN: Final = 6  # v1.0 guesses at the tokens of DNABERT-S
V1_SPECIAL_TOKENS: Final = 2

Batches = list[list[int]]  # indexes of the rows of each batch


def single_rows(lengths: Sequence[int]) -> Batches:
    """Return batches of one row each: vanilla's for DNABERT-S."""
    return [[row] for row in range(len(lengths))]


def sorted_batches(lengths: Sequence[int], budget: int = TOKENS_PER_BATCH) -> Batches:
    """Return vanilla's batches for ESM-2.

    Rows come shortest first. A batch is as wide as its longest row plus one token, and its area is
    within the budget.

    >>> sorted_batches([1000, 10, 1040])
    [[1, 0], [2]]
    """

    def area(batch: list[int]) -> int:
        return (max(lengths[row] for row in batch) + 1) * len(batch)

    rows = sorted(range(len(lengths)), key=lengths.__getitem__)
    return _fill_batches(rows, area, budget)


def filled_batches(sizes: Sequence[int], budget: int = TOKENS_PER_BATCH) -> Batches:
    """Return batches of v1.0: in file order, each closed before its sizes exceed the budget.

    >>> filled_batches([1000, 1000, 100, 3000])
    [[0, 1], [2], [3]]
    """

    def total(batch: list[int]) -> int:
        return sum(sizes[row] for row in batch)

    return _fill_batches(range(len(sizes)), total, budget)


def guessed_batches(lengths: Sequence[int]) -> Batches:
    """Return v1.0's batches for DNABERT-S, whose tokens it guesses from the bases."""
    sizes = [length // V1_BASES_PER_TOKEN + V1_SPECIAL_TOKENS for length in lengths]
    return filled_batches(sizes)


def _fill_batches(rows: Iterable[int], cost: Callable[[list[int]], int], budget: int) -> Batches:
    """Fill batches with rows in order; each is closed before it costs more than the budget."""
    batches: Batches = []
    for row in rows:
        if batches and cost([*batches[-1], row]) <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


# How each program batches rows, given their lengths in bases or in residues
BATCHES: Final[dict[tuple[BaselineName, EncoderName], Callable[[Sequence[int]], Batches]]] = {
    ("vanilla", "dnabert_s"): single_rows,
    ("vanilla", "esm2"): sorted_batches,
    ("v1", "dnabert_s"): guessed_batches,
    ("v1", "esm2"): filled_batches,
}


def assign(sizes: Sequence[float], devices: int) -> list[list[int]]:
    """Assign files to devices: the largest first, each to the device that has least.

    Args:
        sizes: Size of each file.
        devices: Number of devices.

    Returns:
        For each device the indexes of its files, in the order in which they were assigned.

    >>> assign([5, 9, 4, 1], 2)
    [[1, 3], [0, 2]]
    """
    loads = [0.0] * devices
    shares: list[list[int]] = [[] for _ in range(devices)]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        device = loads.index(min(loads))
        shares[device].append(index)
        loads[device] += sizes[index]
    return shares


def cut(rows: int, file_rows: int) -> list[tuple[int, int]]:
    """Return the range of rows of each file, [low, high)."""
    return [(low, min(low + file_rows, rows)) for low in range(0, rows, file_rows)]
