"""Which failures a retry can help, and how long to wait before it."""

from __future__ import annotations

from typing import Any, Final

from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import exponential_backoff

from virnuc_core.errors import ConfigError, DeviceError, InputError, ShardError, WeightsError, WorkerError

HOPELESS: Final = (InputError, ConfigError, WeightsError, FileNotFoundError, PermissionError, IsADirectoryError)
WORTH_A_RETRY: Final = (WorkerError, ShardError, DeviceError, OSError, MemoryError)

# 10 s, 20 s, 40 s; each stretched by up to a fifth, so that tasks felled together do not come back together
POLICY: Final[dict[str, Any]] = {
    "retries": 3,
    "retry_delay_seconds": exponential_backoff(backoff_factor=10),
    "retry_jitter_factor": 0.2,
}


def can_help(error: BaseException) -> bool:
    """Whether the same call may succeed later: a dead worker or a busy disk may, a wrong setting or bad input never."""
    return isinstance(error, WORTH_A_RETRY) and not isinstance(error, HOPELESS)


def retry_condition(_task: Any, _task_run: TaskRun, state: State[Any]) -> bool:
    """Prefect's question after a failed attempt."""
    try:
        state.result()
    except Exception as error:  # noqa: BLE001 - whatever the task raised is what has to be judged
        return can_help(error)
    return False


POLICY["retry_condition_fn"] = retry_condition
