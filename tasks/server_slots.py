"""Takes the slots of GPUs at the Prefect server, and gives them back."""

import logging
from collections.abc import Iterator
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

from virnuc.tasks.server_connection import connection
from virnuc.tasks.server_use import REQUEST_TIMEOUT_S

LEASE_S: Final = 60.0  # the slot of a process that was killed is free again after this
logger = logging.getLogger(__name__)


@contextmanager
def slots_at_server(names: list[str], wait_s: float | None) -> Iterator[None]:
    """Hold slots at the Prefect server while the `with` block runs.

    With a temporary server, which no other run sees, nothing is held. If the server is lost, the
    run goes on without the slots, and the log says so at its end.

    Args:
        names: The names of the slots.
        wait_s: How long to wait for them. None waits as long as it takes.

    Raises:
        TimeoutError: The slots were not free within `wait_s`.
    """
    if connection.embedded is not None:
        yield
        return
    text = ", ".join(names)
    with ExitStack() as slots:
        try:
            _take_slots(slots, names, wait_s)
        except ConcurrencySlotAcquisitionError as error:
            # Prefect wraps the error of its HTTP client. A transport error means that the server
            # does not answer. Then the lock of the operating system alone guards the GPU.
            is_server_lost = isinstance(error.__cause__, httpx.TransportError)
            if not is_server_lost:
                raise
            connection.unreported.append(f"slots of {text}")
        try:
            yield
        finally:
            # If the server cannot be told, the end of the run lists "that … are free" among what
            # was not reported, and the slots become free after `LEASE_S`. So one request is enough.
            subject = f"that {text} are free"
            with connection.reporting(subject), _short_timeouts(retries=0):
                slots.close()


def _short_timeouts(retries: int) -> AbstractContextManager[object]:
    """Limit the time that Prefect clients created in the `with` block wait for an answer.

    Args:
        retries: How often such a client repeats a request.
    """
    return temporary_settings(
        {PREFECT_API_REQUEST_TIMEOUT: REQUEST_TIMEOUT_S, PREFECT_CLIENT_MAX_RETRIES: retries}
    )


def _take_slots(slots: ExitStack, names: list[str], wait_s: float | None) -> None:
    """Wait for the slots with these names. They are released when `slots` is closed.

    A slot is a concurrency limit of 1 on the Prefect server. It is created if it does not exist. If
    the server does not answer to that, no slot is taken.

    Raises:
        ConcurrencySlotAcquisitionError: The server does not answer while the slots are waited for.
        TimeoutError: The slots were not free within `wait_s`.
    """
    text = ", ".join(names)
    with connection.reporting(f"limits of {text}"), get_client(sync_client=True) as client:
        for name in names:
            with suppress(ObjectAlreadyExists):  # another run created it just now
                client.upsert_global_concurrency_limit_by_name(name, limit=1)
    if connection.lost:
        return
    logger.info("waiting for %s", text)
    with _short_timeouts(retries=2):  # a server that restarts while we wait keeps our place
        acquired = concurrency(
            names,
            strict=True,  # without this, Prefect ignores a limit that does not exist
            timeout_seconds=wait_s,
            lease_duration=LEASE_S,
            raise_on_lease_renewal_failure=False,
        )
        slots.enter_context(acquired)
