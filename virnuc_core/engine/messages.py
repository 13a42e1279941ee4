"""What a worker process is told and what it answers: JSON lines, each one of these models, written and read by them.

The first line to a worker is its `WorkerSpec`. The engine's workers are then told of one job and any number of shards,
the baseline's of files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter

from virnuc_core.config import BaselineName, EngineSpec, Spec
from virnuc_core.errors import ConfigError, DeviceError, InputError, ShardError, VirnucError, WeightsError
from virnuc_core.runfiles import Device
from virnuc_core.telemetry.tables import ShardDone

OWN_ERRORS: Final = {e.__name__: e for e in (InputError, ConfigError, WeightsError, DeviceError, ShardError)}
SYSTEM_ERRORS: Final = ("OSError", "PermissionError", "FileNotFoundError", "NotADirectoryError")


# --- to a worker ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """What a worker records with torch's profiler, once: whole shards, so that every encoder and the head are in it."""

    folder: str  # `<device>.json.gz` and `<device>.operations.json` are written there
    skip: int = 1  # shards left out first: they warm caches and allocators
    shards: int = 1
    operations: int = 50  # rows of the table of operations
    max_bytes: int = 200 << 20  # a larger trace is removed, its table stays
    shapes: bool = False
    memory: bool = False


class WorkerSpec(Spec):
    """The first line a worker reads: all it needs to load, while the reads may still be staged."""

    models: str
    device: Device
    engine: EngineSpec
    divisor: int = 1  # of the token budgets, after the device was found too small for them
    trace: TraceSpec | None = None


class JobSpec(Spec):
    """What the shards to come are about."""

    op: Literal["begin"] = "begin"
    run: str
    store: str
    reads: str  # fingerprint of the store the plan was made for
    logs: str  # folder of what workers write to standard error


class ShardTask(Spec):
    """A shard to compute, or, looking for a row that ends workers, a part of one."""

    op: Literal["compute"] = "compute"
    shard: int
    lo: int  # first unique, and one past the last
    hi: int
    divisor: int = 1  # of the token budgets
    skip: tuple[int, ...] = ()  # uniques left out
    probe: bool = False  # compute and say so, commit nothing


Operation = Literal["dnabert_s", "esm2", "merge", "predict"]


class FileTask(Spec):
    """A file for the baseline's worker."""

    op: Operation
    algorithm: BaselineName
    folder: str
    file: int  # its number in the folder


class Stop(Spec):
    """No more shards will come."""

    op: Literal["stop"] = "stop"


Request = JobSpec | ShardTask | FileTask | Stop


# --- from a worker ----------------------------------------------------------------------------------------------------


class Alive(Spec):
    """A heartbeat."""

    event: Literal["alive"] = "alive"
    progress_s: float  # `time.monotonic()` of the last progress


class Ready(Spec):
    """The worker takes tasks."""

    event: Literal["ready"] = "ready"
    record: dict[str, Any] = Field(default_factory=dict)  # what it says of itself in summary.json


class Computed(Spec):
    """A shard is on disk; or, where it was a probe, has been computed, and the worker lives."""

    event: Literal["computed"] = "computed"
    done: ShardDone | None  # None for a probe


class RowsDone(Spec):
    """Rows the baseline's worker embedded since it last said so."""

    event: Literal["rows"] = "rows"
    rows: int


class FileDone(Spec):
    """One operation on one file."""

    event: Literal["done"] = "done"
    file: int
    rows: int
    load_s: float  # getting the model ready
    compute_s: float  # the rest


class Measured(Spec):
    """What the linear layers of each encoder sustain."""

    event: Literal["measured"] = "measured"
    tokens_per_s: dict[str, float]


class Failed(Spec):
    """The worker's last message: what it ends of."""

    event: Literal["failed"] = "failed"
    kind: str  # name of the exception's class
    message: str
    traceback: str

    @property
    def out_of_memory(self) -> bool:
        return self.kind == "OutOfMemoryError"

    def own_error(self) -> VirnucError | None:
        """The error as one of ours, where it is one or the system's: what another try cannot mend."""
        if self.kind in OWN_ERRORS:
            return OWN_ERRORS[self.kind](self.message)
        return VirnucError(self.message) if self.kind in SYSTEM_ERRORS else None


class Closed(Spec):
    """The worker's output has ended. Said for it, after its last message."""

    event: Literal["closed"] = "closed"


Event = Alive | Ready | Computed | RowsDone | FileDone | Measured | Failed | Closed

REQUESTS: Final[TypeAdapter[Request]] = TypeAdapter(Annotated[Request, Field(discriminator="op")])
EVENTS: Final[TypeAdapter[Event]] = TypeAdapter(Annotated[Event, Field(discriminator="event")])
