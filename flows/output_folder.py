"""Is there a place to write to? Asked before any work is done for it."""

import tempfile
from pathlib import Path

from virnuc_core.errors import ConfigError
from virnuc_core.rundir import check_room
from virnuc_core.system_errors import (
    describe_system_error,
    is_folder,
    process_limit_error,
    storage_error,
    target_exists,
)


def nearest_existing(path: Path) -> Path:
    """Return the path itself if it exists, otherwise the nearest parent folder that exists.

    Raises:
        UnreadableError: It is not known whether a path exists.
    """
    absolute = path.absolute()
    for candidate in (absolute, *absolute.parents):
        if target_exists(candidate):
            return candidate
    return Path(absolute.anchor)


def require_writable(folder: Path, nbytes: int = 0, purpose: str = "") -> None:
    """Raise an error if a folder cannot be created or written to, or has not enough room.

    A temporary file is written for the check and removed again.

    Args:
        folder: The folder. It need not exist.
        nbytes: Number of bytes that will be written to it.
        purpose: Description of these bytes, for the message.

    Raises:
        ConfigError: A file is in the way, or the folder cannot be written to.
        StorageError: There is not enough room.
        LimitError: This process may not open enough files.
    """
    existing = nearest_existing(folder)
    if not is_folder(existing):
        raise ConfigError(f"{folder}: {existing} is a file; choose another directory")
    try:
        # A real write also fails on a disk that is full or read-only; permission bits do not show
        # that.
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"virnuc")
            file.flush()
    except OSError as error:
        disk_problem = storage_error(error, folder)
        if disk_problem is not None:
            raise disk_problem from error
        limit = process_limit_error(error)
        if limit is not None:
            raise limit from error
        reason = describe_system_error(error, "choose another directory")
        raise ConfigError(f"{folder}: cannot write in {existing}: {reason}") from error
    check_room(existing, nbytes, purpose)
