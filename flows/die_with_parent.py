"""A program that ends when its parent is gone: `python -m flows.die_with_parent PARENT MODULE ARGUMENTS`.

For programs that are not ours and cannot be asked to watch. The kernel's parent-death signal would not do: it is sent
when the *thread* that started the program ends, which may be long before the process does.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from typing import Final

LOOK_S: Final = 1.0


def main(words: list[str]) -> None:
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
    main(sys.argv[1:])
