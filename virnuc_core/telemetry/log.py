"""The telemetry files of a run, and reading them back.

`telemetry_<time>.json` holds the summary, the windows and the batches; `telemetry_<time>.h5` every column of every
table. The JSON lists at most `JSON_BATCHES` batches, evenly chosen, and says so; the HDF5 file has all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import h5py
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.errors import InputError
from virnuc_core.rundir import whole_file, write_text_whole
from virnuc_core.telemetry.batches import (
    BatchSummary,
    by_encoder,
    device_busy,
    device_time_spread,
    embedding_window,
    packing_of_each,
    summarise,
    windows,
)
from virnuc_core.telemetry.clock import StageTime
from virnuc_core.telemetry.records import BatchRecord, ShardDone
from virnuc_core.telemetry.tables import (
    ENCODERS,
    QUEUE_STATES,
    BatchTable,
    Floats,
    HostTable,
    SampleTable,
    ShardTable,
    Table,
)
from virnuc_core.telemetry.usage import alarms, device_stats, host_stats, log_alarms

SCHEMA_VERSION: Final = 1
JSON_BATCHES: Final = 20_000

AnyTable = TypeVar("AnyTable", bound=Table)
TableName = Literal["batches", "samples", "host", "shards", "stages"]


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

    def get_throughput(self) -> dict[str, float | None]:
        """Tokens, batches' rows and batches per second over the embedding window."""
        return _throughput(summarise(self.batches))

    def get_dataloader_statistics(self) -> dict[str, Any]:
        """Waits, packing and queue states."""
        return dataloader_statistics(summarise(self.batches))

    def get_average_packing_efficiency(self) -> float | None:
        """Real tokens over slots launched, in percent."""
        packing = summarise(self.batches).packing_efficiency
        return None if packing is None else 100.0 * packing

    def get_average_gpu_utilization(self) -> float | None:
        """Mean over the devices of each one's mean in the embedding window, in percent; `None` without samples."""
        window = embedding_window(self.batches)
        stats = [device_stats(self.samples, device, window) for device in self.samples.devices]
        known = [s.gpu_util_avg for s in stats if s.gpu_util_avg is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True, slots=True)
class TelemetryFiles:
    """Where a run's telemetry lies."""

    json: Path
    h5: Path


class TelemetryLog:
    """Collects a run's shards and batches and writes the two files at the end."""

    def __init__(
        self,
        folder: Path,
        devices: Sequence[str],
        *,
        origin_s: float,
        window_s: float = 30.0,
        started: datetime | None = None,
    ) -> None:
        """`origin_s` is `time.monotonic()` at the run's start, `started` the wall clock then (now, when not given)."""
        self._folder = folder
        self._devices = tuple(devices)
        self._origin_s = origin_s
        self._window_s = window_s
        self._started = started or datetime.now(UTC)
        self._batches: list[BatchRecord] = []
        self._shards: list[ShardDone] = []

    def add_shard(self, done: ShardDone) -> None:
        """Record a committed shard and its batches."""
        self._shards.append(done)
        self._batches.extend(done.batches)

    def telemetry(self, samples: SampleTable, host: HostTable, stages: Sequence[StageTime]) -> Telemetry:
        """Everything recorded so far, as columns."""
        return Telemetry(
            BatchTable.of(self._batches, self._devices),
            samples,
            host,
            ShardTable.of(self._shards, self._devices),
            tuple(stages),
            self._origin_s,
            self._started.isoformat(),
        )

    def finish(
        self, samples: SampleTable, host: HostTable, stages: Sequence[StageTime], *, n_reads: int, wall_s: float
    ) -> TelemetryFiles:
        """Write both files whole and say the alarms in the log. Errors: `OSError` of the disk."""
        measured = self.telemetry(samples, host, stages)
        stem = _free_stem(self._folder, self._started)
        files = TelemetryFiles(self._folder / f"{stem}.json", self._folder / f"{stem}.h5")
        summary = summary_of(measured, n_reads=n_reads, wall_s=wall_s)
        body = {
            "schema_version": SCHEMA_VERSION,
            "summary": summary,
            "window_s": self._window_s,
            "windows": [asdict(w) for w in windows(measured.batches, samples, self._window_s, self._origin_s)],
            **batches_for_json(measured),
        }
        write_h5(files.h5, measured)
        write_text_whole(files.json, json.dumps(body, indent=1, allow_nan=False) + "\n")
        log_alarms(alarms(samples, embedding_window(measured.batches)))
        return files


def _free_stem(folder: Path, started: datetime) -> str:
    stem = f"telemetry_{started:%Y%m%d_%H%M%S}"
    tries = 0
    while (folder / f"{stem}{f'_{tries}' if tries else ''}.json").exists():
        tries += 1
    return f"{stem}_{tries}" if tries else stem


def summary_of(measured: Telemetry, *, n_reads: int, wall_s: float) -> dict[str, Any]:
    """The `summary` of the JSON file: plain numbers under the names that readers of such files know."""
    whole = summarise(measured.batches)
    span = embedding_window(measured.batches)
    busy = device_busy(measured.shards)
    return {
        "started": measured.started,
        "wall_s": wall_s,
        "total_sequences": n_reads,
        "sequences_per_hour": n_reads / wall_s * 3600.0 if wall_s > 0 else None,
        "throughput": _throughput(whole),
        "dataloader": dataloader_statistics(whole),
        "encoders": {name: asdict(own) for name, own in by_encoder(measured.batches).items()},
        "gpus": {d: asdict(device_stats(measured.samples, d, span)) for d in measured.samples.devices},
        "host": asdict(host_stats(measured.host)),
        "devices": [{**asdict(b), "busy_s": b.busy_s} for b in busy],
        "device_time_spread": device_time_spread(busy),
        "stages": {stage.name: stage.seconds for stage in measured.stages},
        "alarms": [asdict(alarm) for alarm in alarms(measured.samples, span)],
    }


