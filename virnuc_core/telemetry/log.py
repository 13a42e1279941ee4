"""The telemetry files of a run, and reading them back.

`telemetry_<time>.json` holds the summary, the windows and the batches; `telemetry_<time>.h5` every column of every
table. The JSON lists at most `JSON_BATCHES` batches, evenly chosen, and says so; the HDF5 file has all.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeVar

import h5py
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.errors import InputError
from virnuc_core.rundir import whole_file
from virnuc_core.runfiles import RunFile, write
from virnuc_core.telemetry.statistics import (
    Alarm,
    BatchMetrics,
    DeviceBusy,
    DeviceUsage,
    HostUsage,
    Window,
    alarms,
    batch_metrics,
    by_encoder,
    device_busy,
    device_time_spread,
    device_usage,
    embedding_span,
    host_usage,
    windows,
)
from virnuc_core.telemetry.tables import (
    ENCODERS,
    QUEUE_STATES,
    BatchTable,
    Encoder,
    Floats,
    HostTable,
    SampleTable,
    ShardDone,
    ShardTable,
    StageTime,
    Table,
)

log = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 1
JSON_BATCHES: Final = 20_000

AnyTable = TypeVar("AnyTable", bound=Table)
TableName = Literal["batches", "samples", "host", "shards", "stages"]
Numbers = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Telemetry:
    """All that one run measured."""

    batches: BatchTable
    samples: SampleTable
    host: HostTable
    shards: ShardTable
    stages: tuple[StageTime, ...]
    origin_s: float  # time.monotonic() at the run's start
    started: str  # wall clock at the same moment, ISO 8601

    @classmethod
    def of(
        cls,
        shards: Sequence[ShardDone],
        samples: SampleTable,
        host: HostTable,
        stages: Sequence[StageTime],
        *,
        origin_s: float,
        started: datetime,
    ) -> Self:
        """The shards committed, with their batches, as columns beside what was sampled."""
        batches, devices = [batch for shard in shards for batch in shard.batches], samples.devices
        tables = BatchTable.of(batches, devices), samples, host, ShardTable.of(shards, devices)
        return cls(*tables, tuple(stages), origin_s, started.isoformat())

    def get_throughput(self) -> Numbers:
        """Tokens, batches' rows and batches per second over the embedding span."""
        return throughput(batch_metrics(self.batches))

    def get_dataloader_statistics(self) -> Numbers:
        """Waits, packing and queue states."""
        return loader_statistics(batch_metrics(self.batches))

    def get_average_packing_efficiency(self) -> float | None:
        """Real tokens over slots launched, in percent."""
        packing = batch_metrics(self.batches).packing_efficiency
        return None if packing is None else 100.0 * packing

    def get_average_gpu_utilization(self) -> float | None:
        """Mean over the devices of each one's mean in the embedding span, in percent; `None` without samples."""
        span = embedding_span(self.batches)
        means = [device_usage(self.samples, device, span).gpu_util_avg for device in self.samples.devices]
        known = [mean for mean in means if mean is not None]
        return sum(known) / len(known) if known else None


class TelemetrySummary(RunFile):
    """The `summary` of the JSON file, under the names that readers of such files know."""

    started: str
    wall_s: float
    total_sequences: int
    sequences_per_hour: float | None
    throughput: Numbers
    dataloader: Numbers
    encoders: dict[Encoder, BatchMetrics]
    gpus: dict[str, DeviceUsage]
    host: HostUsage
    devices: tuple[DeviceBusy, ...]
    device_time_spread: float | None
    stages: Numbers
    alarms: tuple[Alarm, ...]


class TelemetryFile(RunFile):
    """`telemetry_<time>.json`."""

    schema_version: int = SCHEMA_VERSION
    summary: TelemetrySummary
    window_s: float
    windows: tuple[Window, ...]
    per_batch_metrics_every: int  # of all batches
    batches: int
    per_batch_metrics: tuple[dict[str, float | int | str | None], ...]


def write_telemetry(folder: Path, measured: Telemetry, *, n_reads: int, wall_s: float, window_s: float = 30.0) -> Path:
    """Write both files whole and say the alarms in the log; returns the JSON file, the other is its `.h5`.

    Errors: `OSError` of the disk.
    """
    path = _free_path(folder, datetime.fromisoformat(measured.started))
    write_h5(path.with_suffix(".h5"), measured)
    content = telemetry_file(measured, n_reads=n_reads, wall_s=wall_s, window_s=window_s)
    for alarm in content.summary.alarms:
        log.warning("%s", alarm.detail)
    return write(path, content)


