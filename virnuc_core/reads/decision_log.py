"""The log of which files belong together. A check before a run makes no lines in it.

What a run reads is decided twice: first in a check that refuses unusable inputs early, and then for
the run itself. Only the second time is logged, so that each decision is one line.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_check: ContextVar[bool] = ContextVar("is_check", default=False)


def decision_logger(name: str) -> logging.Logger:
    """Return the logger of a module, which is silent within `unlogged_check`.

    Args:
        name: The name of the module.
    """
    logger = logging.getLogger(name)
    logger.addFilter(_is_logged)
    return logger


def _is_logged(_: logging.LogRecord) -> bool:
    """Return True if lines are logged now."""
    return not _is_check.get()


@contextmanager
def unlogged_check() -> Iterator[None]:
    """Log no decisions within a `with` statement. Errors are raised as usual."""
    token = _is_check.set(True)
    try:
        yield
    finally:
        _is_check.reset(token)
