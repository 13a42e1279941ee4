"""The search for a row that ends workers: it finds the guilty, clears the innocent, and ends."""

from __future__ import annotations

import random
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.config import EngineSpec
from virnuc_core.engine.poison_rows import bisect_poison_rows
from virnuc_core.engine.pool import Pool, PooledJob
from virnuc_core.engine.process import LocalWorkers, WorkerSpec
from virnuc_core.engine.shards import ShardTask
from virnuc_core.errors import ShardError
from virnuc_core.runfiles import Device

JOB: dict[str, Any] = {"run": "run", "store": "", "reads_fingerprint": ""}


def play_search(
    probes: Generator[ShardTask, bool, None],
    poison_rows: set[int],
    *,
    outside_kills: random.Random | None = None,
) -> tuple[ShardTask | None, int]:
    """Play pool and workers until the shard itself is computed.

    Args:
        probes: The search.
        poison_rows: Rows that kill workers.
        outside_kills: If given, one worker in twenty is killed from outside.

    Returns:
        The final task, None for a shard that was given up; and the number of deaths.
    """
    task = next(probes)
    n_deaths = 0
    for _ in range(10_000):
        rows = set(range(task.lo, task.hi)) - set(task.skipped_rows)
        is_killed = bool(rows & poison_rows)
        if outside_kills is not None and outside_kills.random() < 0.05:
            is_killed = True
        if is_killed:
            n_deaths += 1
            try:
                task = probes.send(False)
            except StopIteration:
                return None, n_deaths
        elif task.is_probe:
            task = probes.send(True)
        else:
            return task, n_deaths
    raise AssertionError("the search does not end")


@given(st.integers(1, 400), st.data())
def test_poison_rows_and_no_others_are_set_aside(rows: int, data: st.DataObject) -> None:
    guilty = set(data.draw(st.lists(st.integers(100, 100 + rows - 1), min_size=1, max_size=3)))
    task, deaths = play_search(
        bisect_poison_rows(ShardTask(**JOB, shard=7, lo=100, hi=100 + rows)), guilty
    )
    assert task is not None
    assert set(task.skipped_rows) == guilty
    assert (task.lo, task.hi, task.is_probe) == (100, 100 + rows, False)
    assert deaths <= len(guilty) * (2 * rows.bit_length() + 4)


@pytest.mark.parametrize("rows", [5, 6, 9, 4_000])
def test_a_fault_of_every_row_is_recognised_after_six_deaths(rows: int) -> None:
    task, deaths = play_search(
        bisect_poison_rows(ShardTask(**JOB, shard=7, lo=100, hi=100 + rows)),
        set(range(100, 100 + rows)),
    )
    assert (task, deaths) == (None, 6), "one for each of five rows, one more for the shard"


@given(st.integers(0, 1000))
def test_a_shard_killed_only_from_outside_keeps_its_rows_or_is_given_up(seed: int) -> None:
    task, _ = play_search(
        bisect_poison_rows(ShardTask(**JOB, shard=7, lo=0, hi=64)),
        set(),
        outside_kills=random.Random(seed),
    )
    assert (
        task is None or len(task.skipped_rows) <= 1
    )  # two kills in a row of one single-row probe cannot be told from guilt


def test_a_shard_that_no_single_row_explains_is_reported_by_number(tmp_path: Path) -> None:
    core = Device(id="cpu-core-0", kind="cpu", name="", core=0)
    pool = Pool([WorkerSpec(models="", device=core, engine=EngineSpec())], LocalWorkers("none"))
    pool._jobs[JOB["run"]] = job = PooledJob(JOB["run"], tmp_path, lambda _: None, {7})

    def die_twenty_times() -> None:
        task = ShardTask(**JOB, shard=7, lo=0, hi=64)
        for _ in range(20):
            task = pool._task_after_death(task, "boom", out_of_memory=False)
            while task.is_probe:
                task = job.searches[7].send(True)

    with pytest.raises(ShardError, match=r"shard 00007: ends workers, and no single row .* boom"):
        die_twenty_times()
