"""Write the telemetry files of a run, and read them back as the tables they were written from.

`telemetry_<time>.json` holds the summary, the windows and the batches; `telemetry_<time>.h5` has
every column of every table. The JSON lists at most `JSON_BATCHES` batches, evenly chosen, and says
so; the HDF5 file has all.
"""

import itertools
import json
import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

import h5py
import numpy as np
import pandas as pd

from virnuc_core.checked_files import SEAL_BYTES, Seal, open_checked_hdf5
from virnuc_core.encoder_names import ENCODER_NAMES, EncoderName
from virnuc_core.errors import InputError
from virnuc_core.rundir import atomic_hdf5
from virnuc_core.runfiles import Attempt, Positive, RunFile, write
from virnuc_core.safe_files import read_dataset, read_file
from virnuc_core.system_errors import is_folder, list_folder, path_exists, read_with_retries
from virnuc_core.telemetry import statistics
from virnuc_core.telemetry.journal import JournalRecord, parse_line
from virnuc_core.telemetry.starvation import Starvation, starvation
from virnuc_core.telemetry.tables import (
    COLUMN_NAMES,
    BatchRecord,
    DeviceSample,
    HostSample,
    ShardDone,
    StageTime,
)

log = logging.getLogger(__name__)

# Files of older versions have no seal.
TELEMETRY_SEAL: Final = Seal("telemetry 1", is_optional=True)
JSON_BATCHES: Final = 20_000
MAX_JOURNAL_BYTES: Final = 2 << 30  # a day of measurements on 8 devices has some 50 MB
JSON_DIGITS: Final = 7  # of a number of a batch
MIN_COMPRESSED_ROWS: Final = 65  # shorter columns take less space as they are
STAGE_NAME_TYPE: Final = "S64"
# 2: `timestamp` of a batch is a Unix time, and the use of the CPU is held beside that of the GPUs.
# In files of version 1 it is the seconds since the start of the run, and the rest is missing.
SCHEMA_VERSION: Final = 2
TABLES: Final = {
    "batches": BatchRecord,
    "samples": DeviceSample,
    "host": HostSample,
    "shards": ShardDone,
}
STAGE_COLUMNS: Final = tuple(stage_field.name for stage_field in fields(StageTime))
TEXT_STAGE_COLUMNS: Final = ("name", "fused_into")  # the others are numbers

Numbers = dict[str, float | None]
TableName = Literal["batches", "samples", "host", "shards", "stages"]


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

    @property
    def origin_epoch_s(self) -> float:
        """Return the run's start as a Unix time: seconds since 1970."""
        return datetime.fromisoformat(self.started).timestamp()

    def get_throughput(self) -> Numbers:
        """Return the tokens, the sequences and the batches per second while the run embedded.

        The time runs from the first launch of a batch to the end of the last batch. A sequence
        counts once, although both encoders embed it. The steady tokens are those without the first
        batches of each device, which are slower. A number is `None` if it is not known.
        """
        metrics = statistics.batch_metrics(self.batches)
        batches_per_s = None
        if metrics.span_s > 0:
            batches_per_s = metrics.batches / metrics.span_s
        return {
            "tokens_per_sec": metrics.tokens_per_s,
            "sequences_per_sec": metrics.rows_per_s,
            "steady_tokens_per_sec": metrics.steady_tokens_per_s,
            "batches_per_sec": batches_per_s,
        }

    def get_dataloader_statistics(self) -> Numbers:
        """Return how long the device waited for batches and how well the batches were packed.

        Waits are in milliseconds and packing efficiencies are shares, 0 to 1. The names that
        begin with `pct_` are the percent of batches in each state of the queue. What is not known
        without a batch is `None`.
        """
        metrics = statistics.batch_metrics(self.batches)
        numbers: Numbers = {
            "avg_wait_time_ms": metrics.avg_wait_ms,
            "p95_wait_time_ms": metrics.p95_wait_ms,
            "max_wait_time_ms": metrics.max_wait_ms,
            "avg_packing_efficiency": metrics.packing_efficiency,
            "min_packing_efficiency": metrics.min_packing_efficiency,
            "batches_below_threshold": metrics.batches_below_threshold,
        }
        share_of_state: dict[str, float] = {}
        if metrics.queue is not None:  # it is None without a batch
            share_of_state = metrics.queue.model_dump()
        for state in statistics.QUEUE_STATES:
            numbers[f"pct_{state}"] = _percent(share_of_state.get(state))
        numbers["pct_waiting_over_1ms"] = _percent(metrics.waiting_share)
        return numbers

    def get_average_packing_efficiency(self) -> float | None:
        """Return real tokens over slots launched, in percent."""
        return _percent(statistics.batch_metrics(self.batches).packing_efficiency)

    def get_average_gpu_utilization(self) -> float | None:
        """Return how busy the GPUs were on average while the run embedded, in percent.

        Each device counts equally: the result is the mean of the devices' own means. Without
        samples it is `None`. Without batches, all samples of the run count.
        """
        start_s, end_s = statistics.embedding_span(self.batches) or (-np.inf, np.inf)
        samples_in_span = self.samples[self.samples.time_s.between(start_s, end_s)]
        mean_of_device = samples_in_span.groupby("device", observed=True).utilisation.mean()
        return statistics.none_if_nan(mean_of_device.mean())


