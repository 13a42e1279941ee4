"""The telemetry files of a run, written, and read back as the tables they were written from.

`telemetry_<time>.json` holds the summary, the windows and the batches; `telemetry_<time>.h5` every column of every
table. The JSON lists at most `JSON_BATCHES` batches, evenly chosen, and says so; the HDF5 file has all."""

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, get_args

import h5py
import numpy as np
import pandas as pd
from pydantic import TypeAdapter, ValidationError

from virnuc_core.errors import InputError
from virnuc_core.rundir import atomic_hdf5
from virnuc_core.runfiles import Attempt, Positive, RunFile, write
from virnuc_core.telemetry import statistics
from virnuc_core.telemetry.tables import (
    ENCODERS,
    BatchRecord,
    DeviceSample,
    Encoder,
    HostSample,
    ShardDone,
    StageTime,
)

log = logging.getLogger(__name__)

JSON_BATCHES: Final = 20_000
TABLES: Final = {
    "batches": BatchRecord,
    "samples": DeviceSample,
    "host": HostSample,
    "shards": ShardDone,
}

Numbers = dict[str, float | None]
Noted = ShardDone | DeviceSample | HostSample | str
NOTED: Final = TypeAdapter[Noted](Noted)


@dataclass(frozen=True, slots=True)
class Telemetry:
    """All that one run measured: a table for each kind of record."""

    batches: pd.DataFrame
    samples: pd.DataFrame
    host: pd.DataFrame
    shards: pd.DataFrame
    stages: tuple[StageTime, ...]
    origin_s: float  # time.monotonic() at the run's start
    started: str  # wall clock at the same moment, ISO 8601

    def get_throughput(self) -> Numbers:
        """Tokens, sequences (each once) and batches per second over the embedding span."""
        whole = statistics.batch_metrics(self.batches)
        return {
            "tokens_per_sec": whole.tokens_per_s,
            "sequences_per_sec": whole.rows_per_s,
            "steady_tokens_per_sec": whole.steady_tokens_per_s,
            "batches_per_sec": whole.batches / whole.span_s if whole.span_s > 0 else None,
        }

    def get_dataloader_statistics(self) -> Numbers:
        """Waits, packing (as shares of 1) and queue states."""
        whole = statistics.batch_metrics(self.batches)
        shares = {} if whole.queue is None else whole.queue.model_dump()
        return {
            "avg_wait_time_ms": whole.avg_wait_ms,
            "p95_wait_time_ms": whole.p95_wait_ms,
            "max_wait_time_ms": whole.max_wait_ms,
            "avg_packing_efficiency": whole.packing_efficiency,
            "min_packing_efficiency": whole.min_packing_efficiency,
            "batches_below_threshold": whole.batches_below_threshold,
            **{
                f"pct_{state}": 100.0 * shares[state] if shares else None
                for state in statistics.QUEUE_STATES
            },
            "pct_waiting_over_1ms": None
            if whole.waiting_share is None
            else 100.0 * whole.waiting_share,
        }

    def get_average_packing_efficiency(self) -> float | None:
        """Real tokens over slots launched, in percent."""
        share = statistics.batch_metrics(self.batches).packing_efficiency
        return None if share is None else 100.0 * share

    def get_average_gpu_utilization(self) -> float | None:
        """Mean over the devices of each one's mean in the embedding span, in percent; `None` without samples."""
        span = statistics.embedding_span(self.batches) or (-np.inf, np.inf)
        inside = self.samples[self.samples.time_s.between(*span)]
        return statistics.none_if_nan(
            inside.groupby("device", observed=True).utilisation.mean().mean()
        )


@contextmanager
def journal(
    path: Path, origin_s: float, started: datetime, devices: Sequence[str]
) -> Iterator[Callable[..., None]]:
    """What adds records to the file in which an attempt's measurements survive it: after a line with its start and
    devices, one for each sample, shard and death of a worker."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb", buffering=0) as file:  # each line at once

        def note(*noted: Noted) -> None:
            with suppress(OSError):  # of a full disk: the next commit tells it
                file.write(b"".join(NOTED.dump_json(one) + b"\n" for one in noted))

        note(json.dumps([origin_s, started.isoformat(), *devices]))
        yield note


def read_journal(path: Path) -> tuple[Telemetry, float, tuple[str, ...]] | None:
    """What an attempt measured, how long it is known to have lived, and its workers' deaths; None without a start."""
    noted: dict[type, list[Any]] = {kind: [] for kind in get_args(Noted)}
    with suppress(OSError):
        for line in path.read_bytes().splitlines():
            with suppress(ValidationError):  # it was cut off
                one = NOTED.validate_json(line)
                noted[type(one)].append(one)
    if not noted[str]:
        return None
    start, *deaths = noted[str]
    origin_s, started, *devices = json.loads(start)
    noted[BatchRecord] = [batch for shard in noted[ShardDone] for batch in shard.batches]
    tables = {name: statistics.frame(kind, noted[kind], devices) for name, kind in TABLES.items()}
    measured = Telemetry(**tables, stages=(), origin_s=origin_s, started=started)
    last_s = max([origin_s, *measured.host.time_s, *measured.shards.finished_s])
    return measured, last_s - origin_s, tuple(deaths)


