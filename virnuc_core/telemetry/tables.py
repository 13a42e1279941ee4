"""The measurements of a run: as records where they are taken, as columns where they are kept and added up.

A column bears the name of its record's field. A device is a code into the table's `devices`; a missing number is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Encoder = Literal["dnabert_s", "esm2"]
QueueState = Literal["full", "normal", "starved"]

ENCODERS: Final[tuple[Encoder, ...]] = ("dnabert_s", "esm2")
QUEUE_STATES: Final[tuple[QueueState, ...]] = ("full", "normal", "starved")
FULL_BELOW_MS: Final = 1.0
STARVED_ABOVE_MS: Final = 50.0
STAGES: Final = (
    "Sequence Chunking",
    "Six-Frame Translation",
    "Nucleotide Splitting",
    "Protein Splitting",
    "DNABERT-S",
    "ESM-2",
    "Feature Merging",
    "Model Prediction",
    "Consensus Scoring",
)


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One packed batch, as the launch loop saw it. Times are seconds of `time.monotonic()` of the host, which all
    processes of one machine share."""

    device: str  # device id within the run, e.g. "GPU-3f2c…" or "cpu-core-1"
    encoder: Encoder
    shard: int
    index: int  # of the batch within the shard and encoder
    rows: int
    tokens: int  # real ones
    slots: int  # launched
    wait_ms: float
    arrived_s: float  # when the loader handed it over
    launched_s: float
    device_ms: float | None  # by device events; on CPU the time of the call


