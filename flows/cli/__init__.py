"""The `virnuc` command: `main` runs a command line."""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    The command is imported here: the process of a temporary server imports `server_guard` of this
    package and nothing of the command.

    Args:
        arguments: The words after `virnuc`. None takes those of this process.
    """
    from virnuc.flows.cli.app import main as run_command_line

    return run_command_line(arguments)
