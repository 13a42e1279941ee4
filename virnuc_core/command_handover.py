"""Hands a command over to a process that has loaded the program already: what both ends do.

`virnuc serve` keeps such processes (preloaded processes, `virnuc_core.engine.preloaded`). One of
them forks a child that runs the command. The process that the user has started, the terminal
process, then only waits: it forwards signals, and ends as the child ends.

The messages, on one connection:

1. The terminal process sends `RunCommand` with the program that the child must have loaded, and
   with the facts of `virnuc_core.process_facts` and further ones of that program.
2. The child answers `Child` with its process id. Or the server answers `Refused`.
3. The terminal process sends `Handover` with its `ProcessState`. With the message come its standard
   streams, its working directory, and the lifeline: one end of a pair of sockets. The kernel kills
   the child when the other end is closed, which is when the terminal process ends, however it ends.
4. The child takes all this over and answers `Accepted`. It has not begun the command.
5. The terminal process sends `Go`. From now on it never runs the command itself.
6. The child sends `Exited`. If it cannot, the preloaded process sees its end and sends `Exited` or
   `Killed`.

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
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from virnuc_core.private_socket import Messages, Peer
from virnuc_core.process_facts import process_facts, read_system_file

# Seconds in which the server must answer and the child must take the command over.
ANSWER_S: Final = 3.0
# Seconds in which the preloaded process must say how a child has ended.
STATUS_S: Final = 2.0
# How soon the kernel kills this process where memory runs out. Batch systems set it.
OOM_SCORE: Final = "/proc/self/oom_score_adj"
STREAMS: Final = (0, 1, 2)  # standard input, output and error
N_HANDLES: Final = len(STREAMS) + 2  # also the working directory and the lifeline
F_SETSIG: Final = 10  # of fcntl(2); Python has no name for it
FORWARDED_SIGNALS: Final[tuple[int, ...]] = (signal.SIGINT, signal.SIGTERM)
# Names of the messages with which a command ends
EXITED: Final = "Exited"
KILLED: Final = "Killed"
INTERRUPTED: Final = 130  # exit code


def format_message(name: str, **fields: Any) -> str:
    """Return a message as text, in the form of `virnuc_core.engine.process.Message`."""
    return f"{name} {json.dumps(fields)}\n"


def parse_message(text: str | None) -> tuple[str, dict[str, Any]]:
    """Return the name and the fields of a message.

    Args:
        text: The message. None, or a text in another form, gives an empty name.
    """
    name, _, body = (text or "").partition(" ")
    try:
        fields = json.loads(body)
    except ValueError:
        return "", {}
    if not isinstance(fields, dict):
        return name, {}
    return name, fields


def _bytes_to_text(value: bytes) -> str:
    """Return any bytes as a text for JSON: each byte becomes one letter."""
    return value.decode("latin-1")


def _text_to_bytes(text: str) -> bytes:
    """Return the bytes that `_bytes_to_text` was given."""
    return text.encode("latin-1")


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What a child takes over from the terminal process, besides open handles.

    Texts that may hold any bytes have one letter for each byte; see `_bytes_to_text`.

    Attributes:
        arguments: The words of the command line, the program first.
        environment: All environment variables.
        limits: The soft and the hard limit by the names of the module `resource`.
        niceness: The priority.
        scheduling_policy: One of the constants `os.SCHED_*`.
        scheduling_priority: The priority within real-time policies.
        oom_score: The text of `OOM_SCORE`.
        pid: The process id of the terminal process.
    """

    arguments: list[str]
    environment: dict[str, str]
    limits: dict[str, list[int]]
    niceness: int
    scheduling_policy: int
    scheduling_priority: int
    oom_score: str
    pid: int

    @staticmethod
    def of_this_process() -> "ProcessState":
        """Return the state of this process."""
        limits = {}
        for name in dir(resource):
            if name.startswith("RLIMIT_"):
                limits[name] = list(resource.getrlimit(getattr(resource, name)))
        environment = {}
        for variable, value in os.environb.items():
            environment[_bytes_to_text(variable)] = _bytes_to_text(value)
        return ProcessState(
            arguments=[_bytes_to_text(os.fsencode(word)) for word in sys.argv],
            environment=environment,
            limits=limits,
            niceness=os.getpriority(os.PRIO_PROCESS, 0),
            scheduling_policy=os.sched_getscheduler(0),
            scheduling_priority=os.sched_getparam(0).sched_priority,
            oom_score=read_system_file(OOM_SCORE),
            pid=os.getpid(),
        )


