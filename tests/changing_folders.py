"""Look at folders in which other processes make, rename and remove files at the same time.

A name that was just listed may be gone, or a link, when it is looked at. `Path.rglob` raises an
error if a folder vanishes while it walks, and `Path.is_file` tells nothing about a moment later.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# The name is gone; a folder on the way to it is gone; it is a link; it is a socket.
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)


def paths_below(folder: Path) -> list[Path]:
    """Return all files and folders below a folder. What vanishes meanwhile may be missing.

    Links are returned and not followed.
    """
    paths = []
    for parent, folder_names, file_names in os.walk(folder):
        paths += [Path(parent, name) for name in (*folder_names, *file_names)]
    return sorted(paths)


def content_of(path: Path) -> bytes:
    """Return the content of a regular file, or nothing if the name is gone or is something else."""
    try:
        # O_NONBLOCK: a named pipe must not be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        return b""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)
