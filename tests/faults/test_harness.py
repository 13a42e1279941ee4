"""The harness sees what it is there to see; and a few of its rounds."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.failing_files import OPEN, failing_variables, has_compiler
from tests.integration.processes import wait_for

from .harness import cores, rounds, works
from .play import Play, mark_of, play
from .rounds import Plan, Round, line, plans, table
from .scene import MARK, Scene, Work, leaves, said
from .strikes import damage, left_over, marked

SEED = 5


def sleeping(mark: str, *, parent_too: bool = True) -> subprocess.Popen[bytes]:
    """A process that bears a mark, and starts another, which is adopted if the parent is not to stay."""
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    stay = "; import time; time.sleep(60)" if parent_too else ""
    return subprocess.Popen(
        [sys.executable, "-c", child + stay], env={**os.environ, MARK: mark}, start_new_session=True
    )


def test_a_process_is_found_by_its_environment_also_when_its_parent_is_gone(tmp_path: Path) -> None:
    mark = str(tmp_path)
    sleeping(mark, parent_too=False).wait()
    # A process that has just begun to run another program has no environment for a moment.
    wait_for(lambda: marked(mark), "the process with the mark")
    assert len(left_over(mark, 0.0)) == 1
    assert left_over(mark, 60.0) == []
    assert marked("another round") == []


def test_rounds_that_are_played_side_by_side_leave_each_others_processes_alone(
    tmp_path: Path,
) -> None:
    """Each test process has a folder of its own, and in it a scene of the same name."""
    scenes = [Scene(tmp_path / folder / "rounds0" / "scene") for folder in ("gw0", "gw1")]
    marks = [mark_of(2, scene) for scene in scenes]
    with sleeping(marks[0]) as process:
        wait_for(lambda: len(marked(marks[0])) == 2, "both processes with the mark")
        assert left_over(marks[1], 0.0) == []
        assert process.poll() is None
        left_over(marks[0], 0.0)


def test_a_file_that_differs_is_missing_or_left_over_is_seen(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "reads.tsv").write_text("read\tfate\n")
    (tmp_path / "summary.json").write_text('{"n_reads": 3, "wall_s": 1.0}')
    (tmp_path / "shards" / "plan.json").write_text("{}")
    files_before = leaves(tmp_path)
    (tmp_path / "summary.json").write_text('{"n_reads": 3, "wall_s": 2.0}')
    (tmp_path / "telemetry").mkdir()
    (tmp_path / "telemetry" / "telemetry_1.json").write_text("{}")
    assert leaves(tmp_path) == files_before  # times may differ
    (tmp_path / "summary.json").write_text('{"n_reads": 4, "wall_s": 2.0}')
    (tmp_path / ".reads.tsv.17.part").write_text("")
    (tmp_path / "reads.tsv").unlink()
    files_after = leaves(tmp_path)
    changed_names = {
        name
        for name in files_before.keys() | files_after.keys()
        if files_before.get(name) != files_after.get(name)
    }
    assert changed_names == {"summary.json", ".reads.tsv.17.part", "reads.tsv"}


def test_a_row_that_is_not_a_number_and_a_file_that_cannot_be_read_are_seen(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "embeddings.h5", "w") as file:
        file["embeddings"] = np.array([[0.0, np.nan]])
    (tmp_path / "summary.json").write_text("{")
    assert leaves(tmp_path)["embeddings.h5"] == "NaN in embeddings"
    assert leaves(tmp_path)["summary.json"].startswith("cannot be read")


@pytest.mark.parametrize("how", ["flip", "cut", "zero", "remove"])
def test_damage_changes_one_file(tmp_path: Path, how: str) -> None:
    import random

    (tmp_path / "run.json").write_text("{}" * 50)
    (tmp_path / "orfs.h5").write_text("store")
    files_before = leaves(tmp_path) | {"run.json": (tmp_path / "run.json").read_text()}
    assert damage(tmp_path, how, "record", random.Random(1)) == tmp_path / "run.json"
    assert damage(tmp_path, how, "viral", random.Random(1)) is None
    files_left = (
        (tmp_path / "run.json").read_text(errors="replace")
        if (tmp_path / "run.json").exists()
        else None
    )
    assert files_left != files_before["run.json"]
    assert (tmp_path / "orfs.h5").read_text() == "store"


def test_counts_are_read_from_the_output_of_a_command() -> None:
    assert said("x\n1,204 of 3,000 reads are viral; more\n") == "1,204 of 3,000 reads are viral"
    assert (
        said("  Reads:       300 = 0 viral + 252 others\n")
        == "Reads:       300 = 0 viral + 252 others"
    )


def test_there_is_a_round_for_every_child_and_every_file() -> None:
    names = {plan.name for plan in plans()}
    assert len(names) == len(plans())
    for whom in ("main", "all", "worker", "loader", "staging", "baseline", "server"):
        assert any(f"kill {whom}" in name for name in names)
        assert whom == "all" or any(f"stop {whom}" in name for name in names)


def test_a_round_that_cannot_be_played_here_is_not_run_and_never_good() -> None:
    plan, damage_plan = Plan("disk", "out"), Plan("kill", "all")
    results = [
        Round(0, plan, not_run="no disk"),
        Round(1, damage_plan),
        Round(2, damage_plan, problems=["process left"]),
    ]
    assert [result.good for result in results] == [False, True, False]
    text = table(results)
    assert "1 of 2 rounds good" in text
    assert "not run: predict: disk out, 1 times: no disk" in text
    assert "| predict: kill all | 2 |" in text
    assert "| predict: disk" not in text
    assert "not run" in line(results[0])


def test_a_strike_that_hits_nothing_is_drawn_again_and_never_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = []

    def miss_twice(play: Play) -> None:
        """Play a round of which the first two strikes hit nothing."""
        draws.append((play.sharpness, play.rng.random()))
        play.round.hit = len(draws) > 2

    monkeypatch.setattr(Play, "_play_kind", miss_twice)
    monkeypatch.setattr(Scene, "truth", lambda *_: None)
    plan = Plan("kill", "all", server="none")
    result = play(0, Scene(tmp_path), SEED, plan)
    assert result.good
    assert result.draws == 3
    assert [sharpness for sharpness, _ in draws] == [1, 2, 4]
    assert len({number for _, number in draws}) == 3
    assert "drawn 3 times" in line(result)

    monkeypatch.setattr(Play, "_play_kind", lambda play: setattr(play.round, "hit", False))
    missed = play(0, Scene(tmp_path), SEED, plan)
    assert missed.state == "hit nothing"
    assert not missed.good
    assert "| predict: kill all (none server) | 2 | 1 | 1 | 0 |" in table([result, missed])
    assert "1 of 2 rounds good; 1 hit nothing; 0 bad." in table([result, missed])


def test_rounds_without_prefect_need_none() -> None:
    plans_without = [plan for plan in plans() if not plan.needs_prefect]
    assert all(plan.command == "predict" for plan in plans_without)
    assert not any("server" in plan.whom for plan in plans_without)
    ways = {plan.how for plan in plans_without}
    assert ways >= {"intrude", "fail", "race", "limit", "kill", "flip"}


@pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
def test_the_calls_that_fail_are_counted_over_all_processes(tmp_path: Path) -> None:
    """Two processes open the same file three times each; the fourth and fifth of the calls fail."""
    (tmp_path / "file").write_text("content")
    program = """if True:
        import sys
        for _ in range(3):
            try:
                open(sys.argv[1]).close()
            except OSError as error:
                print(error.errno)
    """
    variables = failing_variables(str(tmp_path / "file"), [errno.EIO], OPEN)
    variables |= {"FAIL_COUNT": str(tmp_path / "count"), "FAIL_FIRST": "4", "FAIL_LAST": "5"}
    printed = []
    for _ in range(2):
        child = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "file")],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=True,
        )
        printed.append(child.stdout.split())
    assert printed == [[], [str(errno.EIO)] * 2]
    assert (tmp_path / "count").read_text() == OPEN * 6


def test_jobs_have_cores_of_their_own_while_there_are_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [cores(job, 4) for job in range(4)] == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
    assert [cores(job, 2) for job in range(2)] == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert cores(5, 8) == {2, 3}
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    assert cores(1, 2) == {3}


def test_the_undisturbed_runs_that_rounds_need_are_known_before_they_begin() -> None:
    needed_works = works(plans())
    assert {replace(plan.work, nodes=0) for plan in plans()} < needed_works
    assert {Work(threshold=1), Work("predict", "b"), Work("validate", "b")} < needed_works


# --- rounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        Plan("intrude", "shared directory", server="none"),
        Plan("intrude", "directory", server="none", plain_user=True),
        Plan("fail", "shards", server="none"),
        Plan("fail", "anything", server="none", plain_user=True),
        Plan("limit", "address space", server="none"),
        Plan("limit", "processes", server="none", plain_user=True),
    ],
    ids=attrgetter("name"),
)
def test_other_users_failing_disks_and_limits_change_no_results(
    quick_scene: Scene, plan: Plan
) -> None:
    result = play(0, quick_scene, SEED, plan)
    if result.not_run:
        pytest.skip(result.not_run)
    assert result.good, table([result])
    assert result.hit


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        Plan("intrude", "server", server="embedded"),
        Plan("intrude", "cluster", server="none", nodes=2),
        Plan("intrude", "directory", server="none"),
        Plan("fail", "anything", server="none"),
        Plan("race", "a new home", server="embedded", starts=3),
        Plan("race", "an older database", server="embedded", starts=3),
    ],
    ids=attrgetter("name"),
)
def test_intruders_failing_calls_and_first_starts_at_once_change_no_results(
    scene: Scene, plan: Plan
) -> None:
    result = play(2, scene, SEED, plan)
    if result.not_run:
        pytest.skip(result.not_run)
    assert result.good, table([result])


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["worker", "staging"])
def test_a_struck_run_ends_as_an_undisturbed_one(scene: Scene, whom: str) -> None:
    """All processes are killed in the rounds that are played side by side, below."""
    result = play(0, scene, SEED, Plan("kill", whom, server="none"))
    assert result.good, table([result])


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        Plan("flip", "shard", server="none"),
        Plan("disk", "out", server="none"),
        Plan("twin", "same", server="none"),
    ],
    ids=attrgetter("name"),
)
def test_damage_a_full_disk_and_a_second_run_do_not_change_results(
    scene: Scene, plan: Plan
) -> None:
    result = play(1, scene, SEED, plan)
    assert result.good, table([result])


@pytest.mark.slow
def test_rounds_are_played_side_by_side_and_one_whose_job_is_killed_is_bad(scene: Scene) -> None:
    kinds, results = [Plan("kill", "all", server="none"), Plan("odd", "files", "predict-inbox")], []
    for result in rounds(range(3), scene, SEED, kinds, 2, lambda: False):
        if not results:
            for job in multiprocessing.active_children():
                if job.name == f"job {1 - result.number % 2}":
                    job.kill()
        results.append(result)
    assert sorted(result.number for result in results) == [0, 1, 2]
    assert [
        result.number
        for result in results
        if any("its process ended" in p for p in result.problems)
    ], table(results)
    assert results[0].good, table(results)


# --- with something taken out, rounds must fail -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("taken_out", "plan", "word"),
    [
        ("no seals", Plan("flip", "shard", server="none"), "differs"),
        ("no locks", Plan("twin", "other reads --force while the first rests", server="none"), ""),
        # a worker also ends with its pipe, a server by the signal alone
        ("no parent-death signal", Plan("kill", "main", server="embedded"), "process left"),
        ("no guard", Plan("intrude", "server", server="embedded"), "answered with 200"),
        ("no first use", Plan("race", "a new home", server="embedded", starts=4), "start "),
    ],
)
def test_the_harness_reports_what_was_taken_out(
    scene: Scene, taken_out: str, plan: Plan, word: str
) -> None:
    mutant = replace(scene, mutant=taken_out)
    for number in range(8):
        result = play(100 + number, mutant, SEED, plan)
        if any(word in problem for problem in result.problems):
            return
    pytest.fail(f"eight rounds with {taken_out} and nothing was reported: {result}")
