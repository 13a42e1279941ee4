"""A process that has loaded the program, and forks a child for each command of the user.

`virnuc serve` holds it (`PreloadedProcess`). The process itself (`keep`) has one thread, uses no
GPU, and runs no command. Each child runs one command, as if the user's own process did; see
`virnuc_core.command_handover`.
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
    "from virnuc_core.engine.preloaded import keep; keep(sys.argv[1], int(sys.argv[2]))"
)
MAX_FACTS_BYTES: Final = 1 << 16
REQUEST: Final = b"connection"  # a message to the process; the connection comes with it
LOADING: Final = "the program is being loaded"
FAILURE: Final = 1  # exit code


class PreloadedProcess:
    """The preloaded process, as the server sees it. It may be there or not.

    Any thread may call the methods.
    """

    def __init__(self, module: str, start: Callable[[Callable[[], None]], None]) -> None:
        """Prepare. The process is not started yet.

        Args:
            module: The module whose function `load` the process calls at its start, and whose
                function `run` its children call.
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
        self._used_s = 0.0  # when it was ready or got its last command, `time.monotonic()`

    @property
    def pid(self) -> int | None:
        """Return the number of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, if there is none.

        Raises:
            OSError: The system does not allow it.
        """
        with self._lock:
            self._notice_end()
            if self._process is None:
                self._start_in_thread(self._start)

    def _start(self) -> None:
        """Start the process. This is called in the thread that lives as long as the server."""
        own_end, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own_end.setblocking(False)
        with other_end:
            number = other_end.fileno()
            self._process = subprocess.Popen(
                parent_bound_command(PROGRAM, self._module, str(number)),
                pass_fds=(number,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # Ctrl-C at the server must not reach the children
            )
        self._control = own_end

    def hand_over(self, facts: Mapping[str, str], connection: int) -> str:
        """Give the connection of a terminal process to the process, if it can take it.

        If it is not there, it is started for the next time.

        Args:
            facts: Those of the terminal process; see `process_facts`.
            connection: The handle of its connection. The caller closes it afterwards.

        Returns:
            Why not; an empty text if it has the connection now, and answers there.
        """
        with self._lock:
            self._notice_end()
            try:
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
            self._used_s = time.monotonic()
            return ""

    def _notice_end(self) -> None:
        """Notice whether the process is ready, or has ended."""
        if self._control is None or self._process is None:
            return
        try:
            content = self._control.recv(MAX_FACTS_BYTES)
            self._facts = json.loads(content)  # nothing if the process has ended
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._forget()
        self._used_s = time.monotonic()

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
            Whether it was ended now.
        """
        with self._lock:
            self._notice_end()
            is_unused = time.monotonic() - self._used_s > idle_s
            if self._facts is None or not is_unused:
                return False
            self._forget()
            return True


def keep(module_name: str, control: int) -> None:
    """Load the program, and fork a child for each command. This is the preloaded process.

    Args:
        module_name: The module with the functions `load` and `run`.
        control: The handle of the connection to the server.
    """
    host = _ChildHost(importlib.import_module(module_name), socket.socket(fileno=control))
    host.load()
    host.serve()


class _ChildHost:
    """The preloaded process, as it sees itself."""

    def __init__(self, module: ModuleType, control: socket.socket) -> None:
        """Prepare.

        Args:
            module: Has the functions `load` and `run`.
            control: The connection to the server.
        """
        self._module = module
        self._control: socket.socket | None = control
        self._connections: dict[int, socket.socket] = {}  # by the number of the child
        self._children: dict[int, int] = {}  # numbers of the children by their handles

    def load(self) -> None:
        """Load the program, and tell the server."""
        self._module.load()
        assert threading.active_count() == 1, "a child has no copy of another thread"
        self._files = _loaded_files(self._module.PROGRAM_FOLDERS)
        self._state = _state_of(self._files)
        # Objects that no child looks at again stay in memory that all of them share.
        gc.collect()
        gc.freeze()
        assert self._control is not None
        with suppress(OSError):  # the server has ended meanwhile
            self._control.send(json.dumps(process_facts()).encode())

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
        if _state_of(self._files) != self._state:
            self._close_control()  # the server starts another process
            self._refuse(connection, "the program or one of its packages was changed")
            return
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or too little memory
            self._refuse(connection, str(error))
            return
        if pid == 0:
            self._close_copies()
            run_child(connection, self._module.run)
        self._children[os.pidfd_open(pid)] = pid
        self._connections[pid] = connection

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
        """Close what a new child has got of this process."""
        self._close_control()
        for handle in self._children:
            os.close(handle)
        for connection in self._connections.values():
            connection.close()

    def _report_end(self, handle: int) -> None:
        """Tell the terminal process of a child how the child has ended."""
        pid = self._children.pop(handle)
        os.close(handle)
        _, status = os.waitpid(pid, 0)
        connection = self._connections.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        text = format_message(EXITED, code=code)
        if code < 0:
            text = format_message(KILLED, signal=-code)
        _send_at_once(connection, text)
        connection.close()


def _send_at_once(connection: socket.socket, text: str) -> None:
    """Send a short message, if the other end is there and takes it without waiting."""
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
    """Return the files of all loaded modules and of the program, and the folders of packages.

    A package that is installed or removed changes its folder.
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


def _state_of(files: Iterable[str]) -> list[tuple[int, int] | None]:
    """Return the size and the time of each file; None for one that is not there."""
    states: list[tuple[int, int] | None] = []
    for path in files:
        try:
            status = os.stat(path)  # noqa: PTH116 - a thousand files for each command
        except OSError:
            states.append(None)
        else:
            states.append((status.st_size, status.st_mtime_ns))
    return states
