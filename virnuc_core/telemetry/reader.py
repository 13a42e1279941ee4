"""Telemetry files read back, as the tables they were written from or as DataFrames with everything by name."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

import h5py
import pandas as pd

from virnuc_core.errors import InputError
from virnuc_core.telemetry.log import TABLES, Telemetry, batch_frame
from virnuc_core.telemetry.statistics import known
from virnuc_core.telemetry.tables import ENCODERS, StageTime


def read_telemetry(path: Path) -> Telemetry:
    """Read `telemetry_<time>.h5` back; `InputError` names the file and what is wrong with it."""
    try:
        with h5py.File(path, "r") as file:
            tables = {
                name: _read_table(file.get(name, file), kind) for name, kind in TABLES.items()
            }  # batches: the root
            columns = [file["stages"][field.name][:].tolist() for field in fields(StageTime)]
            stages = tuple(StageTime(*map(_told, stage)) for stage in zip(*columns, strict=True))
            started, origin_s = str(file.attrs["started"]), float(file.attrs["origin_s"])
            return Telemetry(**tables, stages=stages, origin_s=origin_s, started=started)
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise InputError(f"not a readable telemetry file ({error})", file=path) from error


def _told(value: Any) -> Any:
    """A text or a number of the file; `None` for an empty text or NaN."""
    return value.decode() or None if isinstance(value, bytes) else known(value)


def _read_table(group: h5py.Group, kind: type[Any]) -> pd.DataFrame:
    categories = {"device": json.loads(group.attrs["devices"]), "encoder": ENCODERS}
    columns: dict[str, Any] = {field.name: group[field.name][:] for field in fields(kind) if field.name != "batches"}
    for name in categories.keys() & columns.keys():
        columns[name] = pd.Categorical.from_codes(columns[name], categories[name])
    return pd.DataFrame(columns)


def open_frame(
    path: Path, table: Literal["batches", "samples", "host", "shards", "stages"] = "batches"
) -> pd.DataFrame:
    """A table of a telemetry file as a pandas DataFrame, with devices, encoders and states by name.

    `path` is the `.h5` file, or a run directory, whose newest telemetry is taken. Raises `InputError`."""
    measured = read_telemetry(latest(path) if path.is_dir() else path)
    if table == "stages":
        return pd.DataFrame([asdict(stage) for stage in measured.stages])
    found = batch_frame(measured) if table == "batches" else getattr(measured, table)
    return found.astype(dict.fromkeys(found.select_dtypes("category"), "object"))


def latest(folder: Path) -> Path:
    """The newest `telemetry_<time>.h5` in a run directory or its `telemetry/`; `InputError` when there is none."""
    found = sorted([*folder.glob("telemetry_*.h5"), *(folder / "telemetry").glob("telemetry_*.h5")])
    if not found:
        raise InputError("no telemetry_<time>.h5 here; give a run directory or the file itself", file=folder)
    return found[-1]
