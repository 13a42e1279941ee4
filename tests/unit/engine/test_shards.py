"""Shards: a commit is a rename, its bytes are a function of the result, and damage is seen."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.damage import flip_bit
from virnuc_core.checked_files import SEAL_BYTES
from virnuc_core.config import EngineSpec
from virnuc_core.engine import shards
from virnuc_core.engine.shards import SHARD_SEAL, ShardPlan, ShardResult, make_plan
from virnuc_core.errors import InputError, ShardError, StorageError
from virnuc_core.report.cosines import cosines
from virnuc_core.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def result(rows: int, seed: int = 0) -> ShardResult:
    rng = np.random.default_rng(seed)
    return ShardResult(
        rng.random((rows, 6), dtype=np.float32), rng.random((rows, 2), dtype=np.float32)
    )


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
    second_read = shards.read_shard(run, plan, 0)
    assert np.array_equal(second_read.embeddings, result(3).embeddings)
    assert sorted(p.name for p in run.shards.iterdir()) == ["00000.h5"]


def test_a_plan_without_bounds_is_not_readable(run: RunDir) -> None:
    shards.write_plan(run, ShardPlan(bounds=(0, 3), fingerprint="f"))
    run.plan.write_text(run.plan.read_text().replace("0,3", "").replace("0, 3", ""))
    with pytest.raises(ShardError, match="not a readable shard plan"):
        shards.read_plan(run)


def test_the_same_result_gives_the_same_bytes(tmp_path: Path) -> None:
    plan = ShardPlan(bounds=(0, 3), fingerprint="f")
    first_bytes = shards.commit(RunDir(tmp_path / "a"), plan, 0, result(3)).read_bytes()
    two = shards.commit(RunDir(tmp_path / "b"), plan, 0, result(3)).read_bytes()
    assert first_bytes == two


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
def test_a_damaged_shard_is_detected_and_moved(run: RunDir, damage: str) -> None:
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
            offset = file["embeddings"].id.get_offset()
        body[offset + 5] ^= 1
        path.write_bytes(body)
    good, damaged_shards = shards.committed(run, plan)
    assert good == [1]
    assert len(damaged_shards) == 1
    assert "shard 00000" in damaged_shards[0]
    assert len(list((run.shards / "damaged").iterdir())) == 1


def test_a_shard_that_disappears_while_shards_are_checked_is_not_damaged(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ShardPlan(bounds=(0, 3, 6), fingerprint="f")
    shards.commit(run, plan, 0, result(3))
    # The list of files still has the second shard.
    monkeypatch.setattr(shards, "path_exists", lambda _: True)
    assert shards.committed(run, plan) == ([0], [])


def test_a_shard_in_the_place_of_another_one_of_its_size_is_noticed(run: RunDir) -> None:
    plan = ShardPlan(bounds=(0, 3, 6), fingerprint="f")
    shards.write_plan(run, plan)
    path = shards.commit(run, plan, 0, result(3))
    os.replace(shards.commit(run, plan, 1, result(3, seed=1)), path)
    with pytest.raises(ShardError, match="not what was committed"):
        shards.read_scores(run, only=[0])
    assert shards.committed(run, plan)[0] == []


def test_a_shard_of_another_run_is_called_so(run: RunDir) -> None:
    plan = ShardPlan(bounds=(0, 3), fingerprint="f")
    shards.commit(run, plan.model_copy(update={"fingerprint": "g"}), 0, result(3))
    with pytest.raises(ShardError, match="belongs to another run"):
        shards.read_shard(run, plan, 0)


def test_a_shard_with_another_number_of_rows_is_no_file_of_this_shard(run: RunDir) -> None:
    plan = ShardPlan(bounds=(0, 3), fingerprint="f")
    shards.commit(run, plan.model_copy(update={"bounds": (0, 2)}), 0, result(2))
    with pytest.raises(ShardError, match="2 x 6 values of type float32, not 3 rows"):
        shards.read_shard(run, plan, 0)


def change_dataset(path: Path, name: str) -> None:
    """Flip a bit of one of the numbers in the file of a shard."""
    with h5py.File(path) as file:
        place = file[name].id.get_offset()
    flip_bit(path, place=place + 2, bit=0)


def test_a_changed_score_is_noticed_although_the_seal_is_not_compared(run: RunDir) -> None:
    """Only the scores are read here; to compare the seal, all of the file would be read."""
    plan = ShardPlan(bounds=(0, 3), fingerprint="f")
    shards.write_plan(run, plan)
    path = shards.commit(run, plan, 0, result(3))
    change_dataset(path, "scores")
    with pytest.raises(ShardError, match=r"not what was committed \(checksum\)"):
        shards.read_scores(run)


def seal_again(path: Path) -> None:
    """Give the file of a shard the seal of its present bytes."""
    body = path.read_bytes()[SEAL_BYTES:]
    path.write_bytes(SHARD_SEAL.seal_of(body) + body)


def test_a_shard_of_another_run_is_noticed_although_it_names_this_one(run: RunDir) -> None:
    plan = ShardPlan(bounds=(0, 3), fingerprint="f")
    other_plan = plan.model_copy(update={"fingerprint": "g"})
    path = shards.commit(run, other_plan, 0, result(3))
    with h5py.File(path, "r+") as file:
        file.attrs["fingerprint"] = "f"
    seal_again(path)
    with pytest.raises(ShardError, match="not what was committed"):
        shards.read_shard(run, plan, 0)


@pytest.mark.parametrize("name", ["embeddings", "scores"])
def test_a_changed_dataset_is_noticed_although_the_seal_is_right(run: RunDir, name: str) -> None:
    """As if a program had written other numbers, and then the seal of the new bytes."""
    plan = ShardPlan(bounds=(0, 3), fingerprint="f")
    path = shards.commit(run, plan, 0, result(3))
    change_dataset(path, name)
    seal_again(path)
    with pytest.raises(ShardError, match=r"not what was committed \(checksum\)"):
        shards.read_shard(run, plan, 0)


def test_a_damaged_file_never_replaces_an_earlier_one(run: RunDir) -> None:
    plan = ShardPlan(bounds=(0, 3), fingerprint="f")
    folder = run.shards / "damaged"

    def damage(content: bytes) -> None:
        """Damage the shard, and let it be moved."""
        shards.commit(run, plan, 0, result(3)).write_bytes(content)
        shards.committed(run, plan)

    damage(b"first")
    damage(b"second")
    # Somebody has looked at the first one and removed it.
    (folder / "00000.0.h5").unlink()
    damage(b"third")
    contents = sorted(path.read_bytes() for path in folder.iterdir())
    assert contents == [b"second", b"third"]


@pytest.mark.parametrize("fault", ["missing", "truncated", "no embeddings", "no table"])
def test_embeddings_of_a_run_whose_first_shard_is_lost_raise_an_error_of_shards(
    run: RunDir, fault: str
) -> None:
    plan = ShardPlan(bounds=(0, 3, 5), fingerprint="f")
    shards.write_plan(run, plan)
    first_path = shards.commit(run, plan, 0, result(3))
    shards.commit(run, plan, 1, result(2, seed=1))
    if fault == "missing":
        first_path.unlink()
    elif fault == "truncated":
        first_path.write_bytes(first_path.read_bytes()[:100])
    else:
        with h5py.File(first_path, "w") as file:
            if fault == "no table":
                file.create_dataset("embeddings", data=1.0)
    with pytest.raises(ShardError, match=str(first_path)):
        shards.read_embeddings(run, np.array([4]))
    with pytest.raises(ShardError, match=str(first_path)):
        shards.write_virtual_embeddings(run)


def test_commits_of_other_machines_are_seen_despite_attribute_caching(
    run: RunDir, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder is shown as it was until this machine changes something in it, as NFS does while attributes are kept."""
    plan, shard_file, late = ShardPlan(bounds=(0, 3, 5), fingerprint="f"), shards.shard_path, [True]
    shards.write_plan(run, plan)
    original_run = RunDir(tmp_path_factory.mktemp("as-it-was"))
    shards.commit(original_run, ShardPlan(bounds=(0, 3, 5), fingerprint="of before"), 0, result(3))
    for shard, rows in enumerate((3, 2)):
        shards.commit(run, plan, shard, result(rows, seed=shard))
    touch = Path.touch

    def changed(path: Path) -> None:
        touch(path)
        late[0] = False

    monkeypatch.setattr(Path, "touch", changed)
    monkeypatch.setattr(
        shards, "shard_path", lambda of, shard: shard_file(original_run if late[0] else of, shard)
    )
    for look in (
        lambda: shards.committed(run, plan) == ([0, 1], []),
        lambda: np.array_equal(
            shards.read_scores(run, [0])[0], result(3).scores
        ),  # another file before
        lambda: np.array_equal(
            shards.read_scores(run, [1])[0], result(2, seed=1).scores
        ),  # none before
    ):
        late[0] = True
        assert look()


