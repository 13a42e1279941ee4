"""Loads the program and Prefect in a process of `virnuc serve`, and runs a command in a child.

Prefect reads its settings when it is imported. So a child runs a command only if the settings of
the command are those with which Prefect was imported (`virnuc.flows.cli.prefect_facts`).
"""

import importlib
import logging
import os
import sys
from typing import Final

from virnuc.flows.cli import preload
from virnuc.flows.cli.prefect_facts import SETTINGS, prefect_facts
from virnuc.flows.cli.prefect_settings import set_prefect_defaults
from virnuc.flows.running_alone import reason_in_one_line
from virnuc_core.errors import ConfigError

# Modules that a run of `virnuc predict` with a Prefect server imports, besides those of `preload`
MODULES: Final = (
    "virnuc.flows.cli.server_choice",
    "virnuc.flows.flow_run",
    "virnuc.flows.prefect_flows.predict",
    "virnuc.tasks.server_connection",
    # The temporary server is a copy of the child, so it finds its modules loaded as well.
    "virnuc.flows.cli.server_guard",
    "prefect.server.api.server",
    "uvicorn",
)
NOT_LOADED: Final = "Prefect cannot be loaded"
PROGRAM_FOLDERS: Final = preload.PROGRAM_FOLDERS
run = preload.run

_facts: dict[str, str] = {}


def load() -> None:
    """Import what a prediction with a Prefect server needs.

    If Prefect cannot be loaded, no command fits this process. Each runs by itself and says why.
    """
    preload.load()
    set_prefect_defaults(os.environ)
    _facts.update(prefect_facts(os.environ))
    try:
        _import_all()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a damaged package raises any error
        _facts[SETTINGS] = NOT_LOADED
        # The server and this process write to the same terminal.
        sys.stderr.write(f"{NOT_LOADED} for the next commands: {reason_in_one_line(error)}\n")


def _import_all() -> None:
    """Import all modules that a run needs.

    Raises:
        Exception: A package is damaged, or Prefect's settings are. Or the user has plugins of
            Prefect, which must begin in each process.
    """
    from prefect.settings import get_current_settings

    from virnuc.flows.cli.temporary_server import SKIP_TYPE_CHECKS

    if get_current_settings().plugins.enabled:
        raise ConfigError("plugins of Prefect begin when it is imported, and would not in a child")

    # A child takes over the variables of its command, so this changes only these imports.
    os.environ.update(SKIP_TYPE_CHECKS)
    for name in MODULES:
        importlib.import_module(name)
    from virnuc.flows.flow_run import load_run_modules

    load_run_modules()


def facts() -> dict[str, str]:
    """Return what must be equal for a command to run in a child, besides `process_facts`."""
    return _facts


def read_settings_again() -> None:
    """Let Prefect read its settings again, and make its log handlers again.

    A child calls this when its command has set up the process: the environment, the working
    directory, and the streams, which hide secrets.

    Raises:
        Exception: A file with settings cannot be read.
    """
    from prefect.context import refresh_global_settings_context
    from prefect.logging.configuration import setup_logging
    from prefect.settings import PREFECT_LOGGING_EXTRA_LOGGERS

    refresh_global_settings_context()
    # Prefect adds to the handlers of these loggers, and leaves those of the root logger that it
    # does not know. They write to the streams of the process in which Prefect was imported.
    for name in ("", *PREFECT_LOGGING_EXTRA_LOGGERS.value()):
        logging.getLogger(name).handlers.clear()
    setup_logging(incremental=False)