def _percent(share: float | None) -> float | None:
    """Return a share, 0 to 1, in percent. `None` stays `None`."""
    if share is None:
        return None
    return 100.0 * share


@dataclass(frozen=True, slots=True)
class Journal:
    """What the journal of an attempt recorded."""

    telemetry: Telemetry
    lived_s: float  # how long the attempt is known to have lived
    deaths: tuple[str, ...]  # of its workers


@dataclass(slots=True)
class _JournalLines:
    """The records of a journal by their kind."""

    texts: list[str] = field(default_factory=list)
    samples: list[DeviceSample] = field(default_factory=list)
    host: list[HostSample] = field(default_factory=list)
    shards: list[ShardDone] = field(default_factory=list)

    def add(self, record: JournalRecord) -> None:
        """Add a record to those of its kind. A text is the attempt's start or a worker's death."""
        match record:
            case ShardDone():
                self.shards.append(record)
            case DeviceSample():
                self.samples.append(record)
            case HostSample():
                self.host.append(record)
            case str():
                self.texts.append(record)


def read_journal(path: Path, root: Path | None = None) -> Journal | None:
    """Read the journal of an attempt, that is, of one start of the command on a run directory.

    A line that was cut off, because the attempt was killed while it wrote, is left out. So are
    damaged lines. A warning tells how many lines are damaged, other than the last one.

    Args:
        path: The journal.
        root: The run directory, below which no link is followed.

    Returns:
        `None` if there is no journal, or if its first line does not have the start of an attempt.

    Raises:
        UnreadableError: The system cannot read the file, so that nothing is known about it.
    """
    lines = _JournalLines()
    try:
        content = read_with_retries(path, lambda: read_file(path, root, MAX_JOURNAL_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    *whole_lines, last_line = content.split(b"\n")
    n_damaged = 0
    for line in whole_lines:
        try:
            lines.add(parse_line(line))
        except ValueError:
            n_damaged += 1
    with suppress(ValueError):  # it has no end, so it was probably cut off
        lines.add(parse_line(last_line))
    if n_damaged:
        log.warning("%s: %d lines are damaged; their measurements are left out", path, n_damaged)
    if not lines.texts:
        return None
    # The first text is the start of the attempt. Each later one is the death of a worker.
    start, *deaths = lines.texts
    try:
        origin_s, started, *devices = json.loads(start)
    except (ValueError, TypeError):  # the first line was cut off, or is none of ours
        return None
    batches = [batch for shard in lines.shards for batch in shard.batches]
    telemetry = Telemetry(
        batches=statistics.record_table(BatchRecord, batches, devices),
        samples=statistics.record_table(DeviceSample, lines.samples, devices),
        host=statistics.record_table(HostSample, lines.host, devices),
        shards=statistics.record_table(ShardDone, lines.shards, devices),
        stages=(),
        origin_s=origin_s,
        started=started,
    )
    # An attempt that was killed wrote no end. It lived at least until its last record.
    last_record_s = max([origin_s, *telemetry.host.time_s, *telemetry.shards.finished_s])
    return Journal(telemetry, lived_s=last_record_s - origin_s, deaths=tuple(deaths))


def finished_attempt(
    attempt: Attempt,
    telemetry: Telemetry,
    wall_s: float,
    deaths: Sequence[str],
    written: Path | None,
) -> Attempt:
    """Return the record of an attempt with what was measured in it.

    An attempt is one start of the command on a run directory.

    Args:
        attempt: The record as it was at the start.
        telemetry: What was measured.
        wall_s: How long the attempt took.
        deaths: The deaths of its workers.
        written: Its telemetry file, or `None` if nothing was computed.
    """
    committed_s = statistics.committed_span_s(telemetry.batches, telemetry.shards)
    # The known time of a killed attempt ends with its last record, before that shard's commit.
    worked_s = min(committed_s, wall_s)
    return attempt.model_copy(
        update={
            "wall_s": wall_s,
            "worked_s": worked_s,
            "shards": len(telemetry.shards),
            "deaths": tuple(deaths),
            "telemetry": None if written is None else written.name,
        }
    )


class TelemetrySummary(RunFile):
    """The `summary` of the JSON file, under the names that readers of such files know."""

    started: str
    wall_s: float
    total_sequences: int
    # reads over the whole time, as in summary.json; None of a part of a run
    sequences_per_hour: float | None
    throughput: Numbers
    dataloader: Numbers
    encoders: dict[EncoderName, statistics.BatchMetrics]
    gpus: dict[str, statistics.DeviceUsage]
    host: statistics.HostUsage
    devices: tuple[statistics.DeviceBusy, ...]
    device_time_spread: float | None
    stages: Numbers
    alarms: tuple[str, ...]
    starvation: Starvation | None = None  # None: a CPU run, too short, or of schema version 1


class TelemetryFile(RunFile):
    """The content of `telemetry_<time>.json`."""

    schema_version: int = SCHEMA_VERSION
    summary: TelemetrySummary
    window_s: Positive
    windows: tuple[statistics.Window, ...]
    per_batch_metrics_every: int  # of all batches
    batches: int
    per_batch_metrics: tuple[dict[str, float | int | str | None], ...]


def telemetry_file(
    telemetry: Telemetry,
    *,
    n_reads: int,
    wall_s: float,
    window_s: float = 30.0,
    sequences_per_hour: float | None = None,
    schema_version: int = SCHEMA_VERSION,
) -> TelemetryFile:
    """Return the content of the JSON file of a run.

    Args:
        telemetry: What the run measured.
        n_reads: How many reads it had.
        wall_s: How long it took.
        window_s: The length of a window, one of the stretches of time that the file lists.
        sequences_per_hour: Reads per hour over the whole time, staging included.
        schema_version: The form of the file. A file of version 1 is computed again as it was
            written then.
    """
    batches = batch_frame(telemetry)
    host: pd.DataFrame | None = telemetry.host
    if schema_version == 1:
        batches["timestamp"] = batches.pop("seconds_since_start")
        host = None
    batch_step = max(1, -(-len(batches) // JSON_BATCHES))  # rounded up
    listed_batches = batches[::batch_step].to_dict(orient="records")
    summary = _summary(telemetry, n_reads, wall_s, sequences_per_hour)
    if schema_version == 1:
        summary = summary.model_copy(update={"starvation": None})
    return TelemetryFile(
        schema_version=schema_version,
        summary=summary,
        window_s=window_s,
        windows=statistics.windows(
            telemetry.batches, window_s, telemetry.origin_s, telemetry.samples, host
        ),
        per_batch_metrics_every=batch_step,
        batches=len(batches),
        per_batch_metrics=tuple(_short_numbers(batch) for batch in listed_batches),
    )


def _summary(
    telemetry: Telemetry, n_reads: int, wall_s: float, sequences_per_hour: float | None
) -> TelemetrySummary:
    """Return the summary of a run: each number for the whole run.

    Args:
        telemetry: What the run measured.
        n_reads: How many reads it had.
        wall_s: How long it took.
        sequences_per_hour: Reads per hour over the whole time, staging included.
    """
    span = statistics.embedding_span(telemetry.batches)
    busy = statistics.device_busy(telemetry.shards)
    gpus = {}
    for device in telemetry.samples.device.cat.categories:
        gpus[device] = statistics.device_usage(telemetry.samples, device, span)
    return TelemetrySummary(
        started=telemetry.started,
        wall_s=wall_s,
        total_sequences=n_reads,
        sequences_per_hour=sequences_per_hour,
        throughput=telemetry.get_throughput(),
        dataloader=telemetry.get_dataloader_statistics(),
        encoders=statistics.by_encoder(telemetry.batches),
        gpus=gpus,
        host=statistics.host_usage(telemetry.host),
        devices=busy,
        device_time_spread=statistics.device_time_spread(busy),
        stages={stage.name: stage.seconds for stage in telemetry.stages},
        alarms=statistics.alarms(telemetry.samples, span),
        starvation=starvation(telemetry.samples, telemetry.host, span),
    )


def _short_numbers(batch: dict[Any, Any]) -> dict[str, float | int | str | None]:
    """Return the fields of a batch with few digits, and with `None` for what is not known."""
    short: dict[str, float | int | str | None] = {}
    for name, value in batch.items():
        if name == "timestamp":  # seconds since 1970 have more digits; microseconds are enough
            short[str(name)] = round(value, 6)
        elif isinstance(value, float):
            short[str(name)] = statistics.none_if_nan(float(f"{value:.{JSON_DIGITS}g}"))
        else:
            short[str(name)] = value
    return short


def batch_frame(telemetry: Telemetry) -> pd.DataFrame:
    """Return a table with one row for each batch: what was measured, and what follows from it.

    The columns have the names of the HDF5 file. A speed is NaN if the device time of the batch is
    not known.
    """
    batches = telemetry.batches
    # Without a device time above 0 the seconds are NaN, so that nothing is divided by zero.
    seconds = (batches.device_ms / 1000.0).where(batches.device_ms > 0)
    packing = statistics.packing(batches)
    seconds_since_start = batches.launched_s - telemetry.origin_s
    computed_columns = {
        "batch_idx": np.arange(len(batches)),
        "timestamp": telemetry.origin_epoch_s + seconds_since_start,  # Unix time of the launch
        "seconds_since_start": seconds_since_start,
        "tokens_per_sec": batches.tokens / seconds,
        "sequences_per_sec": batches.rows / seconds,
        "gpu_util": _utilisation_at_launch(batches, telemetry.samples),
        "packing_efficiency": packing,
        "padding_waste": 1.0 - packing,
        "queue_state": statistics.queue_state(batches),
    }
    return pd.concat([pd.DataFrame(computed_columns), batches], axis="columns")


def _utilisation_at_launch(batches: pd.DataFrame, samples: pd.DataFrame) -> pd.Series:
    """Return how busy the device of each batch was when the batch was launched, in percent.

    The last sample of the device before the launch gives it, or the first sample of the device if
    none was taken before. It is NaN for a device without samples.
    """
    utilisation = pd.Series(np.nan, index=batches.index)
    for device, own_samples in samples.groupby("device", observed=True):
        is_own = batches.device == device
        launched_s = batches.launched_s[is_own]
        n_samples_before = np.searchsorted(own_samples.time_s, launched_s, side="right")
        sample_index = np.clip(n_samples_before - 1, 0, None)
        utilisation[is_own] = own_samples.utilisation.to_numpy()[sample_index]
    return utilisation


def write_telemetry(
    folder: Path,
    telemetry: Telemetry,
    *,
    n_reads: int,
    wall_s: float,
    window_s: float = 30.0,
    sequences_per_hour: float | None = None,
) -> Path:
    """Write both telemetry files of a run, and log its alarms.

    In the HDF5 file the columns of the batches lie at the root, and the other tables in groups of
    their names.

    Args:
        folder: Where the files go.
        telemetry: What the run measured.
        n_reads: How many reads the run had.
        wall_s: How long it took.
        window_s: The length of a window, one of the stretches of time that the JSON file lists.
        sequences_per_hour: Reads per hour over the whole time, staging included.

    Returns:
        The JSON file.
    """
    path = _unused_path(folder, datetime.fromisoformat(telemetry.started))
    content = telemetry_file(
        telemetry,
        n_reads=n_reads,
        wall_s=wall_s,
        window_s=window_s,
        sequences_per_hour=sequences_per_hour,
    )
    with atomic_hdf5(
        path.with_suffix(".h5"), TELEMETRY_SEAL.seal_of, userblock_size=SEAL_BYTES
    ) as file:
        file.attrs["schema_version"] = content.schema_version
        file.attrs["origin_s"] = telemetry.origin_s
        file.attrs["started"] = telemetry.started
        _write_table(file, batch_frame(telemetry))
        _write_table(file.create_group("samples"), telemetry.samples)
        _write_table(file.create_group("host"), telemetry.host)
        _write_table(file.create_group("shards"), telemetry.shards)
        _write_stages(file.create_group("stages"), telemetry.stages)
    for alarm in content.summary.alarms:
        log.warning("%s", alarm)
    return write(path, content)


def _unused_path(folder: Path, started: datetime) -> Path:
    """Return the path of the JSON file of a run that started then.

    If two runs started in the same second, the second one gets a number.
    """
    stem = f"telemetry_{started:%Y%m%d_%H%M%S}"
    path = folder / f"{stem}.json"
    for number in itertools.count(1):
        if not path_exists(path):
            break
        path = folder / f"{stem}_{number}.json"
    return path


def _write_table(group: h5py.Group, table: pd.DataFrame) -> None:
    """Write each column of a table as a dataset.

    Categories are written as codes. The devices that the codes stand for are written as an
    attribute, because they differ from run to run. The other categories have fixed names.
    """
    devices = list(table.device.cat.categories) if "device" in table else []
    group.attrs["devices"] = json.dumps(devices)
    options: dict[str, Any] = {}
    if len(table) >= MIN_COMPRESSED_ROWS:
        options = {"compression": "gzip", "shuffle": True}
    for name, column in table.items():
        values = column
        if isinstance(column.dtype, pd.CategoricalDtype):
            values = column.cat.codes
        group.create_dataset(name, data=values.to_numpy(), **options)


def _write_stages(group: h5py.Group, stages: Sequence[StageTime]) -> None:
    """Write the stages as columns: an empty text, or NaN, for what is `None`."""
    for name in STAGE_COLUMNS:
        values = [getattr(stage, name) for stage in stages]
        if name in TEXT_STAGE_COLUMNS:
            group[name] = np.array([text or "" for text in values], STAGE_NAME_TYPE)
        else:
            group[name] = np.array(values, float)  # None becomes NaN


def read_telemetry(path: Path, root: Path | None = None) -> Telemetry:
    """Read a `telemetry_<time>.h5` back.

    Args:
        path: The file.
        root: The run directory, below which no link is followed.

    Raises:
        InputError: It is absent, is no telemetry file, or is not as it was written. The message
            says what is wrong with it.
        UnsafeFileError: It is no regular file, or leads to other files.
        UnreadableError: The system cannot read the file, so that nothing is known about it.
    """

    def load() -> Telemetry:
        """Read the telemetry file. It is called again if the system fails to read it."""
        remedy = "restore it from a copy, or repeat the run"
        with open_checked_hdf5(path, TELEMETRY_SEAL, root, remedy=remedy) as file:
            tables = {}
            for name, kind in TABLES.items():
                group = file.get(name, file)  # the batches lie at the root
                tables[name] = _read_table(group, kind)
            return Telemetry(
                batches=tables["batches"],
                samples=tables["samples"],
                host=tables["host"],
                shards=tables["shards"],
                stages=_read_stages(file["stages"]),
                origin_s=float(file.attrs["origin_s"]),
                started=str(file.attrs["started"]),
            )

    try:
        return read_with_retries(path, load)
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise InputError(f"not a readable telemetry file ({error})", file=path) from error


def _read_stages(group: h5py.Group) -> tuple[StageTime, ...]:
    """Read the stages back from their columns, which lie in one dataset each."""
    columns = [read_dataset(group[name]).tolist() for name in STAGE_COLUMNS]
    stages = []
    # The columns are in the order of the fields of `StageTime`.
    for values in zip(*columns, strict=True):
        stages.append(StageTime(*[_none_if_missing(value) for value in values]))
    return tuple(stages)


def _none_if_missing(value: Any) -> Any:
    """Return a text or a number of the file, and `None` for an empty text or NaN."""
    if isinstance(value, bytes):
        return value.decode() or None
    return statistics.none_if_nan(value)


def _read_table(group: h5py.Group, kind: type[Any]) -> pd.DataFrame:
    """Read the table of records of one kind back.

    Devices and encoders are stored as codes. They come back as categories with their names.

    Args:
        group: The part of the file with one dataset for each column.
        kind: The class of the records. Its fields are the columns.

    Raises:
        KeyError: A column is missing.
        TypeError: A column does not have numbers, or not whole ones where they are counts.
        ValueError: Columns do not fit each other.
    """
    columns: dict[str, Any] = {}
    for column_field in fields(kind):
        name = COLUMN_NAMES.get(column_field.name, column_field.name)
        if name == "batches":  # of a shard: they have a table of their own
            continue
        if name not in group and column_field.default is None:
            columns[name] = math.nan  # a file of an older version lacks it
            continue
        values = read_dataset(group[name])
        if name == "device":
            columns[name] = pd.Categorical.from_codes(values, json.loads(group.attrs["devices"]))
        elif name == "encoder":
            columns[name] = pd.Categorical.from_codes(values, pd.Index(ENCODER_NAMES))
        else:
            _require_numbers(name, values, are_whole=column_field.type is int)
            columns[name] = values
    return pd.DataFrame(columns)


def _require_numbers(name: str, values: Any, *, are_whole: bool) -> None:
    """Raise an error if a column does not have numbers.

    Args:
        name: The column.
        values: Its values.
        are_whole: The numbers must be whole.

    Raises:
        TypeError: They are not.
    """
    allowed_kinds = "iu" if are_whole else "iuf"  # of numpy: signed, unsigned, floating
    if len(values) and values.dtype.kind not in allowed_kinds:
        numbers = "whole numbers" if are_whole else "numbers"
        raise TypeError(f"{name}: not {numbers}")


def open_frame(path: Path, table: TableName = "batches") -> pd.DataFrame:
    """Open a table of a telemetry file with pandas.

    Args:
        path: The `.h5` file, or a run directory, whose newest telemetry is taken.
        table: The table.

    Returns:
        The table, with devices, encoders and queue states by name.

    Raises:
        InputError: There is no such file, or it cannot be read.
    """
    if is_folder(path):
        telemetry = read_telemetry(latest(path), path)
    else:
        # A link is followed here, because the user has named this file. Links that lie within a
        # run directory are refused, because somebody else may have put them there.
        telemetry = read_telemetry(path.resolve())
    if table == "stages":
        return pd.DataFrame(list(telemetry.stages))
    frame: pd.DataFrame = getattr(telemetry, table)
    if table == "batches":
        frame = batch_frame(telemetry)
    category_columns = frame.select_dtypes("category").columns
    return frame.astype(dict.fromkeys(category_columns, "object"))


def latest(folder: Path) -> Path:
    """Return the newest `telemetry_<time>.h5` in a run directory or in its `telemetry/`.

    Raises:
        InputError: There is none.
        UnreadableError: The system cannot list a folder, so that nothing is known about it.
    """
    in_run = list_folder(folder, "telemetry_*.h5")
    in_telemetry = list_folder(folder / "telemetry", "telemetry_*.h5")
    files = sorted([*in_run, *in_telemetry])  # names have the time, so the newest is the last
    if not files:
        raise InputError(
            "no telemetry_<time>.h5 here; give a run directory or the file itself", file=folder
        )
    return files[-1]
