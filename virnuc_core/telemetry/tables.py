"""Measurements as columns: what a run of millions of reads keeps in memory and writes to HDF5.

Each table is a frozen record of equally long arrays. A device is a code into `devices`; a missing number is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from virnuc_core.telemetry.records import FULL_BELOW_MS, STARVED_ABOVE_MS, BatchRecord, DeviceSample, ShardDone

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

ENCODERS: Final = ("dnabert_s", "esm2")
QUEUE_STATES: Final = ("full", "normal", "starved")


@dataclass(frozen=True, slots=True)
class HostSample:
    """One reading of the host, on the clock of the device samples."""

    time_s: float
    cpu_percent: float | None  # of all cores this process may use: 100 is all busy
    rss_bytes: int | None  # of this process and its children
    disk_read_bytes: int | None  # since boot
    disk_write_bytes: int | None


@dataclass(frozen=True, slots=True)
class Table:
    """Base of the tables: `devices` names the codes, every other field is a column."""

    devices: tuple[str, ...]

    def columns(self) -> dict[str, NDArray[Any]]:
        """Every column by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "devices"}

    def __len__(self) -> int:
        return len(next(iter(self.columns().values())))

    def where(self, mask: Mask) -> Self:
        """The rows of `mask`, in order."""
        return self.from_columns(self.devices, {name: column[mask] for name, column in self.columns().items()})

    def of_device(self, device: str) -> Self:
        """The rows of one device."""
        code = self.devices.index(device) if device in self.devices else -1
        return self.where(self.columns()["device"] == code)

    @classmethod
    def from_columns(cls, devices: Sequence[str], columns: Mapping[str, NDArray[Any]]) -> Self:
        """Build from columns by name; `ValueError` names a column that is missing or of another length."""
        wanted = [field.name for field in fields(cls) if field.name != "devices"]
        missing = [name for name in wanted if name not in columns]
        if missing:
            raise ValueError(f"{cls.__name__}: no column {', '.join(missing)}")
        lengths = {name: len(columns[name]) for name in wanted}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{cls.__name__}: columns of different lengths: {lengths}")
        return cls(tuple(devices), **{name: np.asarray(columns[name]) for name in wanted})


@dataclass(frozen=True, slots=True)
class BatchTable(Table):
    """Packed batches; times are seconds of the host's monotonic clock."""

    device: NDArray[np.int16]
    encoder: NDArray[np.int8]  # code into ENCODERS
    shard: Ints
    index: Ints
    rows: Ints
    tokens: Ints
    slots: Ints
    wait_ms: Floats
    arrived_s: Floats
    launched_s: Floats
    device_ms: Floats

    @classmethod
    def of(cls, records: Iterable[BatchRecord], devices: Sequence[str] = ()) -> BatchTable:
        """Columns of the records, in the order launched; `devices` fixes the first codes."""
        ordered = sorted(records, key=lambda r: r.launched_s)
        names, codes = _codes(devices, [r.device for r in ordered])
        return cls(
            names,
            codes,
            np.array([ENCODERS.index(r.encoder) for r in ordered], dtype=np.int8),
            np.array([r.shard for r in ordered], dtype=np.int64),
            np.array([r.index for r in ordered], dtype=np.int64),
            np.array([r.rows for r in ordered], dtype=np.int64),
            np.array([r.tokens for r in ordered], dtype=np.int64),
            np.array([r.slots for r in ordered], dtype=np.int64),
            np.array([r.wait_ms for r in ordered], dtype=np.float64),
            np.array([r.arrived_s for r in ordered], dtype=np.float64),
            np.array([r.launched_s for r in ordered], dtype=np.float64),
            _floats([r.device_ms for r in ordered]),
        )

    def of_encoder(self, encoder: str) -> BatchTable:
        """The batches of one encoder."""
        return self.where(self.encoder == ENCODERS.index(encoder))

    @property
    def finished_s(self) -> Floats:
        """When the device was done with each batch, as far as known: launch plus device time."""
        return np.asarray(self.launched_s + np.nan_to_num(self.device_ms) / 1000.0)

    @property
    def queue_state(self) -> NDArray[np.int8]:
        """Codes into QUEUE_STATES, by the same limits as `records.queue_state`."""
        normal_or_starved = np.where(self.wait_ms > STARVED_ABOVE_MS, 2, 1)
        return np.where(self.wait_ms < FULL_BELOW_MS, 0, normal_or_starved).astype(np.int8)