def ended(
    attempt: Attempt,
    measured: Telemetry,
    wall_s: float,
    deaths: Sequence[str],
    written: Path | None,
) -> Attempt:
    """An attempt with what was measured of it, in the telemetry file `written`, if anything was computed."""
    worked_s = statistics.committed_span_s(measured.batches, measured.shards)
    told = {"wall_s": wall_s, "worked_s": min(worked_s, wall_s), "shards": len(measured.shards)}
    return attempt.model_copy(
        update={**told, "deaths": tuple(deaths), "telemetry": written and written.name}
    )


class TelemetrySummary(RunFile):
    """The `summary` of the JSON file, under the names that readers of such files know."""

    started: str
    wall_s: float
    total_sequences: int
    sequences_per_hour: (
        float | None
    )  # reads over the whole time, as in summary.json; None of a part of a run
    throughput: Numbers
    dataloader: Numbers
    encoders: dict[Encoder, statistics.BatchMetrics]
    gpus: dict[str, statistics.DeviceUsage]
    host: statistics.HostUsage
    devices: tuple[statistics.DeviceBusy, ...]
    device_time_spread: float | None
    stages: Numbers
    alarms: tuple[str, ...]


class TelemetryFile(RunFile):
    """`telemetry_<time>.json`."""

    schema_version: int = 1
    summary: TelemetrySummary
    window_s: Positive
    windows: tuple[statistics.Window, ...]
    per_batch_metrics_every: int  # of all batches
    batches: int
    per_batch_metrics: tuple[dict[str, float | int | str | None], ...]


