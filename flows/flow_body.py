"""Runs the steps of a flow, with all that surrounds the work of every flow, and without Prefect.

The *body* of a flow is the plain function with its steps, such as `predict` in `flows/predict.py`.

Within a flow run `flow_decorator` calls it; where there is no server, the command does.
"""

import os
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from virnuc.flows.exit_deadline import exit_deadline
from virnuc.flows.parameters import build
from virnuc.flows.settings.shared import FlowSettings
from virnuc.tasks.core_logs import core_logs
from virnuc.tasks.outcome import Outcome, failed
from virnuc.tasks.server_use import without_server
from virnuc_core.allowed_paths import require_allowed_options
from virnuc_core.engine.process import end_all_children
from virnuc_core.errors import VirnucError
from virnuc_core.system_errors import limit_error

Settings = TypeVar("Settings", bound=FlowSettings)
T = TypeVar("T")
WORKERS_CHILD: Final = "PREFECT__FLOW_RUN_ID"  # set in the process that a worker starts for a run


def run_body(
    body: Callable[[Settings], Outcome[T]], make_settings: Callable[[], Settings]
) -> Outcome[T]:
    """Make the settings of a flow, run its body with them, and return how it ended.

    While the body runs, the process has an exit deadline, the core's log lines are shown, and the
    output directory is locked. All child processes are ended after it.

    Args:
        body: The plain function with the steps of the flow.
        make_settings: Returns checked settings, or raises an error of ours.

    Returns:
        The outcome of the body. An error of ours, or a limit of the system, becomes a failed
        outcome with one line for the user.

    Raises:
        BaseException: Any other error. It is a fault of the program, or an interrupt.
    """
    try:
        return _run(body, make_settings())
    except VirnucError as error:
        return failed(error)
    except BaseException as error:
        limit = limit_error(error)
        if limit is None:
            raise
        return failed(limit)


def run_body_alone(
    body: Callable[[Settings], Outcome[T]], model: type[Settings], values: dict[str, Any]
) -> Outcome[T]:
    """Run the body of a flow now, without Prefect and without a server; see `run_body`.

    Args:
        body: The plain function with the steps of the flow.
        model: The settings model of the flow.
        values: The values of its fields by name.
    """

    def make_settings() -> Settings:
        """Return the settings for a run that was planned for this moment."""
        return checked_settings(model, values, datetime.now(UTC))

    return without_server(run_body, body=body, make_settings=make_settings)


def checked_settings(
    model: type[Settings], values: dict[str, Any], planned_start: datetime
) -> Settings:
    """Return the settings of a run.

    Args:
        model: The settings model of the flow.
        values: The values of its fields by name.
        planned_start: When the run was to start; settings may contain its date.

    Raises:
        ConfigError: A value cannot be used, or a path is not allowed.
    """
    settings = build(model, values)
    require_allowed_options(settings)
    return settings.for_start_time(planned_start)


def _run(body: Callable[[Settings], Outcome[T]], settings: Settings) -> Outcome[T]:
    """Run the body of a flow, with exit deadline, log lines and locked output."""
    is_workers_child = WORKERS_CHILD in os.environ  # then the process ends with the run
    with exit_deadline(final=is_workers_child), core_logs(), settings.locked_output():
        try:
            return body(settings)
        finally:
            # This is done in the main thread and not in a task, because signals are handled in the
            # main thread only.
            end_all_children()
