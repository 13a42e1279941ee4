"""Find the rows of a shard that kill worker processes.

A row is one sequence. The search computes parts of the shard (probes) and sees whether the worker
survives. The pool computes the probes; this module only decides which one is next.
"""

from collections.abc import Generator, Sequence
from typing import Final

from virnuc_core.engine.shards import ShardTask

# A row is taken for the cause after it has killed this many workers alone. A single worker may have
# been killed from outside.
DEATHS_TO_CONFIRM: Final = 2
# Single rows, spread over the shard, that are tried first.
N_SPREAD_PROBES: Final = 5
# The search ends after this many rows in one shard: the machine is broken, not the rows.
MAX_POISON_ROWS: Final = 16
# The search ends after this many rounds in a row that found no row.
MAX_FAILED_ROUNDS: Final = 3

# Generators that yield the next probe and are sent true if the worker survived it.
Probes = Generator[ShardTask, bool, None]
RowSearch = Generator[ShardTask, bool, int | None]


def bisect_poison_rows(shard: ShardTask) -> Probes:
    """Search a shard for the rows that kill workers, by computing smaller and smaller parts.

    The caller computes each task that is yielded. For a probe, which is a part of the shard, it
    sends back true if the worker survived.

    The search has rounds. A round looks for one more row, and then yields the whole shard without
    all rows that were found. If a worker survives this task, the shard is done, and the caller asks
    for no further task. So the generator goes on only after another death, with the next round.

    The generator ends if the shard cannot be saved. If several rows that lie far apart each kill a
    worker, the cause is not a row: then only the whole shard is tried once more.

    Args:
        shard: The task at which workers died.

    Yields:
        Probes (tasks for a part of the shard, which are not committed), and the task for the whole
        shard, which is committed.
    """
    every_row_kills = yield from _kills_at_every_spread_row(shard)
    if every_row_kills:
        yield shard
        return
    guilty_rows: list[int] = []
    failed_rounds = 0
    while failed_rounds < MAX_FAILED_ROUNDS and len(guilty_rows) <= MAX_POISON_ROWS:
        row = yield from _bisect_one_row(shard, guilty_rows)
        if row is None:
            # No single row was found. Below, the shard is tried again without the earlier ones.
            failed_rounds += 1
        else:
            guilty_rows = sorted([*guilty_rows, row])
            failed_rounds = 0
        yield shard.model_copy(update={"skipped_rows": tuple(guilty_rows)})


def _kills_at_every_spread_row(shard: ShardTask) -> Generator[ShardTask, bool, bool]:
    """Compute a few single rows that lie far apart, and return true if each kills a worker.

    Return false as soon as a worker survives one of them, and also if the shard has too few rows.
    This generator yields a task for each row, and is sent true if the worker survived it.
    """
    # The first row, and others at equal distances after it.
    step = max(1, (shard.hi - shard.lo) // N_SPREAD_PROBES)
    rows = range(shard.lo, shard.hi, step)[:N_SPREAD_PROBES]
    for row in rows:
        worker_survived = yield _probe(shard, row, row + 1, guilty_rows=())
        if worker_survived:
            return False
    return len(rows) == N_SPREAD_PROBES


def _bisect_one_row(shard: ShardTask, guilty_rows: list[int]) -> RowSearch:
    """Search for one more row that kills workers, by halving the range of rows again and again.

    This generator yields a task for each half, and is sent true if the worker survived it.

    Args:
        shard: The task of the whole shard.
        guilty_rows: Rows that were found before. They are left out of every probe.

    Returns:
        The row, after it has killed `DEATHS_TO_CONFIRM` workers alone. None if the workers
        survived both halves of a range, so that the death before had another cause.
    """
    # The row is searched in the range from `lo` to `hi - 1`.
    lo = shard.lo
    hi = shard.hi
    deaths_alone = 0
    while deaths_alone < DEATHS_TO_CONFIRM:
        # With a single row left, the lower half is this row, and the upper half is empty.
        middle = max(lo + 1, (lo + hi) // 2)
        worker_survived = yield _probe(shard, lo, middle, guilty_rows)
        if not worker_survived:
            # A guilty row is in the lower half. There may be others in the upper half: they are
            # found in a later round, if the whole shard kills a worker again.
            hi = middle
        else:
            if middle == hi:
                # A single row, which the worker survives now.
                return None
            worker_survived = yield _probe(shard, middle, hi, guilty_rows)
            if worker_survived:
                return None
            lo = middle
        if hi - lo == 1:
            # The last death was at this single row.
            deaths_alone += 1
    return lo


def _probe(shard: ShardTask, lo: int, hi: int, guilty_rows: Sequence[int]) -> ShardTask:
    """Return a task to compute the rows from `lo` to `hi - 1` of a shard without committing them.

    Rows of `guilty_rows` that lie in this range are left out.
    """
    skipped_here = tuple(row for row in guilty_rows if lo <= row < hi)
    return shard.model_copy(
        update={"lo": lo, "hi": hi, "skipped_rows": skipped_here, "is_probe": True}
    )
