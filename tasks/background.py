"""A thread beside the work of a run."""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from virnuc.tasks.server_connection import REQUEST_TIMEOUT_S


@contextmanager
def background_thread(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Another thread does `work` for the current run while the body lasts; the event tells it of the body's end."""
    stop, here = threading.Event(), contextvars.copy_context()
    thread = threading.Thread(target=here.run, args=(work, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=REQUEST_TIMEOUT_S)
