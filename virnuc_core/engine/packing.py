"""Rows into batches of fixed shape, with almost no empty slots.

Three rules make a row's numbers independent of its neighbours while the device sees only a handful of shapes:
rows are grouped by the power of two above their length (the kernel's block is chosen by the row itself), a group is
filled into the largest shape it can fill, longest rows first, and the rest goes into shapes of a quarter and a
sixteenth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SMALLEST_GROUP = 64
NEARLY = 16  # a shape is worth launching when less than one part in this many stays empty
MIN_TOKENS_PER_ROW = 8  # row capacity of a batch = slots / this; only rows shorter than 6 residues could ask for more


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One batch: which rows, in order, in how many slots."""

    rows: NDArray[np.int64]
    slots: int
    max_seqlen: int  # the group's bound
    tokens: int


def shapes(budget: int) -> tuple[int, ...]:
    """The batch shapes of a token budget, largest first."""
    return tuple(dict.fromkeys(max(1, budget // part) for part in (1, 4, 16)))


def row_capacity(slots: int) -> int:
    """Rows a batch of `slots` can hold."""
    return max(1, slots // MIN_TOKENS_PER_ROW)


def group_bound(length: int) -> int:
    """The power of two a row of `length` tokens is grouped under, at least `SMALLEST_GROUP`."""
    return max(SMALLEST_GROUP, 1 << (max(length, 1) - 1).bit_length())


def pack(lengths: Sequence[int] | NDArray[np.int64], budget: int) -> list[BatchPlan]:
    """Place every row of `lengths` (tokens, specials included, each ≥ 1) in exactly one batch.

    Deterministic: the same lengths give the same batches. A row longer than the budget gets a batch of its own whose
    slots are the smallest multiple of the budget that holds it.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) == 0:
        return []
    bounds = np.array([group_bound(int(n)) for n in np.unique(sizes)], dtype=np.int64)
    bound_of = dict(zip(np.unique(sizes).tolist(), bounds.tolist(), strict=True))
    group = np.array([bound_of[n] for n in sizes.tolist()], dtype=np.int64)
    batches: list[BatchPlan] = []
    for bound in sorted(set(bounds.tolist()), reverse=True):
        batches += _pack_group(np.flatnonzero(group == bound), sizes, bound, budget)
    return batches


def _pack_group(members: NDArray[np.int64], sizes: NDArray[np.int64], bound: int, budget: int) -> list[BatchPlan]:
    """Batches of one group: first-fit decreasing, bin by bin, over counts of equal lengths."""
    distinct, counts = np.unique(sizes[members], return_counts=True)
    order = np.argsort(sizes[members], kind="stable")
    by_length = dict(zip(distinct.tolist(), np.split(members[order], np.cumsum(counts)[:-1]), strict=True))
    taken = dict.fromkeys(by_length, 0)
    left = dict(zip(distinct.tolist(), counts.tolist(), strict=True))
    remaining = int((distinct * counts).sum())
    batches = []
    while remaining:
        lengths = [n for n in sorted(left, reverse=True) if left[n]]
        slots = _slots(remaining, lengths[0], budget)
        room, places, chosen = slots, row_capacity(slots), []
        for n in lengths:
            count = min(left[n], room // n, places)
            if count:
                chosen.append(by_length[n][taken[n] : taken[n] + count])
                taken[n] += count
                left[n] -= count
                room -= n * count
                places -= count
        tokens = slots - room
        remaining -= tokens
        batches.append(BatchPlan(np.concatenate(chosen), slots, bound, tokens))
    return batches


def _slots(remaining: int, longest: int, budget: int) -> int:
    """The largest shape the remaining tokens nearly fill, or the smallest; never too small for the longest row."""
    sizes = shapes(budget)
    if longest > sizes[0]:
        return -(-longest // budget) * budget
    fitting = [s for s in sizes if longest <= s]
    filled = [s for s in fitting if remaining >= s - s // NEARLY]
    return filled[0] if filled else fitting[-1]
