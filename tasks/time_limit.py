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
    """End all child processes when the body takes too long.

    Args:
        subject: What is limited, for the message of the error.
        limit_s: The limit. None sets no limit.
        on_reached: Takes the seconds that the body took, before the error is raised.

    Raises:
        TimeLimitError: The limit was reached.
    """
    started_s = time.monotonic()
    is_reached = threading.Event()

    def end(stop: threading.Event) -> None:
        if not stop.wait(limit_s):
            is_reached.set()
            end_all_children()

    try:
        with background_thread(end):
            yield
    except WorkerError as error:  # the body's workers were ended
        if not is_reached.is_set():
            raise
        on_reached(time.monotonic() - started_s)
        raise TimeLimitError(f"{subject}: ended at the limit of {limit_s or 0:,.0f} s") from error
