"""Let one process make what many processes need, while the others wait for it.

Some things are made on their first use in a place that processes share: the database in Prefect's
home, the digests of large weights, the models directory that is downloaded. When many jobs start at
once (a job array, a workflow manager), all of them would make the same thing. For a database this
fails, and for weights it wastes minutes. `FirstUseLock` is the only lock for such places.

The lock is `flock` on a small file in the shared folder. The system releases it when its holder
ends, even if the holder is killed. The file stays, because removing it would let two processes hold
locks on two files of the same name. Lasting work in a directory is protected by `lease` instead,
which does not need a file system with locks.

Caches of libraries need no lock of ours. Triton writes each compiled kernel under a temporary name
and renames it, and matplotlib has a lock of its own.
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

LOCK_FILE: Final = ".virnuc-first-use"
WARN_AFTER_S: Final = 1.0  # a process that waits longer says what it waits for
POLL_S: Final = 0.2
# A holder that was suspended would stop all others for ever. After this time they go on without the
# lock. The slowest thing that is made is a download of some gigabytes.
MAX_WAIT_S: Final = 600.0
log = logging.getLogger(__name__)


def _is_never_ready() -> bool:
    """Return false: the caller cannot tell whether the thing is there already."""
    return False


class FirstUseLock:
    """A lock on a folder in which one process makes something that others need, too.

    Use `first_use` if the work is one `with` block.

    Args:
        folder: The shared folder. It is made if it is missing.
        description: What is made, for the message of a process that waits: "Prefect's database".
        is_ready: Returns whether the thing is there, so that no lock is needed.
    """

    def __init__(
        self, folder: Path, description: str, is_ready: Callable[[], bool] = _is_never_ready
    ) -> None:
        """Prepare a lock; `take` takes it. The arguments are those that the class describes."""
        self._folder = folder
        self._description = description
        self._is_ready = is_ready
        self._file: IO[bytes] | None = None

    @property
    def is_held(self) -> bool:
        """Return whether this process is the one that makes the thing.

        This is also true if the file system has no locks, or if the holder of the lock was waited
        for in vain: then this process makes the thing without a lock.
        """
        return self._file is not None

    def take(self) -> None:
        """Take the lock, unless the thing is ready. While another process holds it, wait.

        Raises:
            OSError: The lock file cannot be made or opened.
        """
        if self._is_ready():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        # O_NOFOLLOW: in a shared folder, another user may have put a link in place of the file.
        # O_CLOEXEC: a child process that lives longer would go on holding the lock.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self._folder / LOCK_FILE, flags, 0o666), "rb+")
        with suppress(OSError):  # the file system has no locks
            self._wait(self._file)
        if self._is_ready():  # another process has made it meanwhile
            self.release()

    def _wait(self, file: IO[bytes]) -> None:
        """Return when this process holds the lock, or need not wait any longer.

        If it takes more than `WARN_AFTER_S`, a warning says so once.

        Raises:
            OSError: The file system has no locks.
        """
        start_s = time.monotonic()
        has_warned = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pass
            waited_s = time.monotonic() - start_s
            if self._is_ready() or waited_s >= MAX_WAIT_S:
                return
            if waited_s >= WARN_AFTER_S and not has_warned:
                has_warned = True
                log.warning(
                    "another process makes %s in %s; waiting for it",
                    self._description,
                    self._folder,
                )
            time.sleep(POLL_S)

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._file is not None:
            self._file.close()
            self._file = None


@contextmanager
def first_use(
    folder: Path, description: str, is_ready: Callable[[], bool] = _is_never_ready
) -> Iterator[bool]:
    """Hold the lock of a shared folder while the `with` block makes something in it.

    If the lock file cannot be made, the block runs without the lock: what prevents the file also
    prevents the thing itself, and its error says more.

    Args:
        folder: The shared folder. It is made if it is missing.
        description: What is made, for the message of a process that waits.
        is_ready: Returns whether the thing is there, so that no lock is needed.

    Yields:
        Whether the block must make the thing. False if it was ready, or became ready meanwhile.
    """
    lock = FirstUseLock(folder, description, is_ready)
    try:
        lock.take()
        must_make = lock.is_held
    except OSError:
        must_make = True
    try:
        yield must_make
    finally:
        lock.release()
