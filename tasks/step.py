"""What every task of ours is: tried again where that can help, heard in its run's log, and brief about wrong input.

And what a flow holds while it works: its child processes, the devices it computes on, and the time it may take. Two
guards stand before a device. Prefect's concurrency slots make runs of one server queue, visibly. The lock of the
operating system, taken by the worker process itself (`virnuc_core.rundir`), is what makes sharing impossible.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from prefect import Task, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, TaskRun
from prefect.concurrency.sync import concurrency
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import ObjectAlreadyExists
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed, Failed
from prefect.tasks import exponential_backoff

from virnuc_core.engine.process import end_all_children
from virnuc_core.errors import (
    ConfigError,
    DeviceError,
    InputError,
    ShardError,
    VirnucError,
    WeightsError,
    WorkerError,
)
from virnuc_core.runfiles import Device

P = ParamSpec("P")
T = TypeVar("T")
CORE: Final = "virnuc_core"
REUSED: Final = "Reused"
NOT_MET: Final = "Criteria not met"
REJECTED: Final = "Rejected"
HOPELESS: Final = (InputError, ConfigError, WeightsError, FileNotFoundError, PermissionError, IsADirectoryError)
WORTH_A_RETRY: Final = (WorkerError, ShardError, DeviceError, OSError, MemoryError)
LEASE_S: Final = 60.0  # a killed holder's slot is free again after this
_held: ContextVar[frozenset[str]] = ContextVar("slots this flow run holds", default=frozenset())
logger = logging.getLogger(__name__)


class NotMetError(VirnucError):
    """A run that ended well, but not as was asked: a criterion was missed, or a reviewer said no."""

    exit_code = 5


def step(name: str, run_name: str) -> Callable[[Callable[P, State[T]]], Task[P, State[T]]]:
    """A decorator that makes a function a task. An error of ours that no retry can help becomes its failed state.

    Such a state holds the error and says it in a sentence; `.result()` of what the task returns raises it.
    """

    def decorate(function: Callable[P, State[T]]) -> Task[P, State[T]]:
        @wraps(function)
        def body(*args: P.args, **kwargs: P.kwargs) -> State[T]:
            try:
                with core_logs():
                    return function(*args, **kwargs)
            except VirnucError as error:
                if can_help(error):
                    raise
                return Failed(message=str(error), data=error)

        # 10 s, 20 s, 40 s; each stretched by up to a fifth, so that tasks felled together do not come back together
        made: Task[P, State[T]] = task(
            name=name,
            task_run_name=run_name,
            cache_policy=NO_CACHE,
            retries=3,
            retry_delay_seconds=exponential_backoff(backoff_factor=10),
            retry_jitter_factor=0.2,
            retry_condition_fn=_retry_condition,
        )(body)
        return made

    return decorate


def can_help(error: BaseException) -> bool:
    """Whether the same call may succeed later: a dead worker or a busy disk may, a wrong setting or bad input never."""
    return isinstance(error, WORTH_A_RETRY) and not isinstance(error, HOPELESS)


def _retry_condition(_task: Any, _task_run: TaskRun, state: State[Any]) -> bool:
    """Prefect's question after a failed attempt."""
    try:
        state.result()
    except Exception as error:  # noqa: BLE001 - whatever the task raised is what has to be judged
        return can_help(error)
    return False


def first_attempt() -> bool:
    """Whether this is not a retry; a retry must go on from what the attempt before it committed."""
    return (runtime.task_run.run_count or 1) <= 1


def done(data: T, message: str, *, reused: bool = False) -> State[T]:
    """Completed, with a message; named `Reused` when no work had to be done."""
    return Completed(name=REUSED if reused else None, message=message, data=data)


def not_met(data: T, message: str, *, fails: bool, name: str = NOT_MET) -> State[T]:
    """Criteria that were not met, or a reviewer's no: a failed run, or a completed one whose name says so."""
    if fails:
        return Failed(name=name, message=message, data=NotMetError(message))
    return Completed(name=name, message=message, data=data)


