"""A place for compiled kernels where the user has no usable home directory, as in some containers.

Triton keeps the kernels that it compiles in `~/.triton`. It would fail if it cannot write there.
Without a home it would make a folder that is called `~` in the working directory.
"""

import logging
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

TRITON_CACHE: Final = Path(".triton", "cache")  # in the home directory
OWN_PLACES: Final = ("TRITON_CACHE_DIR", "TRITON_HOME")  # by which a user names another place
log = logging.getLogger(__name__)


def kernel_cache_variables(*, fresh: bool = False) -> dict[str, str]:
    """Return the environment variables by which workers on GPUs find a place for their kernels.

    If Triton cannot write to its folder in the home directory, this is a temporary folder. Only
    this user can write to it, because what is in it is executed. It is removed when this process
    ends, so a later run compiles again. A warning says so.

    Args:
        fresh: Use a temporary folder in any case, because the kept kernels may be damaged.

    Returns:
        One variable; none if the user has a usable home or has named a place.
    """
    if fresh:
        return {"TRITON_CACHE_DIR": _fresh_folder().name}
    if _has_usable_home() or any(os.environ.get(name) for name in OWN_PLACES):
        return {}
    return {"TRITON_CACHE_DIR": _temporary_folder().name}


@cache
def _temporary_folder() -> "tempfile.TemporaryDirectory[str]":
    """Make the folder, once for all workers of this process."""
    log.warning(
        "the kernels of this run are compiled anew, because ~/.triton cannot be written; "
        "name a folder for them with TRITON_CACHE_DIR"
    )
    return _make_folder()


@cache
def _fresh_folder() -> "tempfile.TemporaryDirectory[str]":
    """Make a folder for workers that must not use kernels of earlier ones, once for all of them."""
    return _make_folder()


def _make_folder() -> "tempfile.TemporaryDirectory[str]":
    """Make a folder to which only this user can write."""
    return tempfile.TemporaryDirectory(prefix="virnuc-kernels-", ignore_cleanup_errors=True)


def _has_usable_home() -> bool:
    """Return whether Triton can make files in its folder in the user's home directory."""
    try:
        home = Path.home()
    except RuntimeError:  # no variable names it, and the user has no entry in /etc/passwd
        return False
    if not home.is_absolute():  # it would be a folder in the working directory
        return False
    cache = home / TRITON_CACHE
    # The folder itself, or the one in which it would be made. It may belong to root, for example
    # after a command under `sudo`.
    existing = next(folder for folder in (cache, *cache.parents) if os.path.lexists(folder))
    # Unlike `Path.is_dir`, this raises no error for a link to a place that this user may not see.
    is_folder = os.path.isdir(existing)  # noqa: PTH112
    return is_folder and os.access(existing, os.W_OK | os.X_OK)
