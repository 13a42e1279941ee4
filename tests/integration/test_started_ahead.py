"""Workers that a command starts before it knows its work: they do that work, or they are gone with the command."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.faults.scene import MARK
from tests.faults.strikes import marked
from tests.process_lookup import family_of, running_with
from virnuc_core.pipeline import read_summary
from virnuc_core.rundir import RunDir

from .processes import PATIENCE_S, VIRNUC, background, gone, wait_for

WORKER = "virnuc_core.engine.worker"
ALONE = {**os.environ, "VIRNUC_NO_PREFECT": "1"}


def words_of(folder: Path, reads: Path, models: Path, *more: str) -> tuple[str, ...]:
    """Return the command line of a prediction on a core."""
    paths = ("predict", str(reads), "-o", str(folder / "run"), "--models", str(models))
    return (*VIRNUC, *paths, "--devices", "cpu:1", *more)


@contextmanager
def begun(
    folder: Path, reads: Path, models: Path, *more: str
) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """A prediction on a core that has started its worker and hardly more, and that worker."""
    words = words_of(folder, reads, models, *more)
    with background(words, ALONE, folder / "log") as command:
        yield command, wait_for(lambda: worker_of(command), "its worker")


def worker_of(command: subprocess.Popen[bytes]) -> psutil.Process | None:
    assert command.poll() is None, "it ended before it had a worker"
    return next(iter(running_with(WORKER, family_of(command.pid))), None)


@pytest.mark.parametrize(
    ("told", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        (signal.SIGTERM, 130),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_command_that_is_ended_takes_its_worker_along(
    tmp_path: Path, some_reads: Path, models: Path, told: signal.Signals, code: int
) -> None:
    with begun(tmp_path, some_reads, models) as (command, worker):
        command.send_signal(told)
        assert command.wait(PATIENCE_S) == code, (tmp_path / "log").read_text()
        wait_for(lambda: gone([worker]), "the worker to end")


def test_reads_that_are_refused_leave_no_worker(tmp_path: Path, models: Path) -> None:
    broken_file = tmp_path / "broken.fastq"
    broken_file.write_text("@r1\nACGT\n+\nIII\n")
    # The worker is looked for by its environment, because it may end before anybody has seen it.
    mark = str(tmp_path)
    words = words_of(tmp_path, broken_file, models)
    with background(words, {**ALONE, MARK: mark}, tmp_path / "log") as command:
        assert command.wait(PATIENCE_S) == 2
        wait_for(lambda: not marked(mark), "the worker to end")
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_an_error_in_the_flow_leaves_no_worker(tmp_path: Path, models: Path) -> None:
    """What comes through a pipe is looked at by the flow only."""
    pipe = tmp_path / "pipe.fastq"
    os.mkfifo(pipe)
    with begun(tmp_path, pipe, models) as (command, worker):
        pipe.write_text("@r1\nACGT\n+\nIII\n")
        assert command.wait(PATIENCE_S) == 2, (tmp_path / "log").read_text()
        wait_for(lambda: gone([worker]), "the worker to end")


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--sample-from", "name"), ("--force",)])
def test_the_worker_that_was_started_first_does_the_work(
    tmp_path: Path, some_reads: Path, models: Path, words: tuple[str, ...]
) -> None:
    if "--force" in words:  # over a run that is complete, for which none is started otherwise
        with begun(tmp_path, some_reads, models) as (command, _):
            assert command.wait(PATIENCE_S) == 0
    with begun(tmp_path, some_reads, models, *words) as (command, worker):
        assert command.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()
        assert gone([worker])
    (summary_file,) = (tmp_path / "run").rglob("summary.json")
    summary = read_summary(RunDir(summary_file.parent))
    assert summary is not None
    assert [worker_record["pid"] for worker_record in summary.workers] == [worker.pid]
    assert summary.stages["Start-up: command"]
    assert "wants others" not in (tmp_path / "log").read_text()
