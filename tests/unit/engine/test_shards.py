"""Shards: a commit is a rename, its bytes are a function of the result, and damage is seen."""

from __future__ import annotations

import os
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.engine import shards
from virnuc_core.engine.shards import ShardPlan, ShardResult, make_plan
from virnuc_core.errors import ShardError, StorageError
from virnuc_core.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def result(rows: int, seed: int = 0) -> ShardResult:
    rng = np.random.default_rng(seed)
    return ShardResult(rng.random((rows, 6), dtype=np.float32), rng.random((rows, 2), dtype=np.float32))


@given(st.lists(st.integers(1, 300), max_size=200), st.integers(64, 5000))
def test_a_plan_covers_every_sequence_once_within_the_size(lengths: list[int], size: int) -> None:
    offsets = np.array([0, *np.cumsum(lengths)], dtype=np.int64)
    plan = make_plan(offsets, size, 1024, "f")
    assert plan.bounds[0] == 0
    assert plan.bounds[-1] == len(lengths)
    assert all(a < b for a, b in zip(plan.bounds, plan.bounds[1:], strict=False))
    for shard in range(len(plan)):
        lo, hi = plan.range(shard)
        assert hi - lo == 1 or sum(lengths[lo:hi]) + 2 * (hi - lo) <= size


def test_a_committed_shard_reads_back_and_leaves_no_temporary_file(run: RunDir) -> None:
    plan = ShardPlan(bounds=(0, 3, 5), fingerprint="f")
    shards.commit(run, plan, 0, result(3))
    again = shards.read_shard(run, plan, 0)
    assert np.array_equal(again.embeddings, result(3).embeddings)
    assert sorted(p.name for p in run.shards.iterdir()) == ["00000.h5"]


def test_the_same_result_gives_the_same_bytes(tmp_path: Path) -> None:
    plan = ShardPlan(bounds=(0, 3), fingerprint="f")
    one = shards.commit(RunDir(tmp_path / "a"), plan, 0, result(3)).read_bytes()
    two = shards.commit(RunDir(tmp_path / "b"), plan, 0, result(3)).read_bytes()
    assert one == two


def test_a_result_of_the_wrong_length_is_refused(run: RunDir) -> None:
    with pytest.raises(ShardError, match="2 rows for 3 sequences"):
        shards.commit(run, ShardPlan(bounds=(0, 3), fingerprint="f"), 0, result(2))
    assert not list(run.root.rglob("*.h5"))


def test_a_failed_write_leaves_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError, match="No space"):
        shards.commit(run, ShardPlan(bounds=(0, 3), fingerprint="f"), 0, result(3))
    assert list(run.shards.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "other range", "other run"])
def test_damage_is_seen_and_the_file_moved_aside(run: RunDir, damage: str) -> None:
    plan = ShardPlan(bounds=(0, 3, 5), fingerprint="f")
    path = shards.commit(run, plan, 0, result(3))
    shards.commit(run, plan, 1, result(2, seed=1))
    body = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(body[: len(body) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "other range":
        os.replace(shards.shard_path(run, 1), path)
        shards.commit(run, plan, 1, result(2, seed=1))
    elif damage == "other run":
        shards.commit(run, ShardPlan(bounds=(0, 3, 5), fingerprint="g"), 0, result(3))
    else:
        with h5py.File(path, "r") as file:
            at = file["embeddings"].id.get_offset()
        body[at + 5] ^= 1
        path.write_bytes(body)
    good, moved = shards.committed(run, plan)
    assert good == [1]
    assert len(moved) == 1
    assert "shard 00000" in moved[0]
    assert len(list((run.shards / "damaged").iterdir())) == 1


def test_scores_come_back_in_order_and_nan_means_failed(run: RunDir) -> None:
    plan = ShardPlan(bounds=(0, 3, 5), fingerprint="f")
    shards.write_plan(run, plan)
    first, second = result(3), result(2, seed=1)
    second.scores[1] = np.nan
    shards.commit(run, plan, 1, second)
    shards.commit(run, plan, 0, first)
    scores, failed = shards.read_scores(run)
    assert np.array_equal(scores[:4], np.concatenate([first.scores, second.scores[:1]]))
    assert failed.tolist() == [False, False, False, False, True]


def test_the_virtual_dataset_shows_all_shards_also_after_a_move(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "here")
    plan = ShardPlan(bounds=(0, 3, 5), fingerprint="f")
    shards.write_plan(run, plan)
    parts = [result(3), result(2, seed=1)]
    for shard, part in enumerate(parts):
        shards.commit(run, plan, shard, part)
    shards.write_virtual_embeddings(run)
    run.root.rename(tmp_path / "there")
    with h5py.File(tmp_path / "there" / "embeddings.h5", "r") as file:
        assert np.array_equal(file["embeddings"][:], np.concatenate([p.embeddings for p in parts]))
        assert np.array_equal(file["scores"][2:4], np.concatenate([p.scores for p in parts])[2:4])
        assert file["embeddings"].is_virtual


def test_the_virtual_dataset_does_not_know_the_time(tmp_path: Path) -> None:
    written = []
    for name in ("a", "b"):
        run, plan = RunDir(tmp_path / name), ShardPlan(bounds=(0, 3), fingerprint="f")
        shards.write_plan(run, plan)
        shards.commit(run, plan, 0, result(3))
        time.sleep(1.1 * len(written))
        written.append(shards.write_virtual_embeddings(run).read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize("start", range(0, 64, 8))
def test_every_single_flipped_bit_of_the_file_is_seen(run: RunDir, start: int) -> None:
    plan = ShardPlan(bounds=(0, 3), fingerprint="f")
    path = shards.commit(run, plan, 0, result(3))
    whole = path.read_bytes()
    for at in range(start, len(whole), 64):
        body = bytearray(whole)
        body[at] ^= 1 << (at % 8)
        path.write_bytes(body)
        with pytest.raises(ShardError):
            shards.read_shard(run, plan, 0)
