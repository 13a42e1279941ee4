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
    """

    is_noted: bool = False
    finished_runs: ClassVar[set[Path]] = set()


def note_command() -> None:
    """Remember that this process is a command that a user waits for."""
    _Command.is_noted = True


def note_finished_run(root: Path) -> None:
    """Remember that this process has computed a run to its end.

    Args:
        root: The run directory.
    """
    if _Command.is_noted:
        _Command.finished_runs.add(root.resolve())


def command_start_s() -> float:
    """Return when this process began, by the clock of `time.monotonic()`, in seconds."""
    since_boot_s = int(process_start_ticks(os.getpid())) / os.sysconf("SC_CLK_TCK")
    # The time of the boot by the clock of `time.monotonic()`. That clock stands still while the
    # machine is suspended, and CLOCK_BOOTTIME does not, so this is not simply 0.
    boot_s = time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot_s + since_boot_s


def waited_s() -> float:
    """Return how long ago this process began, in seconds.

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
