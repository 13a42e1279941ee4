"""The log lines of the core during a flow or a step: where they are shown, and from which level."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from virnuc.tasks.server_use import with_server


@contextmanager
def core_logs() -> Iterator[None]:
    """Let the core log from INFO up while the `with` block runs.

    In a flow run of a Prefect server, the server gets the lines, too.
    """
    core_logger = logging.getLogger("virnuc_core")
    previous_level = core_logger.level
    core_logger.setLevel(min(core_logger.getEffectiveLevel(), logging.INFO))
    sending: AbstractContextManager[None] = nullcontext()
    if with_server():
        from virnuc.tasks.server_logs import logs_sent_to_server

        sending = logs_sent_to_server(core_logger)
    try:
        with sending:
            yield
    finally:
        core_logger.setLevel(previous_level)