@dataclass(frozen=True, slots=True)
class SampleTable(Table):
    """Readings of the devices."""

    time_s: Floats
    device: NDArray[np.int16]
    utilisation: Floats
    memory_used_bytes: Floats
    power_w: Floats
    temperature_c: Floats

    @classmethod
    def of(cls, samples: Iterable[DeviceSample], devices: Sequence[str] = ()) -> SampleTable:
        """Columns of the samples, by time."""
        ordered = sorted(samples, key=lambda s: s.time_s)
        names, codes = _codes(devices, [s.device for s in ordered])
        return cls(
            names,
            np.array([s.time_s for s in ordered], dtype=np.float64),
            codes,
            _floats([s.utilisation for s in ordered]),
            _floats([s.memory_used_bytes for s in ordered]),
            _floats([s.power_w for s in ordered]),
            _floats([s.temperature_c for s in ordered]),
        )

    def between(self, start_s: float, end_s: float) -> SampleTable:
        """The samples taken from `start_s` to `end_s`, both included."""
        return self.where((self.time_s >= start_s) & (self.time_s <= end_s))


@dataclass(frozen=True, slots=True)
class HostTable(Table):
    """Readings of the host."""

    time_s: Floats
    cpu_percent: Floats
    rss_bytes: Floats
    disk_read_bytes: Floats
    disk_write_bytes: Floats

    @classmethod
    def of(cls, samples: Iterable[HostSample]) -> HostTable:
        """Columns of the samples, by time."""
        ordered = sorted(samples, key=lambda s: s.time_s)
        return cls(
            (),
            np.array([s.time_s for s in ordered], dtype=np.float64),
            _floats([s.cpu_percent for s in ordered]),
            _floats([s.rss_bytes for s in ordered]),
            _floats([s.disk_read_bytes for s in ordered]),
            _floats([s.disk_write_bytes for s in ordered]),
        )


@dataclass(frozen=True, slots=True)
class ShardTable(Table):
    """Committed shards."""

    device: NDArray[np.int16]
    shard: Ints
    rows: Ints
    protein_tokens: Ints
    dna_tokens: Ints
    started_s: Floats
    finished_s: Floats
    dnabert_s: Floats
    esm2_s: Floats
    head_s: Floats
    commit_s: Floats
    merge_s: Floats
    budget_divisor: Ints
    skipped: Ints

    @classmethod
    def of(cls, done: Iterable[ShardDone], devices: Sequence[str] = ()) -> ShardTable:
        """Columns of the shards, in the order finished."""
        ordered = sorted(done, key=lambda s: s.finished_s)
        names, codes = _codes(devices, [s.device for s in ordered])
        counts = {
            name: np.array([getattr(s, name) for s in ordered], dtype=np.int64)
            for name in ("shard", "rows", "protein_tokens", "dna_tokens", "budget_divisor", "skipped")
        }
        seconds = {
            name: np.array([getattr(s, name) for s in ordered], dtype=np.float64)
            for name in ("started_s", "finished_s", "dnabert_s", "esm2_s", "head_s", "commit_s", "merge_s")
        }
        return cls.from_columns(names, {"device": codes, **counts, **seconds})


def _floats(values: Sequence[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _codes(known: Sequence[str], named: Sequence[str]) -> tuple[tuple[str, ...], NDArray[np.int16]]:
    names = tuple(dict.fromkeys([*known, *named]))
    place = {name: code for code, name in enumerate(names)}
    return names, np.array([place[name] for name in named], dtype=np.int16)
