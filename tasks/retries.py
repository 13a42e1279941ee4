"""Which errors of a step are worth another attempt, and how many attempts there are."""

import contextvars
from typing import Final

from virnuc_core.errors import DeviceError, IncapableError, ShardError, WorkerError
from virnuc_core.system_errors import process_limit_error, storage_error

RETRYABLE_ERRORS: Final = (WorkerError, ShardError, DeviceError, OSError, MemoryError)
PERMANENT_ERRORS: Final = (FileNotFoundError, PermissionError, IsADirectoryError, IncapableError)
RETRIES: Final = 3
BACKOFF_S: Final = 10  # retries come after 10 s, 20 s and 40 s
_attempt: contextvars.ContextVar[int] = contextvars.ContextVar("attempt of a step", default=1)


def is_retryable(error: BaseException) -> bool:
    """Return whether the same call may succeed later.

    A worker that died or a busy disk may recover. A wrong setting, bad input, a full disk or a
    limit of this process does not.
    """
    if isinstance(error, PERMANENT_ERRORS):
        return False
    if storage_error(error) is not None or process_limit_error(error) is not None:
        return False
    return isinstance(error, RETRYABLE_ERRORS)


def begin_attempt(number: int) -> None:
    """Note which attempt of a step begins in this thread, counted from 1."""
    _attempt.set(number)


def first_attempt() -> bool:
    """Return whether the step that calls this runs for the first time, and is not a retry.

    A retry goes on from what the attempt before it committed, so it must not discard anything.
    """
    return _attempt.get() <= 1
