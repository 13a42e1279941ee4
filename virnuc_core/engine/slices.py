"""Cut positions of rows into ranges of consecutive rows, each of which is read in one step."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

SLICE_ROWS: Final = 1024  # of a range at most
Slice = tuple[int, int]  # position of the first row, and the position after the last one


def slices(positions: NDArray[np.int64]) -> list[Slice]:
    """Cut sorted positions into ranges of consecutive positions, none longer than `SLICE_ROWS`.

    A new range also begins at each multiple of `SLICE_ROWS`.

    Args:
        positions: Positions in ascending order, each once.

    Returns:
        For each range its first position, and the position after its last one.
    """
    has_gap_before = np.diff(positions) != 1
    is_slice_start = positions[1:] % SLICE_ROWS == 0
    # Both arrays begin with the second position, hence + 1.
    cuts = np.flatnonzero(has_gap_before | is_slice_start) + 1
    ranges = []
    for part in np.split(positions, cuts):
        # Without any position there is one empty part.
        if len(part):
            ranges.append((int(part[0]), int(part[-1]) + 1))
    return ranges
