"""The processes of `virnuc_core.reads.workers`: found, and killed."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import psutil
import pytest

from virnuc_core.reads.workers import Workers


def workers_of(pid: int) -> list[psutil.Process]:
    processes = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):  # a short-lived one of some import, gone by now
            if "reads.workers" in " ".join(child.cmdline()):
                processes.append(child)
    return processes


def kill_when_asked(patch: pytest.MonkeyPatch) -> None:
    """Each is killed as soon as it has been given something."""
    submit = Workers._submit

    def submit_and_kill(self: Workers, *job: Any) -> Any:
        answer = submit(self, *job)
        for member in workers_of(os.getpid()):
            member.kill()
        return answer

    patch.setattr(Workers, "_submit", submit_and_kill)
