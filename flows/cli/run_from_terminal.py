"""Runs a flow in the process of its command, as a user at a terminal starts it.

What can be refused at once is refused before any work, and before the flow is loaded. Nothing heavy
is imported before it is needed, so that `virnuc predict --help` answers at once. Prefect is
imported only if a server is to show the run.
"""

import importlib
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from virnuc.flows.cli.prefect_settings import prepare_prefect
from virnuc.flows.cli.prestart import prestart_digest, prestart_workers, use_server
from virnuc.flows.outcome import NotMetError
from virnuc.flows.parameters import PRIVATE_FIELDS
from virnuc.flows.running_alone import warn_of_running_alone
from virnuc.flows.settings.predict import PredictSettings
from virnuc.flows.settings.shared import FlowSettings
from virnuc.tasks.outcome import Outcome
from virnuc_core.command_time import note_command, waited_s
from virnuc_core.config import INPUT_FIELDS
from virnuc_core.errors import printable

if TYPE_CHECKING:
    from virnuc.flows.cli.server_choice import ChosenServer


def run_from_terminal(function_path: str, model: type[FlowSettings], settings: Any) -> Outcome[Any]:
    """Run a flow on its settings and return how it ended.

    The temporary server, where one is needed, and the workers of a prediction start first. They
    load while the reads and weights are checked and while the flow itself is imported.

    Args:
        function_path: The plain function with the steps of the flow, as `package.module:function`.
        model: The settings model of the flow.
        settings: Settings of this model, which are also those of the terminal (`OnTerminal`).

    Returns:
        The outcome. It is a failed one only if criteria were not met.

    Raises:
        VirnucError: The flow cannot run on these settings, failed or was cancelled.
    """
    _keep_in_memory(settings)
    note_command()
    prepare_prefect()
    server: ChosenServer | None = None
    if not getattr(settings, "no_prefect", False):
        from virnuc.flows.cli.server_choice import choose_server  # it brings servers along

        server = choose_server(settings)
    has_named_server = server is not None and server.temporary is None
    with ExitStack() as prestarted:
        use_server(settings, prestarted)
        # A server that the user named assigns devices to runs. So workers start only when the flow
        # has asked it.
        if not has_named_server:
            prestart_workers(settings, prestarted)
        from virnuc.flows.preflight import preflight  # while the workers load

        devices = preflight(settings)
        if not has_named_server:
            prestart_digest(settings)
        nodes_or_devices = getattr(settings, "cluster", None) or devices
        function_name = function_path.rpartition(":")[2]
        out_name = printable(str(settings.out))
        _report_progress(
            settings,
            f"{function_name} into {out_name} on {nodes_or_devices}: reads and weights will do",
        )
        values = _flow_values(model, settings)

        def run_alone() -> Outcome[Any]:
            """Run what the flow does without a server, and end the one that was to show it."""
            if server is not None:
                server.stop()
            return _run_alone(function_path, model, values)

        flow = None
        if server is not None:
            flow = _load_flow(function_path, server)
        from virnuc.flows.console import shown_log_lines

        # Loading the flow has made the handler by which Prefect writes to the terminal.
        with shown_log_lines(settings):
            if server is None or flow is None:
                outcome = run_alone()
            else:
                _report_progress(settings, "Prefect is loaded")
                from virnuc.flows.flow_run import load_run_modules, run_flow
                from virnuc.flows.shared_steps import load_page_modules

                load_run_modules()  # while the server starts
                if isinstance(settings, PredictSettings):
                    load_page_modules()
                fallback = None if server.is_needed else run_alone
                outcome = run_flow(flow, values, lambda: _wait_for(server, settings), fallback)
    _raise_failure(outcome)
    if server is not None:
        server.finish()
    return outcome


def _import(path: str) -> Any:
    """Return a function, given as `package.module:function`."""
    module_name, _, function_name = path.partition(":")
    return getattr(importlib.import_module(module_name), function_name)


def _keep_in_memory(settings: Any) -> None:
    """Remember the mail address for downloads in this process. The flow does not get it."""
    from virnuc_core.reads.contact import keep_contact_address

    keep_contact_address(settings.email)


def prefect_flow_path(function_path: str) -> str:
    """Return where the Prefect flow of a function is, as `package.prefect_flows.module:function`.

    Args:
        function_path: The plain function with the steps of the flow, as `package.module:function`.
    """
    package, _, name = function_path.rpartition(".")
    return f"{package}.prefect_flows.{name}"


def _load_flow(function_path: str, server: "ChosenServer") -> Any:
    """Return the Prefect flow of a function, or None if it cannot be loaded.

    Then a warning is logged that the run goes on without a Prefect server.

    Args:
        function_path: The plain function with the steps of the flow, as `package.module:function`.
        server: The server that is to show the run.

    Raises:
        Exception: The flow cannot be loaded, and the run needs the server.
    """
    try:
        return _import(prefect_flow_path(function_path))
    except Exception as error:  # a damaged package raises errors of any type
        if server.is_needed:
            raise
        warn_of_running_alone(error)
        return None


def _wait_for(server: "ChosenServer", settings: Any) -> None:
    """Return once the server answers, and report that.

    Raises:
        VirnucError: The temporary server does not start.
    """
    server.wait()
    if server.temporary is not None:
        _report_progress(settings, "its server answers")


def _run_alone(
    function_path: str, model: type[FlowSettings], values: dict[str, Any]
) -> Outcome[Any]:
    """Run the steps of a flow, without Prefect and without a server.

    Args:
        function_path: The plain function with the steps of the flow, as `package.module:function`.
        model: The settings model of the flow.
        values: The values of its fields by name.
    """
    from virnuc.flows.flow_body import run_body_alone

    return run_body_alone(_import(function_path), model, values)


def _raise_failure(outcome: Outcome[Any]) -> None:
    """Raise the error of a failed outcome, unless the run ended well and only missed its criteria.

    Raises:
        BaseException: The error.
    """
    if outcome.error is not None and not isinstance(outcome.error, NotMetError):
        raise outcome.error


def _flow_values(model: type[FlowSettings], settings: Any) -> dict[str, Any]:
    """Return the values of the flow's settings, without what a Prefect server must not keep.

    A server keeps the parameters of each run. So the part of a URL after `?`, which may hold a
    signature, is removed, and the user's mail address (`PRIVATE_FIELDS`) is left out. Downloads
    find both, the full URLs and the mail address, in the memory of this process.

    Args:
        model: The settings model of the flow. What only the terminal takes is left out.
        settings: The settings.
    """
    from virnuc_core.reads.sources import redact_url

    values = {}
    for name in model.model_fields:
        if name in PRIVATE_FIELDS:
            continue
        value = getattr(settings, name)
        if name in INPUT_FIELDS:
            value = tuple(redact_url(url) for url in value)
        values[name] = value
    return values


def _report_progress(settings: Any, event: str) -> None:
    """Write an event with the time to standard error, unless the user wants a quiet terminal."""
    if settings.quiet:
        return
    clock = time.strftime("%X")
    sys.stderr.write(f"{clock}  {event}, {waited_s():.1f} s after the command\n")
