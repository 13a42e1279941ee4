"""Prefect's embedded server: kept apart from the terminal, and never outliving the process that started it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

from prefect.server.api import server

ATTENDED: Final = "flows.die_with_parent"
logger = logging.getLogger(__name__)


class _Attended:
    """The module `subprocess`, but what it starts is in a session of its own and ends with this process."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    @staticmethod
    def Popen(args: Sequence[str], **options: Any) -> subprocess.Popen[Any]:  # noqa: N802 - the name it stands for
        return subprocess.Popen(attended(args), **{"start_new_session": True, **options})


def attended(command: Sequence[str]) -> list[str]:
    """`python -m MODULE …` as a command that ends when this process does, however that ends."""
    if list(command[:2]) != [sys.executable, "-m"]:
        logger.warning("the embedded server is started in a way unknown here; it may outlive a killed run")
        return list(command)
    return [sys.executable, "-P", "-m", ATTENDED, str(os.getpid()), *command[2:]]


def keep_server_ours() -> None:
    """From now on an embedded server outlives a Ctrl-C at the terminal, but not this process.

    Ctrl-C reaches every process of the terminal's group. A server that is gone first leaves the flow asking for it for
    two minutes; one that this process could not stop, because it was killed, would stay for ever. Prefect has no
    setting for how it starts its server, so the module's own `subprocess` is stood in for.
    """
    server.subprocess = _Attended()  # type: ignore[attr-defined, assignment]
