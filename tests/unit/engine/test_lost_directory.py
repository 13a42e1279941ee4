"""The directory of a run is renamed, removed or replaced while the run computes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.damage import edit_json
from virnuc_core.pipeline import read_summary
from virnuc_core.rundir import RunDir

from .runs import copy_run, result_bytes

PROGRAM = "from tests.unit.engine.runs import {name}; {name}()"
TIMES = ("staging", "computing", "writing results")
WAYS = ("renamed", "removed", "replaced")
# `make test` has each time and each way once; the other pairs are in `make test-slow`.
QUICK_PAIRS = tuple(zip(TIMES, WAYS, strict=True))
PAIRS = tuple(
    pytest.param(*pair, marks=() if pair in QUICK_PAIRS else pytest.mark.slow, id="-".join(pair))
    for pair in itertools.product(TIMES, WAYS)
)


def run_child(
    name: str, *arguments: object, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program of `runs` in a child process, if wanted in another working directory."""
    command = [sys.executable, "-c", PROGRAM.format(name=name), *map(str, arguments)]
    repository = Path(__file__).parents[3]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(("time", "way"), PAIRS)
def test_a_run_whose_directory_has_gone_says_so_and_makes_nothing(
    tmp_path: Path, tiny_models: Path, reads_file: Path, time: str, way: str
) -> None:
    root = tmp_path / "run"

    child = run_child("predict_in_lost_directory", root, tiny_models, reads_file, time, way)

    assert child.returncode != 0
    last_line = child.stderr.strip().splitlines()[-1]
    assert last_line.startswith(f"ConfigError: {root}: ")
    if way == "replaced":
        assert "its lease was removed" in last_line
        assert list(root.iterdir()) == []
        root.rmdir()
    else:
        assert "this directory has gone" in last_line
        assert not root.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lost"] * (way != "removed")


@pytest.mark.parametrize(
    "way", ["parent renamed", pytest.param("parent removed", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("time", "is_relative"),
    [
        pytest.param("computing", False, marks=pytest.mark.slow, id="absolute path"),
        pytest.param("staging", True, marks=pytest.mark.slow, id="relative path, staging"),
        pytest.param("computing", True, id="relative path, computing"),
        pytest.param("writing results", True, marks=pytest.mark.slow, id="relative path, writing"),
    ],
)
def test_the_folder_that_holds_the_directory_may_go_as_well(
    tmp_path: Path, tiny_models: Path, reads_file: Path, time: str, way: str, is_relative: bool
) -> None:
    """With a relative path, the folder is also the working directory of the run."""
    work = tmp_path / "work"
    work.mkdir()
    root = Path("run") if is_relative else work / "run"

    child = run_child(
        "predict_in_lost_directory", root, tiny_models, reads_file, time, way, folder=work
    )

    assert child.returncode != 0
    assert not work.exists()
    last_line = child.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ConfigError: ")
    assert "this directory has gone" in last_line


def test_a_worker_writes_nothing_into_another_run_of_the_same_name(
    tmp_path: Path, tiny_models: Path, reads_file: Path, reference: Path
) -> None:
    """Another run, with a plan of its own, takes the place of the directory."""
    root = tmp_path / "run"
    other_plan = RunDir(copy_run(reference, tmp_path / "other")).plan
    edit_json(other_plan, lambda plan: plan.update(fingerprint="of other weights"))
    shards_before = result_bytes(tmp_path / "other")

    child = run_child(
        "predict_in_lost_directory", root, tiny_models, reads_file, "computing", "other run"
    )

    assert child.returncode != 0
    assert child.stderr.strip().splitlines()[-1].startswith(f"ConfigError: {root}: ")
    assert result_bytes(root) == shards_before


@pytest.mark.parametrize(
    "time",
    [
        pytest.param("staging", marks=pytest.mark.slow),
        "computing",
        pytest.param("writing results", marks=pytest.mark.slow),
    ],
)
def test_the_next_start_works_under_the_old_name_and_the_new_one(
    tmp_path: Path, tiny_models: Path, reads_file: Path, time: str
) -> None:
    root = tmp_path / "run"
    run_child("predict_in_lost_directory", root, tiny_models, reads_file, time, "renamed")

    old_name = run_child("predict_in_child", root, tiny_models, reads_file)
    new_name = run_child("predict_in_child", tmp_path / "lost", tiny_models, reads_file)

    assert old_name.returncode == 0, old_name.stderr
    assert new_name.returncode == 0, new_name.stderr
    assert result_bytes(root) == result_bytes(tmp_path / "lost")
    summary = read_summary(RunDir(tmp_path / "lost"))
    assert summary is not None
    assert summary.shards_reused is not None
    assert (summary.shards_reused > 0) == (time != "staging")
