"""A program for a forked process, which writes one models directory in two processes at once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from virnuc.flows.cli import main


def write_models_in_two_processes() -> None:
    """Run `virnuc models init-random` in two processes, and print their exit codes.

    The command line has a folder. The processes write the models into its folder `models`, and
    their messages into the files `errors-0` and `errors-1`.
    """
    folder = Path(sys.argv[1])
    processes = []
    for number in range(2):
        pid = os.fork()
        if pid == 0:
            _run_command(folder, number)
        processes.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in processes]
    print(json.dumps([os.waitstatus_to_exitcode(status) for status in statuses]))


def _run_command(folder: Path, number: int) -> None:
    """Run the command, and end this process with its exit code."""
    errors = os.open(folder / f"errors-{number}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    code = 255
    try:
        code = main(["models", "init-random", str(folder / "models")])
    finally:
        sys.stderr.flush()
        os._exit(code)
