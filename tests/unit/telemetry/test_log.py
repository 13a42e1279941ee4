"""Telemetry files: the names other tools read, every column back as it was, and a size that stays small."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest

from virnuc_core.errors import InputError
from virnuc_core.telemetry import log as module
from virnuc_core.telemetry.log import latest, open_frame, read_telemetry, write_telemetry
from virnuc_core.telemetry.statistics import record_table
from virnuc_core.telemetry.tables import (
    DeviceSample,
    HostSample,
    ShardDone,
    StageClock,
    StageTime,
)

from .measurements import batch, shard, telemetry_of

STARTED = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
DEVICES = ("GPU-a", "GPU-b")


def samples() -> pd.DataFrame:
    return record_table(
        DeviceSample,
        [
            DeviceSample(100 + i / 2, d, 90.0 + i, 1 << 30, 400.0, 60.0)
            for i in range(20)
            for d in DEVICES
        ],
        DEVICES,
    )


NO_HOST = record_table(HostSample, [])


def write(
    folder: Path,
    shards: list[ShardDone],
    samples: pd.DataFrame,
    *,
    host: pd.DataFrame = NO_HOST,
    stages: tuple[StageTime, ...] = (),
    origin_s: float = 0.0,
    n_reads: int,
    wall_s: float,
) -> Path:
    """The `.h5` file of what was measured; the JSON lies beside it."""
    telemetry = telemetry_of(shards, samples, host, stages, origin_s=origin_s, started=STARTED)
    return write_telemetry(
        folder, telemetry, n_reads=n_reads, wall_s=wall_s, window_s=60.0
    ).with_suffix(".h5")


def written(folder: Path) -> Path:
    shards = [
        shard(0, [batch(100 + i, index=i, wait_ms=60.0 * (i == 3)) for i in range(5)]),
        shard(1, [batch(101, device="GPU-b", encoder="dnabert_s", device_ms=None)], device="GPU-b"),
    ]
    clock = StageClock()
    clock.add("ESM-2", 4.0, (100.0, 104.0))
    clock.fuse("Feature Merging", "ESM-2")
    host = record_table(
        HostSample, [HostSample(100.0, 20.0, 1 << 20), HostSample(101.0, 40.0, 1 << 21)]
    )
    return write(
        folder,
        shards,
        samples(),
        host=host,
        stages=clock.times(),
        origin_s=100.0,
        n_reads=50,
        wall_s=10.0,
    )


def test_names_that_other_tools_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert path.name == "telemetry_20260301_120000.h5"
    body = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert {"schema_version", "summary", "windows", "per_batch_metrics"} <= body.keys()
    first_batch = body["per_batch_metrics"][0]
    assert {
        "batch_idx",
        "timestamp",
        "tokens_per_sec",
        "sequences_per_sec",
        "gpu_util",
        "packing_efficiency",
    } <= set(first_batch)
    assert {"wait_ms", "arrived_s", "queue_state", "padding_waste", "device", "encoder"} <= set(
        first_batch
    )
    assert {"gpu_util_avg", "gpu_util_min", "mem_used_peak", "sample_count"} <= set(
        body["summary"]["gpus"]["GPU-a"]
    )
    loader = body["summary"]["dataloader"]
    assert {
        "avg_wait_time_ms",
        "p95_wait_time_ms",
        "avg_packing_efficiency",
        "pct_starved",
    } <= loader.keys()
    assert loader["pct_starved"] == pytest.approx(100 / 6)
    with h5py.File(path, "r") as file:
        assert {"batch_idx", "tokens_per_sec", "gpu_util", "packing_efficiency"} <= set(file)
        assert file["packing_efficiency"][0] == pytest.approx(0.9)
        assert file["gpu_util"][0] == 90.0


def test_the_timestamp_of_a_batch_is_a_unix_time(tmp_path: Path) -> None:
    """It is the time of the launch, as `time.time()` would have told it."""
    path = written(tmp_path)
    body = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert body["schema_version"] == 2
    # The first batch is launched at the run's start, and the next one a second later.
    started_s = STARTED.timestamp()
    for number, batch_record in (
        (0, body["per_batch_metrics"][0]),
        (-1, body["per_batch_metrics"][-1]),
    ):
        assert batch_record["timestamp"] == started_s + [0, 4][number]
        assert batch_record["seconds_since_start"] == [0, 4][number]
    with h5py.File(path, "r") as file:
        assert file["timestamp"][:].tolist() == [started_s + s for s in (0, 1, 1, 2, 3, 4)]
        assert file["seconds_since_start"][0] == 0.0
    assert open_frame(path).timestamp[0] == started_s


def test_a_file_of_the_first_version_is_computed_again_as_it_was(tmp_path: Path) -> None:
    telemetry = read_telemetry(written(tmp_path))
    old = module.telemetry_file(telemetry, n_reads=50, wall_s=10.0, schema_version=1)
    assert old.schema_version == 1
    assert [old.per_batch_metrics[0]["timestamp"], old.per_batch_metrics[-1]["timestamp"]] == [0, 4]
    assert "seconds_since_start" not in old.per_batch_metrics[0]
    assert {window.cpu_percent for window in old.windows} == {None}


def test_a_table_of_an_older_version_has_unknown_numbers_where_columns_lack(tmp_path: Path) -> None:
    path = written(tmp_path)
    new_columns = ("busiest_core_percent", "disk_read_bytes", "disk_written_bytes")
    old_path = tmp_path / "old.h5"
    with h5py.File(path) as file, h5py.File(old_path, "w") as old_file:  # without a seal
        old_file.attrs.update(file.attrs)
        for name in file:
            file.copy(name, old_file)
        for name in new_columns:
            del old_file["host"][name]
    host = open_frame(old_path, "host")
    assert host.cpu_percent.tolist() == [20.0, 40.0]
    assert host[list(new_columns)].isna().to_numpy().all()


def test_windows_hold_the_use_of_the_cpu_beside_that_of_the_gpus(tmp_path: Path) -> None:
    body = json.loads(written(tmp_path).with_suffix(".json").read_text(encoding="utf-8"))
    (window,) = body["windows"]
    assert window["cpu_percent"] == pytest.approx(30.0)
    assert window["gpu_util"].keys() == {"GPU-a", "GPU-b"}


def test_everything_comes_back_as_it_was(tmp_path: Path) -> None:
    telemetry = read_telemetry(written(tmp_path))
    assert telemetry.batches.groupby("device", observed=True).size().to_dict() == {
        "GPU-a": 5,
        "GPU-b": 1,
    }
    assert telemetry.batches.launched_s.tolist() == sorted([100, 101, 102, 103, 104, 101])
    assert np.isnan(telemetry.batches.device_ms).sum() == 1
    pd.testing.assert_frame_equal(telemetry.samples, samples())
    assert telemetry.shards.esm2_s.tolist() == [2.0, 2.0]
    assert [(s.name, s.seconds, s.fused_into) for s in telemetry.stages] == [
        ("ESM-2", 4.0, None),
        ("Feature Merging", None, "ESM-2"),
    ]
    assert telemetry.origin_s == 100.0


def test_the_same_questions_can_be_asked_of_a_finished_run(tmp_path: Path) -> None:
    telemetry = read_telemetry(written(tmp_path))
    assert telemetry.get_average_packing_efficiency() == pytest.approx(90.0)
    assert telemetry.get_average_gpu_utilization() == pytest.approx(94.0)
    assert telemetry.get_throughput()["tokens_per_sec"] == pytest.approx(5400 / 4.1)
    assert telemetry.get_dataloader_statistics()["max_wait_time_ms"] == 60.0


def test_frames_for_pandas(tmp_path: Path) -> None:
    written(tmp_path / "telemetry")
    frame = open_frame(tmp_path)
    assert set(frame["device"]) == set(DEVICES)
    assert frame.groupby("encoder")["tokens"].sum().to_dict() == {"dnabert_s": 900, "esm2": 4500}
    assert frame["queue_state"].value_counts().to_dict() == {"full": 5, "starved": 1}
    assert open_frame(tmp_path, "samples").groupby("device")["utilisation"].mean()[
        "GPU-b"
    ] == pytest.approx(99.5)
    assert len(open_frame(tmp_path, "host")) == 2
    assert open_frame(tmp_path, "shards")["device"].tolist() == ["GPU-b", "GPU-a"]
    assert open_frame(tmp_path, "stages")["name"].tolist() == ["ESM-2", "Feature Merging"]


def test_a_run_that_launched_nothing_is_written_and_read(tmp_path: Path) -> None:
    path = write(tmp_path, [], record_table(DeviceSample, []), n_reads=0, wall_s=0.0)
    body = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert body["per_batch_metrics"] == []
    assert body["summary"]["sequences_per_hour"] is None
    telemetry = read_telemetry(path)
    assert telemetry.get_average_packing_efficiency() is None
    assert telemetry.get_average_gpu_utilization() is None
    assert len(open_frame(path)) == 0


def test_a_second_run_in_the_same_second_keeps_the_first(tmp_path: Path) -> None:
    first_file, second = written(tmp_path), written(tmp_path)
    assert first_file != second
    assert first_file.exists()
    assert latest(tmp_path) == second


def test_alarms_are_said_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    idle = record_table(
        DeviceSample, [DeviceSample(float(i), "GPU-a", 20.0, None, None, None) for i in range(40)]
    )
    write(tmp_path, [shard(0, [batch(float(i)) for i in range(40)])], idle, n_reads=1, wall_s=40.0)
    assert "gpu utilisation of GPU-a below 50 %" in caplog.text


@pytest.mark.parametrize("content", [b"", b"not hdf5 at all"])
def test_a_file_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "telemetry_x.h5"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"telemetry_x\.h5"):
        read_telemetry(path)


def test_no_telemetry_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no telemetry"):
        open_frame(tmp_path)


def test_a_foreign_hdf5_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.h5"
    with h5py.File(path, "w") as file:
        file["x"] = [1]
    with pytest.raises(InputError, match="not a readable telemetry file"):
        read_telemetry(path)


@pytest.mark.slow
def test_six_million_reads_stay_small(tmp_path: Path) -> None:
    """A run of 6 M reads launches about 30,000 batches; ten hours of two devices are 144,000 samples."""
    dice = np.random.default_rng(0)
    waits, tokens = dice.exponential(0.5, 30_000), dice.integers(15_000, 16_384, 30_000)
    batches = [
        batch(1.2 * i, index=i, tokens=int(tokens[i]), wait_ms=float(waits[i]))
        for i in range(30_000)
    ]
    levels = dice.integers(80, 100, 144_000)
    table = record_table(
        DeviceSample,
        [
            DeviceSample(i // 2 * 0.5, DEVICES[i % 2], float(levels[i]), 9 << 30, 650.0, 70.0)
            for i in range(144_000)
        ],
    )
    path = write(tmp_path, [shard(0, batches)], table, n_reads=6_000_000, wall_s=36_000.0)
    assert path.with_suffix(".json").stat().st_size < 16_000_000
    assert path.stat().st_size < 8_000_000
    body = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert body["batches"] == 30_000
    assert body["per_batch_metrics_every"] == 2
    assert len(body["per_batch_metrics"]) <= module.JSON_BATCHES
    assert len(open_frame(path)) == 30_000
