"""The errors people see. Each says what is wrong, where, and the way out, in one line."""

import errno
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

MAX_SHOWN_LETTERS: Final = 100  # characters of a value or a name that is wrong
# what moves a terminal's cursor or turns the order of letters round, and bytes of a file name that are no letters
_UNPRINTABLE: Final = re.compile(
    r"[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""A text with its control characters written out: what a file calls itself must not act on who reads of it.

    >>> printable("reads\x1b[2J.fa")
    'reads\\x1b[2J.fa'
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def join_first(names: Iterable[object]) -> str:
    """The first three of some names, short and on one line, and how many more there are."""
    found = [re.sub(r"\s", " ", str(name))[:MAX_SHOWN_LETTERS] for name in names]
    return ", ".join(found[:3]) + f" and {len(found) - 3} more" * (len(found) > 3)


class VirnucError(Exception):
    """Root of the family. ``exit_code`` is what the command line returns for it."""

    exit_code = 1

    def __init__(self, problem: str) -> None:
        super().__init__(printable(problem))


class InputError(VirnucError):
    """Reads that cannot be used: names the file, the line or the read, and what to do."""

    exit_code = 2

    def __init__(
        self,
        problem: str,
        *,
        file: Path | str = "",
        line: int = 0,
        read_id: str = "",
        hint: str = "",
    ) -> None:
        self.file, self.line, self.read_id = file, line, read_id
        place = "" if not file else f"{file}:{line}: " if line else f"{file}: "
        who = f"read '{read_id}': " if read_id else ""
        super().__init__(f"{place}{who}{problem}{'; ' + hint if hint else ''}")


class ConfigError(VirnucError):
    """Settings that contradict each other, are unknown or out of range."""

    exit_code = 2


class WeightsError(VirnucError):
    """A models directory, or a checkpoint, that cannot be used as it is."""

    exit_code = 3


class NotFiniteError(WeightsError):
    """Reads for too many rows of which a model gives NaN or infinity, though its weights are finite."""


class DeviceError(VirnucError):
    """A device that is absent, taken, or cannot hold the work."""

    exit_code = 4


class IncapableError(DeviceError):
    """A device that cannot do what is asked, at any other time either."""


class ShardError(VirnucError):
    """A shard that could not be computed, or whose file is not what was committed."""

    def __init__(self, problem: str, *, shard: int | None = None) -> None:
        super().__init__(problem if shard is None else f"shard {shard:05d}: {problem}")


class WorkerError(VirnucError):
    """A worker process that failed for good; the worker's own traceback is a note, which `--debug` shows."""

    def __init__(self, problem: str, *, worker_traceback: str = "") -> None:
        super().__init__(problem)
        if worker_traceback:
            self.add_note(worker_traceback)


# what a disk that takes no more says, and the way out
_STORAGE: Final = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room, or have the quota raised",
    errno.EFBIG: "have the limit on file sizes raised (ulimit -f)",
    errno.EIO: "have the disk looked at, or choose another",
    errno.EROFS: "have it mounted for writing, or choose another directory",
}


class StorageError(VirnucError):
    """A disk that is full, broken or read-only, or a limit that is reached: told at once, for no other try can help."""


def storage_error(error: BaseException, path: Path | None = None) -> StorageError | None:
    """What the system said of a disk while `path` was written, with the room that is left there; None for all else."""
    if not isinstance(error, OSError) or error.errno not in _STORAGE:
        return None
    path = path or (Path(os.fsdecode(error.filename)) if error.filename else None)
    place = (
        next((folder for folder in (path, *path.parents) if folder.is_dir()), None)
        if path
        else None
    )
    left = f"; {format_bytes(shutil.disk_usage(place).free)} free there" if place else ""
    said = f"{os.strerror(error.errno)}{left}; {_STORAGE[error.errno]} and run again, what was committed stays"
    return StorageError(f"{path}: {said}" if path else said)


def format_bytes(nbytes: int) -> str:
    """Bytes as people say them.

    >>> size(2_000_000), size(72_300_000_000)
    ('2.0 MB', '72.3 GB')
    """
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"


class SpentInputError(VirnucError):
    """Staging failed in a way that another try might mend, but its reads came through a pipe and are gone."""


class RunMismatchError(ConfigError):
    """A run directory that holds results of other reads, weights or settings. Nothing is mixed."""


INPUT_SPECIFIC_ERRORS: Final = (
    InputError,
    NotFiniteError,
)  # what lies with a file of reads, and no other attempt would mend


def is_machine_error(error: BaseException) -> bool:
    """Whether no other reads would fare better."""
    return isinstance(error, (WeightsError, DeviceError, StorageError)) and not isinstance(
        error, INPUT_SPECIFIC_ERRORS
    )


def error_from_name(kind: str, message: str) -> VirnucError | None:
    """An error of another process by its class's name: one of ours, or the system's; None for all else."""
    system = ("OSError", "PermissionError", "FileNotFoundError", "NotADirectoryError")
    found = VirnucError if kind in system else globals().get(kind)
    return found(message) if found else None
