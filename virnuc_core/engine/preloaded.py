"""Keeps a process that has loaded the program, and that forks a child for each command of the user.

In the server (`virnuc serve`), a `PreloadedProcess` stands for it. In the process itself,
`run_preloaded_process` is the program. It has one thread, uses no GPU, and runs no command. Each
child runs one command, as if the user's own process did; see `virnuc_core.command_handover`.
"""

import atexit
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn

from virnuc_core.command_handover import (
    EXITED,
    INTERRUPTED,
    KILLED,
    format_message,
    take_over,
)
from virnuc_core.engine.borrowed import refusal_of_identity
from virnuc_core.private_socket import Messages, frame
from virnuc_core.process_facts import process_facts
from virnuc_core.rundir import parent_bound_command

log = logging.getLogger(__name__)

PROGRAM: Final = (
    "from virnuc_core.engine.preloaded import run_preloaded_process; "
    "run_preloaded_process(sys.argv[1], int(sys.argv[2]))"
)
MAX_FACTS_BYTES: Final = 1 << 16
# A message of the server to the process. The connection of a terminal process comes with it.
REQUEST: Final = b"connection"
LOADING: Final = "the program is being loaded"
FAILED: Final = "the program could not be loaded a moment ago"
# Seconds before another process is started after one that ended while it loaded the program
RETRY_S: Final = 60.0
FAILURE: Final = 1  # exit code


