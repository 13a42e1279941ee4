"""Runs wait for each other's GPUs at the Prefect server, where each GPU has one slot.

What makes sharing impossible is the lock of the operating system that a worker process takes. The
slots only spare runs from failing at it.
"""

import contextvars
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Final

import httpx
from prefect.client.orchestration import get_client
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import (
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)

from virnuc.tasks.server_connection import REQUEST_TIMEOUT_S, connection, with_server
from virnuc_core.runfiles import Device

LEASE_S: Final = 60.0  # the slot of a process that was killed is free again after this
_held_slots: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "slots this flow run holds", default=frozenset()
)
logger = logging.getLogger(__name__)


@contextmanager
def device_slots(devices: Sequence[Device], *, wait_s: float | None = None) -> Iterator[None]:
    """Hold the slot of each GPU while the body lasts.

    Slots that this run holds already are not taken again. Without a server, or with a temporary one
    that nobody else sees, nothing is held; nor if the server is lost.

    Args:
        devices: The devices of the run.
        wait_s: How long to wait for the slots. None waits as long as it takes.

    Raises:
        TimeoutError: The slots were not free within `wait_s`.
    """
    # The id of a GPU is its UUID, which is unique over all machines.
    names = {f"virnuc-{device.id}".lower() for device in devices if device.kind == "cuda"}
    missing = sorted(names - _held_slots.get())
    if not missing or not with_server() or connection.embedded is not None:
        yield
        return
    text = ", ".join(missing)
    with ExitStack() as slots:
        try:
            _take_slots(slots, missing, wait_s)
        except ConcurrencySlotAcquisitionError as error:
            if not isinstance(error.__cause__, httpx.TransportError):
                raise
            connection.unreported.append(f"slots of {text}")
        token = _held_slots.set(_held_slots.get() | set(missing))
        try:
            yield
        finally:
            _held_slots.reset(token)
            with connection.reporting(f"that {text} are free"), short_timeouts(retries=0):
                slots.close()


def short_timeouts(retries: int) -> AbstractContextManager[object]:
    """Limit the time that Prefect clients created in the `with` block wait for an answer.

    Args:
        retries: How often such a client repeats a request.
    """
    return temporary_settings(
        {PREFECT_API_REQUEST_TIMEOUT: REQUEST_TIMEOUT_S, PREFECT_CLIENT_MAX_RETRIES: retries}
    )


def _take_slots(slots: ExitStack, names: list[str], wait_s: float | None) -> None:
    """Wait for the slots with these names. They are released when `slots` is closed.

    A slot is a concurrency limit of 1 on the Prefect server. It is created if it does not exist.
    """
    text = ", ".join(names)
    with connection.reporting(f"limits of {text}"), get_client(sync_client=True) as client:
        for name in names:
            with suppress(ObjectAlreadyExists):  # another run created it just now
                client.upsert_global_concurrency_limit_by_name(name, limit=1)
    if connection.lost:
        return
    logger.info("waiting for %s", text)
    with short_timeouts(retries=2):  # a server that restarts while we wait keeps our place
        acquired = concurrency(
            names,
            strict=True,  # without this, Prefect ignores a limit that does not exist
            timeout_seconds=wait_s,
            lease_duration=LEASE_S,
            raise_on_lease_renewal_failure=False,
        )
        slots.enter_context(acquired)