def is_stopped(pid: int) -> bool:
    """Return true if a process was stopped, as by Ctrl-Z."""
    # The name of the program, in parentheses, may hold any letters. The state follows it.
    fields = read_system_file(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return bool(fields) and fields[0] in ("T", "t")


class TerminalProcess:
    """The process that the user has started, while a child of the server runs its command."""

    def __init__(
        self,
        connection: Messages,
        server: Peer,
        program: str,
        program_facts: Mapping[str, str] | None = None,
    ) -> None:
        """Begin with a new connection to the user's server.

        Args:
            connection: The connection.
            server: The server.
            program: The name of the program that the child must have loaded.
            program_facts: What must be equal for this program, besides `process_facts`.
        """
        self._program = program
        self._program_facts = dict(program_facts or {})
        self._connection = connection
        self._server = server
        self._deadline_s = time.monotonic() + ANSWER_S
        self._child_handle = -1  # a pidfd of the child, which also waits for its end
        self._forwarded_signal: int | None = None  # the last one, if any came

    def run(self) -> int | None:
        """Hand the command of this process over, and wait until it has ended.

        If the child was killed by a signal, this process ends by the same signal.

        Returns:
            The exit code; None if the command was not begun. Then this process must run it.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed before the command was begun.
        """
        with ExitStack() as resources:
            resources.callback(self._connection.release)
            if self._begin(resources):
                return self._wait()
        if self._forwarded_signal is not None:
            # It came while the command was handed over, and was meant for the command.
            os.kill(os.getpid(), self._forwarded_signal)
        return None

    def _begin(self, resources: ExitStack) -> bool:
        """Let a child begin the command.

        Args:
            resources: Is closed when the command has ended. It then closes handles and restores
                the handlers of signals.

        Returns:
            False if the child has not begun, and will not.
        """
        try:
            if not self._hand_over(resources):
                return False
            self._handle_signals(resources)
            self._connection.send(format_message("Go"))
        except OSError:
            # The connection broke before `Go` was sent, or this system lacks something.
            return False
        return True

    def _hand_over(self, resources: ExitStack) -> bool:
        """Let a child take the command over, up to the last step before it begins.

        Args:
            resources: Closes the handles that must stay open until the command has ended.

        Returns:
            False if the server or the child does not want it, or does not answer.
        """
        if is_stopped(self._server.pid):
            return False
        facts = process_facts() | self._program_facts
        self._connection.send(format_message("RunCommand", program=self._program, facts=facts))
        name, fields = parse_message(self._connection.receive(ANSWER_S))
        if name != "Child":
            return False
        self._child_handle = os.pidfd_open(fields["pid"])
        resources.callback(os.close, self._child_handle)
        working_directory = os.open(".", os.O_PATH | os.O_DIRECTORY)
        resources.callback(os.close, working_directory)
        # The child gets one end, and no other process has a copy of the other one.
        own_end, lifeline = socket.socketpair()
        resources.enter_context(own_end)
        with lifeline:
            state = asdict(ProcessState.of_this_process())
            self._connection.send_handles(
                format_message("Handover", state=state),
                [*STREAMS, working_directory, lifeline.fileno()],
            )
        remaining_s = max(0.0, self._deadline_s - time.monotonic())
        name, _ = parse_message(self._connection.receive(remaining_s))
        return name == "Accepted"

    def _handle_signals(self, resources: ExitStack) -> None:
        """Pass on signals to the child from now on.

        Args:
            resources: Restores the handlers that there were before.
        """
        for number in FORWARDED_SIGNALS:
            previous_handler = signal.signal(number, self._forward)
            resources.callback(signal.signal, number, previous_handler)
        # A shell without job control lets Ctrl-Z be ignored.
        if signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN:
            previous_handler = signal.signal(signal.SIGTSTP, self._stop)
            resources.callback(signal.signal, signal.SIGTSTP, previous_handler)

    def _forward(self, number: int, _frame: object) -> None:
        """Send a signal to the child. This is a signal handler."""
        self._forwarded_signal = number
        self._signal_child(number)

    def _stop(self, number: int, _frame: object) -> None:
        """Stop the child, then this process. Both go on together. This is a signal handler."""
        self._signal_child(signal.SIGSTOP)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        # This process is stopped here, and goes on after SIGCONT.
        signal.signal(number, self._stop)
        self._signal_child(signal.SIGCONT)

    def _signal_child(self, number: int) -> None:
        """Send a signal to the child, if it has not ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._child_handle, number)

    def _wait(self) -> int:
        """Wait until the child has ended, and return its exit code."""
        poll = select.poll()
        poll.register(self._child_handle, select.POLLIN)
        poll.register(self._connection, select.POLLIN)
        ready_handles = {handle for handle, _ in poll.poll()}
        if self._connection.fileno() in ready_handles:
            limit_s = None  # a message has begun, or the connection has ended
        else:
            limit_s = STATUS_S  # the child has ended; the preloaded process says how, if it lives
        name, fields = parse_message(self._connection.receive(limit_s))
        # A child that has sent its exit code has the streams open for a moment longer.
        select.select([self._child_handle], [], [])
        if name == EXITED:
            return int(fields["code"])
        if name == KILLED:
            return end_by_signal(int(fields["signal"]))
        # Nobody is left who knows how the child ended. It sends its exit code unless it is killed.
        if self._forwarded_signal is not None:
            return INTERRUPTED
        return end_by_signal(signal.SIGKILL)


def end_by_signal(number: int) -> NoReturn:
    """End this process as a signal ends a process, so that a shell reports it."""
    if number not in (signal.SIGKILL, signal.SIGSTOP):  # nothing else can be set for these
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the signal does not end a process


def take_over(connection: Messages) -> bool:
    """Take over the command of a terminal process, up to the moment when it may begin.

    This changes the whole process. So only a process that was forked for it may call this.

    Args:
        connection: The connection to the terminal process.

    Returns:
        False if the terminal process runs the command itself, or has ended.

    Raises:
        OSError: The terminal process has ended.
    """
    connection.send(format_message("Child", pid=os.getpid()))
    text, handles = connection.receive_with_handles(N_HANDLES)
    name, fields = parse_message(text)
    if name != "Handover" or len(handles) != N_HANDLES:
        return False
    *streams, working_directory, lifeline = handles
    state = ProcessState(**fields["state"])
    try:
        _die_with_peer(lifeline)
        os.fchdir(working_directory)
        os.close(working_directory)
        _take_over_limits(state.limits)
        _take_over_priority(state)
        _take_over_environment(state.environment)
        _take_over_streams(streams)
    except (OSError, ValueError) as error:  # for example, a limit may only be lowered
        connection.send(format_message("Refused", reason=str(error)))
        return False
    sys.argv = [os.fsdecode(_text_to_bytes(word)) for word in state.arguments]
    # The user has waited since then. It takes a while to import, and only a child needs it.
    from virnuc_core.command_time import note_start

    note_start(state.pid)
    connection.send(format_message("Accepted"))
    # Without a time limit: the terminal process may be stopped, and go on later.
    name, _ = parse_message(connection.receive())
    return name == "Go"


def _die_with_peer(lifeline: int) -> None:
    """Let the kernel kill this process when the other end of a pair of sockets is closed.

    This works also if the process is stopped, or busy in a library.

    Args:
        lifeline: One end of the pair. It stays open.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)


