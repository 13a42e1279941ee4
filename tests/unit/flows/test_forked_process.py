"""A child process that begins as a copy of its parent."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.process_lookup import has_ended
from virnuc.flows.cli.forked_process import ForkedProcess

PATIENCE_S = 60.0
# Prints whether a process may be copied: at first, beside the exit deadline, beside another thread.
CAN_FORK = """
import os, threading, time
from virnuc.flows.cli.forked_process import can_fork
from virnuc.flows.exit_deadline import exit_deadline
end = threading.Event()
with exit_deadline():
    print(can_fork())
    thread = threading.Thread(target=end.wait)
    thread.start()
    print(can_fork())
    end.set()
    thread.join()
# Linux counts a thread for a moment longer than Python.
while len(os.listdir("/proc/self/task")) > 1:
    time.sleep(0.001)
print(can_fork())
"""
# Is copied, prints the number of the copy, and waits to be killed.
PARENT = """
import os, sys, time
from virnuc.flows.cli.forked_process import ForkedProcess
child = ForkedProcess(lambda: time.sleep(600), kept_file=os.dup(1), error_file=None)
print(child.pid, flush=True)
time.sleep(600)
"""


def ended(target: Callable[[], Any], error_file: Any) -> int:
    """Return how a copy ends that calls a function."""
    process = ForkedProcess(target, kept_file=error_file.fileno(), error_file=error_file.fileno())
    return process.wait(PATIENCE_S)


def raise_error() -> None:
    raise LookupError("the database is away")


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (lambda: None, 0),
        (lambda: sys.exit(3), 3),
        (raise_error, 1),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    ],
    ids=["returns", "exits", "fails", "is killed"],
)
def test_the_status_of_a_copy_is_that_of_a_process_that_python_runs(
    target: Callable[[], Any], status: int
) -> None:
    with tempfile.TemporaryFile() as errors:
        assert ended(target, errors) == status


def test_an_error_of_a_copy_is_written_to_its_own_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # pytest puts another object in the place of `sys.stderr`, which a command does not have
    with capsys.disabled(), tempfile.TemporaryFile() as errors:
        ended(raise_error, errors)
        errors.seek(0)
        assert errors.read().decode().endswith("LookupError: the database is away\n")


def test_a_copy_holds_no_lock_that_its_parent_releases(tmp_path: Path) -> None:
    """The lock on a new database, which a server would otherwise hold as long as it runs."""
    path = tmp_path / "lock"
    with tempfile.TemporaryFile() as kept:
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            process = ForkedProcess(
                lambda: time.sleep(600), kept_file=kept.fileno(), error_file=None
            )
        try:
            child = psutil.Process(process.pid)
            limit_s = time.monotonic() + PATIENCE_S
            while any(file.path == str(path) for file in child.open_files()):
                assert time.monotonic() < limit_s
                time.sleep(0.01)
            with path.open("w") as other:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert process.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=0.01)
        finally:
            process.kill()
            assert process.wait(PATIENCE_S) == -signal.SIGKILL
        process.terminate()  # its process id may be another's now: no signal is sent


def test_a_copy_keeps_the_file_that_it_needs() -> None:
    with tempfile.TemporaryFile() as kept:
        number = kept.fileno()
        process = ForkedProcess(
            lambda: os.write(number, b"answer"), kept_file=number, error_file=None
        )
        assert process.wait(PATIENCE_S) == 0
        kept.seek(0)
        assert kept.read() == b"answer"


def test_a_copy_dies_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.ppid() == parent.pid
        parent.kill()
        limit_s = time.monotonic() + PATIENCE_S
        while not has_ended(child):
            assert time.monotonic() < limit_s
            time.sleep(0.01)


def test_a_process_with_another_thread_is_not_copied() -> None:
    answers = subprocess.run(
        [sys.executable, "-c", CAN_FORK],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert answers.stdout.split() == ["True", "False", "True"]
