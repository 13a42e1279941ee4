"""Prefect's embedded server, kept apart from the terminal."""

from __future__ import annotations

import subprocess
from typing import Any

from prefect.server.api import server


class _OwnSession:
    """The module `subprocess`, but what it starts is in a session of its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    @staticmethod
    def Popen(*arguments: Any, **options: Any) -> subprocess.Popen[Any]:  # noqa: N802 - the name it stands for
        return subprocess.Popen(*arguments, **{"start_new_session": True, **options})


def keep_from_ctrl_c() -> None:
    """From now on an embedded server outlives a Ctrl-C at the terminal, until this process stops it.

    Ctrl-C reaches every process of the terminal's group. A server that is gone first leaves the flow asking for it for
    two minutes. Prefect has no setting for how it starts its server, so the module's own `subprocess` is stood in for.
    """
    server.subprocess = _OwnSession()  # type: ignore[attr-defined, assignment]
