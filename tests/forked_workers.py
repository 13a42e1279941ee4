"""Workers that are forks of a process which has imported torch, so that each is there at once.

The import takes two to three seconds of a processor. A forked worker runs the same program as a new
process would, with pipes, a session, an environment and arguments of its own, and it is a child of
the process that starts it. Commands start new processes, and so do the tests of workers themselves.
Tests of what is computed or reported use the fixture `forked_workers`.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Final, NoReturn
from unittest.mock import patch

from virnuc_core.baseline.run import WORKER_MODULE as BASELINE_WORKER
from virnuc_core.engine import process

REPOSITORY: Final = Path(__file__).parents[1]
MODULES: Final = (process.WORKER, BASELINE_WORKER)  # workers that import torch
MAIN: Final = "import sys; from tests.forked_workers import serve_new; serve_new(int(sys.argv[1]))"
MAX_REQUEST: Final = 1 << 20  # bytes of a command and its environment
ROOM: Final = " " * 2000  # on the command line of the process that forks, for those of its forks
PR_SET_CHILD_SUBREAPER: Final = 36  # the kernel's number


class Forker:
    """A process with one thread that forks for each worker. Threads would not survive a fork."""

    def __init__(self, connection: socket.socket, modules: Sequence[str] = MODULES) -> None:
        """Use a forking process.

        Args:
            connection: Leads to `serve` in that process.
            modules: The modules of the workers that are forked.
        """
        self._connection = connection
        self._modules = modules

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a worker: a fork if its module is one of those that are forked.

        Args:
            command: A command of `parent_bound_command`.
            options: What `subprocess.Popen` gets.
        """
        if command[-1] not in self._modules:
            return subprocess.Popen(command, **options)
        return ForkedProcess(self._connection, command, **options)


class ForkedProcess(subprocess.Popen[Any]):
    """A process that runs a Python program and was forked, not started anew."""

    def __init__(self, connection: socket.socket, command: Sequence[str], **options: Any) -> None:
        self._connection = connection
        super().__init__(command, **options)

    def _execute_child(self, *arguments: Any) -> None:
        """Have a process forked in the place of `subprocess.Popen`, which would execute a command.

        The fork is an orphan, and becomes a child of this process, which adopts orphans meanwhile.
        """
        method = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        values = inspect.signature(method).bind(self, *arguments).arguments
        pipes = [values["p2cread"], values["c2pwrite"], values["errwrite"]]
        request = {"command": values["args"], "environment": dict(values["env"])}
        adopt_orphans(is_wanted=True)
        try:
            socket.send_fds(self._connection, [json.dumps(request).encode()], pipes)
            self.pid = int(self._connection.recv(64))
        finally:
            adopt_orphans(is_wanted=False)
        self._child_created = True
        for descriptor in pipes:
            os.close(descriptor)


def adopt_orphans(*, is_wanted: bool) -> None:
    """Choose whether descendants of this process become its children when their parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0)


def serve(connection: socket.socket) -> NoReturn:
    """Fork for each request of the parent process, until it closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the terminal is for the tests
    while True:
        content, pipes, _, _ = socket.recv_fds(connection, MAX_REQUEST, 3)
        if not content:
            os._exit(0)
        request = json.loads(content)
        output, number_of_worker = os.pipe()
        middle = os.fork()
        if middle == 0:
            worker = os.fork()
            if worker == 0:
                connection.close()
                os.close(output)
                os.close(number_of_worker)
                run_program(request["command"], request["environment"], pipes)
            os.write(number_of_worker, str(worker).encode())
            os._exit(0)
        os.waitpid(middle, 0)  # the worker is an orphan, and adopted, before its number is told
        connection.send(os.read(output, 64))
        for descriptor in (*pipes, output, number_of_worker):
            os.close(descriptor)


def run_program(command: Sequence[str], environment: dict[str, str], pipes: list[int]) -> NoReturn:
    """Become the process of a command, and run its program to its end.

    Args:
        command: The words `python -P -c PROGRAM PARENT`, and the arguments of the program.
        environment: The environment variables of the process.
        pipes: Its standard input, output and error.
    """
    status = 1
    try:
        show_command(command)
        os.setsid()
        for number, descriptor in enumerate(pipes):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - a descriptor
            for number, mode in enumerate("rww")
        )
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        _, _, _, program, *words = command
        sys.argv = ["-c", *words]
        parent = int(words[0])
        while os.getppid() != parent:  # the process in the middle ends at once
            assert os.getppid() > 1, "nobody has adopted this worker"
            time.sleep(0.001)
        exec(program, {"__name__": "__main__"})
        status = 0
    except BaseException:  # noqa: BLE001 - no more requests may be served in this process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def show_command(command: Sequence[str]) -> None:
    """Let the system show another command line for this process, as far as there is room for it.

    Tests find workers by their command lines. The system reads them from the memory of a process.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # `arg_start` and `arg_end` in proc(5)
    words = "\0".join(command).encode()
    room = end - start
    if len(words) < room:
        ctypes.memmove(start, words.ljust(room, b"\0"), room)


def require_descriptor(file: int | IO[Any]) -> None:
    """Raise the error of `os.fsync` for what is no open file, and do not wait for the disk."""
    os.fstat(file if isinstance(file, int) else file.fileno())


def serve_new(descriptor: int) -> NoReturn:
    """Import what workers need, and serve requests of a connection that was inherited.

    The forks do not wait for the disk, as the tests do not (`tests/conftest.py`).
    """
    import_workers()
    os.fsync = require_descriptor
    serve(socket.socket(fileno=descriptor))


def import_workers() -> None:
    """Import the workers with torch."""
    from virnuc_core.baseline import worker as baseline_worker
    from virnuc_core.engine import worker

    assert {worker.__name__, baseline_worker.__name__} == set(MODULES)


@contextmanager
def forks_of_new_process() -> Iterator[Forker]:
    """Start a process that forks for the tests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    number = theirs.fileno()
    forking_process = subprocess.Popen(
        [sys.executable, "-c", MAIN, str(number), ROOM],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        pass_fds=[number],
    )
    theirs.close()
    try:
        with ours:  # the process ends when the connection is closed
            yield Forker(ours)
    finally:
        forking_process.wait()


@contextmanager
def forks_of_this_process(modules: Sequence[str] = MODULES) -> Iterator[Forker]:
    """Fork the process that forks from this one, which must have one thread, and the workers.

    Args:
        modules: The modules of the workers that are forked, which this process has imported.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        serve(theirs)
    theirs.close()
    with ours:
        yield Forker(ours, modules)


@contextmanager
def workers_of(forker: Forker) -> Iterator[None]:
    """Let workers that this process starts be forks of the forking process."""
    names = SimpleNamespace(**vars(subprocess))
    names.Popen = forker.start
    with patch.object(process, "subprocess", names):
        yield
