"""Runs a flow in the process of its command, as a user at a terminal starts it.

What can be refused at once is refused before any work, and before the flow is loaded. Nothing heavy
is imported before it is needed, so that `virnuc predict --help` answers at once. Prefect is
imported only if a server is to show the run.
"""

import importlib
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from virnuc.flows.cli.prefect_settings import prepare_prefect
from virnuc.flows.cli.prestart import prestart_digest, prestart_workers
from virnuc.flows.cli.temporary_server import USE_NO_SERVER, start_temporary_server
from virnuc.flows.parameters import PRIVATE_FIELDS
from virnuc.flows.preflight import preflight
from virnuc.flows.settings.shared import FlowSettings
from virnuc.tasks.outcome import Outcome
from virnuc_core.confidential import redact
from virnuc_core.config import INPUT_FIELDS
from virnuc_core.errors import ConfigError, VirnucError, printable
from virnuc_core.lease import command_start_s
from virnuc_core.proxies import warn_of_removed_proxies

log = logging.getLogger(__name__)
RUNS_ALONE: Final = "the run goes on without a Prefect server, and is not in the UI: %s"
LEAVE_OUT_APPROVAL: Final = "leave out --approval, for which a server is needed"
MAX_REASON_LENGTH: Final = 300  # of an error of Prefect's, which may hold pages of explanations


def run_from_terminal(flow_path: str, model: type[FlowSettings], settings: Any) -> Outcome[Any]:
    """Run a flow on its settings and return how it ended.

    The temporary server, where one is needed, and the workers of a prediction start first. They
    load while the reads and weights are checked and while the flow itself is imported.

    Args:
        flow_path: The flow, as `package.module:function`.
        model: The settings model of the flow.
        settings: Settings of this model, which are also those of the terminal (`OnTerminal`).

    Returns:
        The outcome. It is a failed one only if criteria were not met.

    Raises:
        VirnucError: The flow cannot run on these settings, failed or was cancelled.
    """
    _keep_in_memory(settings)
    prepare_prefect()
    has_named_server, wait_for_server = _prepare_server(settings)
    with ExitStack() as prestarted:
        # A server that the user named assigns devices to runs. So workers start only when the flow
        # has asked it.
        if not has_named_server:
            prestart_workers(settings, prestarted)
        devices = preflight(settings)
        if not has_named_server:
            prestart_digest(settings)
        nodes_or_devices = getattr(settings, "cluster", None) or devices
        function_name = flow_path.rpartition(":")[2]
        out_name = printable(str(settings.out))
        _report_progress(
            settings,
            f"{function_name} into {out_name} on {nodes_or_devices}: reads and weights will do",
        )
        values = _flow_values(model, settings)

        def run_alone() -> Outcome[Any]:
            """Run the flow without a server."""
            return _run_alone(flow_path, model, values)

        from virnuc.flows.console import shown_log_lines

        if wait_for_server is None:
            with shown_log_lines(settings):
                outcome = run_alone()
        else:
            from virnuc.flows.flow_run import run_flow

            flow = _import(flow_path)
            _report_progress(settings, "Prefect is loaded")
            # A server that the user named is to show the run, so the run needs it.
            needs_server = has_named_server or _needs_server(settings)
            fallback = None if needs_server else run_alone
            with shown_log_lines(settings):
                outcome = run_flow(flow, values, wait_for_server, fallback)
    _raise_failure(outcome)
    _report_progress(settings, "done")
    return outcome


def _import(path: str) -> Any:
    """Return a function, given as `package.module:function`."""
    module_name, _, function_name = path.partition(":")
    return getattr(importlib.import_module(module_name), function_name)


def _keep_in_memory(settings: Any) -> None:
    """Remember the mail address for downloads in this process. The flow does not get it."""
    from virnuc_core.reads.contact import keep_contact_address

    keep_contact_address(settings.email)


def _run_alone(flow_path: str, model: type[FlowSettings], values: dict[str, Any]) -> Outcome[Any]:
    """Run what a flow does, without Prefect and without a server.

    Args:
        flow_path: The flow, as `package.module:function`. What it does is the function of the same
            name in `package.bodies.module`.
        model: The settings model of the flow.
        values: The values of its fields by name.
    """
    from virnuc.flows.flow_body import run_body_alone

    package, _, name = flow_path.rpartition(".")
    return run_body_alone(_import(f"{package}.bodies.{name}"), model, values)


