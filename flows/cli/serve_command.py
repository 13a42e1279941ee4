"""The command `virnuc serve`."""

import re
import sys
import threading
import time
from contextlib import suppress
from typing import Annotated, Final

from cyclopts import Parameter

from virnuc.flows.cli.handed_over import PROGRAMS, WITHOUT_PREFECT
from virnuc_core.errors import ConfigError, UnsafeFileError, printable
from virnuc_core.private_socket import InUseError, PrivateListener, socket_folders
from virnuc_core.system_errors import describe_system_error

UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}  # seconds of each unit of time


def serve(
    *,
    idle: Annotated[
        str, Parameter(help="end what no run has used for this long: 90s, 15m, 2h")
    ] = "15m",
) -> int:
    """Keep workers with loaded models for your runs of `virnuc predict`, until Ctrl-C.

    The program is kept loaded, too. Other commands (`validate`, `scale`, `tune`, `profile`,
    `train`) start workers of their own.
    """
    idle_s = parse_duration(idle)
    listener = _listen()
    from virnuc_core.engine.worker_server import WorkerServer

    server = WorkerServer(
        listener,
        idle_s=idle_s,
        report=_report,
        programs=PROGRAMS,
        first_program=WITHOUT_PREFECT,
    )
    _report(f"runs of yours can use this server now: {listener.path}")
    try:
        server.serve(threading.Event())
    except KeyboardInterrupt:  # SIGTERM acts like Ctrl-C here
        _report("the server has ended")
    return 0


def parse_duration(text: str) -> float:
    """Return a duration such as `90s`, `15m` or `2h` in seconds.

    Raises:
        ConfigError: It is no duration.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if match is None:
        raise ConfigError(f"--idle {text}: give a number with s, m or h, such as 15m")
    number, unit = match.groups()
    return float(number) * UNITS_S[unit]


def _listen() -> PrivateListener:
    """Return the listening end of this user's socket.

    Raises:
        ConfigError: Another server of this user runs, or the socket cannot be made.
    """
    problem = "there is no XDG_RUNTIME_DIR and no home directory"
    for folder in socket_folders():
        try:
            return PrivateListener(folder)
        except (InUseError, UnsafeFileError):
            raise
        except OSError as error:
            problem = f"{folder}: {describe_system_error(error)}"
    raise ConfigError(f"the server has no place for its socket: {problem}")


def _report(event: str) -> None:
    """Write an event with the time to standard error, if that can be written to.

    The terminal may be gone, or the disk with the log may be full. The server goes on, because
    runs use its workers.
    """
    clock = time.strftime("%X")
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{clock}  {printable(event)}\n")
        sys.stderr.flush()
