"""The `virnuc` command: finds what was asked for, runs it, and says in one line what went wrong.

Only the asked-for command's module is imported, so that `virnuc --help` answers at once. Exit codes: 0 done, 1 failure,
2 bad input or settings, 3 weights, 4 devices, 5 a validation finished but a criterion failed
or its reviewer rejected it, 130 interrupted.
"""

from __future__ import annotations

import importlib
import logging
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from virnuc_core.errors import VirnucError

INTERRUPTED: Final = 130
FAILURE: Final = 1


@dataclass(frozen=True, slots=True)
class Command:
    """Where a command lives: `module.function(arguments) -> exit code`."""

    help: str
    place: str

    def load(self) -> Callable[[Sequence[str]], int]:
        """The function, imported now."""
        module, _, function = self.place.partition(":")
        loaded: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
        return loaded


COMMANDS: Final[dict[str, Command]] = {
    "validate": Command("prove this machine against a profile: the validation flow", "flows.run_commands:validate"),
    "predict": Command("say which reads are viral: the production flow", "flows.run_commands:predict"),
    "predict-inbox": Command("predict each new file of a folder, once", "flows.run_commands:predict_inbox"),
    "scale": Command("the scaling curve over the devices of this machine", "flows.run_commands:scale"),
    "tune": Command("the fastest engine settings for this machine and these reads", "flows.tune_command:tune"),
    "profile": Command("where the time goes: profiler traces and tables", "flows.profile_command:profile"),
    "train": Command("fit the head on labelled reads", "flows.run_commands:train"),
    "approve": Command("answer a validation that waits for its reviewer", "flows.approve_command:approve"),
    "models": Command("make, convert, fetch or check weights", "flows.model_commands:models"),
    "simulate": Command("write labelled synthetic reads", "flows.read_commands:simulate"),
    "sample": Command("draw a subset with the same read lengths", "flows.read_commands:sample"),
    "compare": Command("agreement of two runs or result files", "flows.report_commands:compare"),
    "report": Command("render a validation's report again", "flows.report_commands:report"),
    "rescore": Command("score stored embeddings again: another head or threshold", "flows.report_commands:rescore"),
    "overhead": Command("time what commits cost, in a validation's directory", "flows.report_commands:overhead"),
    "verify": Command("recompute every number of a report from raw files", "flows.report_commands:verify"),
    "history": Command("the trend of past validations", "flows.report_commands:history"),
    "profiles": Command("the profiles a validation can be held against", "flows.machine_commands:profiles"),
    "devices": Command("the devices of this machine", "flows.machine_commands:devices"),
    "doctor": Command("is this machine sound? one line a check", "flows.doctor_command:doctor"),
}


def usage() -> str:
    """What `virnuc --help` prints."""
    width = max(len(name) for name in COMMANDS) + 2
    listed = "\n".join(f"  {name:<{width}}{command.help}" for name, command in COMMANDS.items())
    return (
        "usage: virnuc COMMAND [options]\n\n"
        "Which short sequencing reads are viral, at the speed of the hardware, with a validation that proves it.\n\n"
        f"commands:\n{listed}\n\n"
        "options (after the command):\n"
        f"  {'--help':<{width}}what the command takes\n"
        f"  {'--debug':<{width}}show tracebacks and Prefect's own log lines\n\n"
        "virnuc --version prints the version.\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0 if words else 2
    if words[0] == "--version":
        sys.stdout.write(f"virnuc {_version()}\n")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        return _complain(f"'{words[0]}' is not a command; see virnuc --help", 2)
    return _run(command, words[1:])


def _run(command: Command, words: Sequence[str]) -> int:
    debug = "--debug" in words
    if not debug:  # a machine without a GPU is not a fatal error
        logging.getLogger("nvitop.api.libnvml").addFilter(lambda _: False)  # it sets its own level on import
    try:
        code = command.load()(words)
        sys.stdout.flush()
    except VirnucError as error:
        if debug:
            traceback.print_exc()
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is ended; one more must not spoil the exit code
        return _complain("interrupted; what was committed stays, the same command goes on from there", INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone; there is nobody to tell
        return FAILURE
    except OSError as error:
        if debug:
            traceback.print_exc()
        return _complain(_of_system(error), FAILURE)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is one line
        if debug:
            traceback.print_exc()
        return _complain(f"unexpected {type(error).__name__}: {error}; --debug shows where", FAILURE)
    return code


def _of_system(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def _complain(problem: str, code: int) -> int:
    line = " ".join(problem.split())
    sys.stderr.write(f"virnuc: {line}\n")
    return code


def _version() -> str:
    from importlib.metadata import version

    return version("virnuc")


if __name__ == "__main__":
    sys.exit(main())
