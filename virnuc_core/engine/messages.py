"""What a worker process is told and what it answers: JSON lines, each one of these models, written and read by them.

The first line to a worker is its `WorkerSpec`. The engine's is then told of one job and any number of shards, the
baseline's of files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter

from virnuc_core.config import BaselineName, EngineSpec, Spec
from virnuc_core.engine.devices import Device
from virnuc_core.errors import ConfigError, DeviceError, InputError, ShardError, VirnucError, WeightsError
from virnuc_core.telemetry.tables import ShardDone

OWN_ERRORS: Final = {e.__name__: e for e in (InputError, ConfigError, WeightsError, DeviceError, ShardError)}
SYSTEM_ERRORS: Final = ("OSError", "PermissionError", "FileNotFoundError", "NotADirectoryError")


class Message(Spec):
    """Base of all messages."""


# --- to a worker ------------------------------------------------------------------------------------------------------


class WorkerSpec(Message):
    """The first line a worker reads: where it computes, with which weights."""

    models: str
    device: Device

    @property
    def device_wait_s(self) -> float:
        """How long to wait for another run's device."""
        return 60.0

    @property
    def heartbeat_s(self) -> float:
        """How often the worker says that it lives."""
        return 2.0


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


class EngineWorkerSpec(WorkerSpec):
    """All the engine's worker needs to load, while the reads may still be staged."""

    of: Literal["engine"] = "engine"
    engine: EngineSpec
    divisor: int = 1  # of the token budgets, after the device was found too small for them
    trace: TraceSpec | None = None

    @property
    def device_wait_s(self) -> float:
        return self.engine.device_wait_s

    @property
    def heartbeat_s(self) -> float:
        return self.engine.heartbeat_s


class BaselineWorkerSpec(WorkerSpec):
    """What a baseline's worker needs to start."""

    of: Literal["baseline"] = "baseline"
    folder: str  # of the files it is given
    algorithm: BaselineName


class JobSpec(Message):
    """What the shards to come are about."""

    op: Literal["begin"] = "begin"
    run: str
    store: str
    reads: str  # fingerprint of the store the plan was made for
    logs: str  # folder of what workers write to standard error


class ShardTask(Message):
    """A shard to compute, or, looking for a row that ends workers, a part of one."""

    op: Literal["compute"] = "compute"
    shard: int
    lo: int  # first unique, and one past the last
    hi: int
    divisor: int = 1  # of the token budgets
    skip: tuple[int, ...] = ()  # uniques left out
    probe: bool = False  # compute and say so, commit nothing


Operation = Literal["dnabert_s", "esm2", "merge", "predict"]


class FileTask(Message):
    """A file for the baseline's worker."""

    op: Operation
    file: int


class Stop(Message):
    """No more shards will come."""

    op: Literal["stop"] = "stop"


Request = JobSpec | ShardTask | FileTask | Stop


# --- from a worker ----------------------------------------------------------------------------------------------------


class Alive(Message):
    """A heartbeat."""

    event: Literal["alive"] = "alive"
    progress_s: float  # `time.monotonic()` of the last progress


class Started(Message):
    """The baseline's worker takes files."""

    event: Literal["started"] = "started"


class Ready(Message):
    """The engine's worker has loaded and computes."""

    event: Literal["ready"] = "ready"
    pid: int
    load_s: float
    torch: str
    attention: dict[str, str]  # by encoder
    precision: dict[str, str]
    ready_s: float = 0.0  # from the start to here, without the wait
    waited_s: float = 0.0  # loaded, and without a job

    def record(self, device: str) -> dict[str, Any]:
        """As written to summary.json."""
        return {"device": device, **self.model_dump(exclude={"event"})}


class Committed(Message):
    """A shard is on disk."""

    event: Literal["committed"] = "committed"
    done: ShardDone


class Probed(Message):
    """A part of a shard was computed, and the worker lives."""

    event: Literal["probed"] = "probed"


class RowsDone(Message):
    """Rows the baseline's worker embedded since it last said so."""

    event: Literal["rows"] = "rows"
    rows: int


class FileDone(Message):
    """One operation on one file."""

    event: Literal["done"] = "done"
    file: int
    rows: int
    load_s: float  # getting the model ready
    compute_s: float  # the rest


class Measured(Message):
    """What the linear layers of each encoder sustain."""

    event: Literal["measured"] = "measured"
    tokens_per_s: dict[str, float]


class Failed(Message):
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


class Closed(Message):
    """The worker's output has ended. Said for it, after its last message."""

    event: Literal["closed"] = "closed"


Event = Alive | Started | Ready | Committed | Probed | RowsDone | FileDone | Measured | Failed | Closed

SPECS: Final[TypeAdapter[EngineWorkerSpec | BaselineWorkerSpec]] = TypeAdapter(
    Annotated[EngineWorkerSpec | BaselineWorkerSpec, Field(discriminator="of")]
)
REQUESTS: Final[TypeAdapter[Request]] = TypeAdapter(Annotated[Request, Field(discriminator="op")])
EVENTS: Final[TypeAdapter[Event]] = TypeAdapter(Annotated[Event, Field(discriminator="event")])
