"""A limit of the system is reported in one line with advice, whatever it stops."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from virnuc.flows.cli import main
from virnuc_core.errors import LimitError, error_from_name
from virnuc_core.system_errors import limit_error

NO_SEMAPHORES = Path(__file__).parents[2] / "data" / "no_semaphores.c"
# Runs a command line in a process that can start a certain number of threads. The error is the one
# that Python raises if the system refuses a thread.
PROGRAM = """
import sys, threading
allowed = int(sys.argv[1])
start_new_thread = threading._start_new_thread
def start(*arguments):
    global allowed
    allowed -= 1
    if allowed < 0:
        raise RuntimeError("can't start new thread")
    return start_new_thread(*arguments)
threading._start_new_thread = start
sys.argv = ["virnuc", *sys.argv[2:]]
from virnuc.flows.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (MemoryError(), "ulimit -v"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (OSError(errno.ENFILE, "Too many open files in system"), "close other programs"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "ulimit -v"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -a"),
        (
            RuntimeError("unable to write to file </torch_1_2_3>: No space left on device (28)"),
            "--shm-size",
        ),
        (
            RuntimeError("unable to open shared memory object </torch_1> in read-write mode"),
            "--shm-size",
        ),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
            ),
            "ulimit -v",
        ),
        (
            ImportError("x.so: failed to map segment from shared object"),
            "ulimit -v",
        ),
    ],
)
def test_each_limit_has_its_advice(error: Exception, advice: str) -> None:
    limit = limit_error(error)
    assert limit is not None
    assert advice in str(limit)
    assert str(limit).endswith("and run again")
    assert isinstance(error_from_name("LimitError", str(limit)), LimitError)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape mismatch"),
        ImportError("No module named 'x'"),
        OSError(errno.ENOENT, "No such file or directory"),
        ValueError("can't start new thread"),
    ],
)
def test_other_errors_are_no_limits(error: Exception) -> None:
    assert limit_error(error) is None


@pytest.mark.parametrize(
    "n_threads",
    [0, 3, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2, 5, 7, 9))],
)
def test_a_run_that_can_start_no_more_threads_ends_with_one_line(
    n_threads: int, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    reads = tmp_path / "reads.fa"
    assert main(["models", "init-random", str(models)]) == 0
    assert main(["simulate", str(reads), "--reads", "5"]) == 0
    words = ["predict", str(reads), "-o", str(tmp_path / "out"), "--models", str(models)]
    options = ["--devices", "cpu:1", "--no-prefect", "--quiet"]
    outcome = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(n_threads), *words, *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if outcome.returncode == 0:
        assert n_threads > 5  # enough threads for so small a run
        return
    assert outcome.returncode == 1
    last_line = outcome.stderr.splitlines()[-1]
    assert last_line.startswith("virnuc: ")
    assert "ulimit -u" in last_line
    assert "unexpected" not in outcome.stderr
    assert "Traceback" not in outcome.stderr


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10))


def little_memory() -> None:
    # Not enough for the libraries. At some other limits a library ends the process by itself.
    resource.setrlimit(resource.RLIMIT_AS, (300_000_000, 300_000_000))


def test_a_library_that_fails_without_a_word_is_short_of_memory_if_memory_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CPython raises this error for a compiled function that fails and sets no error."""
    error = SystemError("error return without exception set")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 30, resource.RLIM_INFINITY))
    limit = limit_error(error)
    assert limit is not None
    assert "ulimit -v" in str(limit)
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert limit_error(error) is None


@pytest.mark.parametrize("limit", [few_files, little_memory])
def test_a_command_with_too_few_files_or_too_little_memory_ends_with_one_line(
    limit: Callable[[], None], tmp_path: Path
) -> None:
    reads = tmp_path / "reads.fa"
    reads.write_text(">r\nACGT\n")
    outcome = subprocess.run(
        [
            *(sys.executable, "-m", "virnuc.flows.cli", "predict", str(reads), "--no-prefect"),
            *("-o", str(tmp_path / "out"), "--models", str(tmp_path), "--quiet"),
        ],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert outcome.returncode in (1, 3)
    assert "unexpected" not in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "--shm-size"),
        pytest.param(errno.EACCES, "--num-workers 0", marks=pytest.mark.slow),
        pytest.param(errno.ENOSYS, "/dev/shm", marks=pytest.mark.slow),
        pytest.param(errno.EMFILE, "ulimit -n", marks=pytest.mark.slow),
    ],
)
def test_loader_processes_without_semaphores_are_one_line_about_shared_memory(
    number: int, advice: str, tmp_path: Path
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    library = tmp_path / "no_semaphores.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, NO_SEMAPHORES], check=True)
    models = tmp_path / "models"
    reads = tmp_path / "reads.fa"
    assert main(["models", "init-random", str(models)]) == 0
    assert main(["simulate", str(reads), "--reads", "5"]) == 0
    words = ["predict", str(reads), "-o", str(tmp_path / "out"), "--models", str(models)]
    options = ["--devices", "cpu:1", "--no-prefect", "--quiet", "--num-workers", "1"]
    outcome = subprocess.run(
        [sys.executable, "-m", "virnuc.flows.cli", *words, *options],
        env=os.environ | {"LD_PRELOAD": str(library), "SEM_ERRNO": str(number)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert outcome.returncode == 1
    last_line = outcome.stderr.splitlines()[-1]
    assert last_line.startswith("virnuc: ")
    assert advice in last_line
