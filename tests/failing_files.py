"""Child processes for which calls of the system fail, through a library that is preloaded."""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

SOURCE = Path(__file__).with_name("data") / "failing_files.c"
OPEN = "o"
READ = "r"
STAT = "s"
LIST = "l"
LOCK = "k"
WRITE = "w"  # and flush to the disk
RENAME = "m"  # and link
REMOVE = "u"
MAKE_FOLDER = "d"
ALL_CALLS = OPEN + READ + STAT + LIST + LOCK + WRITE + RENAME + REMOVE + MAKE_FOLDER


@cache
def _library() -> Path:
    """Compile the library once for this process, into a folder that goes with the process."""
    folder = Path(mkdtemp(prefix="virnuc-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)  # processes of other users load it, too
    library = folder / "failing_files.so"
    command = ["cc", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return library


def has_compiler() -> bool:
    """Return whether the library can be compiled here."""
    return shutil.which("cc") is not None


def failing_variables(
    path: str, numbers: Sequence[int], calls: str, while_file: Path | None = None
) -> dict[str, str]:
    """Return the environment variables with which calls of a child process fail.

    Args:
        path: The calls fail for files with this text in their path.
        numbers: The numbers of the errors (errno), of which one is drawn for each call.
        calls: Which calls fail.
        while_file: If given, the calls fail only while this file exists.
    """
    variables = {
        "LD_PRELOAD": str(_library()),
        "FAIL_PATH": path,
        "FAIL_ERRNO": ",".join(map(str, numbers)),
        "FAIL_CALLS": calls,
    }
    if while_file is not None:
        variables["FAIL_WHILE"] = str(while_file)
    return variables


def failing_calls(
    path: str, number: int, calls: str = OPEN + READ, while_file: Path | None = None
) -> dict[str, str]:
    """Return the environment of a child process of which calls fail; see `failing_variables`."""
    import pytest

    if not has_compiler():
        pytest.skip("needs a C compiler")
    return os.environ | failing_variables(path, [number], calls, while_file)


def words_of(number: int) -> str:
    """Return the system's words for an error, for example "Stale file handle"."""
    assert number in errno.errorcode
    return os.strerror(number)
