"""Faults inside a worker. They come from `inject/`, which only a test puts on the path."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from virnuc_core.reads.store import OrfStore

from . import injected
from .scene import INJECT, python_path

HERE = Path(__file__).resolve().parent


def guilty_row(core_scene: injected.Scene) -> tuple[int, str]:
    """The longest of the uniques whose protein stands nowhere else: it opens a batch of the full budget."""
    store = OrfStore.open(core_scene.store)
    proteins = [p.decode() for p in store.protein(0, store.n_uniques)]
    counts = Counter(proteins)
    unique = max(
        (i for i in range(store.n_uniques) if counts[proteins[i]] == 1),
        key=lambda i: len(proteins[i]),
    )
    return unique, proteins[unique]


def run(
    core_scene: injected.Scene, root: Path, fault: dict[str, Any], **engine: Any
) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(INJECT),
        "VIRNUC_FAULT": json.dumps(fault),
    }
    settings = injected.ENGINE.model_copy(update=engine)
    return subprocess.run(
        injected.command(root, core_scene, "cpu:1", settings),
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["poison", "raise"])
def test_a_row_that_ends_workers_is_set_aside_by_name_and_the_rest_is_unchanged(
    core_scene: injected.Scene, tmp_path: Path, kind: str
) -> None:
    unique, protein = guilty_row(core_scene)
    outcome = run(
        core_scene, tmp_path / "run", {"kind": kind, "protein": protein}, shard_tokens=1024
    )
    assert outcome.returncode == 6, outcome.stderr
    store = OrfStore.open(core_scene.store)
    rows = [row for row in range(store.n_rows) if store.row_unique[row] == unique]
    failed_rows = (tmp_path / "run" / "failed.tsv").read_text().splitlines()[1:]
    assert [line.split("\t")[0] for line in failed_rows] == [
        store.row_ids(row, row + 1)[0] for row in rows
    ]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rows_set_aside"] == 1
    assert summary["fates"]["failed"] == len({int(store.row_read[row]) for row in rows})
    assert sum(summary["fates"].values()) == store.n_reads
    ours = (tmp_path / "run" / "prediction_results.txt").read_text().splitlines()
    theirs = core_scene.reference["prediction_results.txt"].decode().splitlines()
    lost_ids = {store.row_ids(row, row + 1)[0] for row in rows}
    assert [x for x in theirs if x.split("\t")[0] not in lost_ids] == ours


@pytest.mark.slow
def test_out_of_memory_halves_the_budget_for_that_shard_only(
    core_scene: injected.Scene, tmp_path: Path
) -> None:
    _, protein = guilty_row(core_scene)
    outcome = run(core_scene, tmp_path / "run", {"kind": "oom", "protein": protein, "fits": 200})
    assert outcome.returncode == 0, outcome.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (divisor,) = summary["reduced_budgets"].values()
    assert divisor in (2, 4, 8)
    ours = injected.result_bytes(tmp_path / "run")
    changed_rows = [
        name
        for name in ours
        if name.startswith("shards/") and ours[name] != core_scene.reference[name]
    ]
    assert len(changed_rows) <= 1


@pytest.mark.slow
def test_a_device_that_is_short_of_memory_at_several_shards_gets_smaller_batches_for_good(
    core_scene: injected.Scene, tmp_path: Path
) -> None:
    fits = injected.ENGINE.token_budget // 4 - 1  # the largest batches of such shards have one more
    outcome = run(core_scene, tmp_path / "run", {"kind": "oom", "fits": fits}, shard_tokens=2048)
    assert outcome.returncode == 0, outcome.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["shards"] > 8
    assert list(summary["reduced_budgets"].values()) == [2] * summary["shards"]
    assert summary["restarts"] == 2, "not one for every shard"


@pytest.mark.slow
def test_an_error_of_every_row_is_reported_after_a_few_workers(
    core_scene: injected.Scene, tmp_path: Path
) -> None:
    outcome = run(core_scene, tmp_path / "run", {"kind": "raise"})
    assert outcome.returncode == 1
    assert (
        "no single row of it is the cause; last words: RuntimeError: device-side assert"
        in outcome.stderr
    )
    assert outcome.stderr.count("ended (status") <= 8
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
def test_a_hanging_worker_is_ended_and_replaced(core_scene: injected.Scene, tmp_path: Path) -> None:
    _, protein = guilty_row(core_scene)
    fault = {"kind": "hang", "protein": protein, "marker": str(tmp_path / "struck")}
    outcome = run(core_scene, tmp_path / "run", fault, silence_s=8.0)
    assert outcome.returncode == 0, outcome.stderr
    assert (tmp_path / "struck").exists()
    assert injected.result_bytes(tmp_path / "run") == core_scene.reference


@pytest.mark.slow
def test_a_model_that_gives_no_numbers_stops_the_run_and_is_named(
    core_scene: injected.Scene, tmp_path: Path
) -> None:
    _, protein = guilty_row(core_scene)
    outcome = run(core_scene, tmp_path / "run", {"kind": "nan", "protein": protein})
    assert outcome.returncode == 3
    assert "/esm2: of " in outcome.stderr
    assert "it gives NaN or infinity for" in outcome.stderr
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
def test_one_death_by_a_passing_fault_sets_nothing_aside(
    core_scene: injected.Scene, tmp_path: Path
) -> None:
    _, protein = guilty_row(core_scene)
    fault = {"kind": "poison", "protein": protein, "marker": str(tmp_path / "struck")}
    outcome = run(core_scene, tmp_path / "run", fault)
    assert outcome.returncode == 0, outcome.stderr
    assert injected.result_bytes(tmp_path / "run") == core_scene.reference


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a small disk needs root"
)
def test_a_full_disk_is_one_line_and_the_run_goes_on_after_space_is_made(
    core_scene: injected.Scene, tmp_path: Path
) -> None:
    room = (
        sum(len(body) for name, body in core_scene.reference.items() if name.startswith("shards/"))
        * 2
        // 3
    )
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(disk)], check=False
    ).returncode:
        pytest.skip("this machine does not let tests mount a disk")
    try:
        outcome = run(core_scene, disk / "run", {})
        assert outcome.returncode == 1, outcome.stderr
        assert "shards and the result files need about" in outcome.stderr
        assert "Traceback" not in outcome.stderr
        assert injected.committed(disk / "run") == 0
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        second_outcome = run(core_scene, disk / "run", {})
        assert second_outcome.returncode == 0, second_outcome.stderr
        assert injected.result_bytes(disk / "run") == core_scene.reference
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def test_the_injected_faults_come_from_outside_the_product() -> None:
    product = [
        p
        for p in (HERE.parents[1] / "virnuc_core").rglob("*.py")
        if "VIRNUC_FAULT" in p.read_text()
    ]
    assert product == []
