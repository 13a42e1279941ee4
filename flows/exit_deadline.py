"""A process that is told to end has ended within ten seconds, whatever holds it up; its children
die with it.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from traceback import walk_stack
from types import FrameType
from typing import Final, NoReturn

ENDING_S: Final = 6.0
POLL_S: Final = 0.05
TERMINATION_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
INTERRUPTED: Final = 130  # exit code
INTERRUPTED_MESSAGE: Final = (
    "interrupted; what was committed stays, the same command goes on from there"
)
WATCHER: Final = "virnuc exit deadline"  # name of the thread that receives the signals
IMPORT_SYSTEM: Final = "<frozen importlib._bootstrap>"  # file name of its frames
_has_deadline: ContextVar[bool] = ContextVar("an exit deadline is set", default=False)


@contextmanager
def exit_deadline(*, by_hand: bool = False, final: bool = False) -> Iterator[None]:
    """End this process `ENDING_S` after SIGTERM or SIGINT, unless the `with` block ends sooner.

    A separate thread receives the signals as well as the usual handlers, so it works even while
    the main thread is busy and cannot run a handler. Inside another deadline, or outside of the
    main thread, nothing happens.

    Args:
        by_hand: The command was started from a terminal. SIGTERM then acts like Ctrl-C, and a
            second Ctrl-C does not disturb the ending. A signal during an import takes effect after
            the import.
        final: The process ends after the block. The deadline then also covers the time between the
            end of the block and the end of the process.
    """
    if _has_deadline.get() or threading.current_thread() is not threading.main_thread():
        yield
        return
    deadline = _Deadline(is_final=final)
    # Without a further thread there is no deadline. The command itself says what is missing.
    with suppress(RuntimeError):
        threading.Thread(target=deadline.watch, name=WATCHER, daemon=True).start()
    token = _has_deadline.set(True)
    # From now on, Python writes the number of each signal to this file, which the thread reads.
    previous_fd = signal.set_wakeup_fd(deadline.wakeup_fd, warn_on_full_buffer=False)
    previous_handlers = {}
    if by_hand:
        for number in TERMINATION_SIGNALS:
            previous_handlers[number] = signal.signal(number, deadline.interrupt)
    try:
        yield
    finally:
        deadline.body_has_ended.set()
        for number, handler in previous_handlers.items():
            # After an interrupt the signal is ignored. It stays ignored until the process ends.
            if signal.getsignal(number) == deadline.interrupt:
                signal.signal(number, handler)
        _has_deadline.reset(token)
        signal.set_wakeup_fd(previous_fd)
        deadline.close()


class _Deadline:
    """What the watching thread and the signal handler of one `exit_deadline` share.

    Args:
        is_final: Whether the process ends with the body.
    """

    def __init__(self, *, is_final: bool) -> None:
        """Open the pair of sockets. It must be called by the main thread."""
        self.body_has_ended = threading.Event()
        self._is_final = is_final
        self._deferred_signals: list[int] = []
        self._main_thread = threading.get_ident()
        # Python writes the number of each arriving signal to one end of this pair of sockets. The
        # watching thread reads it from the other end.
        self._watched_end, self._python_end = socket.socketpair()
        self._python_end.setblocking(False)

    @property
    def wakeup_fd(self) -> int:
        """The file descriptor for `signal.set_wakeup_fd`."""
        return self._python_end.fileno()

    def close(self) -> None:
        """End the watching thread, which sees that this end of the pair of sockets is closed."""
        self._python_end.close()

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt in the main thread, once. This is a signal handler.

        Signals are ignored from then on, so that a second Ctrl-C does not disturb the ending.
        During an import nothing is raised: the signal is kept for later.

        Args:
            number: The number of the signal.
            frame: Where the main thread is.
        """
        is_importing = any(
            caller.f_code.co_filename == IMPORT_SYSTEM for caller, _ in walk_stack(frame)
        )
        if is_importing:
            # An exception during the import of a C library can crash the process (torch), or make
            # the library unusable (NumPy). The watching thread sends the signal again later.
            self._deferred_signals.append(number)
            return
        for termination_signal in TERMINATION_SIGNALS:
            signal.signal(termination_signal, signal.SIG_IGN)
        raise KeyboardInterrupt

    def watch(self) -> None:
        """Wait for a termination signal, and end the process if the body does not end in time.

        The body is that of the `with` block. This runs in a thread of its own until the body ends
        or, if the process ends with the body (`_is_final`), until the process ends.
        """
        with self._watched_end:
            while True:
                # Python writes a byte with the number of each signal that arrives.
                signal_byte = self._watched_end.recv(1)
                if not signal_byte:  # closed: the body has ended
                    return
                if signal_byte[0] in TERMINATION_SIGNALS:
                    break
            deadline_s = time.monotonic() + ENDING_S
            self._wait_for_body(deadline_s)
            if not self.body_has_ended.is_set():
                sys.stderr.write(
                    "virnuc: interrupted; what was committed stays, run again to go on\n"
                )
                _end_process()
            if self._is_final:
                # The process should end by itself now. If it still exists at the deadline, it is
                # ended.
                time.sleep(max(0.0, deadline_s - time.monotonic()))
                _end_process()

    def _wait_for_body(self, deadline_s: float) -> None:
        """Wait until the body has ended or the deadline is over.

        Signals that came during an import were deferred. They are sent to the main thread again and
        again, until they do not meet an import.
        """
        while time.monotonic() < deadline_s:
            if self.body_has_ended.wait(POLL_S):
                return
            if self._deferred_signals:
                signal.pthread_kill(self._main_thread, self._deferred_signals.pop())


def _end_process() -> NoReturn:
    """End this process without waiting for its threads."""
    os._exit(INTERRUPTED)