def test_scores_come_back_in_order_and_nan_means_failed(run: RunDir) -> None:
    plan = ShardPlan(bounds=(0, 3, 5), fingerprint="f")
    shards.write_plan(run, plan)
    first_result, second = result(3), result(2, seed=1)
    second.scores[1] = np.nan
    shards.commit(run, plan, 1, second)
    shards.commit(run, plan, 0, first_result)
    scores, failed_rows = shards.read_scores(run)
    assert np.array_equal(scores[:4], np.concatenate([first_result.scores, second.scores[:1]]))
    assert failed_rows.tolist() == [False, False, False, False, True]


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


def test_without_a_sequence_the_virtual_dataset_is_an_empty_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    shards.write_plan(run, ShardPlan(bounds=(0,), fingerprint="f"))
    with h5py.File(shards.write_virtual_embeddings(run), "r") as file:
        assert (file["embeddings"][:].shape, file["scores"][:].shape) == ((0, 0), (0, 2))
        assert file.attrs["fingerprint"] == "f"


def test_the_virtual_dataset_has_no_timestamps(tmp_path: Path) -> None:
    written_shards = []
    for name in ("a", "b"):
        run, plan = RunDir(tmp_path / name), ShardPlan(bounds=(0, 3), fingerprint="f")
        shards.write_plan(run, plan)
        shards.commit(run, plan, 0, result(3))
        time.sleep(1.1 * len(written_shards))
        written_shards.append(shards.write_virtual_embeddings(run).read_bytes())
    assert written_shards[0] == written_shards[1]


