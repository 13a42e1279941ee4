"""The search for rows that kill workers: which parts of a shard to compute next."""

from collections.abc import Generator
from typing import Final

from virnuc_core.engine.shards import ShardTask

DEATHS_TO_CONFIRM: Final = 2  # workers that a row must kill alone before it is the cause
N_SPREAD_PROBES: Final = 5  # rows tried first, spread over the shard
MAX_POISON_ROWS: Final = 16  # in one shard; more mean a broken machine
MAX_FAILED_ROUNDS: Final = 3  # in a row, before the shard is given up

Probes = Generator[ShardTask, bool, None]
Row = Generator[ShardTask, bool, int | None]


def bisect_poison_rows(shard: ShardTask) -> Probes:
    """Yield probes that bisect a shard for the rows that kill workers.

    Send back whether the worker survived each probe. After each round the whole shard is yielded,
    without the rows found so far; send back false if it kills a worker again. A row is guilty only
    after it has killed `DEATHS_TO_CONFIRM` workers alone, because a worker may also be killed from
    outside. The generator stops when the shard cannot be cleared. It stops early if each of
    several unrelated rows kills a worker: then no row is the cause.

    Args:
        shard: The task at which workers died.

    Yields:
        Probes, which are computed but not committed, and the whole shard, which is committed.
    """
    any_row_kills = yield from _kills_at_every_spread_row(shard)
    if any_row_kills:
        yield shard
        return
    guilty: list[int] = []
    failed_rounds = 0
    while failed_rounds < MAX_FAILED_ROUNDS and len(guilty) <= MAX_POISON_ROWS:
        row = yield from _bisect_one_row(shard, guilty)
        if row is None:
            failed_rounds += 1
        else:
            guilty = sorted([*guilty, row])
            failed_rounds = 0
        yield shard.model_copy(update={"skip": tuple(guilty)})


def _kills_at_every_spread_row(shard: ShardTask) -> Generator[ShardTask, bool, bool]:
    """Probe a few single rows that lie far apart, and return whether each kills a worker.

    A shard with too few rows for such a test gives false.
    """
    step = max(1, (shard.hi - shard.lo) // N_SPREAD_PROBES)
    rows = range(shard.lo, shard.hi, step)[:N_SPREAD_PROBES]
    for row in rows:
        worker_survived = yield _probe(shard, row, row + 1, skip=())
        if worker_survived:
            return False
    return len(rows) == N_SPREAD_PROBES


def _bisect_one_row(shard: ShardTask, guilty: list[int]) -> Row:
    """Narrow the shard down to one more row that kills workers, and return it.

    Args:
        shard: The whole shard.
        guilty: Rows that are known already, and left out of every probe.

    Returns:
        The row, after it has killed `DEATHS_TO_CONFIRM` workers alone; None if the workers
        survived both halves of a range.
    """
    lo = shard.lo
    hi = shard.hi
    deaths_alone = 0
    while deaths_alone < DEATHS_TO_CONFIRM:
        middle = max(lo + 1, (lo + hi) // 2)
        worker_survived = yield _probe(shard, lo, middle, guilty)
        if not worker_survived:
            # The row is in the lower half. The upper half is tested when the shard runs again.
            hi = middle
        else:
            if middle == hi:
                return None
            worker_survived = yield _probe(shard, middle, hi, guilty)
            if worker_survived:
                return None
            lo = middle
        if hi - lo == 1:
            deaths_alone += 1
    return lo


def _probe(shard: ShardTask, lo: int, hi: int, skip: list[int] | tuple[int, ...]) -> ShardTask:
    """Make a task for the rows from `lo` to `hi` that is computed but not committed."""
    skipped_here = tuple(row for row in skip if lo <= row < hi)
    return shard.model_copy(update={"lo": lo, "hi": hi, "skip": skipped_here, "probe": True})
