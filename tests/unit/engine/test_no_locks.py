"""File systems without locks: NFS without a lock service, Lustre mounted without `flock`."""

from __future__ import annotations

import ast
import errno
import subprocess
import sys
from pathlib import Path

import pytest

from tests.failing_files import LOCK, failing_calls

from .runs import result_bytes

PROGRAM = "from tests.unit.engine.runs import {name}; {name}()"
# What such file systems answer to a request for a lock.
OTHER_LOCK_ERRORS = (errno.ENOSYS, errno.EAGAIN, errno.EIO)
LOCK_ERRORS = [errno.ENOLCK]
LOCK_ERRORS += [pytest.param(number, marks=pytest.mark.slow) for number in OTHER_LOCK_ERRORS]


def run_without_locks(name: str, folder: Path, number: int, *arguments: object) -> str:
    """Run a program of `runs` for which no file in a folder can be locked. Return its output."""
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(name=name), *map(str, arguments)],
        env=failing_calls(str(folder), number, LOCK),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


@pytest.fixture(scope="module")
def run_with_locks(
    tmp_path_factory: pytest.TempPathFactory, tiny_models: Path, reads_file: Path
) -> Path:
    """Predict the reads on a file system with locks."""
    root = tmp_path_factory.mktemp("with_locks") / "run"
    program = PROGRAM.format(name="predict_in_child")
    command = [sys.executable, "-c", program, str(root), str(tiny_models), str(reads_file)]
    subprocess.run(command, check=True, timeout=120)
    return root


@pytest.mark.parametrize("number", LOCK_ERRORS, ids=errno.errorcode.get)
def test_a_run_needs_no_locks(
    tmp_path: Path, tiny_models: Path, reads_file: Path, run_with_locks: Path, number: int
) -> None:
    root = tmp_path / "run"

    run_without_locks("predict_in_child", tmp_path, number, root, tiny_models, reads_file)

    assert result_bytes(root) == result_bytes(run_with_locks)


@pytest.mark.parametrize("number", LOCK_ERRORS, ids=errno.errorcode.get)
def test_to_read_a_run_needs_no_locks(run_with_locks: Path, number: int) -> None:
    output = run_without_locks("read_everything_in_child", run_with_locks, number, run_with_locks)

    n_uniques, n_compared, n_shards = map(int, output.split())
    assert n_uniques == n_compared > 0
    assert n_shards > 4


def test_every_file_of_hdf5_is_opened_without_a_lock() -> None:
    """A call of `h5py.File` without `locking=False` fails on such a file system."""
    package = Path(__file__).parents[3] / "virnuc_core"
    calls_with_lock = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "h5py.File":
                continue
            options = {option.arg: ast.unparse(option.value) for option in node.keywords}
            is_in_memory = options.get("driver") == "'core'"
            if options.get("locking") != "False" and not is_in_memory:
                calls_with_lock.append(f"{path.name}:{node.lineno}")
    assert calls_with_lock == []
