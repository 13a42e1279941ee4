"""The decorator below `@flow`: it turns a function of settings into a flow's function, and connects
it to its flow run at the server.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext, SyncClientContext

from virnuc.flows.cancellation import interrupted_when_cancelled
from virnuc.flows.flow_body import checked_settings, run_body
from virnuc.flows.hidden_secrets import without_secrets
from virnuc.flows.own_outcome import current_outcome
from virnuc.flows.parameters import with_flow_signature
from virnuc.flows.run_names import name_machine_by_pool
from virnuc.flows.settings.shared import FlowSettings
from virnuc.flows.strict_parameters import refuse_unknown_parameters
from virnuc.tasks.outcome import Outcome
from virnuc.tasks.prefect_states import to_state
from virnuc.tasks.server_connection import connection, route_through_connection
from virnuc_core.config import INPUT_FIELDS
from virnuc_core.errors import VirnucError
from virnuc_core.reads.sources import redact_url

Settings = TypeVar("Settings", bound=FlowSettings)
T = TypeVar("T")
LOGGERS_OF_ERRORS: Final = ("prefect.flow_runs", "prefect.engine")


def with_parameters(
    model: type[Settings],
) -> Callable[[Callable[[Settings], Outcome[T]]], Callable[..., State[T]]]:
    """Return a decorator for the function of a flow.

    The function takes one settings object and returns an outcome. The decorated function has the
    fields of the settings model as parameters, checks them, and returns a state of Prefect. While
    it runs, the cancel button of the UI works; see also `run_body`.

    Args:
        model: The settings model.
    """
    refuse_unknown_parameters()

    def decorate(function: Callable[[Settings], Outcome[T]]) -> Callable[..., State[T]]:
        """Return the decorated function."""

        def called(**values: Any) -> State[T]:
            """Check the settings, run the function, and return its outcome as a state.

            What the function returned or raised is also stored in `current_outcome`. If the run was
            started in a terminal, the command reads it there. So the command ends as the function
            did, even if the server gives the run another state.
            """
            _hide_own_tracebacks()
            own_outcome = current_outcome()
            own_outcome.has_begun = True  # from here on, an error is not one of Prefect's start
            try:
                with interrupted_when_cancelled():
                    outcome = run_body(function, lambda: _settings_of_run(model, values))
            except BaseException as error:
                own_outcome.error = error
                raise
            own_outcome.returned = _with_flow_run_id(outcome)
            return to_state(outcome)

        return with_flow_signature(without_secrets(called), function, model)

    return decorate


def _settings_of_run(model: type[Settings], values: dict[str, Any]) -> Settings:
    """Return the settings of the current flow run, and prepare it for the loss of its server.

    Raises:
        ConfigError: A value cannot be used, or a path is not allowed.
    """
    client_context = SyncClientContext.get()
    if client_context is not None:
        # From here on, requests of the run go through `connection`, which goes on without a server
        # that does not answer any more.
        route_through_connection(client_context.client)
    name_machine_by_pool()
    # A run that starts late belongs to the date for which it was planned. Settings may use that
    # date as the name of the output directory.
    planned_start = runtime.flow_run.scheduled_start_time or datetime.now(UTC)
    settings = checked_settings(model, values, planned_start.astimezone(UTC))
    return _without_queries(settings)


def _with_flow_run_id(outcome: Outcome[T]) -> Outcome[T]:
    """Return an outcome with the id of the current flow run, if there is one."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return outcome
    return replace(outcome, flow_run_id=context.flow_run.id)


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
    full URLs stay in this process's memory, where downloads find them.
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
