"""Runs that write no shards: the same results, nothing to go on from, and no embeddings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from virnuc_core.config import ClassifySpec, Devices, EngineSpec
from virnuc_core.engine.shards import ShardPlan, scores_as_text, scores_from_texts
from virnuc_core.errors import ConfigError, ShardError
from virnuc_core.pipeline import NO_CHECKPOINTS, read_summary
from virnuc_core.reads.stage import StageSummary
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import read_record

from .runs import ALL_CORES, ONE_CORE, RESULTS, SMALL, Staged, classify_store, copy_run

pytestmark = pytest.mark.usefixtures("forked_workers")

NO_COMMITS = SMALL.model_copy(update={"commit": False})


def tables(root: Path) -> dict[str, bytes]:
    """Return the bytes of the result files; they must be those of a run with commits."""
    return {name: (root / name).read_bytes() for name in RESULTS}


def test_the_results_are_those_of_a_run_with_commits(
    tmp_path: Path, staged: Staged, tiny_models: Path, reference: Path
) -> None:
    root = tmp_path / "run"
    summary = classify_store(root, staged, tiny_models, Devices.parse(ALL_CORES), engine=NO_COMMITS)
    assert tables(root) == tables(reference)
    assert not summary.checkpoints
    assert NO_CHECKPOINTS in summary.warnings
    assert not list((root / "shards").glob("*.h5"))
    assert not (root / "embeddings.h5").exists()
    with_commits = read_summary(RunDir(reference))
    assert with_commits is not None
    assert with_commits.checkpoints
    assert summary.fates == with_commits.fates


@pytest.mark.slow
def test_a_run_that_is_killed_begins_anew(
    tmp_path: Path,
    staged: tuple[Path, StageSummary],
    reads_file: Path,
    tiny_models: Path,
    reference: Path,
) -> None:
    """SIGKILL after the first shard: the next start computes all of it, and counts its own time only."""
    root = tmp_path / "run"
    program = "from tests.unit.engine.runs import classify_in_child; classify_in_child()"
    arguments = [
        *(str(path) for path in (root, staged[0], tiny_models, reads_file)),
        str(ONE_CORE),
        NO_COMMITS.model_dump_json(),
    ]
    run = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], cwd=Path(__file__).parents[3]
    )
    journal = RunDir(root).journal
    while not (journal.exists() and b'"shard"' in journal.read_bytes()):
        time.sleep(0.005)
        assert run.poll() is None, "the run ended before it could be killed"
    family = psutil.Process(run.pid).children(recursive=True)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs(family, timeout=120)
    assert not alive
    summary = classify_store(root, staged, tiny_models, ONE_CORE, engine=NO_COMMITS)
    assert summary.shards_computed == summary.shards
    assert summary.shards_reused == 0
    assert len(summary.attempts) == 1
    assert "Earlier attempts: lost" not in summary.stages
    assert tables(root) == tables(reference)


@pytest.mark.slow
def test_a_complete_run_is_computed_again_and_may_then_keep_its_shards(
    tmp_path: Path, staged: Staged, tiny_models: Path, reference: Path
) -> None:
    root = tmp_path / "run"
    classify_store(root, staged, tiny_models, ONE_CORE, engine=NO_COMMITS)
    summary = classify_store(root, staged, tiny_models, ONE_CORE)
    assert summary.checkpoints
    assert summary.shards_computed == summary.shards
    assert len(summary.attempts) == 1
    assert len(read_record(RunDir(root)).attempts) == 1
    assert tables(root) == tables(reference)
    assert len(list((root / "shards").glob("0*.h5"))) == summary.shards


@pytest.mark.slow
def test_shards_of_an_earlier_run_are_not_left_unused(
    tmp_path: Path, staged: Staged, tiny_models: Path, reference: Path
) -> None:
    root = copy_run(reference, tmp_path / "run")
    with pytest.raises(ConfigError, match="leave out --disable-checkpointing"):
        classify_store(root, staged, tiny_models, ONE_CORE, engine=NO_COMMITS)
    assert tables(root) == tables(reference)
    summary = classify_store(root, staged, tiny_models, ONE_CORE, engine=NO_COMMITS, force=True)
    assert not summary.checkpoints
    assert not (root / "embeddings.h5").exists(), "its shards are gone"


def test_a_cluster_cannot_do_without(tiny_models: Path) -> None:
    with pytest.raises(ConfigError, match="cluster"):
        ClassifySpec(models=tiny_models, cluster="local:2", engine=EngineSpec(commit=False))


def test_a_shard_without_its_scores_is_an_error() -> None:
    import numpy as np

    plan = ShardPlan(bounds=(0, 2, 3), fingerprint="f")
    first = np.array([[0.25, 0.75], [np.nan, np.nan]], np.float32)
    texts = {0: scores_as_text(first), 1: scores_as_text(first[:1])}
    scores, has_failed = scores_from_texts(plan, texts)
    np.testing.assert_array_equal(scores, np.concatenate([first, first[:1]]))
    assert has_failed.tolist() == [False, True, False]
    del texts[1]
    with pytest.raises(ShardError, match="0 scores for 1 sequences"):
        scores_from_texts(plan, texts)