class PreloadedProcess:
    """The preloaded process, as the server sees it. It may be there or not.

    Any thread may call the methods.
    """

    def __init__(self, module: str, start: Callable[[Callable[[], None]], None]) -> None:
        """Prepare. The process is not started yet.

        Args:
            module: The module of the program. The process calls its functions `load`, at its start,
                and `facts`, for what a command must have in common with it besides
                `process_facts`. Its children call the function `run`. `PROGRAM_FOLDERS` are the
                folders whose files, if they change, end the process.
            start: Calls a function in a thread that lives as long as the server. The kernel ends
                the process when the thread that started it ends.
        """
        self._module = module
        self._start_in_thread = start
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        # What a command must have in common with the process; None until it has loaded the program.
        self._facts: dict[str, str] | None = None
        # When it was ready or got its last command, `time.monotonic()`
        self._last_use_s = 0.0
        # Before this time no other process is started, `time.monotonic()`.
        self._retry_at_s = 0.0

    @property
    def pid(self) -> int | None:
        """Return the process id; None if there is no process."""
        if self._process is None:
            return None
        return self._process.pid

    def start(self) -> None:
        """Start the process, if there is none.

        Raises:
            OSError: The system does not allow it.
        """
        with self._lock:
            self._update()
            if self._process is None:
                self._start_in_thread(self._start)

    def _start(self) -> None:
        """Start the process. This is called in the thread that lives as long as the server."""
        own_end, process_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own_end.setblocking(False)
        try:
            with process_end:
                handle = process_end.fileno()
                self._process = subprocess.Popen(
                    parent_bound_command(PROGRAM, self._module, str(handle)),
                    pass_fds=(handle,),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,  # Ctrl-C at the server must not reach the children
                )
        except OSError:  # the process cannot be started
            own_end.close()
            raise
        self._control = own_end

    def hand_over(self, facts: Mapping[str, str], connection: int) -> str:
        """Give the connection of a terminal process to the preloaded process, if it can take it.

        If there is no preloaded process, one is started, which can take the next connection.

        Args:
            facts: Those of the terminal process.
            connection: The handle of its connection. The caller closes it afterwards.

        Returns:
            The reason why the connection was not given; an empty text if it was. Then a child
            answers to the terminal process.
        """
        with self._lock:
            self._update()
            try:
                if self._control is None and time.monotonic() < self._retry_at_s:
                    return FAILED
                if self._control is None:
                    self._start_in_thread(self._start)
                if self._control is None or self._facts is None:
                    return LOADING
                reason = refusal_of_identity(self._facts, facts)
                if reason:
                    return reason
                socket.send_fds(self._control, [REQUEST], [connection])
            except (OSError, RuntimeError) as error:  # it has ended, or the server ends
                return str(error)
            self._last_use_s = time.monotonic()
            return ""

    def _update(self) -> None:
        """Find out whether the process has become ready, or has ended, since the last call."""
        if self._control is None or self._process is None:
            return
        try:
            content = self._control.recv(MAX_FACTS_BYTES)
            self._facts = json.loads(content)
        except BlockingIOError:  # it has said nothing new
            return
        except (OSError, ValueError):  # it has ended: the content is empty, which is no JSON
            if self._facts is None:
                self._retry_at_s = time.monotonic() + RETRY_S
            self._forget()
        self._last_use_s = time.monotonic()

    def _forget(self) -> None:
        """Close the connection to the process. It ends when its last child has ended."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            # Somebody must ask for its exit status, or its number stays in use.
            threading.Thread(target=self._process.wait, daemon=True).start()
        self._control = None
        self._process = None
        self._facts = None

    def end(self) -> None:
        """Let the process end, as soon as its children have ended."""
        with self._lock:
            self._forget()

    def end_if_unused(self, idle_s: float) -> bool:
        """Let the process end if it has got no command for some time.

        Args:
            idle_s: The time in seconds.

        Returns:
            True if it was let end by this call.
        """
        with self._lock:
            self._update()
            is_loading_or_gone = self._facts is None
            is_unused = time.monotonic() - self._last_use_s > idle_s
            if is_loading_or_gone or not is_unused:
                return False
            self._forget()
            return True


def run_preloaded_process(module_name: str, control: int) -> None:
    """Load the program, and fork a child for each command, until the server ends.

    Args:
        module_name: The module of the program; see `PreloadedProcess`.
        control: The handle of the connection to the server.
    """
    host = _ChildHost(importlib.import_module(module_name), socket.socket(fileno=control))
    host.load()
    host.serve()


@dataclass(frozen=True, slots=True)
class _RunningChild:
    """A child that runs a command.

    Attributes:
        pid: Its process id.
        connection: The connection to its terminal process, which hears how the child ends.
    """

    pid: int
    connection: socket.socket


class _ChildHost:
    """Loads the program and forks the children. This is the work of the preloaded process."""

    def __init__(self, module: ModuleType, control: socket.socket) -> None:
        """Prepare. Nothing is loaded yet.

        Args:
            module: The program; see `PreloadedProcess`.
            control: The connection to the server.
        """
        self._module = module
        self._control: socket.socket | None = control
        self._children: dict[int, _RunningChild] = {}  # by a pidfd, by which its end is noticed

    def load(self) -> None:
        """Load the program, and tell the server."""
        self._module.load()
        assert threading.active_count() == 1, "a child has no copy of another thread"
        self._files = _loaded_files(self._module.PROGRAM_FOLDERS)
        self._file_states = _file_states(self._files)
        # Objects that no child looks at again stay in memory that all of them share.
        gc.collect()
        gc.freeze()
        assert self._control is not None
        with suppress(OSError):  # the server has ended meanwhile
            facts = process_facts() | self._module.facts()
            self._control.send(json.dumps(facts).encode())

    def serve(self) -> None:
        """Fork children until the server ends or the program was changed.

        Then wait for the children that run, to tell how they end.
        """
        while self._control is not None or self._children:
            poll = select.poll()
            if self._control is not None:
                poll.register(self._control, select.POLLIN)
            for handle in self._children:
                poll.register(handle, select.POLLIN)
            for handle, _ in poll.poll():
                if handle in self._children:
                    self._report_end(handle)
                else:
                    self._receive()

    def _receive(self) -> None:
        """Receive the connection of a terminal process, and fork a child for it."""
        assert self._control is not None
        request, handles, _, _ = socket.recv_fds(
            self._control, len(REQUEST), 1, socket.MSG_CMSG_CLOEXEC
        )
        if not request or len(handles) != 1:
            self._close_control()
            return
        connection = socket.socket(fileno=handles[0])
        if _file_states(self._files) != self._file_states:
            self._close_control()  # the server starts another process
            self._refuse(connection, "the program or one of its packages was changed")
            return
        try:
            pid, handle = _fork_with_pidfd()
        except OSError as error:  # too many processes or open files, or too little memory
            self._refuse(connection, str(error))
            return
        if pid == 0:
            self._close_copies()
            run_child(connection, self._module.run)
        self._children[handle] = _RunningChild(pid, connection)

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        """Tell a terminal process to run its command itself."""
        _send_at_once(connection, format_message("Refused", reason=reason))
        connection.close()

    def _close_control(self) -> None:
        """Take no more commands."""
        if self._control is not None:
            self._control.close()
        self._control = None

    def _close_copies(self) -> None:
        """Close what a new child has inherited from this process and must not keep open."""
        self._close_control()
        for handle, child in self._children.items():
            os.close(handle)
            child.connection.close()

    def _report_end(self, handle: int) -> None:
        """Tell the terminal process of a child how the child has ended."""
        child = self._children.pop(handle)
        os.close(handle)
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            text = format_message(EXITED, code=code)
        else:
            text = format_message(KILLED, signal=-code)
        _send_at_once(child.connection, text)
        child.connection.close()


def _fork_with_pidfd() -> tuple[int, int]:
    """Fork this process, and open a handle that tells when the child has ended.

    Returns:
        The process id of the child and the handle. In the child, 0 and a number that is no handle.

    Raises:
        OSError: The system allows no further process or handle. Then there is no child.
    """
    # The handle can be opened only after the fork. So a place for it is kept free.
    place = os.open(os.devnull, os.O_RDONLY)
    try:
        pid = os.fork()
    finally:
        os.close(place)
    if pid == 0:
        return 0, -1
    try:
        return pid, os.pidfd_open(pid)
    except OSError:  # too little memory, or too many open files of all processes
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _send_at_once(connection: socket.socket, text: str) -> None:
    """Send a short message, unless the other end is gone or would have to be waited for."""
    with suppress(OSError):
        connection.send(frame(text), socket.MSG_DONTWAIT)


def run_child(connection: socket.socket, run: Callable[[], int]) -> NoReturn:
    """Run the command of a terminal process in this process, and end.

    Args:
        connection: The connection to the terminal process.
        run: Runs the command of `sys.argv`, and returns its exit code.
    """
    code = FAILURE
    try:
        os.setsid()
        _reset_signals()
        messages = Messages(connection)
        if take_over(messages):
            code = _run_to_end(run)
            with suppress(OSError):
                messages.send(format_message(EXITED, code=code))
    except KeyboardInterrupt:  # before the command could handle it
        code = INTERRUPTED
    except OSError:
        pass  # the terminal process has ended, or runs the command itself
    except BaseException:  # noqa: BLE001 - this process must not go on as its parent does
        traceback.print_exc()
    finally:
        os._exit(code)


def _reset_signals() -> None:
    """Handle signals as Python does when it starts.

    A server that a script has started in the background may ignore some.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _run_to_end(run: Callable[[], int]) -> int:
    """Run a command and do what Python does at the end of a process. Return the exit code."""
    try:
        code = run()
    except SystemExit as error:
        code = _exit_code(error.code)
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # Commands flush their output themselves, and say so if that fails.
        with suppress(OSError, ValueError):
            stream.flush()
    return code


def _exit_code(value: Any) -> int:
    """Return the exit code of a process that ends by `sys.exit` with a value."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    sys.stderr.write(f"{value}\n")
    return FAILURE


def _loaded_files(program_folders: Iterable[Path]) -> list[str]:
    """Return all files and folders that change when the loaded program does.

    These are the files of the loaded modules and of the program, and the folders in which Python
    looks for packages. A package that is installed or removed changes such a folder.

    Args:
        program_folders: The folders of the program. All files in them count, also templates.
    """
    files = {path for path in sys.path if path}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path:
            files.add(path)
    for folder in program_folders:
        for path in folder.rglob("*"):
            if path.suffix != ".pyc" and path.is_file():
                files.add(str(path))
    return sorted(files)


def _file_states(files: Iterable[str]) -> list[tuple[int, int] | None]:
    """Return the size and the time of change of each file; None for a file that is not there."""
    states: list[tuple[int, int] | None] = []
    for path in files:
        try:
            status = os.stat(path)  # noqa: PTH116 - a thousand files for each command
        except OSError:
            states.append(None)
        else:
            states.append((status.st_size, status.st_mtime_ns))
    return states
