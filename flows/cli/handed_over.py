"""Lets the user's `virnuc serve` run the command of this process, if it can.

Little is imported before that, because the saved imports are the gain.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

# The programs that a server keeps loaded, and their modules
WITHOUT_PREFECT: Final = "the program without Prefect"
WITH_PREFECT: Final = "the program with Prefect"
PROGRAMS: Final = {
    WITHOUT_PREFECT: "virnuc.flows.cli.preload",
    WITH_PREFECT: "virnuc.flows.cli.preload_prefect",
}
NO_PREFECT: Final = "--no-prefect"
# Paths that lead to another file in another process
OWN_PATHS: Final = ("/dev/fd/", "/proc/self", "/proc/thread-self")
# Values of an environment variable that switch a flag off, as cyclopts reads them
FALSE_VALUES: Final = ("", "0", "f", "false", "n", "no")


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
        return _hand_over(words)
    except KeyboardInterrupt:  # before a child has begun the command
        from virnuc.flows.exit_deadline import INTERRUPTED, INTERRUPTED_MESSAGE

        sys.stderr.write(f"virnuc: {INTERRUPTED_MESSAGE}\n")
        return INTERRUPTED


def _hand_over(words: Sequence[str]) -> int | None:
    """Find a server of this user, and hand the command of this process over to it.

    Args:
        words: The words after `virnuc`.

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
            program, facts = _program_of(words)
            return TerminalProcess(*server, program, facts).run()
    return None


def _program_of(words: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the program that a child must have loaded, and what must be equal for it.

    Args:
        words: The words after `virnuc`.
    """
    if not uses_prefect(words, os.environ):
        return WITHOUT_PREFECT, {}
    from virnuc.flows.cli.prefect_facts import prefect_facts

    return WITH_PREFECT, prefect_facts(os.environ)


def may_be_handed_over(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return true if another process may run a command line.

    It may run predictions on this machine, unless the user has switched it off.

    Args:
        words: The words after `virnuc`.
        environment: The variables by name.
    """
    if words[:1] != ["predict"]:
        return False
    for word in words:
        option, has_value, _ = word.partition("=")
        if option == "--cluster" or any(path in word for path in OWN_PATHS):
            return False
        if option == NO_PREFECT and has_value:  # only the command itself reads such values
            return False
    return _serve_mode(words, environment) != "off"


def uses_prefect(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return true if a command line shows its run on a Prefect server.

    Args:
        words: The words after `virnuc`.
        environment: The variables by name.
    """
    is_off_by_default = environment.get("VIRNUC_NO_PREFECT", "").lower() not in FALSE_VALUES
    return NO_PREFECT not in words and not is_off_by_default


def _serve_mode(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the value of `--serve` or its variable; an empty text if there is none.

    If the option is there more than once, the last one counts.
    """
    mode = environment.get("VIRNUC_SERVE", "")
    for position, word in enumerate(words):
        option, _, value = word.partition("=")
        if option == "--serve":
            next_words = words[position + 1 : position + 2]
            mode = value or "".join(next_words)
    return mode


def _has_streams(words: Sequence[str]) -> bool:
    """Return true if the three standard streams are open, and can be given to another process.

    A command that reads from a terminal cannot give it away: only a process of the group in the
    foreground may read there, and the child is none.

    Args:
        words: The words after `virnuc`. With `-` the command reads standard input.
    """
    for handle in (0, 1, 2):
        try:
            os.fstat(handle)
        except OSError:  # it is closed
            return False
    if "-" in words and os.isatty(0):
        return False
    return sys.stdin is not None
