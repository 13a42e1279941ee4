"""How long a user waits for a command: from the start of its process to its last line.

This is one number. The command prints it, and `summary.json` of the run that it has computed has
the same.
"""

import os
import time
from pathlib import Path
from typing import ClassVar

from virnuc_core.lease import process_start_ticks


class _Command:
    """Whether this process is a command that a user waits for, and what it has computed.

    Attributes:
        is_noted: False in a notebook, a script or a worker of Prefect, which do other things before
            and after a run.
        finished_runs: The directories of the runs that this process has computed to their end.
        start_ticks: When the process began that the user has started, if that is another one. It
            has the form of `process_start_ticks`.
    """

    is_noted: bool = False
    finished_runs: ClassVar[set[Path]] = set()
    start_ticks: str = ""


def note_command() -> None:
    """Remember that this process is a command that a user waits for."""
    _Command.is_noted = True


def note_start(pid: int) -> None:
    """Remember that this process runs the command of another process, from which time counts.

    Args:
        pid: The process that the user has started.

    Raises:
        OSError: It has ended.
    """
    _Command.start_ticks = process_start_ticks(pid)


def note_finished_run(root: Path) -> None:
    """Remember that this process has computed a run to its end.

    Args:
        root: The run directory.
    """
    if _Command.is_noted:
        _Command.finished_runs.add(root.resolve())


def command_start_s() -> float:
    """Return when the command began, by the clock of `time.monotonic()`, in seconds."""
    start_ticks = _Command.start_ticks or process_start_ticks(os.getpid())
    since_boot_s = int(start_ticks) / os.sysconf("SC_CLK_TCK")
    # The time of the boot by the clock of `time.monotonic()`. That clock stands still while the
    # machine is suspended, and CLOCK_BOOTTIME does not, so this is not simply 0.
    boot_s = time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot_s + since_boot_s


def waited_s() -> float:
    """Return how long ago the command began, in seconds.

    It includes what came before our first line: the start of Python and its imports.
    """
    return time.monotonic() - command_start_s()


def record_waiting(root: Path, elapsed_s: float) -> bool:
    """Write how long the user waited into the summary of a run, if this command computed that run.

    A run that was complete before keeps its time.

    Args:
        root: The run directory.
        elapsed_s: The time that the command prints, in seconds.

    Returns:
        Whether the time was written.

    Raises:
        VirnucError: The directory or its summary cannot be read or written, or another process
            works there now.
    """
    if root.resolve() not in _Command.finished_runs:
        return False
    # The command reads its start time long before it needs the run files.
    from virnuc_core.rundir import RunDir, run_lock
    from virnuc_core.runfiles import RunSummary, read, write

    run = RunDir(root)
    with run_lock(root):
        summary = read(run.summary, RunSummary)
        write(run.summary, summary.model_copy(update={"waited_s": elapsed_s}))
    return True
