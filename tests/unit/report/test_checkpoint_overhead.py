"""What commits cost: pairs of runs with and without, the verdict, and the figures computed again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.damage import edit_json
from virnuc_core.profiles import Profile, load_profile
from virnuc_core.report.benchmark import benchmark_json
from virnuc_core.report.build import build_report, write_report
from virnuc_core.report.model import Criterion
from virnuc_core.report.raw_files import RawFolder
from virnuc_core.report.render import render
from virnuc_core.report.verification import Verification
from virnuc_core.report.verify import verify_report
from virnuc_core.report.verify_runs import verify_overhead
from virnuc_core.report.views.speed import efficiency_facts
from virnuc_core.report.views.tools import overhead_rows
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import read, write
from virnuc_core.telemetry.log import read_telemetry, write_telemetry
from virnuc_core.telemetry.statistics import committed_span_s
from virnuc_core.validation import OVERHEAD, OverheadFile, OverheadPair

from ..telemetry.measurements import telemetry_of
from .validate_directory import (
    ORIGIN_S,
    STARTED,
    Recipe,
    build,
    copy_made_once,
    device_samples,
    host_samples,
    shards_done,
    write_json,
)

pytestmark = pytest.mark.usefixtures("telemetry_once")

GPUS = ("GPU-00000000-aaaa", "GPU-10000000-aaaa")
NO_COMMIT_S = 1e-6


def build_pairs(
    out: Path, commit_s: tuple[float, ...] = (0.2, 0.25, 0.3), restarts: int = 0
) -> None:
    """Make runs with and without commits by the product's own writer, and the file that names them.

    Args:
        out: The validation's directory.
        commit_s: Seconds of a commit in each pair.
        restarts: Workers that were restarted in each pair.
    """
    made_from = ("pairs", commit_s, restarts)
    copy_made_once(made_from, lambda folder: _build_pairs_anew(folder, commit_s, restarts), out)


def _build_pairs_anew(out: Path, commit_s: tuple[float, ...], restarts: int) -> None:
    pairs = []
    for number, seconds in enumerate(commit_s, start=1):
        with_rate, with_span_s = _build_run(out, f"{number}-on", seconds, commits=True)
        without_rate, without_span_s = _build_run(out, f"{number}-off", NO_COMMIT_S, commits=False)
        pair = OverheadPair(
            with_run=f"overhead/{number}-on",
            without_run=f"overhead/{number}-off",
            with_tokens_per_s=with_rate,
            without_tokens_per_s=without_rate,
            seconds=min(with_span_s, without_span_s),
            restarts=restarts,
        )
        pairs.append(pair)
    content = OverheadFile(
        job="0", devices=GPUS, shards=6, shard_tokens=262_144, pairs=tuple(pairs)
    )
    write(out / OVERHEAD, content)


def _build_run(out: Path, name: str, commit_s: float, *, commits: bool) -> tuple[float, float]:
    """Make one run of a pair, and return its tokens per second and its seconds."""
    run = RunDir(out / "overhead" / name)
    recipe = Recipe(shards=6)
    shards = [replace(shard, commit_s=commit_s) for shard in shards_done(recipe, list(GPUS))]
    end_s = max(shard.finished_s for shard in shards)
    samples = device_samples(recipe, list(GPUS), end_s)
    telemetry = telemetry_of(
        shards, samples, host_samples(end_s), (), origin_s=ORIGIN_S, started=STARTED
    )
    path = write_telemetry(run.telemetry, telemetry, n_reads=300, wall_s=end_s - ORIGIN_S)
    write_json(run.record, {"spec": {"commit": commits}, "fingerprints": {}})
    measured = read_telemetry(path.with_suffix(".h5"))
    span_s = committed_span_s(measured.batches, measured.shards)
    return float(measured.batches.tokens.sum()) / span_s, span_s


@pytest.fixture
def production(tmp_path: Path) -> Profile:
    """A validation by a profile that asks for cheap commits."""
    profile = load_profile("production-6m").model_copy(
        update={"min_reads": 1, "target_reads": None}
    )
    return build(tmp_path, Recipe(shards=4), profile)


def overhead_check(out: Path, profile: Profile) -> Criterion:
    (check,) = [
        check for check in build_report(out, profile).checks if check.id == "checkpoint_overhead"
    ]
    return check


def overhead_differences(out: Path) -> list[str]:
    verification = Verification()
    verify_overhead(verification, RawFolder(out))
    return verification.differences


def test_cheap_commits_pass_on_the_median_of_the_pairs(tmp_path: Path, production: Profile) -> None:
    build_pairs(tmp_path)
    check = overhead_check(tmp_path, production)
    assert check.verdict == "pass"
    # three shards of 6 s a device, then the commit
    assert check.value == pytest.approx(100 * 0.25 / (18 + 0.25), rel=1e-3)
    assert "Checkpoint overhead:" in render(build_report(tmp_path, production))["report.txt"]


def test_dear_commits_fail_and_say_what_to_try(tmp_path: Path, production: Profile) -> None:
    build_pairs(tmp_path, (3.0, 4.0, 5.0))
    check = overhead_check(tmp_path, production)
    assert check.verdict == "fail"
    assert "shard_tokens above 262,144" in check.reason


@pytest.mark.parametrize(("commit_s", "restarts"), [((0.2, 0.25), 0), ((0.2, 0.25, 0.3), 1)])
def test_too_few_or_disturbed_pairs_are_not_run(
    tmp_path: Path, production: Profile, commit_s: tuple[float, ...], restarts: int
) -> None:
    build_pairs(tmp_path, commit_s, restarts)
    check = overhead_check(tmp_path, production)
    assert check.verdict == "not run"
    assert "undisturbed pairs" in check.reason


def test_runs_too_short_to_tell_are_not_run(tmp_path: Path, production: Profile) -> None:
    build_pairs(tmp_path)
    path = tmp_path / OVERHEAD
    edit_json(path, lambda body: [pair.update(seconds=1.5) for pair in body["pairs"]])
    check = overhead_check(tmp_path, production)
    assert check.verdict == "not run"
    assert check.value is not None
    assert "a run took 1.5 s" in check.reason
    assert len(overhead_differences(tmp_path)) == 3, "the seconds are computed again too"


def test_persistent_models_are_told_and_are_no_measurement_of_commits(
    tmp_path: Path, production: Profile
) -> None:
    """Pairs of the models alone: how much faster, and nothing about checkpoints."""
    pairs = tuple(
        OverheadPair(
            switch="models",
            with_run=f"overhead/{number}-models-on",
            without_run=f"overhead/{number}-models-off",
            with_tokens_per_s=rate,
            without_tokens_per_s=100.0,
            seconds=20.0,
            restarts=0,
        )
        for number, rate in enumerate((120.0, 150.0, 130.0), start=1)
    )
    content = OverheadFile(job="0", devices=GPUS, shards=6, shard_tokens=262_144, pairs=pairs)
    write(tmp_path / OVERHEAD, content)
    report = build_report(tmp_path, production)
    told = "1.30x as fast as loading once more halfway (median of 3 pairs of runs, 1.20 to 1.50x)"
    assert efficiency_facts(report)["Persistent models"] == told
    efficiency = json.loads(benchmark_json(report))["results"]["efficiency"]
    assert efficiency["persistent_models_speedup"] == pytest.approx(1.3)
    assert efficiency["checkpoint_overhead"] is None
    check = overhead_check(tmp_path, production)
    assert (check.verdict, check.reason) == (
        "not run",
        "no pair of runs with and without commits",
    )
    assert not [warning for warning in report.warnings if "Checkpoint overhead" in warning]


def test_models_that_were_not_measured_are_not_told(tmp_path: Path, production: Profile) -> None:
    build_pairs(tmp_path)
    assert "Persistent models" not in efficiency_facts(build_report(tmp_path, production))


def test_the_pairs_are_computed_again_by_verify(tmp_path: Path, production: Profile) -> None:
    build_pairs(tmp_path)
    assert overhead_differences(tmp_path) == []
    path = tmp_path / OVERHEAD
    edit_json(path, lambda body: body["pairs"][1].update(with_tokens_per_s=9e9))
    write_report(tmp_path, production)
    differences = verify_report(tmp_path).differences
    assert any("2-on: tokens/s: says 9000000000.0" in line for line in differences)


def test_a_side_that_is_not_what_it_says_is_named(tmp_path: Path) -> None:
    build_pairs(tmp_path)
    record = tmp_path / "overhead" / "3-off" / "run.json"
    edit_json(record, lambda body: body["spec"].update(commit=True))
    assert overhead_differences(tmp_path) == [
        "checkpoint_overhead.json: overhead/3-off: commits: says false, the raw files give true"
    ]


def test_a_file_of_another_kind_is_a_problem_and_no_figure(
    tmp_path: Path, production: Profile
) -> None:
    write_json(tmp_path / OVERHEAD, {"with_tokens_per_s": 1.0})
    report = build_report(tmp_path, production)
    assert report.overhead is None
    assert any(OVERHEAD in warning for warning in report.warnings)


def test_the_table_in_the_ui_has_a_row_for_each_pair(tmp_path: Path) -> None:
    build_pairs(tmp_path)
    rows = overhead_rows(read(tmp_path / OVERHEAD, OverheadFile).pairs)
    assert [row["pair"] for row in rows] == [1, 2, 3]
    assert all(str(row["overhead"]).endswith(" %") for row in rows)
