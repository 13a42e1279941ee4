"""The decorator below `@flow`: it turns a function of settings into a flow's function, with all
that surrounds its work.
"""

import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext, SyncClientContext
from prefect.states import Failed

from virnuc.flows.cancellation import interrupted_when_cancelled
from virnuc.flows.exit_deadline import exit_deadline
from virnuc.flows.own_outcome import current_outcome
from virnuc.flows.parameters import build, with_flow_signature
from virnuc.flows.settings.shared import FlowSettings
from virnuc.flows.strict_parameters import refuse_unknown_parameters
from virnuc.tasks.server_connection import connection, route_through_connection
from virnuc.tasks.task import core_logs
from virnuc_core.allowed_paths import require_allowed_options
from virnuc_core.config import INPUT_FIELDS
from virnuc_core.engine.process import end_all_children
from virnuc_core.errors import VirnucError
from virnuc_core.reads.sources import redact_url
from virnuc_core.system_errors import limit_error

Settings = TypeVar("Settings", bound=FlowSettings)
T = TypeVar("T")
WORKERS_CHILD: Final = "PREFECT__FLOW_RUN_ID"  # set in the process that a worker starts for a run
LOGGERS_OF_ERRORS: Final = ("prefect.flow_runs", "prefect.engine")


def with_parameters(
    model: type[Settings],
) -> Callable[[Callable[[Settings], State[T]]], Callable[..., State[T]]]:
    """Return a decorator for the function of a flow.

    The function takes one settings object. The decorated function has the fields of the settings
    model as parameters, and checks them. While it runs, the process has an exit deadline, logs of
    the core are sent to the server, the output directory is locked, and the cancel button of the UI
    works. An error of ours becomes a failed state with the error's message.

    Args:
        model: The settings model.
    """
    refuse_unknown_parameters()

    def decorate(function: Callable[[Settings], State[T]]) -> Callable[..., State[T]]:
        """Return the decorated function."""

        def called(**values: Any) -> State[T]:
            """Check the settings, run the function, and return its state.

            An error of ours, or a limit of the system, becomes a failed state with one line for the
            user. Any other error is a fault of the program and is raised. Both are also stored in
            the outcome, so that a run from a terminal ends with them, whatever a server says.
            """
            _hide_own_tracebacks()
            outcome = current_outcome()
            outcome.has_begun = True
            try:
                settings = _checked_settings(model, values)
                state = _run(function, settings)
            except VirnucError as error:
                state = Failed(message=str(error), data=error)
            except BaseException as error:
                limit = limit_error(error)
                if limit is None:
                    outcome.error = error
                    raise
                state = Failed(message=str(limit), data=limit)
            outcome.keep(state)
            return state

        return with_flow_signature(called, function, model)

    return decorate


def _checked_settings(model: type[Settings], values: dict[str, Any]) -> Settings:
    """Return the settings of a run.

    Raises:
        ConfigError: A value cannot be used, or a path is not allowed.
    """
    settings = build(model, values)
    require_allowed_options(settings)
    client_context = SyncClientContext.get()
    if client_context is not None:
        route_through_connection(client_context.client)
    planned_start = runtime.flow_run.scheduled_start_time or datetime.now(UTC)
    return settings.for_start_time(planned_start.astimezone(UTC))


def _run(function: Callable[[Settings], State[T]], settings: Settings) -> State[T]:
    """Run the function of a flow, with exit deadline, logs, cancelling and locked output."""
    is_workers_child = WORKERS_CHILD in os.environ
    with (
        exit_deadline(final=is_workers_child),
        core_logs(),
        interrupted_when_cancelled(),
        settings.locked_output(),
    ):
        try:
            return function(_without_queries(settings))
        finally:
            # This is done in the main thread and not in a task, because signals are handled in the
            # main thread only.
            end_all_children()


def _hide_own_tracebacks() -> None:
    """Keep Prefect from logging tracebacks of our errors. The state already has their message."""
    for name in LOGGERS_OF_ERRORS:
        logging.getLogger(name).addFilter(_is_not_ours)  # the same filter is added only once


def _is_not_ours(record: logging.LogRecord) -> bool:
    """Return whether a log record may be logged: it has no traceback of an error of ours."""
    return record.exc_info is None or not isinstance(record.exc_info[1], VirnucError)


def _without_queries(settings: Settings) -> Settings:
    """Return the settings without the query strings of URLs, and remove them from the server's
    record.

    A query string may hold a signature. Whoever created the run at a server gave it in full; the
    full URLs stay in this process's memory.
    """
    names = {field: getattr(settings, field, ()) for field in INPUT_FIELDS}
    redacted_inputs = {}
    for field, urls in names.items():
        redacted_inputs[field] = tuple(redact_url(url) for url in urls)
    context = FlowRunContext.get()
    if redacted_inputs == names or context is None or context.flow_run is None:
        return settings
    flow_run = context.flow_run
    as_lists = {field: list(urls) for field, urls in redacted_inputs.items()}
    reporting = connection.reporting("addresses without their queries")
    with reporting, get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, parameters=flow_run.parameters | as_lists)
    return settings.model_copy(update=redacted_inputs)
