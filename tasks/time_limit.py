"""A time limit on a step."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from virnuc.tasks.background import background_thread
from virnuc_core.engine.process import end_all_children
from virnuc_core.errors import (
    VirnucError,
    WorkerError,
)


class TimeLimitError(VirnucError):
    """A run that took longer than its profile allows."""


@contextmanager
def time_limit(
    what: object, limit_s: float | None, on_reached: Callable[[float], object]
) -> Iterator[None]:
    """End all child processes after `limit_s`. Errors: `TimeLimitError` then, once `on_reached` knows the seconds."""
    started_s, reached = time.monotonic(), threading.Event()

    def end(stop: threading.Event) -> None:
        if not stop.wait(limit_s):
            reached.set()
            end_all_children()

    try:
        with background_thread(end):
            yield
    except WorkerError as error:
        if not reached.is_set():
            raise
        on_reached(time.monotonic() - started_s)
        raise TimeLimitError(f"{what}: ended at the limit of {limit_s or 0:,.0f} s") from error
