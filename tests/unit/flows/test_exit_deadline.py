"""A process that is told to end ends in time, whatever holds it up."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from virnuc.flows import exit_deadline

STUCK = """
import threading, time
from prefect.utilities.engine import capture_sigterm
from virnuc.flows import exit_deadline
exit_deadline.ENDING_S = 0.5
with {}:
    try:
        print("here", flush=True)
        time.sleep(600)
    finally:
        threading.Event().wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "started",
    [
        "exit_deadline.exit_deadline(by_hand=True)",
        "capture_sigterm(), exit_deadline.exit_deadline(final=True)",
    ],
    ids=["hand", "worker"],
)
def test_a_run_that_cannot_come_to_an_end_is_ended_all_the_same(started: str) -> None:
    """A disk or a server that answers nothing holds the ending: it has its time, and no more."""
    program = STUCK.format(started)
    with subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "here\n"
        run.terminate()
        try:
            assert (
                run.communicate(timeout=120)[1]
                == "virnuc: interrupted; what was committed stays, run again to go on\n"
            )
        finally:
            run.kill()
    assert run.returncode == 130


IMPORTS = """
import os, signal
for told in (signal.SIGINT, signal.SIGTERM):
    os.kill(os.getpid(), told)
whole = True
"""


def test_a_module_that_is_being_imported_is_imported_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries written in C do not stand it otherwise: torch aborts the process, NumPy cannot be loaded again."""
    (tmp_path / "interrupted_module.py").write_text(IMPORTS)
    # After this time the process of the tests would be ended.
    monkeypatch.setattr(exit_deadline, "ENDING_S", 120.0)
    monkeypatch.syspath_prepend(tmp_path)

    def wants_it() -> None:
        with exit_deadline.exit_deadline(by_hand=True):
            importlib.import_module("interrupted_module")
            threading.Event().wait(60)

    with pytest.raises(KeyboardInterrupt):
        wants_it()
    assert sys.modules["interrupted_module"].whole


@pytest.mark.slow
def test_what_a_run_does_after_its_last_words_is_ended_too() -> None:
    """Threads of libraries, servers that do not go: they had their time, and the message is there already."""
    program = STUCK.format("exit_deadline.exit_deadline(by_hand=True, final=True)").replace(
        "    finally:\n        ", "    except:\n        pass\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "here\n"
        run.terminate()
        try:
            assert run.communicate(timeout=120)[1] == ""
        finally:
            run.kill()
    assert run.returncode == 130
