"""The errors people see. Each says in one line what is wrong, where, and the way out."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from virnuc_core.confidential import redact

MAX_SHOWN_LETTERS: Final = 100  # of a value or a name that is wrong
MAX_SHOWN_NAMES: Final = 3  # of a list in a message
# Characters that move the cursor of a terminal or reverse the order of letters, and bytes of file
# names that are no letters.
_UNPRINTABLE: Final = re.compile(
    r"[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Return the text with its control characters written out.

    Names that come from a file must not act on the terminal of whoever reads them.

    Args:
        text: A message, or a name that a message shows.

    >>> printable("reads\x1b[2J.fa")
    'reads\\x1b[2J.fa'
    """
    return _UNPRINTABLE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    """Return the matched letter as Python writes it in a string, for example `\\x1b`."""
    return match[0].encode("unicode_escape").decode("ascii")


def shorten(name: str) -> str:
    """Return the first `MAX_SHOWN_LETTERS` letters of a name, on one line."""
    return re.sub(r"\s", " ", name)[:MAX_SHOWN_LETTERS]


def join_first(names: Iterable[object]) -> str:
    """Return the first three names, shortened and on one line, and the number of the others.

    Args:
        names: Names, or anything else whose text can be shown.

    >>> join_first(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    texts = [shorten(str(name)) for name in names]
    text = ", ".join(texts[:MAX_SHOWN_NAMES])
    n_hidden = len(texts) - MAX_SHOWN_NAMES
    if n_hidden > 0:
        text += f" and {n_hidden} more"
    return text


class VirnucError(Exception):
    """Root of the family. `exit_code` is the exit code of a command that ends with it.

    Its text has no passwords, and no control characters.
    """

    exit_code = 1

    def __init__(self, problem: str) -> None:
        super().__init__(printable(redact(problem)))


class InputError(VirnucError):
    """Reads that cannot be used. Names the file, the line or the read, and what to do."""

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
        """Compose the message, for example `sample.fa:91: read 'r7': problem; hint`.

        Args:
            problem: What is wrong.
            file: The file of reads, if one is to blame.
            line: The line in it, from 1. 0 if it is not known.
            read_id: The id of the read, if one is to blame.
            hint: What the user can do.
        """
        self.file = file
        self.line = line
        self.read_id = read_id
        message = problem
        if read_id:
            message = f"read '{read_id}': {message}"
        if file and line:
            message = f"{file}:{line}: {message}"
        elif file:
            message = f"{file}: {message}"
        if hint:
            message = f"{message}; {hint}"
        super().__init__(message)


class ConfigError(VirnucError):
    """Settings that contradict each other, are unknown or out of range."""

    exit_code = 2


def missing_package_error(package: str | None, extra: str, purpose: str) -> ConfigError:
    """Return the error for a package that only some installations have.

    No release is on a package index, so the message names the checkout. A package with our name on
    an index would be a stranger's.

    Args:
        package: The name of the module that could not be imported.
        extra: The optional dependencies in `pyproject.toml` that contain it.
        purpose: What the package is needed for.
    """
    return ConfigError(
        f"{purpose} needs the package {package}, which is not installed; "
        f"run pip install '.[{extra}]' in the checkout of virnuc"
    )


class WeightsError(VirnucError):
    """A models directory, or a checkpoint, that cannot be used as it is."""

    exit_code = 3


class NotFiniteError(WeightsError):
    """A model with finite weights gave NaN or infinity for too many rows of these reads."""


class DeviceError(VirnucError):
    """A device that is absent, taken, or cannot hold the work."""

    exit_code = 4


class IncapableError(DeviceError):
    """A device that can never do what is asked of it."""


class ShardError(VirnucError):
    """A shard that could not be computed, or whose file is not what was committed."""

    def __init__(self, problem: str, *, shard: int | None = None) -> None:
        if shard is not None:
            problem = f"shard {shard:05d}: {problem}"
        super().__init__(problem)


class WorkerError(VirnucError):
    """A worker process that failed for good. Its own traceback is a note that `--debug` shows."""

    def __init__(self, problem: str, *, worker_traceback: str = "") -> None:
        super().__init__(problem)
        if worker_traceback:
            self.add_note(worker_traceback)


class StorageError(VirnucError):
    """A disk that is full, broken or read-only, or a limit that is reached. A retry cannot help."""


class UnsafeFileError(ConfigError):
    """A file or folder of a run that virnuc does not open, because somebody may have planted it.

    For example a symbolic link that leads out of the run directory, a named pipe in place of a
    file, or an HDF5 file that shows the bytes of another file.
    """


class DamagedFileError(InputError, ConfigError):
    """A file that virnuc wrote, and that has another content now than its recorded digest says.

    It was read, so this is neither absence nor an error of the system. The file may be input of a
    command (a table of results) or decide what it does (a record), so it counts as both.
    """


class UnreadableError(StorageError):
    """A file whose content is not known, because the system could not read it (not even later).

    The file may be as good as ever. It must not be called absent, damaged or changed.
    """


class LimitError(VirnucError):
    """A limit of the system, such as the number of threads or the memory of a process."""


def format_bytes(n_bytes: int) -> str:
    """Return a number of bytes as people read it, in MB or GB of powers of ten.

    Args:
        n_bytes: The number of bytes.

    >>> format_bytes(2_000_000), format_bytes(72_300_000_000)
    ('2.0 MB', '72.3 GB')
    """
    if n_bytes >= 1e9:
        return f"{n_bytes / 1e9:,.1f} GB"
    return f"{n_bytes / 1e6:,.1f} MB"


class SpentInputError(VirnucError):
    """Staging failed, and a retry might help, but the reads came by a pipe and are gone."""


class RunMismatchError(ConfigError):
    """A run directory that holds results of other reads, weights or settings. Nothing is mixed."""


# Errors that lie with one file of reads: other files may still be processed.
INPUT_SPECIFIC_ERRORS: Final = (InputError, NotFiniteError)


def is_machine_error(error: BaseException) -> bool:
    """Return true if the machine or the weights failed: every other input would fail too.

    Args:
        error: The error that ended the work on one input.
    """
    if isinstance(error, INPUT_SPECIFIC_ERRORS):
        return False
    return isinstance(error, (WeightsError, DeviceError, StorageError))


# Errors that another process may report by name: all of ours, and some of the system's.
_ERRORS_BY_NAME: Final[dict[str, type[VirnucError]]] = {
    error.__name__: error
    for error in (
        VirnucError,
        ConfigError,
        LimitError,
        WeightsError,
        NotFiniteError,
        DeviceError,
        IncapableError,
        InputError,
        ShardError,
        WorkerError,
        StorageError,
        UnreadableError,
        SpentInputError,
        RunMismatchError,
        UnsafeFileError,
        DamagedFileError,
    )
}
_SYSTEM_ERRORS: Final = ("OSError", "PermissionError", "FileNotFoundError", "NotADirectoryError")


def error_from_name(name: str, message: str) -> VirnucError | None:
    """Return the error that another process reported by the name of its class.

    Args:
        name: The name of the class.
        message: The message of the error.

    Returns:
        An error of the class of that name, if it is one of virnuc's. An error of the system becomes
        a plain `VirnucError`. None for any other name.
    """
    if name in _SYSTEM_ERRORS:
        return VirnucError(message)
    error_class = _ERRORS_BY_NAME.get(name)
    if error_class is None:
        return None
    return error_class(message)
