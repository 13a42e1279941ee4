"""System errors (`OSError`): what each proves about a file, and what the user can do about it.

An error of the operating system is an answer to a question, for example "what is in this file?".
Only "there is no such file" is a certain answer. A stale handle of a network file system, a missing
permission or a time-out say nothing about the file: its content is not known. Code that treats
"not known" as "absent" or "damaged" computes finished work again, or removes it.
"""

import errno
import fnmatch
import functools
import logging
import os
import re
import resource
import shutil
import stat
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar

from virnuc_core.errors import LimitError, StorageError, UnreadableError, format_bytes

log = logging.getLogger(__name__)

Content = TypeVar("Content")


class ErrorKind(StrEnum):
    """What a system error proves about the file that it names."""

    ABSENT = "absent"  # there is no such file, and this is certain
    TRANSIENT = "transient"  # nothing is known about the file; the same call may succeed later
    REFUSED = "refused"  # nothing is known about the content; the same call will fail again
    CONTENT = "content"  # the file was read, and its content is not what was expected


ABSENT_ERRORS: Final = frozenset({errno.ENOENT, errno.ENOTDIR})

_PERMISSION: Final = (
    "check the permissions of the file and its folders, and on a network file system your Kerberos "
    "ticket (klist)"
)
_FILE_SERVER: Final = "wait until the file server answers, or have the file system mounted again"
_TICKET: Final = "renew your Kerberos ticket (kinit)"
_FILE_SYSTEM_CHECK: Final = "have the file system checked (fsck)"
_OTHER_FILE_SYSTEM: Final = "choose a directory on another file system"

# The only table from an error number of the system to advice for the user. Each text is a clause
# that can be followed by " and run again".
ADVICE: Final = {
    # A disk that accepts no more data.
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room, or have the quota raised",
    errno.EFBIG: "have the limit on file sizes raised (ulimit -f)",
    errno.EIO: "have the disk looked at, or choose another",
    errno.EROFS: "have it mounted for writing, or choose another directory",
    # A network file system.
    errno.ENOLCK: (
        "have the lock service of the file system started (for NFS: rpc.statd and lockd), have it "
        "mounted with local locks (nolock), or choose another directory"
    ),
    errno.ESTALE: _FILE_SERVER,
    errno.ETIMEDOUT: _FILE_SERVER,
    errno.EHOSTDOWN: _FILE_SERVER,
    errno.EHOSTUNREACH: _FILE_SERVER,
    errno.ENETDOWN: _FILE_SERVER,
    errno.ENETUNREACH: _FILE_SERVER,
    errno.ECONNREFUSED: _FILE_SERVER,
    errno.ECONNRESET: _FILE_SERVER,
    errno.ECONNABORTED: _FILE_SERVER,
    errno.ENOTCONN: _FILE_SERVER,
    errno.ESHUTDOWN: _FILE_SERVER,
    errno.EREMOTEIO: _FILE_SERVER,
    errno.ENOKEY: _TICKET,
    errno.EKEYEXPIRED: _TICKET,
    errno.EKEYREVOKED: _TICKET,
    errno.EKEYREJECTED: _TICKET,
    # A user or a process that may not, or may not now.
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EBUSY: "wait until the other program no longer uses it",
    errno.EAGAIN: "wait, or have the limits on locks and processes raised (ulimit -a)",
    errno.EDEADLK: "wait until the other program no longer uses it",
    errno.EINTR: "wait a moment",
    errno.EMFILE: "have the limit on open files raised (ulimit -n)",
    errno.ENFILE: "close other programs: this machine has too many open files",
    errno.ENOMEM: "close other programs, or have the limit on memory raised (ulimit -v)",
    errno.ENOBUFS: "close other programs, or have the limit on memory raised (ulimit -v)",
    # A disk or a file system with a fault.
    errno.EUCLEAN: _FILE_SYSTEM_CHECK,
    errno.EBADMSG: _FILE_SYSTEM_CHECK,
    errno.ENODEV: "have the disk connected again",
    errno.ENXIO: "have the disk connected again",
    # A path that cannot be what it should be.
    errno.EISDIR: "move away the directory that has the name of the file",
    errno.ELOOP: "remove the symbolic links that lead to each other",
    errno.ENAMETOOLONG: "choose a directory with a shorter name",
    errno.ENOSYS: _OTHER_FILE_SYSTEM,
    errno.EOPNOTSUPP: _OTHER_FILE_SYSTEM,
}

# Errors that a later call meets again, because something must be changed first.
REFUSED_ERRORS: Final = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EROFS,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOSYS,
        errno.EOPNOTSUPP,
        errno.EINVAL,
    }
)

# `config.read_small_text` raises this for a file that is too large: its size is known.
CONTENT_ERRORS: Final = frozenset({errno.EOVERFLOW})

