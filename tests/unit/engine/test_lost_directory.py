"""The directory of a run is renamed, removed or replaced while the run computes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.damage import edit_json
from virnuc_core.pipeline import read_summary
from virnuc_core.rundir import RunDir

from .forked_programs import ForkedPrograms
from .runs import copy_run, result_bytes

TIMES = ("staging", "computing", "writing results")
WAYS = ("renamed", "removed", "replaced")
# Each pair takes a whole run. `make test` has two, and `make test-slow` the others.
QUICK_PAIRS = (("staging", "renamed"), ("computing", "removed"))
PAIRS = tuple(
    pytest.param(*pair, marks=() if pair in QUICK_PAIRS else pytest.mark.slow, id="-".join(pair))
    for pair in itertools.product(TIMES, WAYS)
)


@pytest.mark.parametrize(("time", "way"), PAIRS)
def test_a_run_whose_directory_has_gone_says_so_and_makes_nothing(
    programs: ForkedPrograms,
    tmp_path: Path,
    tiny_models: Path,
    reads_file: Path,
    time: str,
    way: str,
) -> None:
    root = tmp_path / "run"

    arguments = (root, tiny_models, reads_file, time, way)
    child = programs.run("predict_in_lost_directory", arguments=arguments)

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


@pytest.mark.slow
@pytest.mark.parametrize("way", ["parent renamed", "parent removed"])
@pytest.mark.parametrize(
    ("time", "is_relative"),
    [
        pytest.param("computing", False, id="absolute path"),
        pytest.param("staging", True, id="relative path, staging"),
        pytest.param("computing", True, id="relative path, computing"),
        pytest.param("writing results", True, id="relative path, writing"),
    ],
)
def test_the_folder_that_holds_the_directory_may_go_as_well(
    programs: ForkedPrograms,
    tmp_path: Path,
    tiny_models: Path,
    reads_file: Path,
    time: str,
    way: str,
    is_relative: bool,
) -> None:
    """With a relative path, the folder is also the working directory of the run."""
    work = tmp_path / "work"
    work.mkdir()
    root = Path("run") if is_relative else work / "run"

    arguments = (root, tiny_models, reads_file, time, way)
    child = programs.run("predict_in_lost_directory", arguments=arguments, folder=work)

    assert child.returncode != 0
    assert not work.exists()
    last_line = child.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ConfigError: ")
    assert "this directory has gone" in last_line


def test_a_worker_writes_nothing_into_another_run_of_the_same_name(
    programs: ForkedPrograms,
    tmp_path: Path,
    tiny_models: Path,
    reads_file: Path,
    reference: Path,
) -> None:
    """Another run, with a plan of its own, takes the place of the directory."""
    root = tmp_path / "run"
    other_plan = RunDir(copy_run(reference, tmp_path / "other")).plan
    edit_json(other_plan, lambda plan: plan.update(fingerprint="of other weights"))
    shards_before = result_bytes(tmp_path / "other")

    arguments = (root, tiny_models, reads_file, "computing", "other run")
    child = programs.run("predict_in_lost_directory", arguments=arguments)

    assert child.returncode != 0
    assert child.stderr.strip().splitlines()[-1].startswith(f"ConfigError: {root}: ")
    assert result_bytes(root) == shards_before


@pytest.mark.slow
@pytest.mark.parametrize("time", TIMES)
def test_the_next_start_works_under_the_old_name_and_the_new_one(
    programs: ForkedPrograms, tmp_path: Path, tiny_models: Path, reads_file: Path, time: str
) -> None:
    root = tmp_path / "run"
    files = (tiny_models, reads_file)
    programs.run("predict_in_lost_directory", arguments=(root, *files, time, "renamed"))

    old_name = programs.run("predict_in_child", arguments=(root, *files))
    new_name = programs.run("predict_in_child", arguments=(tmp_path / "lost", *files))

    assert old_name.returncode == 0, old_name.stderr
    assert new_name.returncode == 0, new_name.stderr
    assert result_bytes(root) == result_bytes(tmp_path / "lost")
    summary = read_summary(RunDir(tmp_path / "lost"))
    assert summary is not None
    assert summary.shards_reused is not None
    assert (summary.shards_reused > 0) == (time != "staging")