@dataclass(frozen=True, slots=True)
class ShardDone:
    """One shard committed by a worker."""

    device: str
    shard: int
    rows: int
    protein_tokens: int
    dna_tokens: int
    started_s: float
    finished_s: float
    dnabert_s: float  # seconds of device time
    esm2_s: float
    head_s: float
    commit_s: float
    merge_s: float  # joining the two embeddings; 0 when both encoders write into one buffer
    batches: tuple[BatchRecord, ...]
    budget_divisor: int = 1  # above 1: the device could not hold the token budget, and this shard ran on a part of it
    skipped: int = 0  # rows set aside because they end every worker


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One reading of one device. `None` where the device does not tell."""

    time_s: float  # time.monotonic()
    device: str
    utilisation: float | None = None  # percent
    memory_used_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, slots=True)
class HostSample:
    """One reading of the host, on the clock of the device samples."""

    time_s: float
    cpu_percent: float | None  # of all cores this process may use: 100 is all busy
    rss_bytes: int | None  # of this process and its children
    disk_read_bytes: int | None  # since boot
    disk_write_bytes: int | None


INTEGERS: Final = (
    *("shard", "index", "rows", "tokens", "slots"),
    *("protein_tokens", "dna_tokens", "budget_divisor", "skipped"),
)


@dataclass(frozen=True, slots=True)
class Table:
    """Base of the tables: a column for each field of the record, read as an attribute of that name."""

    RECORD: ClassVar[type[Any]]
    ORDER: ClassVar[str]  # the column that the rows of `of` stand in the order of

    devices: tuple[str, ...]  # what the codes in the column `device` stand for
    data: Mapping[str, NDArray[Any]]

    @classmethod
    def names(cls) -> list[str]:
        """The columns."""
        return [field.name for field in fields(cls.RECORD) if field.name != "batches"]

    @classmethod
    def of(cls, records: Iterable[Any], devices: Sequence[str] = ()) -> Self:
        """Columns of the records of the table's kind, in order; `devices` fixes the first codes."""
        ordered = sorted(records, key=lambda record: float(getattr(record, cls.ORDER)))
        known = [record.device for record in ordered] if "device" in cls.names() else []
        places = {name: code for code, name in enumerate(dict.fromkeys([*devices, *known]))}
        data: dict[str, NDArray[Any]] = {}
        for name in cls.names():
            values = [getattr(record, name) for record in ordered]
            if name == "device":
                data[name] = np.array([places[device] for device in values], dtype=np.int16)
            elif name == "encoder":
                data[name] = np.array([ENCODERS.index(encoder) for encoder in values], dtype=np.int8)
            else:  # None becomes NaN
                data[name] = np.array(values, dtype=np.int64 if name in INTEGERS else np.float64)
        return cls(tuple(places), data)

    @classmethod
    def from_columns(cls, devices: Sequence[str], columns: Mapping[str, NDArray[Any]]) -> Self:
        """Build from columns by name; `ValueError` names a column that is missing or of another length."""
        missing = [name for name in cls.names() if name not in columns]
        if missing:
            raise ValueError(f"{cls.__name__}: no column {', '.join(missing)}")
        lengths = {name: len(columns[name]) for name in cls.names()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{cls.__name__}: columns of different lengths: {lengths}")
        return cls(tuple(devices), {name: np.asarray(columns[name]) for name in cls.names()})

    def __getattr__(self, name: str) -> NDArray[Any]:
        if name not in type(self).names():
            raise AttributeError(f"{type(self).__name__} has no column {name}")
        return self.data[name]

    def __len__(self) -> int:
        return len(self.data[self.ORDER])

    def where(self, mask: Mask) -> Self:
        """The rows of `mask`, in order."""
        return type(self)(self.devices, {name: column[mask] for name, column in self.data.items()})

    def of_device(self, device: str) -> Self:
        """The rows of one device."""
        return self.where(self.device == (self.devices.index(device) if device in self.devices else -1))

    def named(self, codes: NDArray[np.int16]) -> NDArray[Any]:
        """The devices' names for their codes."""
        return np.array([*self.devices, ""], dtype=object)[codes]


class BatchTable(Table):
    """Packed batches, in the order launched. `encoder` is a code into ENCODERS."""

    RECORD, ORDER = BatchRecord, "launched_s"

    def of_encoder(self, encoder: Encoder) -> BatchTable:
        """The batches of one encoder."""
        return self.where(self.encoder == ENCODERS.index(encoder))

    @property
    def finished_s(self) -> Floats:
        """When the device was done with each batch, as far as known: launch plus device time."""
        return np.asarray(self.launched_s + np.nan_to_num(self.device_ms) / 1000.0)

    @property
    def queue_state(self) -> NDArray[np.int8]:
        """How ready each batch was when the launch loop asked for it; codes into QUEUE_STATES."""
        normal_or_starved = np.where(self.wait_ms > STARVED_ABOVE_MS, 2, 1)
        return np.where(self.wait_ms < FULL_BELOW_MS, 0, normal_or_starved).astype(np.int8)

    @property
    def packing(self) -> Floats:
        """Tokens over slots of each batch; NaN for a batch of no slot."""
        slots = self.slots.astype(np.float64)
        packing: Floats = np.divide(self.tokens, slots, out=np.full(len(self), np.nan), where=slots > 0)
        return packing


class SampleTable(Table):
    """Readings of the devices, by time."""

    RECORD, ORDER = DeviceSample, "time_s"

    def between(self, start_s: float, end_s: float) -> SampleTable:
        """The samples taken from `start_s` to `end_s`, both included."""
        return self.where((self.time_s >= start_s) & (self.time_s <= end_s))


class HostTable(Table):
    """Readings of the host, by time."""

    RECORD, ORDER = HostSample, "time_s"


class ShardTable(Table):
    """Committed shards, in the order finished."""

    RECORD, ORDER = ShardDone, "finished_s"


@dataclass(frozen=True, slots=True)
class StageTime:
    """One stage: its seconds, or the stage it is fused with."""

    name: str
    seconds: float | None  # None: fused, its work is part of `fused_into`
    fused_into: str | None = None
    started_s: float | None = None  # time.monotonic(); None when only seconds are known
    finished_s: float | None = None


class StageClock:
    """Collects the seconds of the nine stages. A stage may run many times; its seconds add up."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._spans: dict[str, tuple[float, float]] = {}
        self._fused: dict[str, str] = {}

    def add(self, name: str, seconds: float, *, started_s: float | None = None) -> None:
        """Add seconds, e.g. device time; `ValueError` for an unknown stage or negative seconds."""
        _check(name)
        if seconds < 0:
            raise ValueError(f"stage '{name}': {seconds} s is negative")
        if name in self._fused:
            raise ValueError(f"stage '{name}' is fused into '{self._fused[name]}' and has no time of its own")
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        if started_s is not None:
            self.seen(name, started_s, started_s + seconds)

    def seen(self, name: str, started_s: float, finished_s: float) -> None:
        """Say when a stage ran, without adding seconds: those of a stage that takes turns with others are fewer than
        lie between its start and its end. `ValueError` for an unknown stage."""
        _check(name)
        first, last = self._spans.get(name, (started_s, finished_s))
        self._spans[name] = (min(first, started_s), max(last, finished_s))

    def fuse(self, name: str, into: str) -> None:
        """Say that stage `name` is done within `into`; `ValueError` when it has a time of its own."""
        _check(name)
        _check(into)
        if name in self._seconds:
            raise ValueError(f"stage '{name}' has a time of its own and cannot be fused")
        self._fused[name] = into

    def times(self) -> tuple[StageTime, ...]:
        """The stages measured or fused so far, in the order of the nine; what was not measured is not there."""
        found = []
        for name in STAGES:
            if name in self._fused:
                found.append(StageTime(name, None, self._fused[name]))
            elif name in self._seconds:
                started, finished = self._spans.get(name, (None, None))
                found.append(StageTime(name, self._seconds[name], None, started, finished))
        return tuple(found)

    def seconds(self) -> dict[str, float | None]:
        """Stage name to seconds, `None` when fused: the form of summary.json."""
        return {stage.name: stage.seconds for stage in self.times()}


def _check(name: str) -> None:
    if name not in STAGES:
        raise ValueError(f"'{name}' is not one of the nine stages: {', '.join(STAGES)}")
