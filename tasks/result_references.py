"""Removes references to results from what a Prefect server answers."""

import logging
from typing import Any, Final

import httpx

# parts of the paths whose answers hold states of runs
STATE_ROUTES: Final = frozenset(
    ("flow_runs", "task_runs", "flow_run_states", "task_run_states", "create_flow_run")
)
logger = logging.getLogger(__name__)


def without_result_references(request: httpx.Request, response: httpx.Response) -> httpx.Response:
    """Return the response without the references to results in its states.

    A reference names a file and how to load it, with pickle for example, and Prefect follows it
    when a state is asked for its result. Results of our flows and tasks never leave this process,
    so what a server sends as one is not ours. It is removed before Prefect parses it, because
    already parsing imports modules that the reference names.

    Args:
        request: The request that was answered. Only the answers of routes with states are changed.
        response: The server's answer.
    """
    if STATE_ROUTES.isdisjoint(request.url.path.split("/")):
        return response
    response.read()
    try:
        body = response.json()
    except ValueError:  # it is no JSON, so Prefect makes no state of it
        return response
    if not _remove_references(body):
        return response
    logger.warning("the Prefect server sent a result with a state; it is ignored")
    return httpx.Response(
        response.status_code, json=body, request=request, extensions=response.extensions
    )


def _remove_references(value: Any) -> bool:
    """Remove the field `data` from every state in a parsed JSON value, which is changed.

    A state is an object with a `type`. Its `data` is the reference to a result.

    Args:
        value: An object, a list or a simple value; all in it is looked at, too.

    Returns:
        True if any state had data.
    """
    has_removed = False
    if isinstance(value, dict):
        if "type" in value and value.get("data") is not None:
            del value["data"]
            has_removed = True
        parts = list(value.values())
    elif isinstance(value, list):
        parts = value
    else:
        parts = []
    for part in parts:
        if _remove_references(part):
            has_removed = True
    return has_removed
