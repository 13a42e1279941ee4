"""Starts a child process as a copy of this one, so that it need not import anything again.

The child has a session of its own and dies with this process, as all of our children. Unlike a
process of Python's `multiprocessing`, it closes all other files of its parent. Otherwise it would
still hold locks that its parent has released.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from virnuc.flows.exit_deadline import WATCHER
from virnuc_core.rundir import die_with_parent

POLL_S: Final = 0.005
FIRST_FILE: Final = 3  # files 0 to 2 are standard input, output and error


class ForkedProcess:
    """A child process that was forked, with the methods of `subprocess.Popen` that we use.

    Attributes:
        pid: Its process id.
        returncode: Its exit status, or the negative number of the signal that ended it. None
            before its end, and until `poll` or `wait` has seen the end.
    """

    def __init__(self, target: Callable[[], None], *, kept_file: int, error_file: int | None):
        """Fork this process.

        Args:
            target: What the child does. It ends when this function returns or raises an error.
            kept_file: The number of the one file of this process that the child keeps.
            error_file: The number of the file that becomes the child's standard error. None keeps
                that of this process.

        Raises:
            OSError: The system refuses another process.
        """
        self.returncode: int | None = None
        self._lock = threading.Lock()  # the exit status can be fetched only once
        parent = os.getpid()
        # What waits in the buffers would be written by both processes.
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # From Python 3.12 on, Python warns of a fork if there are other threads. `can_fork`
            # says which of them do no harm.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _run_child(target, parent, kept_file, error_file)

    def poll(self) -> int | None:
        """Return the exit status of the process, or None if it has not ended."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid == self.pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return its exit status.

        Args:
            timeout: How many seconds to wait at most. None waits as long as it takes.

        Raises:
            subprocess.TimeoutExpired: It has not ended in this time.
        """
        start_s = time.monotonic()
        while True:
            status = self.poll()
            if status is not None:
                return status
            if timeout is not None and time.monotonic() - start_s >= timeout:
                raise subprocess.TimeoutExpired("a copy of this process", timeout)
            time.sleep(POLL_S)

    def terminate(self) -> None:
        """Ask the process to end, if it has not ended."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End the process by force, if it has not ended."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended: another process may have its id then."""
        if self.poll() is None:
            os.kill(self.pid, number)


def can_fork() -> bool:
    """Return true if this process may be copied, because no other thread can hold a lock.

    A copy has only the thread that made it. Locks that other threads held at that moment would stay
    locked in it for ever. The thread of the exit deadline may run, because it only waits for
    signals and holds nothing meanwhile. Linux also counts the threads of libraries. Other systems
    do not tell their number, so there a process is never copied.
    """
    python_threads = threading.enumerate()
    threads_with_locks = [thread for thread in python_threads if thread.name != WATCHER]
    if threads_with_locks != [threading.main_thread()]:
        return False
    try:
        n_threads = len(list(Path("/proc/self/task").iterdir()))  # with those of libraries
    except OSError:
        return False
    return n_threads == len(python_threads)


def _run_child(
    target: Callable[[], None], parent: int, kept_file: int, error_file: int | None
) -> NoReturn:
    """Do the work of the child, and end it without the handlers that its parent has registered.

    Args:
        target: See `ForkedProcess`.
        parent: The process id of the parent.
        kept_file: See `ForkedProcess`.
        error_file: See `ForkedProcess`.
    """
    status = 1
    try:
        os.setsid()
        die_with_parent(parent)
        _forget_parent(kept_file, error_file)
        target()
        status = 0
    except SystemExit as end:
        if isinstance(end.code, int):
            status = end.code
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _forget_parent(kept_file: int, error_file: int | None) -> None:
    """Reset the signal handlers, keep Python from collecting the parent's objects, close its files.

    Args:
        kept_file: The number of the file that stays open.
        error_file: The number of the file that becomes standard error, or None.
    """
    # Some objects of the parent close a file when they are collected. The number of that file may
    # belong to another file of the child by then.
    gc.freeze()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if error_file is not None:
        os.dup2(error_file, 2)
    os.closerange(FIRST_FILE, kept_file)
    os.closerange(kept_file + 1, os.sysconf("SC_OPEN_MAX"))