def telemetry_file(
    measured: Telemetry,
    *,
    n_reads: int,
    wall_s: float,
    window_s: float = 30.0,
    sequences_per_hour: float | None = None,
) -> TelemetryFile:
    """The content of the JSON file of a run of `n_reads` reads that took `wall_s`."""
    span, busy = (
        statistics.embedding_span(measured.batches),
        statistics.device_busy(measured.shards),
    )
    devices, table = measured.samples.device.cat.categories, batch_frame(measured)
    summary = TelemetrySummary(
        started=measured.started,
        wall_s=wall_s,
        total_sequences=n_reads,
        sequences_per_hour=sequences_per_hour,
        throughput=measured.get_throughput(),
        dataloader=measured.get_dataloader_statistics(),
        encoders=statistics.by_encoder(measured.batches),
        gpus={
            device: statistics.device_usage(measured.samples, device, span) for device in devices
        },
        host=statistics.host_usage(measured.host),
        devices=busy,
        device_time_spread=statistics.device_time_spread(busy),
        stages={stage.name: stage.seconds for stage in measured.stages},
        alarms=statistics.alarms(measured.samples, span),
    )
    every, known = max(1, -(-len(table) // JSON_BATCHES)), statistics.none_if_nan
    chosen = table[::every].to_dict(orient="records")
    return TelemetryFile(
        summary=summary,
        window_s=window_s,
        windows=statistics.windows(measured.batches, window_s, measured.origin_s, measured.samples),
        per_batch_metrics_every=every,
        batches=len(table),
        per_batch_metrics=tuple(  # numbers short, unknown as null
            {
                str(k): known(float(f"{v:.7g}")) if isinstance(v, float) else v
                for k, v in row.items()
            }
            for row in chosen
        ),
    )


def batch_frame(measured: Telemetry) -> pd.DataFrame:
    """One row a batch, under the names of the HDF5 file."""
    table, samples = measured.batches, measured.samples
    seconds, packed = (
        (table.device_ms / 1000.0).where(table.device_ms > 0),
        statistics.packing(table),
    )
    used = pd.Series(
        np.nan, index=table.index
    )  # by the newest sample taken at the launch, else by the next
    for device, own in samples.groupby("device", observed=True):
        mine = table.device == device
        place = np.searchsorted(own.time_s, table.launched_s[mine], side="right") - 1
        used[mine] = own.utilisation.to_numpy()[np.clip(place, 0, None)]
    derived = {
        "batch_idx": np.arange(len(table)),
        "timestamp": table.launched_s - measured.origin_s,
        "tokens_per_sec": table.tokens / seconds,
        "sequences_per_sec": table.rows / seconds,
        "gpu_util": used,
        "packing_efficiency": packed,
        "padding_waste": 1.0 - packed,
        "queue_state": statistics.queue_state(table),
    }
    return pd.concat([pd.DataFrame(derived), table], axis="columns")


def write_telemetry(folder: Path, measured: Telemetry, **told: Any) -> Path:
    """Write both files whole and say the alarms in the log; the JSON file. `told` is what `telemetry_file` takes. In
    HDF5 the columns of the batches lie at the root, the other tables in groups of their names."""
    stem = f"telemetry_{datetime.fromisoformat(measured.started):%Y%m%d_%H%M%S}"
    names = itertools.chain([stem], (f"{stem}_{tries}" for tries in itertools.count(1)))
    path = next(path for name in names if not (path := folder / f"{name}.json").exists())
    content = telemetry_file(measured, **told)
    with atomic_hdf5(path.with_suffix(".h5")) as file:
        file.attrs.update(
            schema_version=content.schema_version,
            origin_s=measured.origin_s,
            started=measured.started,
        )
        _write_table(file, batch_frame(measured))
        for name in ("samples", "host", "shards"):
            _write_table(file.create_group(name), getattr(measured, name))
        stages = file.create_group("stages")
        for field in fields(StageTime):
            values = [getattr(stage, field.name) for stage in measured.stages]
            number = field.type == float | None  # in which None becomes NaN
            stages[field.name] = (
                np.array(values, float)
                if number
                else np.array([one or "" for one in values], "S64")
            )
    for alarm in content.summary.alarms:
        log.warning("%s", alarm)
    return write(path, content)


def _write_table(group: h5py.Group, table: pd.DataFrame) -> None:
    """Each column as a dataset: categories as codes; the devices that those of `device` stand for as an attribute."""
    group.attrs["devices"] = json.dumps(
        list(table.device.cat.categories) if "device" in table else []
    )
    options = {"compression": "gzip", "shuffle": True} if len(table) > 64 else {}
    for name, column in table.items():
        values = column.cat.codes if isinstance(column.dtype, pd.CategoricalDtype) else column
        group.create_dataset(name, data=values.to_numpy(), **options)


def read_telemetry(path: Path) -> Telemetry:
    """Read `telemetry_<time>.h5` back; `InputError` names the file and what is wrong with it."""
    try:
        with h5py.File(path, "r") as file:
            tables = {
                name: _read_table(file.get(name, file), kind) for name, kind in TABLES.items()
            }  # or at the root
            columns = [file["stages"][field.name][:].tolist() for field in fields(StageTime)]
            stages = tuple(StageTime(*map(_told, stage)) for stage in zip(*columns, strict=True))
            started, origin_s = str(file.attrs["started"]), float(file.attrs["origin_s"])
            return Telemetry(**tables, stages=stages, origin_s=origin_s, started=started)
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise InputError(f"not a readable telemetry file ({error})", file=path) from error


def _told(value: Any) -> Any:
    """A text or a number of the file; `None` for an empty text or NaN."""
    return value.decode() or None if isinstance(value, bytes) else statistics.none_if_nan(value)


def _read_table(group: h5py.Group, kind: type[Any]) -> pd.DataFrame:
    categories = {"device": json.loads(group.attrs["devices"]), "encoder": ENCODERS}
    columns: dict[str, Any] = {
        field.name: group[field.name][:] for field in fields(kind) if field.name != "batches"
    }
    for name in categories.keys() & columns.keys():
        columns[name] = pd.Categorical.from_codes(columns[name], categories[name])
    whole = {field.name for field in fields(kind) if field.type is int}
    for name in columns.keys() - categories.keys():
        if len(columns[name]) and columns[name].dtype.kind not in (
            "iu" if name in whole else "iuf"
        ):
            raise TypeError(f"{name}: not {'whole ' * (name in whole)}numbers")
    return pd.DataFrame(columns)


def open_frame(
    path: Path, table: Literal["batches", "samples", "host", "shards", "stages"] = "batches"
) -> pd.DataFrame:
    """A table of a telemetry file as a pandas DataFrame, with devices, encoders and states by name. `path` is the `.h5`
    file, or a run directory, whose newest telemetry is taken. Raises `InputError`."""
    measured = read_telemetry(latest(path) if path.is_dir() else path)
    if table == "stages":
        return pd.DataFrame(list(measured.stages))
    found = batch_frame(measured) if table == "batches" else getattr(measured, table)
    return found.astype(dict.fromkeys(found.select_dtypes("category"), "object"))


def latest(folder: Path) -> Path:
    """The newest `telemetry_<time>.h5` in a run directory or its `telemetry/`; `InputError` when there is none."""
    found = sorted([*folder.glob("telemetry_*.h5"), *(folder / "telemetry").glob("telemetry_*.h5")])
    if not found:
        raise InputError(
            "no telemetry_<time>.h5 here; give a run directory or the file itself", file=folder
        )
    return found[-1]
