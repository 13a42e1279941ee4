"""Final states that speak: what a task or flow run did, in the run list."""

from __future__ import annotations

from typing import Final, TypeVar

from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

T = TypeVar("T")
REUSED: Final = "Reused"
NOT_MET: Final = "Criteria not met"
REJECTED: Final = "Rejected"


def done(data: T, message: str, *, reused: bool = False) -> State[T]:
    """Completed, with a message; named `Reused` when no work had to be done."""
    return Completed(name=REUSED if reused else None, message=message, data=data)


def not_met(data: T, message: str, *, fails: bool, name: str = NOT_MET) -> State[T]:
    """Criteria that were not met, or a reviewer's no: a failed run, or a completed one whose name says so."""
    if fails:
        return Failed(name=name, message=message, data=data)
    return Completed(name=name, message=message, data=data)