def _throughput(summary: BatchSummary) -> dict[str, float | None]:
    return {
        "tokens_per_sec": summary.tokens_per_s,
        "rows_per_sec": summary.rows_per_s,
        "steady_tokens_per_sec": summary.steady_tokens_per_s,
        "batches_per_sec": summary.batches / summary.span_s if summary.span_s > 0 else None,
    }


def dataloader_statistics(summary: BatchSummary) -> dict[str, Any]:
    """Waits, packing (as shares of 1) and queue states under their usual names."""
    queue = summary.queue
    return {
        "avg_wait_time_ms": summary.avg_wait_ms,
        "p95_wait_time_ms": summary.p95_wait_ms,
        "max_wait_time_ms": summary.max_wait_ms,
        "avg_packing_efficiency": summary.packing_efficiency,
        "min_packing_efficiency": summary.min_packing_efficiency,
        "batches_below_threshold": summary.batches_below_threshold,
        "pct_full": None if queue is None else 100.0 * queue.full,
        "pct_normal": None if queue is None else 100.0 * queue.normal,
        "pct_starved": None if queue is None else 100.0 * queue.starved,
        "pct_waiting_over_1ms": None if summary.waiting_share is None else 100.0 * summary.waiting_share,
    }


def batches_for_json(measured: Telemetry) -> dict[str, Any]:
    """The batches as JSON records, at most `JSON_BATCHES` of them: every n-th, and which n."""
    frame = batch_frame(measured)
    every = max(1, -(-len(frame) // JSON_BATCHES))
    chosen = frame.iloc[::every]
    records = [{str(k): _plain(v) for k, v in row.items()} for row in chosen.to_dict(orient="records")]
    return {"per_batch_metrics_every": every, "batches": len(frame), "per_batch_metrics": records}


def _plain(value: Any) -> Any:
    """A JSON value: numbers short, unknown as null."""
    if isinstance(value, float):
        return None if np.isnan(value) else float(f"{value:.7g}")
    return value


def batch_frame(measured: Telemetry) -> pd.DataFrame:
    """One row a batch, under the names of the HDF5 file."""
    table = measured.batches
    columns: dict[str, Any] = {**_batch_columns(measured)}
    columns["device"] = np.array([*table.devices, ""], dtype=object)[table.device]
    columns["encoder"] = np.array(ENCODERS, dtype=object)[table.encoder]
    columns["queue_state"] = np.array(QUEUE_STATES, dtype=object)[table.queue_state]
    return pd.DataFrame(columns)


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
        "packing_efficiency": packing_of_each(table),
        "padding_waste": 1.0 - packing_of_each(table),
        "queue_state": table.queue_state,
        **table.columns(),
    }


def _utilisation_at(table: BatchTable, samples: SampleTable) -> Floats:
    """Utilisation of each batch's device at its launch: the newest sample taken by then, else the next; NaN without."""
    found = np.full(len(table), np.nan)
    for code, device in enumerate(table.devices):
        own = samples.of_device(device)
        mine = table.device == code
        if not len(own) or not mine.any():
            continue
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
            _write_columns(file.create_group(name), table.devices, table.columns())
        _write_columns(file.create_group("stages"), (), _stage_columns(measured.stages))


def _write_columns(group: h5py.Group, devices: Sequence[str], columns: dict[str, NDArray[Any]]) -> None:
    group.attrs["devices"] = json.dumps(list(devices))
    for name, values in columns.items():
        options = {"compression": "gzip", "shuffle": True} if len(values) > 64 else {}
        group.create_dataset(name, data=values, **options)


def _stage_columns(stages: Sequence[StageTime]) -> dict[str, NDArray[Any]]:
    def numbers(values: Sequence[float | None]) -> Floats:
        return np.array([np.nan if v is None else v for v in values], dtype=np.float64)

    return {
        "name": np.array([s.name.encode() for s in stages], dtype="S64"),
        "fused_into": np.array([(s.fused_into or "").encode() for s in stages], dtype="S64"),
        "seconds": numbers([s.seconds for s in stages]),
        "started_s": numbers([s.started_s for s in stages]),
        "finished_s": numbers([s.finished_s for s in stages]),
    }


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
    columns: dict[str, Any] = dict(chosen.columns())
    if "device" in columns:
        columns["device"] = np.array([*chosen.devices, ""], dtype=object)[columns["device"]]
    return pd.DataFrame(columns)


def latest(folder: Path) -> Path:
    """The newest `telemetry_<time>.h5` in a run directory or its `telemetry/`; `InputError` when there is none."""
    found = sorted([*folder.glob("telemetry_*.h5"), *(folder / "telemetry").glob("telemetry_*.h5")])
    if not found:
        raise InputError("no telemetry_<time>.h5 here; give a run directory or the file itself", file=folder)
    return found[-1]
