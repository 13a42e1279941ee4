"""Programs in child processes that need not import the product, which takes 3 s each.

One process imports it, and forks for each program. The library of `failing_files` is preloaded, so
that calls of the system can fail in each program and in the workers that it starts.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import selectors
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from tests.failing_files import failing_variables, has_compiler
from tests.forked_workers import forks_of_this_process, import_workers, workers_of
from tests.process_lookup import family_of, kill_all

from . import runs

REPOSITORY = Path(__file__).parents[3]
MAIN = "from tests.unit.engine.forked_programs import serve; serve()"


@dataclass(frozen=True)
class Request:
    """Programs to run one after the other in one process.

    Attributes:
        names: Functions of `runs`, or full names such as "tests.unit.unknown_answers.ask_in_child".
        arguments: The command line, without the name of the program.
        variables: Environment variables besides those of the parent.
        folder: The working directory.
    """

    names: tuple[str, ...]
    arguments: tuple[str, ...]
    variables: dict[str, str]
    folder: str


@dataclass(frozen=True)
class Ended:
    """How a process ended, with the names of `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


class ForkedPrograms:
    """The process that forks. Use it in a `with` statement."""

    def __init__(self) -> None:
        # Threads do not survive a fork, so that there should be none.
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        if has_compiler():
            environment["LD_PRELOAD"] = failing_variables("", [], "")["LD_PRELOAD"]
        self._parent = subprocess.Popen(
            [sys.executable, "-c", MAIN],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> ForkedPrograms:
        return self

    def __exit__(self, *_: object) -> None:
        kill_all(family_of(self._parent.pid))
        self._parent.communicate()

    def run(
        self,
        *names: str,
        arguments: tuple[object, ...] = (),
        variables: Mapping[str, str] | None = None,
        folder: Path = REPOSITORY,
    ) -> Ended:
        """Run functions in one new process, and wait for it and for its workers.

        Args:
            names: The functions, in the order of their calls: names in `runs`, or full names.
            arguments: The command line that they read.
            variables: Further environment variables, for example those of `failing_variables`.
            folder: The working directory.

        Returns:
            How the process ended.
        """
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        words = tuple(map(str, arguments))
        request = Request(names, words, dict(variables or {}), str(folder))
        self._parent.stdin.write(json.dumps(asdict(request)) + "\n")
        self._parent.stdin.flush()
        return Ended(**json.loads(self._parent.stdout.readline()))


def serve() -> None:
    """Fork for each request on standard input, and answer how the new process ended."""
    import_workers()
    for line in iter(sys.stdin.readline, ""):
        request = Request(**json.loads(line))
        functions = [find_function(name) for name in request.names]
        output_end, output = os.pipe()
        errors_end, errors = os.pipe()
        pid = os.fork()
        if pid == 0:
            _become(request, output, errors)
            _run_to_end(functions)
        os.close(output)
        os.close(errors)
        texts = _read_to_end(output_end, errors_end)
        _, status = os.waitpid(pid, 0)
        ended = Ended(os.waitstatus_to_exitcode(status), *texts)
        print(json.dumps(asdict(ended)), flush=True)


def find_function(name: str) -> Callable[[], object]:
    """Return a function of `runs`, or one with a full name, whose module is imported for all forks."""
    module_name, _, function_name = name.rpartition(".")
    module = importlib.import_module(module_name) if module_name else runs
    function: Callable[[], object] = getattr(module, function_name)
    return function


def _become(request: Request, output: int, errors: int) -> None:
    """Make this process one that was started with the command line of a request."""
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a descriptor is wanted
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
    os.environ.update(request.variables)
    os.chdir(request.folder)
    sys.argv = ["-c", *request.arguments]


def _run_to_end(functions: Sequence[Callable[[], object]]) -> NoReturn:
    """Call the functions, and end the process as Python ends a program.

    The interpreter is not taken down: it would touch every object of the process that was forked,
    so that the system copies them all, which takes a second of a processor.
    """
    status = 0
    try:
        with forks_of_this_process() as forker, workers_of(forker):
            for function in functions:
                function()
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as Python does, every error is printed
        status = 1
        traceback.print_exc()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _read_to_end(*descriptors: int) -> list[str]:
    """Return all that is written to pipes, until the last process that has them ends or closes them."""
    contents = {descriptor: bytearray() for descriptor in descriptors}
    with selectors.DefaultSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                part = os.read(key.fd, 1 << 16)
                contents[key.fd] += part
                if not part:
                    selector.unregister(key.fd)
                    os.close(key.fd)
    return [content.decode(errors="replace") for content in contents.values()]
