"""Rows that are embedded again wait for rows of later shards, so that batches are full."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virnuc_core.config import EngineSpec
from virnuc_core.engine.loader import TokenRows, group_bounds, pack, row_capacity
from virnuc_core.engine.pool import Pool, PooledJob
from virnuc_core.engine.process import LocalWorkers, WorkerSpec
from virnuc_core.engine.repeats import QueuedRow, RepeatedShard, RowQueue
from virnuc_core.engine.shards import Computed, ShardResult, ShardTask, Waiting
from virnuc_core.errors import NotFiniteError
from virnuc_core.runfiles import Device
from virnuc_core.telemetry.tables import ShardDone

SLOTS = 4096
NO_RESULT = ShardResult(np.empty((0, 0), np.float32), np.empty((0, 0), np.float32))


def add_shard(queue: RowQueue, lengths: list[int]) -> RepeatedShard:
    """Queue rows of these lengths; the tokens of each are its own position."""
    rows = np.arange(len(lengths))
    shard = RepeatedShard(NO_RESULT, rows, len(rows))
    queue.add(shard, TokenRows(np.repeat(rows, lengths), np.cumsum([0, *lengths])))
    return shard


def run_all(shards: list[list[int]], slots: int) -> list[list[QueuedRow]]:
    """Return the batches of some shards, which come one after the other."""
    queue = RowQueue()
    batches = []
    added = []
    for lengths in shards:
        added.append(add_shard(queue, lengths))
        while rows := queue.take_full_batch(slots):
            batches.append(rows)
    for shard in added:
        while rows := queue.take_batch_of(shard, slots):
            batches.append(rows)
    assert len(queue) == 0
    return batches


@pytest.mark.parametrize("longest", [52, 102])
def test_padding_falls_from_a_fifth_to_a_twentieth(longest: int) -> None:
    """As in a run of 1 M reads, where the rows near the threshold of a shard fill 2.4 batches."""
    generator = np.random.default_rng(1)
    shards = []
    for _ in range(60):
        lengths = [52] * 189
        if longest > 52:
            lengths = generator.integers(20, longest + 1, 161).tolist()
        shards.append(lengths)
    n_tokens = sum(map(sum, shards))
    separate = [plan for lengths in shards for plan in pack(lengths, SLOTS, divisors=(1,))]
    padding_of_separate = 1 - n_tokens / (SLOTS * len(separate))
    padding = 1 - n_tokens / (SLOTS * len(run_all(shards, SLOTS)))
    assert padding_of_separate > 0.19
    assert padding < 0.02


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.integers(2, 130), max_size=40), max_size=8), st.sampled_from([130, 512])
)
def test_every_row_is_in_one_batch_of_its_group_which_has_room_for_it(
    shards: list[list[int]], slots: int
) -> None:
    batches = run_all(shards, slots)
    taken: Counter[tuple[int, int]] = Counter()
    for rows in batches:
        lengths = np.array([len(row.tokens) for row in rows])
        assert lengths.sum() <= slots
        assert len(rows) <= row_capacity(slots)
        assert len(set(group_bounds(lengths).tolist())) == 1
        for row in rows:
            assert (row.tokens == row.position).all()
            taken[id(row.shard), row.position] += 1
    assert set(taken.values()) <= {1}
    assert len(taken) == sum(map(len, shards))


def test_a_shard_is_not_passed_by_later_ones_for_ever() -> None:
    """The oldest row is in the next batch of its group, even if later rows would fill it better."""
    queue = RowQueue()
    oldest = add_shard(queue, [60])
    add_shard(queue, [64] * 4)
    rows = queue.take_full_batch(128)
    assert rows[0].shard is oldest


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        # 40 + 20 fit into 64, but neither 50 nor 60 fits beside 40.
        ([40, 50, 60, 20], [[0, 3], [1], [2]]),
        # 40 + 24 fill the batch before the row of 30 tokens is looked at.
        ([40, 50, 24, 30], [[0, 2], [1], [3]]),
    ],
)
def test_rows_that_are_left_for_later_batches_keep_their_order(
    lengths: list[int], batches: list[list[int]]
) -> None:
    taken = run_all([lengths], slots=64)
    assert [[row.position for row in rows] for rows in taken] == batches


def test_a_batch_is_full_if_it_has_as_many_rows_as_it_can_hold() -> None:
    """There is room for one row in each 8 token slots, so for 8 rows in 64."""
    queue = RowQueue()
    shard = add_shard(queue, [2] * 16)
    assert len(queue.take_full_batch(64)) == 8
    assert len(queue.take_full_batch(64)) == 8
    add_shard(queue, [2] * 7)
    assert queue.take_full_batch(64) == []
    assert queue.take_batch_of(shard, 64) == [], "its rows were taken before"


def test_rows_that_fill_all_slots_are_a_full_batch() -> None:
    queue = RowQueue()
    add_shard(queue, [32])
    assert queue.take_full_batch(64) == []
    add_shard(queue, [32])
    assert len(queue.take_full_batch(64)) == 2


# The parent: which shards of a worker that has died may be the cause.
JOB = {"run": "r", "store": "s", "reads_fingerprint": "f"}


class DeadWorker:
    """A worker that has ended without a word."""

    device, node_lost, failure, last_words, log = "one", False, None, "killed", None

    def __init__(self) -> None:
        self.received: list[int] = []

    def end(self, grace_s: float) -> int:
        return -9

    def send(self, task: ShardTask) -> None:
        self.received.append(task.shard)


@pytest.fixture
def pool(tmp_path: Path) -> Any:
    """A pool of one worker, without processes, and a job of six shards."""
    core = Device(id="one", kind="cpu", name="", core=0)
    engine = EngineSpec(max_shard_attempts=1)
    pool: Any = Pool([WorkerSpec(models="", device=core, engine=engine)], LocalWorkers("none"))
    tasks = [ShardTask(**JOB, shard=shard, lo=9 * shard, hi=9 * shard + 9) for shard in range(6)]
    pool._jobs["r"] = PooledJob("r", tmp_path, lambda _: None, set(range(6)), tasks)
    pool._todo.extend(tasks)
    start(pool)
    return pool


def start(pool: Any) -> DeadWorker:
    """Let a worker start on the only device, and send it tasks."""
    slot = pool._slots[0]
    slot.worker = DeadWorker()
    slot.ready_record = {}
    pool._feed()
    worker: DeadWorker = slot.worker
    return worker


def test_a_worker_gets_tasks_while_shards_wait(pool: Any) -> None:
    slot = pool._slots[0]
    assert slot.worker.received == [0, 1]
    for n_received in (3, 4):
        pool._handle_message(slot, slot.worker, Waiting())
        pool._feed()
        assert len(slot.worker.received) == n_received
    answer_oldest(pool)
    pool._feed()
    assert (len(slot.worker.received), slot.n_waiting) == (4, 1), "that one did not count before"


def answer_oldest(pool: Any, skipped: int = 0) -> None:
    """Let the worker answer its oldest task, of which some rows have no result."""
    slot = pool._slots[0]
    shard = slot.tasks[0].shard
    done = ShardDone("one", shard, 9, 1, 1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, batches=())
    done = replace(done, skipped=skipped)
    pool._handle_message(slot, slot.worker, Computed(done=done))


def test_no_shard_is_blamed_if_several_may_be_the_cause_and_each_is_alone_then(pool: Any) -> None:
    slot = pool._slots[0]
    job = pool._jobs["r"]
    pool._handle_message(slot, slot.worker, Waiting())
    pool._feed()
    assert [task.shard for task in slot.tasks] == [0, 1, 2]
    pool._handle_death(slot, slot.worker)
    assert not job.deaths_at_shard, "a search in an innocent shard would find nothing"
    assert not job.searches
    assert [task.shard for task in pool._todo] == [0, 1, 2, 3, 4, 5], "nothing is lost"
    assert (len(job.deaths), slot.n_waiting) == (1, 0)
    for shard in (0, 1):
        answer_next(pool, shard)
    worker = start(pool)
    assert worker.received == [2]
    pool._handle_death(slot, worker)
    assert job.deaths_at_shard == {2: 2}, "it was the cause of the first death, too"
    assert pool._todo[0].is_probe, "the cause is known now"


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
def test_a_row_that_kills_workers_is_searched_for_after_as_many_deaths_as_without_waiting_shards(
    pool: Any, max_attempts: int
) -> None:
    """A worker of an fp16 run has no shard that waits, so that the first death has one cause."""
    slot = pool._slots[0]
    engine = EngineSpec(max_shard_attempts=max_attempts)
    pool.specs = (pool.specs[0].model_copy(update={"engine": engine}),)
    pool._handle_message(slot, slot.worker, Waiting())
    pool._handle_death(slot, slot.worker)
    n_deaths = 1
    answer_next(pool, shard=0)
    while not pool._todo[0].is_probe:
        pool._handle_death(slot, start(pool))
        n_deaths += 1
    # With a single death it is not known yet which shard to search in.
    assert n_deaths == max(2, max_attempts)


def test_a_death_with_several_possible_causes_is_charged_to_one_shard_only(pool: Any) -> None:
    slot = pool._slots[0]
    job = pool._jobs["r"]
    pool._handle_message(slot, slot.worker, Waiting())
    pool._handle_death(slot, slot.worker)  # at shard 0 or 1
    engine = EngineSpec(max_shard_attempts=9)
    pool.specs = (pool.specs[0].model_copy(update={"engine": engine}),)
    pool._handle_death(slot, start(pool))  # at shard 0, which is alone
    answer_next(pool, shard=0)
    pool._handle_death(slot, start(pool))  # at shard 1, which is alone
    assert job.deaths_at_shard == {1: 1}
    assert not job.unclear_deaths


def test_a_committed_shard_is_not_suspected_of_an_earlier_death_any_more(tmp_path: Path) -> None:
    job = PooledJob(run="r", logs=tmp_path, on_event=print, remaining={2, 3})
    job.unclear_deaths = [{1, 2}, {1}]
    job.clear_shard(1)
    assert [shard for shard in (1, 2, 3) if job.is_suspect(shard)] == [2]
    assert job.charge_death(2) == 2, "the death that 1 or 2 had caused, and this one"
    assert not job.unclear_deaths, "the death without a cause that is left came from outside"


def answer_next(pool: Any, shard: int) -> None:
    """Let a new worker compute the next shard, which it gets alone."""
    assert start(pool).received == [shard]
    answer_oldest(pool)


def test_a_gpu_worker_that_died_while_it_loaded_is_followed_by_one_without_kept_kernels(
    pool: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that was cut off by a power failure ends every worker that loads it."""
    slot = pool._slots[0]
    gpu = Device(id="GPU-1", kind="cuda", name="")
    for device, is_gpu in ((slot.spec.device, False), (gpu, True)):
        slot.spec = slot.spec.model_copy(update={"device": device})
        slot.unready_deaths = 0
        for _ in range(2):
            worker = start(pool)
            slot.ready_record = None  # it has not loaded the weights yet
            pool._handle_death(slot, worker)
            assert slot.spec.fresh_kernels == is_gpu
    assert caplog.text.count("remove the folder ~/.triton/cache") == 1


def test_a_death_without_shards_that_wait_belongs_to_the_oldest_one(pool: Any) -> None:
    slot = pool._slots[0]
    pool._handle_death(slot, slot.worker)
    assert pool._jobs["r"].deaths_at_shard == {0: 1}
    assert not pool._jobs["r"].unclear_deaths


def test_rows_that_are_not_finite_stop_the_run_if_they_are_more_than_its_limit(pool: Any) -> None:
    """A row that the task leaves out on purpose is none of them."""
    slot = pool._slots[0]
    limit = {"max_not_finite": 2}
    slot.tasks[0] = slot.tasks[0].model_copy(update=limit | {"skipped_rows": (4,)})
    slot.tasks[1] = slot.tasks[1].model_copy(update=limit)
    answer_oldest(pool, skipped=3)
    assert pool._jobs["r"].n_not_finite == 2
    with pytest.raises(NotFiniteError, match="3 rows are not finite"):
        answer_oldest(pool, skipped=1)
