"""Whether steps and flows report to a Prefect server, or run as plain functions.

A run without a server must work where Prefect cannot be imported, and must not spend seconds on the
import. So modules that such a run uses import Prefect only inside of functions, and only after
`with_server` has returned true.
"""

import contextvars
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")
REQUEST_TIMEOUT_S: Final = 15.0  # for one request; a busy server has needed some seconds
_runs_alone: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "runs without Prefect", default=False
)


def with_server() -> bool:
    """Return whether there is a Prefect server to report to."""
    return not _runs_alone.get()


def without_server(function: Callable[..., T], **arguments: Any) -> T:
    """Call a function in which steps are plain functions: no server is asked or told anything.

    Args:
        function: The function to call.
        arguments: Its keyword arguments.

    Returns:
        What the function returns. After it, this thread reports to a server as before.
    """
    context = contextvars.copy_context()
    context.run(_runs_alone.set, True)
    return context.run(function, **arguments)
