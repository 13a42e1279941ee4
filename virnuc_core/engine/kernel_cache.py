"""A place for compiled kernels where the user has no home directory, as in some containers.

Triton keeps the kernels that it compiles in `~/.triton`. Without a home it would fail, or make a
folder that is called `~` in the working directory.
"""

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

OWN_PLACES: Final = ("TRITON_CACHE_DIR", "TRITON_HOME")  # by which a user names another place


def kernel_cache_variables() -> dict[str, str]:
    """Return the environment variables by which workers on GPUs find a place for their kernels.

    Without a usable home, this is a temporary folder that only this user can write to, because what
    is in it is executed. It is removed when this process ends, so a later run compiles again.

    Returns:
        One variable; none if the user has a home or has named a place.
    """
    if _has_usable_home() or any(os.environ.get(name) for name in OWN_PLACES):
        return {}
    return {"TRITON_CACHE_DIR": _temporary_folder().name}


@cache
def _temporary_folder() -> "tempfile.TemporaryDirectory[str]":
    """Make the folder, once for all workers of this process."""
    return tempfile.TemporaryDirectory(prefix="virnuc-kernels-", ignore_cleanup_errors=True)


def _has_usable_home() -> bool:
    """Return whether there is a home directory in which files can be made."""
    try:
        home = Path.home()
    except RuntimeError:  # no variable names it, and the user has no entry in /etc/passwd
        return False
    existing = next(folder for folder in (home, *home.parents) if folder.exists())
    return existing.is_dir() and os.access(existing, os.W_OK)
