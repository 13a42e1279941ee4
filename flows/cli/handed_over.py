"""Lets the user's `virnuc serve` run a command, if it can. Little is imported before that."""

import os
import stat
import sys
from collections.abc import Mapping, Sequence
from typing import Final

# Paths that lead elsewhere in another process
OWN_PATHS: Final = ("/dev/fd/", "/proc/self", "/proc/thread-self")
NO_WORDS: Final = ("", "0", "f", "false", "n", "no")  # as cyclopts reads a variable of a flag


def run_in_server(words: Sequence[str]) -> int | None:
    """Let a server of this user run the command of this process, and wait for its end.

    Args:
        words: The words after `virnuc`.

    Returns:
        The exit code; None if this process must run the command itself.
    """
    if not may_be_handed_over(words, os.environ) or not _has_streams(words):
        return None
    try:
        return _hand_over()
    except KeyboardInterrupt:  # before a child has begun the command
        from virnuc.flows.exit_deadline import INTERRUPTED, INTERRUPTED_MESSAGE

        sys.stderr.write(f"virnuc: {INTERRUPTED_MESSAGE}\n")
        return INTERRUPTED


def _hand_over() -> int | None:
    """Find a server of this user, and hand the command of this process over to it.

    Returns:
        The exit code; None if this process must run the command itself.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed before a child has begun the command.
    """
    from virnuc_core.command_handover import TerminalProcess
    from virnuc_core.errors import VirnucError
    from virnuc_core.private_socket import connect, socket_folders

    for folder in socket_folders():
        try:
            server = connect(folder)
        except VirnucError:
            return None  # the command says what is wrong
        if server is not None:
            connection, peer = server
            return TerminalProcess(connection, peer).run()
    return None


def may_be_handed_over(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return true if another process may run a command line.

    These are predictions without Prefect, on this machine.

    Args:
        words: The words after `virnuc`.
        environment: The variables by name.
    """
    if words[:1] != ["predict"]:
        return False
    no_prefect = environment.get("VIRNUC_NO_PREFECT", "").lower() not in NO_WORDS
    if "--no-prefect" not in words and not no_prefect:
        return False
    is_off = environment.get("VIRNUC_SERVE") == "off"
    for position, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == "--serve":
            is_off = (value or "".join(words[position + 1 : position + 2])) == "off"
        if name == "--cluster" or any(path in word for path in OWN_PATHS):
            return False
    return not is_off


def _has_streams(words: Sequence[str]) -> bool:
    """Return true if the three standard streams are open, and can be given to another process.

    Only the process group in the foreground may read from a terminal.
    """
    for number in (0, 1, 2):
        try:
            status = os.fstat(number)
        except OSError:
            return False
        if number == 0 and "-" in words and stat.S_ISCHR(status.st_mode) and os.isatty(number):
            return False
    return sys.stdin is not None
