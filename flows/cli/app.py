"""Runs a command line of `virnuc`, and says in one line what went wrong.

Only the module of the asked-for command is imported, so that `virnuc --help` answers at once.

Exit codes:
    0: done.
    1: failure.
    2: bad input or settings.
    3: weights.
    4: devices.
    5: finished, but a criterion, band or limit was missed, or a reviewer said no.
    6: done, but rows had to be set aside.
    7: a validation could not be judged here.
    130: interrupted.
"""

import gc
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version
from inspect import BoundArguments, Parameter
from typing import Any, Final

from cyclopts import (
    App,
    Argument,
    CycloptsError,
    MissingArgumentError,
    UnknownOptionError,
    UnusedCliTokensError,
    ValidationError,
)

from virnuc.flows.cli.options import ENVIRONMENT
from virnuc.flows.cli.output import accept_all_letters
from virnuc.flows.cli.registry import COMMAND_NAMES, COMMANDS
from virnuc.flows.exit_deadline import INTERRUPTED, INTERRUPTED_MESSAGE, exit_deadline
from virnuc_core.allowed_paths import require_allowed_options
from virnuc_core.confidential import secrets_hidden
from virnuc_core.errors import ConfigError, VirnucError, printable
from virnuc_core.rundir import relax_garbage_collection
from virnuc_core.system_errors import describe_system_error, limit_error

FAILURE: Final = 1
BAD_SETTINGS: Final = ConfigError.exit_code
DEBUG_OPTION: Final = "--debug"
# A lone dash is standard input to us and an option to cyclopts. Until it is parsed it goes by a
# name that no file can have.
STDIN_PLACEHOLDER: Final = "\0stdin"
# words that cyclopts would take for a number or for an option
WORDS_FOR_CYCLOPTS: Final = {
    "-1": "--mates-1",
    "-2": "--mates-2",
    "-": STDIN_PLACEHOLDER,
}
# Options of VirNucPro's `predict` that have another form here, and what to do
VIRNUCPRO_OPTIONS: Final = {
    "--gpus": "name devices with --devices cuda:0,cuda:1",
    "--parallel": "leave it out, all GPUs work at the same time",
    "--keep-intermediate": "leave it out, the embeddings are always kept",
    "--persistent-models": "leave it out, workers always keep their models",
    "--resume": "leave it out, the same command goes on with the work that is missing",
    "--output-dir": "use --out",
    "--dnabert-batch-size": "use --dna-token-budget, in tokens",
    "--esm-batch-size": "use --token-budget, in tokens",
    "--batch-size": "use --token-budget and --dna-token-budget, in tokens",
}