def _free_path(folder: Path, started: datetime) -> Path:
    stem = f"telemetry_{started:%Y%m%d_%H%M%S}"
    names = itertools.chain([stem], (f"{stem}_{tries}" for tries in itertools.count(1)))
    return next(path for name in names if not (path := folder / f"{name}.json").exists())


def telemetry_file(measured: Telemetry, *, n_reads: int, wall_s: float, window_s: float) -> TelemetryFile:
    """The content of the JSON file of a run of `n_reads` reads that took `wall_s`."""
    span = embedding_span(measured.batches)
    whole, busy = batch_metrics(measured.batches), device_busy(measured.shards)
    summary = TelemetrySummary(
        started=measured.started,
        wall_s=wall_s,
        total_sequences=n_reads,
        sequences_per_hour=n_reads / wall_s * 3600.0 if wall_s > 0 else None,
        throughput=throughput(whole),
        dataloader=loader_statistics(whole),
        encoders=by_encoder(measured.batches),
        gpus={device: device_usage(measured.samples, device, span) for device in measured.samples.devices},
        host=host_usage(measured.host),
        devices=busy,
        device_time_spread=device_time_spread(busy),
        stages={stage.name: stage.seconds for stage in measured.stages},
        alarms=alarms(measured.samples, span),
    )
    frame = batch_frame(measured)
    every = max(1, -(-len(frame) // JSON_BATCHES))
    chosen = frame.iloc[::every].to_dict(orient="records")
    return TelemetryFile(
        summary=summary,
        window_s=window_s,
        windows=windows(measured.batches, measured.samples, window_s, measured.origin_s),
        per_batch_metrics_every=every,
        batches=len(frame),
        per_batch_metrics=tuple({str(k): _plain(v) for k, v in row.items()} for row in chosen),
    )


def throughput(whole: BatchMetrics) -> Numbers:
    """Tokens, rows and batches per second under their usual names."""
    return {
        "tokens_per_sec": whole.tokens_per_s,
        "rows_per_sec": whole.rows_per_s,
        "steady_tokens_per_sec": whole.steady_tokens_per_s,
        "batches_per_sec": whole.batches / whole.span_s if whole.span_s > 0 else None,
    }


def loader_statistics(whole: BatchMetrics) -> Numbers:
    """Waits, packing (as shares of 1) and queue states under their usual names."""
    shares = {} if whole.queue is None else whole.queue.model_dump()
    return {
        "avg_wait_time_ms": whole.avg_wait_ms,
        "p95_wait_time_ms": whole.p95_wait_ms,
        "max_wait_time_ms": whole.max_wait_ms,
        "avg_packing_efficiency": whole.packing_efficiency,
        "min_packing_efficiency": whole.min_packing_efficiency,
        "batches_below_threshold": whole.batches_below_threshold,
        **{f"pct_{state}": 100.0 * shares[state] if shares else None for state in QUEUE_STATES},
        "pct_waiting_over_1ms": None if whole.waiting_share is None else 100.0 * whole.waiting_share,
    }


def _plain(value: Any) -> Any:
    """A JSON value: numbers short, unknown as null."""
    if isinstance(value, float):
        return None if np.isnan(value) else float(f"{value:.7g}")
    return value


def batch_frame(measured: Telemetry) -> pd.DataFrame:
    """One row a batch, under the names of the HDF5 file, with devices, encoders and states by name."""
    table = measured.batches
    named = {
        "device": table.named(table.device),
        "encoder": np.array(ENCODERS, dtype=object)[table.encoder],
        "queue_state": np.array(QUEUE_STATES, dtype=object)[table.queue_state],
    }
    return pd.DataFrame({**_batch_columns(measured), **named})


def _batch_columns(measured: Telemetry) -> dict[str, NDArray[Any]]:
    table = measured.batches
    seconds = table.device_ms / 1000.0
    nothing = np.full(len(table), np.nan)
    return {
        "batch_idx": np.arange(len(table), dtype=np.int64),
        "timestamp": table.launched_s - measured.origin_s,
        "tokens_per_sec": np.divide(table.tokens, seconds, out=nothing.copy(), where=seconds > 0),
        "sequences_per_sec": np.divide(table.rows, seconds, out=nothing.copy(), where=seconds > 0),
        "gpu_util": _utilisation_at(table, measured.samples),
        "packing_efficiency": table.packing,
        "padding_waste": 1.0 - table.packing,
        "queue_state": table.queue_state,
        **table.data,
    }


def _utilisation_at(table: BatchTable, samples: SampleTable) -> Floats:
    """Utilisation of each batch's device at its launch: the newest sample taken by then, else the next; NaN without."""
    found = np.full(len(table), np.nan)
    for code, device in enumerate(table.devices):
        own = samples.of_device(device)
        mine = table.device == code
        if len(own) and mine.any():
            place = np.searchsorted(own.time_s, table.launched_s[mine], side="right") - 1
            found[mine] = own.utilisation[np.clip(place, 0, len(own) - 1)]
    return found


def write_h5(path: Path, measured: Telemetry) -> None:
    """Write the HDF5 file whole. Batch columns lie at the root, the other tables in groups of their names."""
    with whole_file(path) as aside, h5py.File(aside, "w") as file:
        file.attrs["schema_version"] = SCHEMA_VERSION
        file.attrs["origin_s"] = measured.origin_s
        file.attrs["started"] = measured.started
        _write_columns(file, measured.batches.devices, _batch_columns(measured))
        for name in ("samples", "host", "shards"):
            table: Table = getattr(measured, name)
            _write_columns(file.create_group(name), table.devices, table.data)
        stages = [asdict(stage) for stage in measured.stages]
        columns = {
            name: np.array([stage[name] for stage in stages], dtype=np.float64)  # None becomes NaN
            for name in ("seconds", "started_s", "finished_s")
        }
        for name in ("name", "fused_into"):
            columns[name] = np.array([(stage[name] or "").encode() for stage in stages], dtype="S64")
        _write_columns(file.create_group("stages"), (), columns)


def _write_columns(group: h5py.Group, devices: Sequence[str], columns: Mapping[str, NDArray[Any]]) -> None:
    group.attrs["devices"] = json.dumps(list(devices))
    for name, values in columns.items():
        options = {"compression": "gzip", "shuffle": True} if len(values) > 64 else {}
        group.create_dataset(name, data=values, **options)


def read_telemetry(path: Path) -> Telemetry:
    """Read `telemetry_<time>.h5` back; `InputError` names the file and what is wrong with it."""
    try:
        with h5py.File(path, "r") as file:
            return Telemetry(
                _read_table(file, BatchTable),
                _read_table(file["samples"], SampleTable),
                _read_table(file["host"], HostTable),
                _read_table(file["shards"], ShardTable),
                _read_stages(file["stages"]),
                float(file.attrs["origin_s"]),
                str(file.attrs["started"]),
            )
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise InputError(f"not a readable telemetry file ({error})", file=path) from error


def _read_table(group: h5py.Group, kind: type[AnyTable]) -> AnyTable:
    columns = {name: item[:] for name, item in group.items() if isinstance(item, h5py.Dataset)}
    return kind.from_columns(json.loads(group.attrs["devices"]), columns)


def _read_stages(group: h5py.Group) -> tuple[StageTime, ...]:
    def number(value: float) -> float | None:
        return None if np.isnan(value) else float(value)

    columns = [group[name][:].tolist() for name in ("name", "seconds", "fused_into", "started_s", "finished_s")]
    return tuple(
        StageTime(name.decode(), number(seconds), fused.decode() or None, number(started), number(finished))
        for name, seconds, fused, started, finished in zip(*columns, strict=True)
    )


def open_frame(path: Path, table: TableName = "batches") -> pd.DataFrame:
    """A table of a telemetry file as a pandas DataFrame, with devices, encoders and states by name.

    `path` is the `.h5` file, or a run directory, whose newest telemetry is taken. Raises `InputError`.
    """
    measured = read_telemetry(latest(path) if path.is_dir() else path)
    if table == "batches":
        return batch_frame(measured)
    if table == "stages":
        return pd.DataFrame([asdict(stage) for stage in measured.stages])
    chosen: Table = getattr(measured, table)
    columns = dict(chosen.data)
    if "device" in columns:
        columns["device"] = chosen.named(columns["device"])
    return pd.DataFrame(columns)


def latest(folder: Path) -> Path:
    """The newest `telemetry_<time>.h5` in a run directory or its `telemetry/`; `InputError` when there is none."""
    found = sorted([*folder.glob("telemetry_*.h5"), *(folder / "telemetry").glob("telemetry_*.h5")])
    if not found:
        raise InputError("no telemetry_<time>.h5 here; give a run directory or the file itself", file=folder)
    return found[-1]
