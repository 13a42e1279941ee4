"""What is made on first use in a shared place is made by one process, and the others wait and say so."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.failing_files import LOCK, OPEN, failing_calls
from virnuc_core import first_use as module
from virnuc_core.encoders import convert, model_files
from virnuc_core.encoders.convert import init_random
from virnuc_core.encoders.quantise import quantise
from virnuc_core.errors import WeightsError
from virnuc_core.first_use import LOCK_FILE, FirstUseLock, first_use
from virnuc_core.reads.simulate import SimulateSpec, simulate

from .engine.forked_programs import ForkedPrograms

N_PROCESSES = 8
# Each process makes the file `made` on its first use, and notes in `makers` that it did so. Making it
# takes until there is a file with the name of the second argument.
MAKER = """
import logging, sys, time
from pathlib import Path
from virnuc_core.first_use import first_use

logging.basicConfig(level=logging.WARNING)
folder, awaited = Path(sys.argv[1]), Path(sys.argv[2])
made = folder / "made"
with first_use(folder, "the thing", made.exists) as must_make:
    if must_make:
        with (folder / "makers").open("a") as file:
            file.write("x")
        while not awaited.exists():
            time.sleep(0.01)
        made.touch()
"""
# The process tells that it holds the lock, and holds it until it is killed.
HOLDER = """
import sys, time
from pathlib import Path
from virnuc_core.first_use import first_use

with first_use(Path(sys.argv[1]), "the thing"):
    print("held", flush=True)
    time.sleep(600)
"""
# One first use of a models directory: the digests of its weights, all of which count as large.
DIGESTS = """
import logging, sys, time
from pathlib import Path
from virnuc_core.encoders import digests

logging.basicConfig(level=logging.WARNING)
digests.LARGE_BYTES = 1
compute = digests.digest_of

def counted(path):
    with open(sys.argv[2], "a") as file:
        file.write("x")
    time.sleep(0.2)
    return compute(path)

