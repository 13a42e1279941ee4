"""The `virnuc` command: `main` runs a command line."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    If a `virnuc serve` of this user can run the command, this process only waits for it.

    The command is imported here: the process of a temporary server imports `server_guard` of this
    package and nothing of the command.

    Args:
        arguments: The words after `virnuc`. None takes those of this process.
    """
    if arguments is None:
        from virnuc.flows.cli.handed_over import run_in_server

        code = run_in_server(sys.argv[1:])
        if code is not None:
            return code
    from virnuc.flows.cli.app import main as run_command_line

    return run_command_line(arguments)
