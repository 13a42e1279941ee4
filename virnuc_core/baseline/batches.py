"""How the original programs divide their work into batches, into files and among devices.

"Vanilla" is the original algorithm, "v1.0" is version 1.0 of the program.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from virnuc_core.config import BaselineName
from virnuc_core.encoder_names import EncoderName

FILE_ROWS: Final = 10_000  # sequences of one intermediate file
TOKENS_PER_BATCH: Final = 2_048
# v1.0 estimates the tokens of DNABERT-S: one for so many bases, and the first and the last token.
V1_BASES_PER_TOKEN: Final = 6
V1_SPECIAL_TOKENS: Final = 2

Batches = list[list[int]]  # indexes of the rows of each batch


def single_rows(lengths: Sequence[int]) -> Batches:
    """Return batches of one sequence each, as vanilla forms them for DNABERT-S."""
    return [[row] for row in range(len(lengths))]


def sorted_batches(lengths: Sequence[int], budget: int = TOKENS_PER_BATCH) -> Batches:
    """Return the batches that the original VirNucPro ("vanilla") forms for ESM-2.

    The sequences are sorted by length, the shortest first. The tokens of a sequence are its
    residues and one start token. All sequences of a batch are padded to the longest. The number of
    tokens with padding must stay within the budget.

    Args:
        lengths: Residues of each sequence.
        budget: Largest number of tokens of a batch, padding included.

    Returns:
        The indexes of the sequences of each batch.

    >>> sorted_batches([1000, 10, 1040], budget=2_048)  # 2 * 1,001 tokens fit, 3 * 1,041 do not
    [[1, 0], [2]]
    """

    def padded_tokens(batch: list[int]) -> int:
        """Return the tokens of a batch, padding included."""
        return (max(lengths[row] for row in batch) + 1) * len(batch)

    rows = sorted(range(len(lengths)), key=lengths.__getitem__)
    return _fill_batches(rows, padded_tokens, budget)


def filled_batches(sizes: Sequence[int], budget: int = TOKENS_PER_BATCH) -> Batches:
    """Return the batches that v1.0 forms: sequences in file order, as many as the budget allows.

    A sequence that is larger than the budget has a batch of its own.

    Args:
        sizes: Size of each sequence, for instance its residues.
        budget: Largest sum of sizes of a batch.

    Returns:
        The indexes of the sequences of each batch.

    >>> filled_batches([1000, 1000, 100, 3000])
    [[0, 1], [2], [3]]
    """

    def total(batch: list[int]) -> int:
        """Return the sum of the sizes of a batch."""
        return sum(sizes[row] for row in batch)

    return _fill_batches(range(len(sizes)), total, budget)


def guessed_batches(lengths: Sequence[int]) -> Batches:
    """Return the batches that v1.0 forms for DNABERT-S, from estimated numbers of tokens.

    Args:
        lengths: Bases of each sequence.
    """
    sizes = [length // V1_BASES_PER_TOKEN + V1_SPECIAL_TOKENS for length in lengths]
    return filled_batches(sizes)


def _fill_batches(rows: Iterable[int], cost: Callable[[list[int]], int], budget: int) -> Batches:
    """Distribute rows to batches in the given order.

    A row that would make the last batch too costly begins a new one.

    Args:
        rows: Indexes of the sequences, in order.
        cost: Returns the cost of a batch.
        budget: Largest cost of a batch. A single row may cost more: it has its own batch.
    """
    batches: Batches = []
    for row in rows:
        has_room = bool(batches) and cost([*batches[-1], row]) <= budget
        if has_room:
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


def assign_to_devices(sizes: Sequence[float], devices: int) -> list[list[int]]:
    """Distribute files to devices so that each device has about the same work.

    The largest file comes first. Each file goes to the device that has the least work so far.

    Args:
        sizes: Size of each file.
        devices: Number of devices.

    Returns:
        For each device the indexes of its files, in the order in which they were assigned.

    >>> assign_to_devices([5, 9, 4, 1], 2)
    [[1, 3], [0, 2]]
    """
    loads = [0.0] * devices  # sum of the sizes of each device's files
    files_of_device: list[list[int]] = [[] for _ in range(devices)]
    largest_first = sorted(range(len(sizes)), key=lambda file: -sizes[file])
    for file in largest_first:
        device = loads.index(min(loads))
        files_of_device[device].append(file)
        loads[device] += sizes[file]
    return files_of_device


def file_ranges(rows: int, file_rows: int) -> list[tuple[int, int]]:
    """Cut rows into files, and return the range of rows of each file.

    Args:
        rows: Number of rows.
        file_rows: Rows of a file. The last file may have fewer.

    Returns:
        For each file its first row, and the row after its last one.
    """
    return [(low, min(low + file_rows, rows)) for low in range(0, rows, file_rows)]