class _RunOf(logging.Filter):
    """Writes the run's ids on each record, since threads of the core know of no run."""

    def __init__(self, flow_run_id: str, task_run_id: str | None) -> None:
        super().__init__()
        self.flow_run_id, self.task_run_id = flow_run_id, task_run_id

    def filter(self, record: logging.LogRecord) -> bool:
        record.flow_run_id = self.flow_run_id
        if self.task_run_id is not None:
            record.task_run_id = self.task_run_id
        return True


def _current_run() -> _RunOf | None:
    task_context = TaskRunContext.get()
    if task_context is not None and task_context.task_run.flow_run_id is not None:
        return _RunOf(str(task_context.task_run.flow_run_id), str(task_context.task_run.id))
    flow = FlowRunContext.get()
    if flow is not None and flow.flow_run is not None:
        return _RunOf(str(flow.flow_run.id), None)
    return None


@contextmanager
def core_logs() -> Iterator[None]:
    """Send the core's records from INFO up to the current run while the body runs; outside a run do nothing."""
    run = _current_run()
    if run is None:
        yield
        return
    logger = logging.getLogger(CORE)
    handler = next((h for h in logger.handlers if isinstance(h, APILogHandler)), None)
    own = handler is None
    if handler is None:
        handler = APILogHandler()
        logger.addHandler(handler)
    level = logger.level
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
    handler.addFilter(run)
    try:
        yield
    finally:
        handler.removeFilter(run)
        logger.setLevel(level)
        if own:
            logger.removeHandler(handler)


# --- what a flow holds while it works ---------------------------------------------------------------------------------


@contextmanager
def no_orphans() -> Iterator[None]:
    """End every child process of this process when the body ends, however it ends.

    It belongs around a flow's body: signals reach the main thread only, so that a guard inside a task which runs in
    another thread would never be asked.
    """
    try:
        yield
    finally:
        end_all_children()


def slot_name(device: Device) -> str:
    """The concurrency limit of a device; a GPU's UUID names it on every machine."""
    return f"virnuc-{device.id}".lower()


@contextmanager
def device_slots(devices: Sequence[Device], *, wait_s: float | None = None) -> Iterator[None]:
    """Hold one slot of the server for each GPU of `devices`, waiting until all are free.

    CPU cores are shared by the machine's scheduler and want no slot. Without a server (the temporary one of an ad hoc
    run is seen by nobody else) the worker's own lock does the work. Slots that the flow holds around this are held
    once. Errors: `TimeoutError` after `wait_s` seconds.
    """
    names = sorted({slot_name(device) for device in devices if device.kind == "cuda"} - _held.get())
    if not names or PREFECT_API_URL.value() is None:
        yield
        return
    with get_client(sync_client=True) as client:
        for name in names:
            with suppress(ObjectAlreadyExists):  # another run made it just now
                client.upsert_global_concurrency_limit_by_name(name, limit=1)
    logger.info("waiting for %s", ", ".join(names))
    # strict: a limit that is missing is an error, never a free pass
    # a server that is away for a while must not end a run: the lock of the operating system still guards the device
    with concurrency(
        names,
        occupy=1,
        strict=True,
        timeout_seconds=wait_s,
        lease_duration=LEASE_S,
        raise_on_lease_renewal_failure=False,
    ):
        before = _held.set(_held.get() | set(names))
        try:
            yield
        finally:
            _held.reset(before)


class TimeLimitError(VirnucError):
    """A run that took longer than its profile allows."""


@contextmanager
def time_limit(what: object, limit_s: float | None, on_reached: Callable[[float], object]) -> Iterator[None]:
    """End all child processes when the body takes longer than `limit_s`, which makes its work fail.

    Errors: `TimeLimitError` then, after `on_reached` was told the seconds that had passed.
    """
    started_s, reached = time.monotonic(), threading.Event()

    def end() -> None:
        reached.set()
        end_all_children()

    timer = None if limit_s is None else threading.Timer(limit_s, end)
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield
    except WorkerError as error:
        if not reached.is_set():
            raise
        on_reached(time.monotonic() - started_s)
        raise TimeLimitError(f"{what}: ended at the limit of {limit_s or 0:,.0f} s") from error
    finally:
        if timer is not None:
            timer.cancel()
            timer.join()
