"""The job for a user's CI: real validations, a history that is kept from job to job, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from virnuc.flows.cli.app import main
from virnuc_core.report.model import HistoryEntry
from virnuc_core.report.regression import append_history, history_gaps, read_history

JOB = Path(__file__).parents[2] / "deployments" / "ci-validate.sh"
PROFILE = """
name = "ci-test"
title = "CI"
min_reads = 1
regression_percent = {percent}
[baseline]
name = "vanilla"
reads = 30
[targets]
consensus_agreement = {{ op = ">=", value = 99.0 }}
"""


def with_speed(path: Path, entries: tuple[HistoryEntry, ...], factor: float) -> None:
    """Write a history anew whose last run is that many times as fast, by virnuc's own functions."""
    path.unlink(missing_ok=True)
    *earlier, last = entries
    changes = {
        "tokens_per_s": (last.tokens_per_s or 0) * factor,
        "total_s": (last.total_s or 0) / factor,
    }
    for entry in (*earlier, last.model_copy(update=changes)):
        assert append_history(path, entry)


@pytest.mark.slow
def test_the_job_fails_after_a_faster_run_and_keeps_the_history_of_good_runs(
    tmp_path: Path, few_reads: Path, models: Path, child_environment: dict[str, str]
) -> None:
    history = tmp_path / "kept" / "virnuc-history.jsonl"
    profile = tmp_path / "ci-test.toml"
    # Two runs of a tiny model differ by more than 10 %. A limit of 60 % is not crossed by chance,
    # and factors of 10 below are.
    profile.write_text(PROFILE.format(percent=60.0))

    def run_job(**environment: str) -> subprocess.CompletedProcess[str]:
        command = [JOB, history, few_reads, "--models", models, "--profile", profile]
        command += ["--devices", "cpu:1"]
        return subprocess.run(
            [*map(str, command)],
            cwd=tmp_path,
            env=child_environment
            | {"VIRNUC": str(Path(sys.executable).with_name("virnuc")), **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    first = run_job()
    assert first.returncode == 7, first.stderr
    assert "no earlier run of this profile" in first.stdout
    assert not history.exists(), "what was not judged is nothing to compare with"
    assert run_job(VIRNUC_CI_FIRST="1").returncode == 0
    [good] = read_history(history)

    # The second real run is compared with a first one that was ten times as fast.
    with_speed(history, (good,), 10.0)
    before = history.read_bytes()
    for _ in range(2):  # to start the job again is no way out
        failed = run_job()
        assert failed.returncode == 5, failed.stdout + failed.stderr
        assert "total_s" in failed.stdout
        assert history.read_bytes() == before

    with_speed(history, (good,), 0.1)
    passed = run_job()
    assert passed.returncode == 0, passed.stdout + passed.stderr
    runs = read_history(history)
    assert len(runs) == 2
    assert not history_gaps(history)

    # The same history, whose second entry is made slower
    slower = tmp_path / "slower.jsonl"
    with_speed(slower, (good, runs[1].model_copy(update={"total_s": good.total_s})), 0.1)
    assert not history_gaps(slower)
    assert main(["history", str(slower), "--check"]) == 5

    # A history with an edited line proves nothing.
    lines = history.read_text().splitlines()
    history.write_text("\n".join([lines[0].replace('"n_reads": ', '"n_reads": 1'), lines[1]]))
    edited = run_job()
    assert edited.returncode == 2, edited.stdout + edited.stderr
