"""What a flow holds while it works: its child processes, the devices it computes on, and the time it may take.

Two guards stand before a device. Prefect's concurrency slots make runs of one server queue, visibly. The lock of the
operating system, taken by the worker process itself (`virnuc_core.rundir`), is what makes sharing impossible.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Final

from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import PREFECT_API_URL

from virnuc_core.engine.devices import Device
from virnuc_core.engine.process import end_all_children
from virnuc_core.errors import VirnucError, WorkerError

LEASE_S: Final = 60.0  # a killed holder's slot is free again after this
logger = logging.getLogger(__name__)
_held: ContextVar[frozenset[str]] = ContextVar("slots this flow run holds", default=frozenset())


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
