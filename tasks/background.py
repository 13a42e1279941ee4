"""A thread that works beside the body of a `with` statement."""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from virnuc.tasks.server_use import REQUEST_TIMEOUT_S


@contextmanager
def background_thread(target: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `target` in another thread while the `with` block runs.

    In Prefect's view, the thread belongs to the same flow or task run as the caller. After the
    block the thread is waited for as long as one request to a server may take, and then left to
    itself; it does not keep the process from ending.

    Args:
        target: The function to run. It receives an event that is set when the block has ended. The
            function must return then.
    """
    stop = threading.Event()
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(target, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=REQUEST_TIMEOUT_S)
