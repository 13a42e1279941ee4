"""The errors people see. Each says what is wrong, where, and the way out, in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

# what moves a terminal's cursor or turns the order of letters round, and bytes of a file name that are no letters
_UNPRINTABLE: Final = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""A text with its control characters written out: what a file calls itself must not act on who reads of it.

    >>> printable("reads\x1b[2J.fa")
    'reads\\x1b[2J.fa'
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class VirnucError(Exception):
    """Root of the family. ``exit_code`` is what the command line returns for it."""

    exit_code = 1

    def __init__(self, problem: str) -> None:
        super().__init__(printable(problem))


class InputError(VirnucError):
    """Reads that cannot be used: names the file, the line or the read, and what to do."""

    exit_code = 2

    def __init__(
        self,
        problem: str,
        *,
        file: Path | str | None = None,
        line: int | None = None,
        read_id: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.file, self.line, self.read_id = file, line, read_id
        place = "" if file is None else str(file)
        if line is not None:
            place += f":{line}" if place else f"line {line}"
        who = "" if read_id is None else f"read '{read_id}': "
        super().__init__(f"{place}{': ' if place else ''}{who}{problem}{'; ' + hint if hint else ''}")


class ConfigError(VirnucError):
    """Settings that contradict each other, are unknown or out of range."""

    exit_code = 2


class WeightsError(VirnucError):
    """A models directory, or a checkpoint, that cannot be used as it is."""

    exit_code = 3


class DeviceError(VirnucError):
    """A device that is absent, taken, or cannot hold the work."""

    exit_code = 4


class ShardError(VirnucError):
    """A shard that could not be computed, or whose file is not what was committed."""

    def __init__(self, problem: str, *, shard: int | None = None) -> None:
        super().__init__(problem if shard is None else f"shard {shard:05d}: {problem}")


class WorkerError(VirnucError):
    """A worker process that failed for good; the worker's own traceback is a note, which `--debug` shows."""

    def __init__(self, problem: str, *, worker_traceback: str = "") -> None:
        super().__init__(problem)
        if worker_traceback:
            self.add_note(worker_traceback)


class SpentInputError(VirnucError):
    """Staging failed in a way that another try might mend, but its reads came through a pipe and are gone."""


class RunMismatchError(ConfigError):
    """A run directory that holds results of other reads, weights or settings. Nothing is mixed."""
