"""Result files by several processes: the same bytes, all or none of them, and nobody left behind."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from virnuc_core import consensus, results
from virnuc_core.errors import WorkerError
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.workers import Workers
from virnuc_core.rundir import RunDir

from .worker_processes import kill_when_asked, workers_of


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> OrfStore:
    """Of 80 pairs, some with an id of another, without bases or open frames; and a read of many blocks."""
    folder, rng = tmp_path_factory.mktemp("store"), random.Random(19)
    for mate in (1, 2):
        reads = (
            "".join(rng.choices(rng.choice(("ACG", "TA")), k=rng.choice((0, 30, 60, 250))))
            for _ in range(80)
        )
        (folder / f"{mate}.fa").write_text(
            "".join(f">r{i % 70}\n{bases}\n" for i, bases in enumerate(reads))
        )
    (folder / "long.fa").write_text(f">long\n{'ACG' * 3_000}\n")
    first_file, second, long_file = (str(folder / name) for name in ("1.fa", "2.fa", "long.fa"))
    spec = StageSpec(mates_1=(first_file,), mates_2=(second,), reads=(long_file,), model_length=60)
    return OrfStore.open(stage(spec, folder / "orfs.h5").store)


def judge(
    root: Path, store: OrfStore, workers: int
) -> tuple[dict[str, bytes], results.ResultSummary]:
    rng = np.random.default_rng(0)
    p, is_failed = (
        rng.random(store.n_uniques).astype(np.float32),
        rng.random(store.n_uniques) < 0.02,
    )
    scores = np.stack((1 - p, p), axis=1)
    written_files = results.write_results(
        RunDir(root), store, scores, is_failed, uncertain=(0.45, 0.55), workers=workers
    )
    assert workers_of(os.getpid()) == []
    assert min(written_files.predict_s, written_files.consensus_s) > 0
    files = {
        path.name: path.read_bytes()
        for path in root.iterdir()
        if path.name in {t.name for t in RunDir(root).tables}
    }
    return files, replace(written_files, predict_s=0, consensus_s=0)


def test_the_bytes_do_not_depend_on_the_processes(
    store: OrfStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[object] = []
    submit = Workers._submit

    def counted(self: Workers, work: Any, item: Any) -> Any:
        requests.append(item.span.is_complete)
        return submit(self, work, item)

    monkeypatch.setattr(Workers, "_submit", counted)
    full_files = judge(tmp_path / "whole", store, 3)
    assert not requests, "few reads need no other process"
    assert len(full_files[0]) == 5
    assert set(full_files[1].fates) == set(full_files[1].pairs) == {*consensus.FATES, "uncertain"}
    assert min(full_files[1].fates.values()) > 0
    monkeypatch.setattr(results, "BLOCK_READS", 8)
    monkeypatch.setattr(results, "BLOCK_ROWS", 8)
    monkeypatch.setattr(
        "virnuc_core.reads.workers._AHEAD", 1_000
    )  # all but the first is for others
    assert judge(tmp_path / "one", store, 1) == full_files
    assert not requests
    assert judge(tmp_path / "three", store, 3) == full_files
    assert {*requests} == {True, False}, "blocks of one read, too"


def test_a_process_that_dies_leaves_no_table_and_another_try_makes_them(
    store: OrfStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "BLOCK_READS", 8)
    with monkeypatch.context() as patch:
        kill_when_asked(patch)
        with pytest.raises(WorkerError, match=r"^a worker process ended \(exit code -9\)$"):
            judge(tmp_path / "run", store, 2)
    assert workers_of(os.getpid()) == []
    assert [*(tmp_path / "run").iterdir()] == []
    assert judge(tmp_path / "run", store, 2) == judge(tmp_path / "one", store, 1)
