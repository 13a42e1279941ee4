"""A command that a server may run: it runs `toy_command` itself if the server does not."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from virnuc_core import command_handover
from virnuc_core.command_handover import TerminalProcess
from virnuc_core.private_socket import connect

PATIENCE_S = 60.0

if __name__ == "__main__":
    # Seconds after which a command runs itself, or asks no more how its child has ended. A busy
    # machine may need more than the usual ones.
    command_handover.ANSWER_S = command_handover.STATUS_S = PATIENCE_S  # type: ignore[misc]
    folder = sys.argv.pop(1)
    time.sleep(float(os.environ.get("TOY_DELAY_S", "0")))  # as if Python were slow to start
    found = connect(Path(folder))
    facts = {"TOY_FACT": os.environ.get("TOY_FACT", "same")}
    program = os.environ.get("TOY_PROGRAM", "toy")
    code = None if found is None else TerminalProcess(*found, program, facts).run()
    if code is None:
        print("itself", file=sys.stderr)
        from tests.unit.engine import toy_command

        code = toy_command.run()
    sys.exit(code)
