"""Is there a place to write to? Asked before any work is done for it."""

import tempfile
from pathlib import Path

from virnuc_core.errors import ConfigError
from virnuc_core.rundir import check_room
from virnuc_core.system_errors import describe_system_error, storage_error


def nearest_existing(path: Path) -> Path:
    """Return the path itself if it exists, else the nearest folder above it that does."""
    absolute = path.absolute()
    return next(place for place in (absolute, *absolute.parents) if place.exists())


def require_writable(folder: Path, nbytes: int = 0, purpose: str = "") -> None:
    """Raise an error unless the folder is, or can become, one that can be written to.

    Nothing is left behind.

    Args:
        folder: The folder.
        nbytes: How much will be written to it.
        purpose: What needs the room, for the message.

    Raises:
        ConfigError: A file is in the way, or the folder cannot be written to.
        StorageError: There is not enough room.
    """
    place = nearest_existing(folder)
    if not place.is_dir():
        raise ConfigError(f"{folder}: {place} is a file; choose another directory")
    try:
        # permission bits say nothing of a disk that is full or read-only
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"virnuc")
            file.flush()
    except OSError as error:
        disk_problem = storage_error(error, folder)
        if disk_problem is not None:
            raise disk_problem from error
        reason = describe_system_error(error, "choose another directory")
        raise ConfigError(f"{folder}: cannot write in {place}: {reason}") from error
    check_room(place, nbytes, purpose)