def _take_over_limits(limits: Mapping[str, list[int]]) -> None:
    """Set the limits of this process.

    Args:
        limits: The soft and the hard limit by the names of the module `resource`.

    Raises:
        ValueError: This process may not raise a limit.
    """
    for name, (soft_limit, hard_limit) in limits.items():
        kind = getattr(resource, name)
        if resource.getrlimit(kind) != (soft_limit, hard_limit):
            resource.setrlimit(kind, (soft_limit, hard_limit))


def _take_over_priority(state: ProcessState) -> None:
    """Set when this process gets a core, and how soon the kernel kills it for its memory.

    What is equal already is not set: that may need rights which this user does not have.

    Raises:
        OSError: This process may not set it.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) != state.niceness:
        os.setpriority(os.PRIO_PROCESS, 0, state.niceness)
    current_policy = os.sched_getscheduler(0)
    current_priority = os.sched_getparam(0).sched_priority
    if (current_policy, current_priority) != (state.scheduling_policy, state.scheduling_priority):
        os.sched_setscheduler(0, state.scheduling_policy, os.sched_param(state.scheduling_priority))
    if read_system_file(OOM_SCORE) != state.oom_score:
        Path(OOM_SCORE).write_text(state.oom_score, encoding="ascii")


def _take_over_environment(environment: Mapping[str, str]) -> None:
    """Replace all environment variables of this process; see `ProcessState`."""
    os.environ.clear()
    for name, value in environment.items():
        os.environb[_text_to_bytes(name)] = _text_to_bytes(value)
    time.tzset()


def _take_over_streams(handles: list[int]) -> None:
    """Make handles the standard streams of this process.

    Args:
        handles: Those of standard input, output and error. They are closed.
    """
    for number, handle in zip(STREAMS, handles, strict=True):
        os.dup2(handle, number)
        os.close(handle)
    _open_streams()


def _open_streams() -> None:
    """Replace the streams of Python by new ones on the same handles, made as Python makes them."""
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