def _raise_failure(outcome: Outcome[Any]) -> None:
    """Raise the error of a failed outcome, unless the run ended well and only missed its criteria.

    Raises:
        BaseException: The error.
    """
    from virnuc.flows.outcome import NotMetError

    if outcome.error is not None and not isinstance(outcome.error, NotMetError):
        raise outcome.error


def _needs_server(settings: Any) -> bool:
    """Return whether the flow cannot run without a server: a reviewer answers at the server."""
    return bool(getattr(settings, "approval", False))


def _way_out(settings: Any) -> str:
    """Return what the user can do if no server can be had, for error messages."""
    return LEAVE_OUT_APPROVAL if _needs_server(settings) else USE_NO_SERVER


def _prepare_server(settings: Any) -> tuple[bool, Callable[[], object] | None]:
    """Find the server that is to show the run. Start a temporary one, if one is needed.

    A warning is logged if no server can be had and the flow can run without one.

    Returns:
        Whether the user named the server; and a function that waits for the server, or None if the
        flow runs without one. The user may want none, and a run that is complete needs none.

    Raises:
        VirnucError: The flow needs a server, and none can be had.
        OSError: The same, if the system refuses something.
    """
    if getattr(settings, "no_prefect", False):
        return False, None
    try:
        if _has_named_server(_way_out(settings)):
            warn_of_removed_proxies()
            return True, _need_not_wait
        if settings.is_done():
            return False, None
        return False, _start_server(settings)
    except (VirnucError, OSError) as error:
        if _needs_server(settings) or os.environ.get("PREFECT_API_URL"):
            raise
        log.warning(RUNS_ALONE, error)
        return False, None


def _has_named_server(way_out: str) -> bool:
    """Return whether the user named a server, in the environment or in a profile of Prefect.

    Args:
        way_out: What a user can do without a server, for error messages.

    Raises:
        ConfigError: Prefect cannot be loaded. A package is damaged, or its settings are.
    """
    try:
        from prefect.settings import PREFECT_API_URL

        url = PREFECT_API_URL.value()
    except Exception as error:  # what a damaged `profiles.toml` raises is not one type of error
        # Half a password, after the text was cut, would not be recognised.
        reason = " ".join(redact(f"{type(error).__name__}: {error}").split())
        if len(reason) > MAX_REASON_LENGTH:
            reason = f"{reason[:MAX_REASON_LENGTH]} …"
        raise ConfigError(
            f"Prefect cannot be loaded ({reason}); mend its profiles.toml, the PREFECT_… "
            f"variables, HOME or the installation, or {way_out}"
        ) from error
    return url is not None


def _start_server(settings: Any) -> Callable[[], object]:
    """Start a temporary server, and return a function that waits until it answers.

    Raises:
        VirnucError: It cannot be started.
        OSError: The same, if the system refuses something.
    """
    server = start_temporary_server(debug=settings.debug, alternative=_way_out(settings))

    def wait() -> None:
        """Wait for the temporary server, and report that it answers."""
        server.wait()
        _report_progress(settings, "its server answers")

    return wait


def _need_not_wait() -> None:
    """Do nothing. A server that the user named is assumed to be running."""


def _flow_values(model: type[FlowSettings], settings: Any) -> dict[str, Any]:
    """Return the values of the flow's settings, without the queries of addresses.

    Prefect keeps the parameters of a run, and a query may hold a signature. Downloads find the full
    addresses in the memory of this process. The mail address is there, too, and flows have no
    parameter for it.

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
            value = tuple(redact_url(address) for address in value)
        values[name] = value
    return values


def _report_progress(settings: Any, event: str) -> None:
    """Write an event with the time to standard error, unless the user wants a quiet terminal."""
    if settings.quiet:
        return
    elapsed_s = time.monotonic() - command_start_s()
    clock = time.strftime("%X")
    sys.stderr.write(f"{clock}  {event}, {elapsed_s:.1f} s after the command\n")