digests.digest_of = counted
print(sorted(digests.fingerprint(Path(sys.argv[1])).items()))
"""


def start(program: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Start a program in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcomes(processes: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """Wait for processes, which must all end well, and return what each wrote."""
    written = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), written
    return written


def test_of_many_processes_one_makes_the_thing_and_the_others_say_that_they_wait(
    tmp_path: Path,
) -> None:
    may_end = tmp_path / "may end"
    processes = [start(MAKER, tmp_path, may_end) for _ in range(N_PROCESSES)]
    try:
        # The one that makes the thing says nothing.
        waiting, _, _ = select.select([process.stderr for process in processes], [], [], 60)
    finally:
        may_end.touch()
    written = outcomes(processes)

    assert waiting
    assert (tmp_path / "makers").read_text() == "x"
    messages = "".join(stderr for _, stderr in written)
    assert "another process makes the thing" in messages
    assert all(stderr.count("another process") <= 1 for _, stderr in written)


def test_a_holder_that_is_killed_does_not_block(tmp_path: Path) -> None:
    with start(HOLDER, tmp_path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)
        waiting = start(MAKER, tmp_path, tmp_path)
        time.sleep(1.0)
        assert not (tmp_path / "makers").exists()
        holder.kill()
        outcomes([waiting])
    assert (tmp_path / "makers").read_text() == "x"


def test_a_suspended_holder_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.3)
    with first_use(tmp_path, "the thing"), first_use(tmp_path, "the thing") as must_make:
        assert must_make


def test_what_is_ready_needs_neither_a_lock_nor_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with first_use(folder, "the thing", lambda: True) as must_make:
        assert not must_make
    assert not folder.exists()


def test_a_child_process_does_not_go_on_holding_the_lock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with first_use(tmp_path, "the thing"):
        child = subprocess.Popen(["sleep", "600"], close_fds=False)
    try:
        lock = FirstUseLock(tmp_path, "the thing")
        lock.take()
        lock.release()
        assert "another process" not in caplog.text, "it had to wait for the lock"
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("calls", "number"), [(LOCK, errno.ENOLCK), (LOCK, errno.ENOSYS), (OPEN, errno.EACCES)]
)
def test_without_locks_the_thing_is_made_all_the_same(
    tmp_path: Path, calls: str, number: int
) -> None:
    failing = failing_calls(f"/{LOCK_FILE}", number, calls)
    outcomes([start(MAKER, tmp_path, tmp_path, **failing)])
    assert (tmp_path / "makers").read_text() == "x"


def test_no_link_is_followed_for_the_lock(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        FirstUseLock(tmp_path, "the thing").take()
    with first_use(tmp_path, "the thing") as must_make:
        assert must_make
    assert not (tmp_path / "elsewhere").exists()


def test_processes_that_start_together_read_large_weights_once(
    tmp_path: Path,
) -> None:
    models, count, home = tmp_path / "models", tmp_path / "count", tmp_path / "home"
    init_random(models)
    home.mkdir()
    written = outcomes([start(DIGESTS, models, count, HOME=str(home)) for _ in range(3)])

    (digests,) = {stdout for stdout, _ in written}
    assert "esm2" in digests
    n_files = sum(path.is_file() for path in models.rglob("*"))
    assert 0 < len(count.read_text()) <= n_files


def test_of_commands_that_write_one_models_directory_at_once_one_succeeds(
    tmp_path: Path, programs: ForkedPrograms
) -> None:
    program = "tests.unit.first_use_programs.write_models_in_two_processes"
    child = programs.run(program, arguments=(tmp_path,))
    assert child.returncode == 0, child.stderr
    codes = json.loads(child.stdout.splitlines()[-1])
    messages = [(tmp_path / f"errors-{number}").read_text() for number in range(2)]

    assert sorted(codes) == [0, 3], messages
    for code, message in zip(codes, messages, strict=True):
        errors = [line for line in message.splitlines() if line.startswith("virnuc: ")]
        assert len(errors) == (code != 0), message
        assert all("already holds" in line for line in errors)
    written = {path.name for path in (tmp_path / "models").iterdir()}
    assert written == {"dnabert_s", "esm2", "head", LOCK_FILE}


def test_of_two_calibrations_of_one_models_directory_the_second_waits_for_the_first(
    tmp_path: Path,
) -> None:
    """Both would load the weights on one GPU, and each would replace what the other measures."""
    models, reads = tmp_path / "models", tmp_path / "reads.fasta"
    init_random(models)
    simulate(SimulateSpec(reads=400, seed=3), reads)
    command = [sys.executable, "-m", "virnuc.flows.cli", "models", "quantize", models, reads]
    with first_use(models, "the int8 calibration"):
        process = subprocess.Popen(
            [*command, "--device", "cpu"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        assert "makes the int8 calibration" in process.stderr.readline()
        assert not list(models.rglob("int8*")), "it has written while another process did"
    _, messages = process.communicate(timeout=120)

    assert process.returncode == 0, messages
    assert (models / "esm2" / "int8.safetensors").is_file()


def test_no_calibration_is_begun_where_there_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(WeightsError):
        quantise(tmp_path / "models", "reads.fasta", torch.device("cpu"))
    assert not (tmp_path / "models").exists()


def test_a_model_that_another_process_has_made_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder appears between the first look and the rename."""
    for module_that_looks in (convert, model_files):
        monkeypatch.setattr(module_that_looks, "path_exists", lambda _: False)
    (tmp_path / "models" / "esm2").mkdir(parents=True)
    (tmp_path / "models" / "esm2" / "config.json").write_text("of another process")
    with pytest.raises(WeightsError, match="exists already"):
        init_random(tmp_path / "models")
    assert (tmp_path / "models" / "esm2" / "config.json").read_text() == "of another process"
    assert not list((tmp_path / "models").glob(".partial*"))