@pytest.mark.parametrize("start", range(0, 64, 8))
def test_every_single_flipped_bit_of_the_file_is_seen(run: RunDir, start: int) -> None:
    plan = ShardPlan(bounds=(0, 3), fingerprint="f")
    path = shards.commit(run, plan, 0, result(3))
    content = path.read_bytes()
    for offset in range(start, len(content), 64):
        body = bytearray(content)
        body[offset] ^= 1 << (offset % 8)
        path.write_bytes(body)
        with pytest.raises(ShardError):
            shards.read_shard(run, plan, 0)


# --- many shards, and the limit of open files ---

PRINTS = {"reads": "r", "head": "h"}


def test_a_run_has_few_enough_shards_to_be_opened_at_once(caplog: pytest.LogCaptureFixture) -> None:
    lengths = np.random.default_rng(1).integers(20, 90, 30_000)
    offsets = np.array([0, *np.cumsum(lengths)], dtype=np.int64)
    engine_spec = EngineSpec(token_budget=256, shard_tokens=512)
    with caplog.at_level("INFO"):
        engine, plan = shards.plan_run(offsets, engine_spec, PRINTS, "cpu")
    assert 600 < len(plan) <= shards.MAX_SHARDS
    assert plan.bounds[-1] == len(lengths)
    assert engine == engine_spec.model_copy(update={"shard_tokens": engine.shard_tokens})
    assert f"shard_tokens 512 → {engine.shard_tokens}" in caplog.text
    assert shards.plan_run(offsets, engine, PRINTS, "cpu") == (engine, plan), (
        "what was enough stays"
    )
    assert len(shards.make_plan(offsets, 512, 256, "f")) > shards.MAX_SHARDS


def many_shards(run: RunDir, count: int) -> ShardPlan:
    plan = ShardPlan(bounds=tuple(range(0, 2 * count + 1, 2)), fingerprint="f")
    shards.write_plan(run, plan)
    for shard in range(count):
        shards.commit(run, plan, shard, result(2, seed=shard))
    shards.write_virtual_embeddings(run)
    return plan


@contextmanager
def open_files(more: int) -> Iterator[None]:
    """So many files may be opened beside those that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + more, hard)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_every_row_is_read_whatever_the_limit_of_open_files(tmp_path: Path) -> None:
    many_shards(RunDir(tmp_path), 60)
    with open_files(20):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        (cosine,) = cosines(tmp_path, tmp_path)
        assert (cosine.n, cosine.minimum) == (120, pytest.approx(1))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == limit


def test_a_limit_that_cannot_be_raised_is_named(tmp_path: Path) -> None:
    many_shards(RunDir(tmp_path), 60)
    program = (
        "import resource, sys; from pathlib import Path; from virnuc_core.report.cosines import cosines; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)); cosines(Path(sys.argv[1]), Path(sys.argv[1]))"
    )
    child = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "if 120 files" in child.stderr.splitlines()[-1], child.stderr
    assert "ulimit -n" in child.stderr.splitlines()[-1]


@pytest.mark.parametrize("damage", ["missing", "empty", "no array"])
def test_a_shard_that_cannot_be_read_is_an_error_and_no_row_of_nan(
    run: RunDir, damage: str
) -> None:
    plan = many_shards(run, 3)
    path = shards.shard_path(run, 1)
    path.unlink()
    if damage == "empty":
        path.touch()
    elif damage == "no array":
        h5py.File(path, "w").close()
    else:
        with h5py.File(run.embeddings) as file:
            assert np.isinf(file["embeddings"][slice(*plan.range(1))]).all(), (
                "NaN is the mark of rows that failed"
            )
    with pytest.raises(InputError, match=r"00001\.h5: cannot be read .*; run again"):
        cosines(run.root, run.root)


def test_a_flipped_bit_in_an_embedding_is_an_error_and_no_other_cosine(run: RunDir) -> None:
    many_shards(run, 3)
    change_dataset(shards.shard_path(run, 1), "embeddings")
    with pytest.raises(InputError, match=r"00001\.h5: has other bytes than were committed"):
        cosines(run.root, run.root)
