"""A folder that cannot be listed is not taken for an empty one. Calls of the system really fail."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from tests.failing_files import LIST, failing_calls, words_of

pytestmark = pytest.mark.slow
# A program that prints its result or the error.
PROGRAM = """
import sys
from pathlib import Path
from virnuc_core import system_errors
from virnuc_core.errors import VirnucError
system_errors.RETRY_PAUSES_S = (0.01,)
folder = Path(sys.argv[1])
try:
    {statements}
except VirnucError as error:
    print(type(error).__name__, error)
"""


def answer(folder: Path, statements: str, number: int, failing: str) -> str:
    """Return what statements print while folders with a text in their path cannot be listed."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(statements=statements), str(folder)],
        env=failing_calls(failing, number, LIST),
        capture_output=True,
        encoding="utf-8",
        check=True,
    ).stdout


def file_in(folder: Path, name: str) -> Path:
    """Write a file of somebody, in folders that may not exist yet."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(">a\nA\n")
    return path


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_an_output_folder_of_others_is_refused_if_its_files_are_not_known(
    tmp_path: Path, number: int
) -> None:
    file_in(tmp_path, "shards/00000.h5")
    statements = "from virnuc_core.rundir import require_own_directory as ask; print(ask(folder))"
    assert "would be overwritten" in answer(tmp_path, statements, number, "/nothing")
    text = answer(tmp_path, statements, number, "/shards")
    assert text.startswith(f"UnreadableError {tmp_path}/shards: cannot be read: {words_of(number)}")


def test_files_of_a_run_are_not_compared_if_its_shards_are_not_known(tmp_path: Path) -> None:
    for run in "ab":
        file_in(tmp_path, f"{run}/shards/00000.h5")
    statements = (
        "from virnuc_core.report.compare import compare_bytes as ask; "
        "print(ask(folder / 'a', folder / 'b').shards_compared)"
    )
    assert answer(tmp_path, statements, errno.EACCES, "/nothing") == "1\n"
    assert answer(tmp_path, statements, errno.EACCES, "/b/shards").startswith("UnreadableError")


def test_a_run_does_not_fail_at_its_end_because_a_folder_cannot_be_listed(tmp_path: Path) -> None:
    statements = (
        "from virnuc_core.rundir import run_lock; lock = run_lock(folder / 'run'); "
        "lock.__enter__(); (folder / 'run/shards').mkdir(); "
        "open(folder / 'shut', 'w').close(); lock.__exit__(None, None, None); print('ended')"
    )
    while_file = tmp_path / "shut"
    answers = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(statements=statements), str(tmp_path)],
        env=failing_calls(f"{tmp_path}/run/shards", errno.ESTALE, LIST, while_file),
        capture_output=True,
        encoding="utf-8",
        check=True,
    ).stdout
    assert answers == "ended\n"
    assert (tmp_path / "run" / ".virnuc").exists(), "nobody knows whether the run has files"
