"""Prefect's embedded server: kept apart from the terminal, and never outliving the process that started it.

Run as a program, `python -m flows.embedded_server PARENT MODULE ARGUMENTS`, this is MODULE, and ends when its parent is
gone: a server is not ours and cannot be asked to watch. The kernel's parent-death signal would not do, it is sent when
the *thread* that started the program ends, which may be long before the process does.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

LOOK_S: Final = 1.0
logger = logging.getLogger(__name__)


class _OwnSubprocess:
    """The module `subprocess`, but what it starts is in a session of its own and ends with this process."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    @staticmethod
    def Popen(args: Sequence[str], **options: Any) -> subprocess.Popen[Any]:  # noqa: N802 - the name it stands for
        return subprocess.Popen(dying_with_parent(args), **{"start_new_session": True, **options})


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """`python -m MODULE …` as a command that ends when this process does, however that ends."""
    if list(command[:2]) != [sys.executable, "-m"]:
        logger.warning("the embedded server is started in a way unknown here; it may outlive a killed run")
        return list(command)
    return [sys.executable, "-P", "-m", "flows.embedded_server", str(os.getpid()), *command[2:]]


def keep_server_ours() -> None:
    """From now on an embedded server outlives a Ctrl-C at the terminal, but not this process.

    Ctrl-C reaches every process of the terminal's group. A server that is gone first leaves the flow asking for it for
    two minutes; one that this process could not stop, because it was killed, would stay for ever. Prefect has no
    setting for how it starts its server, so the module's own `subprocess` is stood in for.
    """
    from prefect.server.api import server

    server.subprocess = _OwnSubprocess()  # type: ignore[attr-defined, assignment]


def _main(words: list[str]) -> None:
    """Watch the process PARENT from a thread, and be the module in this one."""
    parent, module, arguments = int(words[0]), words[1], words[2:]
    threading.Thread(target=_end_after, args=(parent,), name="parent's watch", daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_after(parent: int) -> None:
    """SIGKILL to this process once another process has adopted it: nobody is left who would want an orderly end."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _main(sys.argv[1:])