# Errors of a disk, or of a file system, that accepts no more data. A retry does not help.
STORAGE_ERRORS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ENOLCK}
)

# Errors of a limit of this machine, this user, or this container or batch job.
LIMIT_ERRORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})

_OUT_OF_MEMORY: Final = "out of memory"
_SHARED_MEMORY: Final = (
    "the memory that processes share (/dev/shm) is full or cannot be used",
    "make room in /dev/shm (in a container: --shm-size)",
)
# Words in errors of Python, of the dynamic linker and of torch. These errors have no number.
_LIMITS_BY_WORDS: Final = {
    "can't start new thread": (
        "no further thread can be started",
        "have the limit on processes (ulimit -u, or pids of the container or batch job) or on "
        "memory (ulimit -v) raised",
    ),
    "unable to open shared memory object": _SHARED_MEMORY,
    "unable to write to file </torch": _SHARED_MEMORY,
    "unable to allocate shared memory": _SHARED_MEMORY,
    "unable to resize file </torch": _SHARED_MEMORY,
    "DefaultCPUAllocator: can't allocate memory": (_OUT_OF_MEMORY, ADVICE[errno.ENOMEM]),
    "failed to map segment from shared object": (
        "out of memory while a library was loaded",
        ADVICE[errno.ENOMEM],
    ),
    "cannot allocate memory in static TLS block": (
        "out of memory while a library was loaded",
        ADVICE[errno.ENOMEM],
    ),
    "Cannot allocate memory": (_OUT_OF_MEMORY, ADVICE[errno.ENOMEM]),
    "Too many open files": ("too many open files", ADVICE[errno.EMFILE]),
}

# Seconds to wait before each further attempt to read. A file server that restarts, or a handle that
# has become stale, often answers again within this time.
RETRY_PAUSES_S: Final = (0.1, 0.4, 1.0, 2.5)

# Errors of a user who may not read a file. They rarely pass without a change of permissions.
PERMISSION_ERRORS: Final = frozenset({errno.EACCES, errno.EPERM})

# Errors of a path with which this user cannot open any file.
UNUSABLE_PATH_ERRORS: Final = PERMISSION_ERRORS | REFUSED_ERRORS

# HDF5, and libraries that are written in Rust, give the number of the system's error in the text of
# their own errors.
_NUMBER_IN_TEXT: Final = re.compile(r"\b(?:errno = |os error )(\d+)")


