"""The processes of `virnuc_core.reads.workers`: found, and killed."""

from __future__ import annotations

import os
from typing import Any

import psutil
import pytest

from tests.process_lookup import kill_all, running_with
from virnuc_core.reads.workers import Workers


def workers_of(pid: int) -> list[psutil.Process]:
    """Return the worker processes of a process, without those that have ended."""
    return running_with("reads.workers", psutil.Process(pid).children())


def kill_when_asked(patch: pytest.MonkeyPatch) -> None:
    """Each is killed as soon as it has been given something."""
    submit = Workers._submit

    def submit_and_kill(self: Workers, *job: Any) -> Any:
        answer = submit(self, *job)
        kill_all(workers_of(os.getpid()))
        return answer

    patch.setattr(Workers, "_submit", submit_and_kill)
