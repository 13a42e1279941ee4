"""Child processes for which calls of the system fail, through a library that is preloaded."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

SOURCE = Path(__file__).with_name("data") / "failing_files.c"
OPEN = "o"
READ = "r"
STAT = "s"
LIST = "l"
LOCK = "k"


@cache
def _library() -> Path:
    """Compile the library once for this process."""
    library = Path(mkdtemp(prefix="virnuc-test-")) / "failing_files.so"
    command = ["cc", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return library


def failing_calls(
    path: str, number: int, calls: str = OPEN + READ, while_file: Path | None = None
) -> dict[str, str]:
    """Return environment variables with which calls of a child process fail.

    Args:
        path: The calls fail for files with this text in their path.
        number: The number of the error (errno).
        calls: Which calls fail.
        while_file: If given, the calls fail only while this file exists.
    """
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    variables = {
        "LD_PRELOAD": str(_library()),
        "FAIL_PATH": path,
        "FAIL_ERRNO": str(number),
        "FAIL_CALLS": calls,
    }
    if while_file is not None:
        variables["FAIL_WHILE"] = str(while_file)
    return os.environ | variables


def words_of(number: int) -> str:
    """Return the system's words for an error, for example "Stale file handle"."""
    assert number in errno.errorcode
    return os.strerror(number)