def error_number(error: BaseException) -> int | None:
    """Return the system's number (errno) of an error.

    HDF5 names the number in its message, also in errors that are no `OSError`.

    Args:
        error: Any error.

    Returns:
        The number, or None if the error does not come from the operating system.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if isinstance(error, (OSError, RuntimeError, KeyError)):
        match = _NUMBER_IN_TEXT.search(str(error))
        if match:
            return int(match[1])
    return None


def classify(error: BaseException) -> ErrorKind:
    """Return what is known about a file after an attempt to open or read it failed.

    An error without an errno was raised by a parser or by HDF5. Then the bytes were read, and they
    are not what was expected. An errno that is in none of the lists of this module counts as
    transient, because a further attempt does no harm.

    Args:
        error: The error of the attempt.
    """
    number = error_number(error)
    if number is None or number in CONTENT_ERRORS:
        return ErrorKind.CONTENT
    if number in ABSENT_ERRORS:
        return ErrorKind.ABSENT
    if number in REFUSED_ERRORS:
        return ErrorKind.REFUSED
    return ErrorKind.TRANSIENT


def describe_system_error(error: BaseException, alternative: str = "") -> str:
    """Return the system's words for an error, and what the user can do about it.

    Args:
        error: Any error. The text of an error that does not come from the system stays as it is.
        alternative: Another way out, such as "choose another directory". If the table `ADVICE` has
            no advice for the error, this is the only one.

    Returns:
        For example "No space left on device; make room, or choose another directory".
    """
    number = error_number(error)
    if number is None:
        reason = str(error) or type(error).__name__
        advice = ""
    else:
        reason = os.strerror(number)
        advice = ADVICE.get(number, "")
    if not advice:
        advice = alternative
    elif alternative and "choose" not in advice:  # some texts of ADVICE end with a choice already
        advice = f"{advice}, or {alternative}"
    if advice:
        return f"{reason}; {advice}"
    return reason


def storage_error(error: BaseException, path: Path | None = None) -> StorageError | None:
    """Translate a system error of a disk into an error that says what to do.

    Args:
        error: Any error that was raised while a file was written.
        path: The file. If it is None, the file that `error` names.

    Returns:
        The error to raise, with the free space that is left, or None if `error` is not one of
        `STORAGE_ERRORS`.
    """
    if not isinstance(error, OSError):
        return None
    number = error_number(error)
    if number not in STORAGE_ERRORS:
        return None
    if path is None and error.filename:
        path = Path(os.fsdecode(error.filename))
    reason = os.strerror(number)
    advice = f"{ADVICE[number]} and run again, what was committed stays"
    if path is None:
        return StorageError(f"{reason}; {advice}")
    # The file, and folders above it, may not exist yet. Any folder shows the disk's free space.
    # The disk that has failed may not answer this question either.
    with suppress(OSError):
        absolute = path.absolute()
        folder = next(folder for folder in (absolute, *absolute.parents) if folder.is_dir())
        free_bytes = shutil.disk_usage(folder).free
        reason += f"; {format_bytes(free_bytes)} free there"
    return StorageError(f"{path}: {reason}; {advice}")


def limit_error(error: BaseException) -> LimitError | None:
    """Translate an error about a limit of the system into an error that says what to do.

    Such limits are the number of threads and processes (`ulimit -u`), of open files (`ulimit -n`),
    the memory of a process (`ulimit -v`), and the room in /dev/shm, through which processes share
    memory.

    Args:
        error: Any error. Python and libraries report these limits by errors of several classes,
            which can only be told apart by their words.

    Returns:
        The error to raise, or None if `error` is about something else.
    """
    if isinstance(error, MemoryError):
        return LimitError(f"{_OUT_OF_MEMORY}; {ADVICE[errno.ENOMEM]} and run again")
    if isinstance(error, OSError) and error.errno in LIMIT_ERRORS:
        return LimitError(f"{describe_system_error(error)} and run again")
    if isinstance(error, SystemError) and _is_memory_limited():
        # A compiled library has failed and has not said why. Several do that if they get no memory.
        return LimitError(f"{_OUT_OF_MEMORY}; {ADVICE[errno.ENOMEM]} and run again")
    if not isinstance(error, (OSError, RuntimeError, ImportError)):
        return None
    text = str(error)
    # Neither a MemoryError nor a number of the system: only the words of the message are left.
    for words, (problem, advice) in _LIMITS_BY_WORDS.items():
        if words in text:
            return LimitError(f"{problem}; {advice} and run again")
    return None


def process_limit_error(error: BaseException) -> LimitError | None:
    """Translate an error about a limit of this process alone into an error that says what to do.

    Such limits are the number of open files (`ulimit -n`) and, if it is limited, the memory
    (`ulimit -v`). The same call will meet them again, later or with another file. Other limits
    (`limit_error`) count what other processes use, and may pass when these end.

    Args:
        error: Any error.

    Returns:
        The error to raise, or None if `error` is about something else.
    """
    number = error_number(error)
    is_about_memory = isinstance(error, MemoryError) or number == errno.ENOMEM
    if number == errno.EMFILE or (is_about_memory and _is_memory_limited()):
        return limit_error(error)
    return None


def _is_memory_limited() -> bool:
    """Return whether the system limits the memory of this process (`ulimit -v`)."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return soft_limit != resource.RLIM_INFINITY


def shared_memory_error(error: OSError) -> LimitError:
    """Return the error to raise if processes cannot share semaphores or memory.

    The system keeps both as files in /dev/shm. So its errors sound like those of a disk, but no
    other directory helps.

    Args:
        error: The error of the system.
    """
    limit = limit_error(error)
    if limit is not None:
        return limit
    return LimitError(
        f"processes cannot share memory in /dev/shm ({error.strerror or error}); make room there "
        "(in a container: --shm-size), or use --num-workers 0, and run again"
    )


def unreadable_error(error: BaseException, path: Path) -> UnreadableError:
    """Return the error to raise if the content of a file is not known because the system failed.

    Args:
        error: The error of the attempt to read the file.
        path: The file.
    """
    return UnreadableError(
        f"{path}: cannot be read: {describe_system_error(error)} and run again; "
        "the file was left as it is"
    )


def read_with_retries(
    path: Path, read: Callable[[], Content], *, expected_errors: Collection[int] = ()
) -> Content:
    """Return what `read` returns. If the system fails to read, call it again a few times.

    A caller that catches `OSError` around this call gets only certain answers: the file is absent
    (`FileNotFoundError`, `NotADirectoryError`), or it was read and a library refused its content
    (an error without a number). `UnreadableError` is not an `OSError`.

    Args:
        path: The file, for the messages.
        read: Opens and reads the file. It must be safe to call it again.
        expected_errors: Numbers (errno) of errors that the caller handles itself. They are raised
            as they are, without a retry.

    Raises:
        UnreadableError: The content is not known: the system refuses, a limit of this process is
            reached, or the system still fails at the last attempt.
    """
    pauses_s = list(RETRY_PAUSES_S)
    while True:
        try:
            return read()
        except (OSError, RuntimeError, KeyError) as error:
            kind = classify(error)
            is_certain_answer = kind in (ErrorKind.ABSENT, ErrorKind.CONTENT)
            if is_certain_answer or error_number(error) in expected_errors:
                raise
            will_fail_again = kind is ErrorKind.REFUSED or process_limit_error(error) is not None
            if will_fail_again or not pauses_s:
                raise unreadable_error(error, path) from error
            reason = os.strerror(error_number(error) or 0)
            log.warning("%s: cannot be read now (%s); trying again", path, reason)
        time.sleep(pauses_s.pop(0))


