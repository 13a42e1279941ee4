"""Loads the program in the preloaded process of `virnuc serve`, and runs a command in a child."""

import importlib
from contextlib import suppress
from pathlib import Path
from typing import Final

import virnuc.flows
import virnuc.tasks
import virnuc_core

# Modules that a run of `virnuc predict --no-prefect` imports. They bring others along.
MODULES: Final = (
    "virnuc.flows.cli.app",
    "virnuc.flows.cli.predict_command",
    "virnuc.flows.console",
    "virnuc.flows.flow_body",
    "virnuc.flows.predict",
    "virnuc.flows.preflight",
    "virnuc_core.engine.borrowed",
    "virnuc_core.engine.stage_times",
    "virnuc_core.pipeline",
    "virnuc_core.reads.contact",
    "virnuc_core.reads.pairs",
    "virnuc_core.reads.samples",
    "virnuc_core.reads.subsets",
    "virnuc_core.report.summary_page",
    "virnuc_core.telemetry.log",
    "virnuc_core.telemetry.starvation",
    "virnuc_core.telemetry.statistics",
    # Packages that are imported late, by a function that needs them
    "email.parser",
    "pynvml",
    "safetensors.numpy",
)
EXAMPLE: Final = ("predict", "reads.fastq", "-o", "out", "--models", "models", "--no-prefect")
# Folders with the program. If a file in them was changed, the process forks no more children.
PROGRAM_FOLDERS: Final = tuple(
    Path(path).resolve()
    for package in (virnuc_core, virnuc.flows, virnuc.tasks)
    for path in package.__path__
)


def load() -> None:
    """Import what a prediction needs, and prepare what is the same for all predictions."""
    for name in MODULES:
        importlib.import_module(name)
    from cyclopts import CycloptsError

    from virnuc.flows.cli.app import app
    from virnuc_core.report.summary_page import load_templates

    load_templates()
    # The first command line takes longest: types of options are looked at, and patterns compiled.
    # A wrong value in the environment is for the user's command to report.
    with suppress(CycloptsError):
        app.parse_args(EXAMPLE, exit_on_error=False, print_error=False)


def facts() -> dict[str, str]:
    """Return what must be equal for a command to run in a child, besides `process_facts`."""
    return {}


def run() -> int:
    """Run the command line of this process, and return its exit code."""
    from virnuc.flows.cli.app import main

    return main()
