"""Runs a flow in the process of its command, as a user at a terminal starts it.

What can be refused at once is refused before any work, and before the flow is loaded. Nothing heavy
is imported before it is needed, so that `virnuc predict --help` answers at once.
"""

import importlib
import inspect
import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from virnuc.flows.cli.prefect_settings import prepare_prefect
from virnuc.flows.cli.prestart import prestart_digest, prestart_workers
from virnuc.flows.cli.temporary_server import start_temporary_server
from virnuc.flows.preflight import preflight
from virnuc_core.config import INPUT_FIELDS
from virnuc_core.errors import VirnucError, printable
from virnuc_core.lease import command_start_s
from virnuc_core.proxies import warn_of_removed_proxies

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

log = logging.getLogger(__name__)
RUNS_ALONE: Final = "the run goes on without a Prefect server, and is not in the UI: %s"


def run_from_terminal(flow_path: str, settings: Any) -> "State[Any]":
    """Run a flow on its settings and return its final state.

    The temporary server, where one is needed, and the workers of a prediction start first. They
    load while the reads and weights are checked and while the flow itself is imported.

    Args:
        flow_path: The flow, as `module:function`.
        settings: The flow's settings, which are also those of the terminal (`OnTerminal`).

    Raises:
        VirnucError: The flow cannot run on these settings, failed or was cancelled.
    """
    prepare_prefect()
    has_named_server = _has_named_server(settings)
    wait_for_server = _prepare_server(settings, has_named_server)
    with ExitStack() as prestarted:
        # A server that the user named assigns devices to runs. So workers start only when the flow
        # has asked it.
        if not has_named_server:
            prestart_workers(settings, prestarted)
        devices = preflight(settings)
        if not has_named_server:
            prestart_digest(settings)
        nodes_or_devices = getattr(settings, "cluster", None) or devices
        module_name, _, function_name = flow_path.partition(":")
        out_name = printable(str(settings.out))
        _report_progress(
            settings,
            f"{function_name} into {out_name} on {nodes_or_devices}: reads and weights will do",
        )
        from virnuc.flows import flow_run

        flow = getattr(importlib.import_module(module_name), function_name)
        parameters = _flow_parameters(flow, settings)
        _report_progress(settings, "Prefect is loaded")
        # A server that the user named is to show the run, so the run needs it.
        may_run_alone = _can_run_alone(settings) and not has_named_server
        state = flow_run.run_flow(
            flow, parameters, settings, wait_for_server, may_run_alone=may_run_alone
        )
    _report_progress(settings, "done")
    return state


def _runs_without_prefect(settings: Any) -> bool:
    """Return whether the user wants no server. Only `virnuc predict` has the option."""
    return bool(getattr(settings, "no_prefect", False))


def _can_run_alone(settings: Any) -> bool:
    """Return whether the flow can run without a server. So can a prediction.

    The other flows have child flows, or steps that wait for a person, which need one.
    """
    return hasattr(settings, "no_prefect")


def _has_named_server(settings: Any) -> bool:
    """Return whether the flow is to use a server that the user named."""
    if _runs_without_prefect(settings):
        return False
    from prefect.settings import PREFECT_API_URL

    return PREFECT_API_URL.value() is not None


def _prepare_server(settings: Any, has_named_server: bool) -> Callable[[], object] | None:
    """Start a temporary server if the flow needs one.

    Returns:
        A function that waits for the flow's server, or None if the flow runs without one. A run
        that is complete needs none. A prediction goes on without one if it cannot be started.

    Raises:
        VirnucError: The flow needs a server, and none can be started.
        OSError: The same, if the system refuses something.
    """
    if _runs_without_prefect(settings):
        return None
    if has_named_server:
        warn_of_removed_proxies()
        return _need_not_wait
    if settings.is_done():
        return None
    try:
        server = start_temporary_server(debug=settings.debug)
    except (VirnucError, OSError) as error:
        if not _can_run_alone(settings):
            raise
        log.warning(RUNS_ALONE, error)
        return None

    def wait() -> None:
        """Wait for the temporary server, and report that it answers."""
        server.wait()
        _report_progress(settings, "its server answers")

    return wait


def _need_not_wait() -> None:
    """Do nothing. A server that the user named is assumed to be running."""


def _flow_parameters(flow: Callable[..., Any], settings: Any) -> dict[str, Any]:
    """Return the values of the flow's parameters, without the queries of addresses.

    Prefect keeps the parameters of a run, and a query may hold a signature.
    """
    from virnuc_core.reads.sources import redact_url

    parameters = {}
    for name in inspect.signature(flow).parameters:
        value = getattr(settings, name)
        if name in INPUT_FIELDS:
            value = tuple(redact_url(address) for address in value)
        parameters[name] = value
    return parameters


def _report_progress(settings: Any, event: str) -> None:
    """Write an event with the time to standard error, unless the user wants a quiet terminal."""
    if settings.quiet:
        return
    elapsed_s = time.monotonic() - command_start_s()
    clock = time.strftime("%X")
    sys.stderr.write(f"{clock}  {event}, {elapsed_s:.1f} s after the command\n")
