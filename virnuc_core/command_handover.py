"""How a command is handed over to a process that has loaded the program already: what both ends do.

`virnuc serve` keeps such a process (the preloaded process, `virnuc_core.engine.preloaded`). It
forks a child that runs the command. The process that the user has started, the terminal process,
then only waits: it forwards signals, and ends as the child ends.

The messages, on one connection:

1. The terminal process sends `RunCommand` with the facts of `virnuc_core.process_facts`.
2. The child answers `Child` with its number. Or the server answers `Refused`.
3. The terminal process sends `Handover`, and with it its standard streams, its working directory,
   and one end of a pair of sockets. The kernel kills the child when the other end is closed, which
   is when the terminal process ends, however it ends.
4. The child takes all this over and answers `Accepted`. It has not begun the command.
5. The terminal process sends `Go`. From now on it never runs the command itself.
6. The child, or the preloaded process that sees it end, sends `Exited` or `Killed`.

If anything else happens before the fifth message, the terminal process runs the command itself, and
the child ends without having begun. So a command is never run twice.

Little is imported here, because every `virnuc predict` imports this module first.
"""

import fcntl
import io
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

from virnuc_core.private_socket import Messages, Peer
from virnuc_core.process_facts import process_facts, read_system_file

# Seconds that the server has until the child has taken the command over.
ANSWER_S: Final = 3.0
# Seconds that the preloaded process has to say how a child ended that has ended.
STATUS_S: Final = 2.0
# How soon the kernel kills this process where memory runs out. Batch systems set it.
OOM_SCORE: Final = "/proc/self/oom_score_adj"
STREAMS: Final = (0, 1, 2)  # standard input, output and error
N_HANDLES: Final = len(STREAMS) + 2  # and those of the working directory and of the pair
F_SETSIG: Final = 10  # of fcntl(2); Python has no name for it
FORWARDED_SIGNALS: Final[tuple[int, ...]] = (signal.SIGINT, signal.SIGTERM)
# Results of a child, as `Exited` and `Killed` tell them
EXITED: Final = "Exited"
KILLED: Final = "Killed"
INTERRUPTED: Final = 130  # exit code


def message(name: str, **fields: Any) -> str:
    """Return a message as text, in the form of `virnuc_core.engine.process.Message`."""
    return f"{name} {json.dumps(fields)}\n"


def parse(line: str | None) -> tuple[str, dict[str, Any]]:
    """Return the name and the fields of a message; an empty name if it is none."""
    name, _, body = (line or "").partition(" ")
    try:
        fields = json.loads(body)
    except ValueError:
        return "", {}
    return name, fields if isinstance(fields, dict) else {}


