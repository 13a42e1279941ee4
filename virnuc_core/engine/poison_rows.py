"""Rows that a run does without, each set aside by name: those that end workers, and those that are not finite.

The row that ends workers is searched for within one shard, by halving. A worker may also be killed from outside, and no
innocent row may be accused. So a row is set aside only when it has ended `PROOFS` workers all alone, and a search in
which every part survives clears the shard, which is then simply computed again.
"""

import functools
from collections.abc import Generator
from pathlib import Path
from typing import Final

import numpy as np

from virnuc_core.encoders.checkpoint import check_finite, open_part
from virnuc_core.encoders.model_config import DnabertShape, Esm2Shape, HeadShape, Shape
from virnuc_core.engine.shards import ShardResult, ShardTask
from virnuc_core.errors import NotFiniteError, few
from virnuc_core.reads.store import OrfStore

PROOFS: Final = 2
MAX_SEARCHES: Final = 3  # in vain, before the shard is given up
MAX_GUILTY: Final = 16  # of one shard: more is not a poisoned row but a broken machine


def search(whole: ShardTask) -> Generator[ShardTask, bool, None]:
    """What to try next within one shard, which has ended workers. Each is answered by whether a worker survived it.

    They are probes, and after each round the shard again without the rows found, which is answered only when it has
    ended workers again. They end when the shard cannot be cleared."""
    guilty, in_vain = list[int](), 0
    while in_vain < MAX_SEARCHES and len(guilty) <= MAX_GUILTY:
        found = yield from _halve(whole, guilty)
        guilty, in_vain = [*guilty, *found], 0 if found else in_vain + 1
        yield whole.model_copy(update={"skip": tuple(sorted(guilty))})


def _halve(whole: ShardTask, guilty: list[int]) -> Generator[ShardTask, bool, list[int]]:
    """Probes; then the row that is the cause, if there is one."""
    parts = _halves(whole.lo, whole.hi)
    while parts:
        lo, hi = parts.pop()
        skip = tuple(row for row in guilty if lo <= row < hi)
        probe = whole.model_copy(update={"lo": lo, "hi": hi, "skip": skip, "probe": True})
        if hi - lo > 1:
            if not (yield probe):
                parts = _halves(lo, hi)  # it is in here; what is outside is looked at when the shard runs again
            continue
        deaths = 0
        while deaths < PROOFS and not (yield probe):
            deaths += 1
        if deaths == PROOFS:
            return [lo]
    return []


def _halves(lo: int, hi: int) -> list[tuple[int, int]]:
    """The parts of a range, the first one last; a single row is not cut."""
    middle = (lo + hi) // 2
    return [(middle, hi), (lo, middle)] if hi - lo > 1 else [(lo, hi)]


def judge_not_finite(result: ShardResult, task: ShardTask, store: OrfStore, models: Path, most: int) -> None:
    """Let up to `most` rows of a shard pass that hold NaN or infinity; those of `task.skip` are known to.

    Errors: `NotFiniteError` names the model that gives more of them, `WeightsError` its tensor that is not finite."""
    width = open_part(models, DnabertShape)[0].width
    left = np.ones(len(result.scores), bool)  # [rows] without a cause so far
    left[np.array(task.skip, np.int64) - task.lo] = False
    kinds: tuple[type[Shape], ...] = (DnabertShape, Esm2Shape, HeadShape)
    halves = result.embeddings[:, :width], result.embeddings[:, width:]
    for values, kind in zip((*halves, result.scores), kinds, strict=True):
        lost = np.flatnonzero(left & ~np.isfinite(values).all(axis=1))
        left[lost] = False
        most -= len(lost)
        if len(lost):
            _examine(models, kind)
        if most < 0:
            names = few(store.row_ids(row, row + 1)[0] for row in store.unique_row[lost + task.lo].tolist())
            raise NotFiniteError(
                f"{models / kind.part()}: of {len(left)} rows of a shard it gives NaN or infinity for {len(lost)} "
                f"({names}), though its weights are finite; use another --precision, or other weights"
            )


@functools.cache
def _examine(models: Path, kind: type[Shape]) -> None:
    """See, once, that the weights of a model are finite. Errors: `WeightsError`."""
    check_finite(models / kind.part(), *open_part(models, kind))
