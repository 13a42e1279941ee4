"""A time limit for a step: when it is reached, the step's processes are ended."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from virnuc.tasks.background import background_thread
from virnuc_core.engine.process import end_all_children
from virnuc_core.errors import VirnucError, WorkerError


class TimeLimitError(VirnucError):
    """A run that took longer than its profile allows."""


@contextmanager
def time_limit(
    subject: object, limit_s: float | None, on_reached: Callable[[float], object]
) -> Iterator[None]:
    """End all child processes if the `with` block takes longer than a limit.

    The block notices that its workers have ended and raises a `WorkerError`. In its place a
    `TimeLimitError` is raised, which is not tried again.

    Args:
        subject: Name of the run, for the message of the error.
        limit_s: The limit in seconds. None sets no limit.
        on_reached: Is called with the elapsed seconds before the error is raised.

    Raises:
        TimeLimitError: The limit was reached.
    """
    started_s = time.monotonic()
    is_reached = threading.Event()

    def end(stop: threading.Event) -> None:
        """Wait for the end of the block or the limit. At the limit, end all child processes."""
        if not stop.wait(limit_s):
            is_reached.set()
            end_all_children()

    try:
        with background_thread(end):
            yield
    except WorkerError as error:  # the block's workers were ended, here or by another cause
        if not is_reached.is_set():
            raise
        on_reached(time.monotonic() - started_s)
        raise TimeLimitError(f"{subject}: ended at the limit of {limit_s or 0:,.0f} s") from error
