"""The time that a user waits is counted from the start of the process, and kept with the right run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from virnuc_core import command_time
from virnuc_core.command_time import note_command, note_finished_run, record_waiting
from virnuc_core.errors import VirnucError
from virnuc_core.rundir import run_lock
from virnuc_core.runfiles import RunSummary, read, write

# Python itself has slept before any module of ours was imported, as a slow start does.
SLOW_START = """
import time
time.sleep(0.3)
from virnuc_core.command_time import waited_s
print(waited_s())
"""
CLOCK_TICK_S = 0.02  # the system tells the start of a process in ticks of 0.01 s


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a test notes stays for the next one."""
    monkeypatch.setattr(command_time._Command, "is_noted", False)
    monkeypatch.setattr(command_time._Command, "finished_runs", set())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The directory of a complete run without a time."""
    root = tmp_path / "run"
    with run_lock(root):
        write(root / "summary.json", RunSummary(total_s=1.5, n_reads=3))
    return root


def recorded_time(root: Path) -> float | None:
    return read(root / "summary.json", RunSummary).waited_s


def test_the_start_of_python_and_imports_count() -> None:
    start_s = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-c", SLOW_START], capture_output=True, text=True, check=True
    )
    outer_s = time.monotonic() - start_s
    assert 0.3 <= float(process.stdout) <= outer_s + CLOCK_TICK_S


def test_a_run_that_the_command_computed_gets_its_time_and_keeps_the_rest(run_dir: Path) -> None:
    note_command()
    note_finished_run(run_dir)
    assert record_waiting(run_dir, 12.25)
    assert recorded_time(run_dir) == 12.25
    content = json.loads((run_dir / "summary.json").read_text())
    assert (content["total_s"], content["n_reads"]) == (1.5, 3)


def test_a_run_that_was_complete_before_keeps_its_time(run_dir: Path) -> None:
    note_command()
    before = (run_dir / "summary.json").read_bytes()
    assert not record_waiting(run_dir, 12.25)
    assert (run_dir / "summary.json").read_bytes() == before


def test_a_run_of_a_script_gets_no_time(run_dir: Path) -> None:
    note_finished_run(run_dir)
    assert not record_waiting(run_dir, 12.25)
    assert recorded_time(run_dir) is None


def test_a_run_directory_that_has_gone_is_an_error_and_does_not_come_back(run_dir: Path) -> None:
    note_command()
    note_finished_run(run_dir)
    run_dir.rename(run_dir.with_name("elsewhere"))
    with pytest.raises(VirnucError):
        record_waiting(run_dir, 12.25)
    assert not run_dir.exists()
