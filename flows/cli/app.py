"""The `virnuc` command: finds what was asked for, runs it, and says in one line what went wrong.

Only the asked-for command's module is imported, so that `virnuc --help` answers at once. Exit codes: 0 done, 1 failure,
2 bad input or settings, 3 weights, 4 devices, 5 finished but a criterion, band or limit was missed
or a reviewer said no, 6 done but rows had to be set aside, 7 a validation could not be judged here, 130 interrupted."""

import gc
import logging
import os
import signal
import sys
import tomllib
import traceback
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from cyclopts import (
    App,
    Argument,
    CycloptsError,
    MissingArgumentError,
    UnusedCliTokensError,
    ValidationError,
)

from virnuc.flows.exit_deadline import exit_deadline
from virnuc_core.errors import ConfigError, VirnucError, printable
from virnuc_core.rundir import relax_garbage_collection

INTERRUPTED: Final = 130
STAYS: Final = "interrupted; what was committed stays, the same command goes on from there"
FAILURE: Final = 1
BAD_SETTINGS: Final = ConfigError.exit_code
# a lone dash is standard input to us and an option to cyclopts; until it is parsed it goes by a name no file can have
STDIN: Final = "\0stdin"
NUMBERS: Final = {
    "-1": "--mates-1",
    "-2": "--mates-2",
    "-": STDIN,
}  # what cyclopts takes for a value or for an option

COMMANDS: Final = tomllib.loads(
    Path(__file__).with_name("commands.toml").read_text(encoding="utf-8")
)["commands"]

app = App(
    name="virnuc",
    help="Which short sequencing reads are viral, at the speed of the hardware, with a validation that proves it.",
    help_epilogue="With --debug a command shows tracebacks and Prefect's own log lines.",
    help_flags=("--help", "-h"),
    help_format="plaintext",
    help_formatter="plain",
    version=lambda: f"virnuc {version('virnuc')}",
    version_flags=("--version", "-V"),
)
app.register_install_completion_command()
for _name, (_module, _help) in COMMANDS.items():
    app.command(
        f"{_module}:{_name.replace('-', '_')}",
        name=_name,
        help=_help,
        sort_key=list(COMMANDS).index(_name),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, this process's own where none is given; returns the exit code."""
    relax_garbage_collection()
    with exit_deadline(by_hand=True, final=arguments is None):
        code = _outcome(list(sys.argv[1:] if arguments is None else arguments))
    if arguments is None:
        gc.freeze()  # what is there now need not be taken apart before the end
        if (server := sys.modules.get("virnuc.tasks.server_connection")) is not None:
            server.connection.leave(code)
    return code


def _outcome(words: list[str]) -> int:
    if words[:1] == ["help"]:
        words[0] = "--help"
    debug = "--debug" in words
    if not os.environ.get("VIRNUC_MODELS"):
        os.environ.pop(
            "VIRNUC_MODELS", None
        )  # an empty one names no directory; to cyclopts it would be this one
    warnings.filterwarnings(
        "ignore", message="Failed to create the Prefect home directory"
    )  # our own error names it
    if not debug:  # a machine without a GPU is not a fatal error
        logging.getLogger("nvitop.api.libnvml").addFilter(
            lambda _: False
        )  # it sets its own level on import
    try:
        code = _run([word for word in words if word != "--debug"], debug)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _complain(STAYS, INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone; there is nobody to tell
        return FAILURE
    except Exception as error:  # noqa: BLE001 - whatever it is, it is one line
        if debug:
            traceback.print_exc()
        if isinstance(error, VirnucError):
            return _complain(str(error), error.exit_code)
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            return _complain(f"{error.filename}: {reason}" if error.filename else reason, FAILURE)
        if (
            signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        ):  # told to end: an import that was cut short fails so
            return _complain(STAYS, INTERRUPTED)
        return _complain(
            f"unexpected {type(error).__name__}: {error}; --debug shows where", FAILURE
        )
    return code


def _run(words: list[str], debug: bool) -> int:
    """Parse the words and call what they name."""
    if "" in words:  # as a path it would be the working directory
        raise ConfigError("an argument is empty; is a variable of the shell not set?")
    if words and words[0] not in app:  # known here; cyclopts would import every command to say so
        close = "".join(
            f", did you mean {name!r}?" for name in get_close_matches(words[0], COMMANDS, n=1)
        )
        raise ConfigError(f"{words[0]!r} is not a command{close}; see virnuc --help")
    try:
        given = [NUMBERS.get(word, word) if words[0] != "models" else word for word in words]
        called, bound, not_parsed = app.parse_args(given, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        asked = " ".join(["virnuc", *(error.command_chain or ())])
        raise ConfigError(f"{_misuse(error)}; see {asked} --help") from error
    bound.arguments.update({name: _with_dashes(value) for name, value in bound.arguments.items()})
    more = {"debug": debug} if "debug" in not_parsed else {}
    code = called(*bound.args, **bound.kwargs, **more)
    nothing_asked = not words or words == ["models"]
    return code if isinstance(code, int) else BAD_SETTINGS if nothing_asked else 0


def _misuse(error: CycloptsError) -> str:
    """What is wrong with a command line, in words that do not take a missing option for one without its value."""
    match error:
        case MissingArgumentError(argument=Argument(tokens=[]) as missing, keyword=None):
            return f"{'/'.join(missing.names)} is required"
        case UnusedCliTokensError(unused_tokens=[*words]):
            return f"unexpected arguments: {' '.join(words).replace(STDIN, '-')}"
        case ValidationError(argument=Argument(names=[name, *_])) if " [type=" in (
            said := str(error.__cause__)
        ):
            return f"{name}: {said.partition(' [type=')[0].splitlines()[-1].strip()}"
    return str(error).replace(STDIN, "-").removesuffix(".")


def _with_dashes(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_with_dashes(part) for part in value)
    return type(value)("-") if str(value) == STDIN else value


def _complain(problem: str, code: int) -> int:
    sys.stderr.write(f"virnuc: {printable(' '.join(problem.split()))}\n")
    return code
