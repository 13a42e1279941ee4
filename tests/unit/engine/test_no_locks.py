"""File systems without locks: NFS without a lock service, Lustre mounted without `flock`."""

from __future__ import annotations

import ast
import errno
from pathlib import Path

import pytest

from tests.failing_files import LOCK, failing_calls

from .forked_programs import ForkedPrograms
from .runs import result_bytes

# What such file systems answer to a request for a lock.
OTHER_LOCK_ERRORS = (errno.ENOSYS, errno.EAGAIN, errno.EIO)
LOCK_ERRORS = [errno.ENOLCK]
LOCK_ERRORS += [pytest.param(number, marks=pytest.mark.slow) for number in OTHER_LOCK_ERRORS]


@pytest.mark.parametrize("number", LOCK_ERRORS, ids=errno.errorcode.get)
def test_neither_a_run_nor_its_readers_need_locks(
    programs: ForkedPrograms,
    tmp_path: Path,
    tiny_models: Path,
    reads_file: Path,
    reference: Path,
    number: int,
) -> None:
    """`reference` is a run of the same reads with locks."""
    root = tmp_path / "run"

    child = programs.run(
        "predict_in_child",
        "read_everything_in_child",
        arguments=(root, tiny_models, reads_file),
        variables=failing_calls(str(tmp_path), number, LOCK),
    )

    assert child.returncode == 0, child.stderr
    assert result_bytes(root) == result_bytes(reference)
    n_uniques, n_compared, n_shards = map(int, child.stdout.splitlines()[-1].split())
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
