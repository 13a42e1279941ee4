"""Look at processes that may begin or end at any moment, and end them.

A process that has just begun to run another program has no command line for a moment. One that has
ended can be asked for nothing, also if it ran when its number was looked up.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_PAUSE_S = 0.01
_LOADING_S = 10.0  # after that a process has no command line, as threads of the kernel have none


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended. One that waits for its parent (zombie) has ended, too."""
    try:
        return not process.is_running() or process.status() in _ENDED
    except psutil.NoSuchProcess:
        return True


def command_line(process: psutil.Process) -> list[str]:
    """Return the command line of a process. It is empty if the process has ended.

    The function waits while the program of the process is being loaded.
    """
    deadline = time.monotonic() + _LOADING_S
    while not has_ended(process) and time.monotonic() < deadline:
        with suppress(psutil.NoSuchProcess):
            words: list[str] = process.cmdline()
            if words:
                return words
        time.sleep(_PAUSE_S)
    return []


def family_of(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants. The list is empty if the process has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def words_of(process: psutil.Process) -> str:
    """Return the name and the command line of a process. The name may be one that it gave itself.

    The text is empty if the process has ended.
    """
    line = " ".join(command_line(process))
    try:
        return f"{process.name()} {line}"
    except psutil.NoSuchProcess:
        return ""


def running_with(text: str, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that have a text in their name or their command line."""
    return [process for process in processes if text in words_of(process)]


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kill processes, of which some may have ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