app = App(
    name="virnuc",
    help=(
        "Which short sequencing reads are viral, at the speed of the hardware, "
        "with a validation that proves it."
    ),
    help_epilogue="With --debug a command shows tracebacks and Prefect's own log lines.",
    help_flags=("--help", "-h"),
    help_format="plaintext",
    help_formatter="plain",
    version=lambda: f"virnuc {version('virnuc')}",
    version_flags=("--version", "-V"),
)
app.register_install_completion_command()
for _position, _entry in enumerate(COMMANDS):
    _help_texts = {"help_epilogue": f"Example: {_entry.example}"} if _entry.example else {}
    app.command(
        _entry.import_path,
        name=_entry.name,
        help=_entry.summary,
        sort_key=_position,
        **_help_texts,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    The command is ended a few seconds after Ctrl-C or SIGTERM, if it does not end by itself.

    Args:
        arguments: The words after `virnuc`. None takes those of this process, which then ends
            with the command.
    """
    is_whole_process = arguments is None
    words = list(sys.argv[1:]) if arguments is None else list(arguments)
    relax_garbage_collection()
    accept_all_letters(sys.stdout, sys.stderr)
    # Threads of other programs may still write after the command, until the process ends.
    hiding = secrets_hidden(streams=True, for_good=is_whole_process)
    with hiding, exit_deadline(by_hand=True, final=is_whole_process):
        code = _run_and_report(words)
    if is_whole_process:
        gc.freeze()  # the process ends now, so Python need not look for garbage once more
        # Only a command that has started a flow has a server, and this module. A child of a process
        # of `virnuc serve` may have the module without a server, which does no harm. Threads of
        # Prefect may wait for the server without end, so `leave` ends the process if need be.
        server_connection = sys.modules.get("virnuc.tasks.server_connection")
        if server_connection is not None:
            server_connection.connection.leave(code)
    return code


def _run_and_report(words: list[str]) -> int:
    """Run the words of a command line. Report an error in one line and return the exit code.

    With `--debug`, the traceback of an error is printed as well.
    """
    if words[:1] == ["help"]:  # `virnuc help` is `virnuc --help`
        words[0] = "--help"
    debug = DEBUG_OPTION in words
    _prepare_process(debug)
    try:
        code = _parse_and_call([word for word in words if word != DEBUG_OPTION], debug)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _complain(INTERRUPTED_MESSAGE, INTERRUPTED)
    except BrokenPipeError:
        # The program that reads our output has ended. A message would raise the same error again.
        sys.stderr.close()
        return FAILURE
    except Exception as error:  # noqa: BLE001 - every error becomes one line
        if debug:
            traceback.print_exc()
        return _report_error(error)
    return code


def _prepare_process(debug: bool) -> None:
    """Set up what all commands share: the environment, warnings and other libraries' logs.

    Args:
        debug: Show warnings and log lines of other libraries that are hidden otherwise.
    """
    models_variable = ENVIRONMENT["models"]
    if not os.environ.get(models_variable):
        # Cyclopts would take an empty variable for the working directory, so it is removed.
        os.environ.pop(models_variable, None)
    # A line of ours already names a home directory that cannot be created, or a damaged profile.
    warnings.filterwarnings("ignore", message="Failed to create the Prefect home directory")
    warnings.filterwarnings("ignore", message="Failed to load profiles from")
    if not debug:
        # If no thread can be started, coroutines of Prefect stay unused. Our error says why.
        warnings.filterwarnings("ignore", message="coroutine '.*' was never awaited")
        # A machine without a GPU is not a fatal error. The library sets its own level on import.
        logging.getLogger("nvitop.api.libnvml").addFilter(lambda _: False)


def _report_error(error: Exception) -> int:
    """Write the line that reports an error, and return the exit code."""
    if isinstance(error, VirnucError):
        return _complain(str(error), error.exit_code)
    limit = limit_error(error)
    if limit is not None:
        return _complain(str(limit), FAILURE)
    if isinstance(error, OSError):
        reason = describe_system_error(error)
        if error.filename:
            reason = f"{error.filename}: {reason}"
        return _complain(reason, FAILURE)
    if isinstance(error, UnicodeEncodeError):
        # Output accepts all letters, so this is the name of a file, for example from a sample
        # sheet. Python encodes names of files by the locale.
        name = ascii(error.object)
        return _complain(
            f"{name}: this name has letters that your locale does not have; set LC_ALL=C.UTF-8",
            BAD_SETTINGS,
        )
    # An import that was interrupted may fail with any error, which is only a consequence. After an
    # interrupt, our handler has let signals be ignored, which shows that there was one.
    is_ending = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    if is_ending:
        return _complain(INTERRUPTED_MESSAGE, INTERRUPTED)
    return _complain(f"unexpected {type(error).__name__}: {error}; --debug shows where", FAILURE)


def _parse_and_call(words: list[str], debug: bool) -> int:
    """Parse the words, call the command that they name, and return the exit code.

    Args:
        words: The command line without `--debug`.
        debug: `--debug` was given. It is passed to commands that have such an option.

    Raises:
        ConfigError: There is no such command, its arguments are wrong, or a path is not allowed.
    """
    _require_known_command(words)
    # Replace words that cyclopts would misread: `-1` (a number to it) and `-`. The commands under
    # `virnuc models` have no options with one digit and read no standard input.
    words_to_parse = words
    if words and words[0] != "models":
        words_to_parse = [WORDS_FOR_CYCLOPTS.get(word, word) for word in words]
    try:
        command, arguments, ignored_parameters = app.parse_args(
            words_to_parse, exit_on_error=False, print_error=False
        )
    except CycloptsError as error:
        command_line = " ".join(["virnuc", *(error.command_chain or ())])
        raise ConfigError(f"{_describe_misuse(error)}; see {command_line} --help") from error
    for name, value in arguments.arguments.items():
        arguments.arguments[name] = _with_dashes(value)
    require_allowed_options(_named_values(arguments).items())
    options = dict(arguments.kwargs)
    # A parameter that is no option of the command line (`parse=False`) is "ignored" by cyclopts.
    if "debug" in ignored_parameters:
        options["debug"] = debug
    code = command(*arguments.args, **options)
    if isinstance(code, int):
        return code
    # `virnuc` alone and `virnuc models` alone have printed their help.
    names_no_command = not words or words == ["models"]
    return BAD_SETTINGS if names_no_command else 0


def _named_values(arguments: BoundArguments) -> dict[str, Any]:
    """Return the values of a parsed command line by the names of the command's parameters.

    Values of a parameter like `**options` stand under their own names.
    """
    values: dict[str, Any] = {}
    for name, value in arguments.arguments.items():
        kind = arguments.signature.parameters[name].kind
        if kind is Parameter.VAR_KEYWORD:
            values |= value
        else:
            values[name] = value
    return values


def _require_known_command(words: list[str]) -> None:
    """Raise `ConfigError` for an empty word or an unknown command.

    The message suggests the command with the most similar name. Cyclopts would find an unknown
    command as well, but it would import every command for it.
    """
    if "" in words:  # an empty path would be the working directory
        raise ConfigError("an argument is empty; is a variable of the shell not set?")
    if not words or words[0] in app:
        return
    suggestion = ""
    similar_names = get_close_matches(words[0], COMMAND_NAMES, n=1)
    if similar_names:
        suggestion = f", did you mean {similar_names[0]!r}?"
    raise ConfigError(f"{words[0]!r} is not a command{suggestion}; see virnuc --help")


def _describe_misuse(error: CycloptsError) -> str:
    """Return a message about a wrong command line.

    Some of cyclopts' own messages are misleading. For a missing argument, for example, it says that
    an option has no value. Such messages are replaced. The others are returned as they are.
    """
    match error:
        case UnknownOptionError(token=token):
            option = (token.keyword or token.value).partition("=")[0]
            if option in VIRNUCPRO_OPTIONS:
                return f"Unknown option: {option} (of VirNucPro): {VIRNUCPRO_OPTIONS[option]}"
        # No word was given for the argument at all (`tokens`).
        case MissingArgumentError(argument=Argument(tokens=[]) as missing, keyword=None):
            return f"{'/'.join(missing.names)} is required"
        case UnusedCliTokensError(unused_tokens=[*words]):
            return f"unexpected arguments: {' '.join(words).replace(STDIN_PLACEHOLDER, '-')}"
        case ValidationError(argument=Argument(names=[name, *_])):
            description = str(error.__cause__)
            # pydantic's last line is `    what is wrong [type=…, input_value=…]`
            message, marker, _ = description.partition(" [type=")
            if marker:
                return f"{name}: {message.splitlines()[-1].strip()}"
    return str(error).replace(STDIN_PLACEHOLDER, "-").removesuffix(".")


def _with_dashes(value: Any) -> Any:
    """Return the parsed value with each placeholder of standard input replaced by a dash.

    The command line is parsed with a placeholder because cyclopts takes a dash for an option.
    """
    if isinstance(value, tuple):
        return tuple(_with_dashes(part) for part in value)
    if str(value) == STDIN_PLACEHOLDER:
        return type(value)("-")  # a text or a path, like the value
    return value


def _complain(problem: str, code: int) -> int:
    """Write the line that names a problem to standard error, and return `code`.

    Line breaks become spaces. Control characters, as in names of files, are escaped.
    """
    one_line = " ".join(problem.split())
    sys.stderr.write(f"virnuc: {printable(one_line)}\n")
    return code
