"""Runs wait for each other's GPUs at the Prefect server, where each GPU has one slot.

What makes sharing impossible is the lock of the operating system that a worker process takes. The
slots only spare runs from failing at it.
"""

import contextvars
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from virnuc.tasks.server_use import with_server
from virnuc_core.runfiles import Device

_held_slots: Final[contextvars.ContextVar[frozenset[str]]] = contextvars.ContextVar(
    "slots this flow run holds", default=frozenset()
)


@contextmanager
def device_slots(devices: Sequence[Device], *, wait_s: float | None = None) -> Iterator[None]:
    """Hold the slot of each GPU while the `with` block runs.

    A slot is the right to use a GPU, of which the Prefect server gives one at a time. Slots that
    this run holds already are not taken again. Without a server nothing is held.

    Args:
        devices: The devices of the run. Cores have no slots.
        wait_s: How long to wait for the slots. None waits as long as it takes.

    Raises:
        TimeoutError: The slots were not free within `wait_s`.
    """
    # The id of a GPU is its UUID, which is unique over all machines.
    names = {f"virnuc-{device.id}".lower() for device in devices if device.kind == "cuda"}
    missing = sorted(names - _held_slots.get())
    if not missing or not with_server():
        yield
        return
    from virnuc.tasks.server_slots import slots_at_server

    with slots_at_server(missing, wait_s):
        token = _held_slots.set(_held_slots.get() | set(missing))
        try:
            yield
        finally:
            _held_slots.reset(token)
