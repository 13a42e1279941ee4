"""Begins work of a prediction before its flow is loaded, so that the first batch comes sooner."""

import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virnuc.flows.settings.predict import PredictSettings
from virnuc.flows.settings.shared import FlowSettings
from virnuc_core.config import Devices
from virnuc_core.errors import ConfigError
from virnuc_core.private_socket import SOCKET, socket_folders
from virnuc_core.rundir import SAMPLES, RunDir

if TYPE_CHECKING:
    from virnuc_core.engine.borrowed import ServeMode


def use_server(settings: Any, prestarted: ExitStack) -> None:
    """Let a prediction borrow its workers from the user's `virnuc serve`, if it runs.

    Args:
        settings: The settings of the flow and of the terminal.
        prestarted: Ends the borrowing when it is closed.

    Raises:
        ConfigError: The user wants borrowed workers only, for a run on a cluster.
    """
    mode: ServeMode = getattr(settings, "serve", "off")  # other commands have no such option
    if mode == "off":
        return
    if getattr(settings, "cluster", None):
        if mode == "require":
            raise ConfigError(
                "--serve require (or VIRNUC_SERVE) and --cluster: a run on a cluster cannot use "
                "virnuc serve; leave one of them out"
            )
        return
    # What follows takes a while to import, so look for the server first.
    has_socket = any(os.path.lexists(folder / SOCKET) for folder in socket_folders())
    if not has_socket and mode == "auto":
        return
    from virnuc_core.engine.borrowed import Borrower
    from virnuc_core.engine.process import set_lender

    set_lender(Borrower(mode))
    prestarted.callback(set_lender, None)


def prestart_workers(settings: FlowSettings, prestarted: ExitStack) -> None:
    """Start the worker processes of a prediction that may have something to compute.

    They import torch and load the weights while the command checks its settings. If the output
    directory has results already, nothing is started: probably nothing is left to compute.

    Args:
        settings: The settings of the flow. Only predictions on this machine start workers.
        prestarted: Ends the workers when it is closed, if no run has taken them.

    Raises:
        DeviceError: A device that the settings name cannot be used.
        ConfigError: The settings of the engine cannot be used.
    """
    if not isinstance(settings, PredictSettings) or settings.cluster:
        return
    from virnuc_core.engine.devices import resolve, resolve_engine
    from virnuc_core.engine.process import WORKER, LocalWorkers, worker_specs

    devices = resolve(Devices.parse(settings.devices))
    engine = resolve_engine(settings.engine(), devices)
    if settings.force or not _has_results(settings.out):
        specs = worker_specs(settings.models, devices, engine)
        prestarted.enter_context(LocalWorkers(WORKER, specs))


def prestart_digest(settings: FlowSettings) -> None:
    """Begin to compute the digests of the weights in a thread, if this is a prediction.

    This takes seconds for weights that were never used before. The result is stored beside them,
    where the run finds it.
    """
    if not isinstance(settings, PredictSettings):
        return
    from virnuc_core.encoders.digests import fingerprint

    threading.Thread(target=fingerprint, args=(settings.models,), daemon=True).start()


def _has_results(out: Path) -> bool:
    """Tell if a directory holds the results of a run, or of samples.

    While a run is computed again, its previous summary is kept under another name
    (`former_summary`). It counts as well.
    """
    run = RunDir(out)
    result_files = (run.summary, run.former_summary, out / SAMPLES)
    # For a name that is too long, Path.exists raises an error and os.path.exists returns False.
    return any(map(os.path.exists, result_files))