def is_stopped(pid: int) -> bool:
    """Return true if a process was stopped, as by Ctrl-Z."""
    state = read_system_file(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return bool(state) and state[0] in ("T", "t")


class TerminalProcess:
    """The process that the user has started, while a child of the server runs its command."""

    def __init__(self, connection: Messages, server: Peer) -> None:
        """Begin with a new connection to the user's server.

        Args:
            connection: The connection.
            server: The server.
        """
        self._connection = connection
        self._server = server
        self._deadline_s = time.monotonic() + ANSWER_S
        self._child = -1  # a handle of the child's process
        self._forwarded: int | None = None  # the last signal that ends commands, if one came

    def run(self) -> int | None:
        """Hand the command of this process over, and wait until it has ended.

        If the child was killed by a signal, this process ends by the same signal.

        Returns:
            The exit code; None if the command was not begun. Then this process must run it.
        """
        handles: list[int] = []
        previous_handlers: dict[int, Any] = {}
        try:
            has_begun = self._begin(handles, previous_handlers)
            if has_begun:
                return self._wait()
        finally:
            for number, previous in previous_handlers.items():
                signal.signal(number, previous)
            self._connection.release()
            for handle in handles:
                os.close(handle)
        if self._forwarded is not None:
            # It came while the command was handed over, and was meant for the command.
            os.kill(os.getpid(), self._forwarded)
        return None

    def _begin(self, handles: list[int], previous_handlers: dict[int, Any]) -> bool:
        """Let a child begin the command.

        Args:
            handles: Gets the handles that must stay open until the command has ended.
            previous_handlers: Gets the handlers of signals that were replaced.

        Returns:
            False if it has not begun, and will not.
        """
        try:
            if not self._hand_over(handles):
                return False
            for number in FORWARDED_SIGNALS:
                previous_handlers[number] = signal.signal(number, self._forward)
            # A shell without job control lets Ctrl-Z be ignored.
            if signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN:
                previous_handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._stop)
            self._connection.send(message("Go"))
        except OSError:
            # The connection broke before `Go` was sent, or this system lacks something.
            return False
        return True

    def _hand_over(self, handles: list[int]) -> bool:
        """Let a child take the command over, up to the last step before it begins.

        Args:
            handles: Gets the handles that must stay open until the command has ended.

        Returns:
            False if the server or the child does not want it, or does not answer.
        """
        if is_stopped(self._server.pid):
            return False
        self._connection.send(message("RunCommand", facts=process_facts()))
        name, fields = parse(self._connection.receive(ANSWER_S))
        if name != "Child":
            return False
        self._child = os.pidfd_open(fields["pid"])
        handles.append(self._child)
        working_directory = os.open(".", os.O_PATH | os.O_DIRECTORY)
        handles.append(working_directory)
        # The child gets one end, and nobody else has the other one.
        own_end, child_end = socket.socketpair()
        handles.append(own_end.detach())
        with child_end:
            self._connection.send_handles(
                message("Handover", **own_state()),
                [*STREAMS, working_directory, child_end.fileno()],
            )
        remaining_s = max(0.0, self._deadline_s - time.monotonic())
        name, _ = parse(self._connection.receive(remaining_s))
        return name == "Accepted"

    def _forward(self, number: int, _frame: object) -> None:
        """Send a signal to the child. This is a signal handler."""
        self._forwarded = number
        self._signal_child(number)

    def _stop(self, number: int, _frame: object) -> None:
        """Stop the child, then this process, as Ctrl-Z does. Both go on together."""
        self._signal_child(signal.SIGSTOP)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        # Here the process goes on, after SIGCONT.
        signal.signal(number, self._stop)
        self._signal_child(signal.SIGCONT)

    def _signal_child(self, number: int) -> None:
        """Send a signal to the child, if it has not ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._child, number)

    def _wait(self) -> int:
        """Wait until the child has ended, and return its exit code."""
        poll = select.poll()
        poll.register(self._child, select.POLLIN)
        poll.register(self._connection, select.POLLIN)
        ready = {handle for handle, _ in poll.poll()}
        limit_s = None
        if self._connection.fileno() not in ready:
            # The child has ended. The preloaded process says how, if it lives.
            limit_s = STATUS_S
        name, fields = parse(self._connection.receive(limit_s))
        # A child that has sent its code still has the streams open for a moment.
        select.select([self._child], [], [])
        if name == EXITED:
            return int(fields["code"])
        if name != KILLED and self._forwarded is not None:
            return INTERRUPTED
        # Nobody is left who knows how the child ended. It tells its code unless it is killed.
        return end_by_signal(int(fields.get("signal", signal.SIGKILL)))


def end_by_signal(number: int) -> NoReturn:
    """End this process as a signal ends a process, so that a shell reports it."""
    if number not in (signal.SIGKILL, signal.SIGSTOP):  # nothing else can be set for these
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # a signal that does not end a process


def own_state() -> dict[str, Any]:
    """Return what the child takes over from this process, besides the handles."""
    limits = {}
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            limits[name] = resource.getrlimit(getattr(resource, name))
    environment = {}
    for variable, value in os.environb.items():
        environment[variable.decode("latin-1")] = value.decode("latin-1")  # each byte a letter
    return {
        "words": [os.fsencode(word).decode("latin-1") for word in sys.argv],
        "environment": environment,
        "limits": limits,
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "scheduling": [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority],
        "oom_score": read_system_file(OOM_SCORE),
        "pid": os.getpid(),
    }


def take_over(connection: Messages) -> bool:
    """Take over the command of a terminal process. Only a process that was forked for it may.

    Args:
        connection: The connection to the terminal process.

    Returns:
        False if the terminal process runs the command itself, or has ended.

    Raises:
        OSError: The terminal process has ended.
    """
    connection.send(message("Child", pid=os.getpid()))
    line, handles = connection.receive_with_handles(N_HANDLES)
    name, state = parse(line)
    if name != "Handover" or len(handles) != N_HANDLES:
        return False
    try:
        _become(state, handles)
    except (OSError, ValueError) as error:  # for example, a limit may only be lowered
        connection.send(message("Refused", reason=str(error)))
        return False
    connection.send(message("Accepted"))
    # Without a time limit: the terminal process may be stopped, and go on later.
    name, _ = parse(connection.receive())
    return name == "Go"


def _become(state: dict[str, Any], handles: list[int]) -> None:
    """Take over the state of the terminal process.

    Args:
        state: What `own_state` has returned there.
        handles: Its standard streams, its working directory, and the end of its pair of sockets.

    Raises:
        OSError: The system does not allow it.
        ValueError: The same, for limits.
    """
    *streams, working_directory, life = handles
    _die_with_peer(life)
    os.fchdir(working_directory)
    os.close(working_directory)
    for name, limits in state["limits"].items():
        kind = getattr(resource, name)
        if resource.getrlimit(kind) != tuple(limits):
            resource.setrlimit(kind, tuple(limits))
    if os.getpriority(os.PRIO_PROCESS, 0) != state["niceness"]:
        os.setpriority(os.PRIO_PROCESS, 0, state["niceness"])
    policy, priority = state["scheduling"]
    scheduling = (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority)
    if scheduling != (policy, priority):
        os.sched_setscheduler(0, policy, os.sched_param(priority))
    if read_system_file(OOM_SCORE) != state["oom_score"]:
        Path(OOM_SCORE).write_text(state["oom_score"], encoding="ascii")
    os.environ.clear()
    for name, value in state["environment"].items():
        os.environb[name.encode("latin-1")] = value.encode("latin-1")
    time.tzset()
    sys.argv = [os.fsdecode(word.encode("latin-1")) for word in state["words"]]
    for number, handle in zip(STREAMS, streams, strict=True):
        os.dup2(handle, number)
        os.close(handle)
    _open_streams()
    # The user has waited since then. It takes a while to import, and only a child needs it.
    from virnuc_core.command_time import note_start

    note_start(state["pid"])


def _die_with_peer(life: int) -> None:
    """Let the kernel kill this process when the other end of a pair of sockets is closed.

    This works also if the process is stopped, or busy in a library.

    Args:
        life: One end of the pair. It stays open.
    """
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(life, fcntl.F_GETFL)
    fcntl.fcntl(life, fcntl.F_SETFL, flags | os.O_ASYNC)


def _open_streams() -> None:
    """Make the streams of Python for what the descriptors lead to now, as Python makes them."""
    # The terminal process has the same options; see `process_facts`.
    is_unbuffered = bool(getattr(sys.stdout, "write_through", False))
    streams: list[io.TextIOWrapper] = []
    for number, previous in zip(STREAMS, (sys.stdin, sys.stdout, sys.stderr), strict=True):
        mode = "r" if number == 0 else "w"
        raw = io.FileIO(number, mode, closefd=False)
        buffer: Any = raw
        if number == 0:
            buffer = io.BufferedReader(raw)
        elif not is_unbuffered:
            buffer = io.BufferedWriter(raw)
        streams.append(
            io.TextIOWrapper(
                buffer,
                previous.encoding,  # the locale is the same
                previous.errors,
                line_buffering=not is_unbuffered and (number == 2 or raw.isatty()),
                write_through=is_unbuffered,
            )
        )
    sys.stdin, sys.stdout, sys.stderr = streams
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]