def require_readable(path: Path) -> None:
    """Raise an error if the system cannot read a file, before a library is told to read it.

    Some libraries report every error of the system as "no such file" or as damage. If this returns,
    the file was read a moment ago, or there is no regular file of this name. Nothing is read from
    pipes, whose data would be lost.

    Args:
        path: The file.

    Raises:
        UnreadableError: The system cannot read the file, so that nothing is known about it.
    """
    if not is_regular_file(path):
        return

    def read_first_byte() -> None:
        """Open the file and read from it once."""
        with path.open("rb") as file:
            file.read(1)

    with suppress(FileNotFoundError, NotADirectoryError):
        read_with_retries(path, read_first_byte)


def is_regular_file(path: Path) -> bool:
    """Return true if a path leads, also by links, to a file that is no folder, pipe or device.

    Args:
        path: The path. False is returned if there is nothing.

    Raises:
        UnreadableError: It is not known, for example because the file server does not answer.
    """
    try:
        mode = read_with_retries(path, path.stat).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(mode)


def path_exists(path: Path) -> bool:
    """Return whether something has this path. A symbolic link counts, also one to nothing.

    `Path.exists` returns false, in some versions of Python, for every error of the system.

    Args:
        path: The path.

    Raises:
        UnreadableError: It is not known, for example because the file server does not answer.
    """
    try:
        read_with_retries(path, path.lstat)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def target_exists(path: Path) -> bool:
    """Return whether a path leads, also by links, to anything.

    Args:
        path: The path. False is returned for a name that no file can have, such as one that is too
            long, and for links that lead to each other.

    Raises:
        UnreadableError: It is not known, for example because the file server does not answer.
    """
    try:
        read_with_retries(path, path.stat, expected_errors=REFUSED_ERRORS)
    except (OSError, ValueError):  # ValueError: a name with a zero byte
        return False
    return True


def is_folder(path: Path) -> bool:
    """Return true if a path leads, also by links, to a folder.

    Args:
        path: The path. False is returned if there is nothing.

    Raises:
        UnreadableError: It is not known, for example because the file server does not answer.
    """
    try:
        mode = read_with_retries(path, path.stat).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISDIR(mode)


def is_link(path: Path) -> bool:
    """Return whether a path is itself a symbolic link.

    Args:
        path: The path. False is returned if there is nothing.

    Raises:
        UnreadableError: It is not known, for example because the file server does not answer.
    """
    return stat.S_ISLNK(_own_mode(path))


def is_real_folder(path: Path) -> bool:
    """Return whether a path is itself a folder. A link to a folder is not.

    Args:
        path: The path. False is returned if there is nothing.

    Raises:
        UnreadableError: It is not known, for example because the file server does not answer.
    """
    return stat.S_ISDIR(_own_mode(path))


def _own_mode(path: Path) -> int:
    """Return type and permissions (`st_mode`) of what a path names itself; 0 if there is nothing.

    Raises:
        UnreadableError: It is not known.
    """
    try:
        return read_with_retries(path, path.lstat).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def real_path(path: Path) -> Path:
    """Return the absolute path of a file after all links are followed. It need not exist.

    `os.path.realpath` takes a part of the path that it cannot look at for no link.

    Args:
        path: The path. Links that lead to each other, which cannot be opened, stay as they are.

    Raises:
        UnreadableError: It is not known, for example because the file server does not answer.
        ValueError: No file can have this name.
    """
    try:
        resolve = functools.partial(os.path.realpath, path, strict=True)
        return Path(read_with_retries(path, resolve, expected_errors=REFUSED_ERRORS))
    except OSError:  # it does not exist as a whole, or it cannot be opened
        return Path(os.path.realpath(path))


def list_folder(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the paths in a folder whose names match a pattern, sorted by name.

    `Path.glob` returns nothing for a folder that may not be listed, as if the folder were empty.

    Args:
        folder: The folder. Nothing is returned if there is none.
        pattern: A pattern for the whole name, as the shell has it. It also matches names that
            begin with a dot.

    Raises:
        UnreadableError: The system cannot list the folder, so that nothing is known about it.
    """
    try:
        entries = read_with_retries(folder, lambda: list(folder.iterdir()))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(entry for entry in entries if fnmatch.fnmatchcase(entry.name, pattern))
