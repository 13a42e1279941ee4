"""Validation and scaling on nodes that are Dask workers of this machine."""

from __future__ import annotations

import errno
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prefect.artifacts import Artifact

from tests.failing_files import OPEN, failing_calls, words_of
from virnuc.flows.prefect_flows.scale import scale
from virnuc.flows.prefect_flows.validate import validate
from virnuc.tasks.artifacts import host_key
from virnuc_core.config import Devices
from virnuc_core.errors import ConfigError, DeviceError
from virnuc_core.pipeline import read_summary
from virnuc_core.report.build import read_report
from virnuc_core.report.verify import verify_report
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import Device

from .processes import PATIENCE_S, ROOT, VIRNUC

pytest.importorskip("distributed")
pytestmark = [pytest.mark.usefixtures("prefect_backend"), pytest.mark.slow]


def devices(folder: Path) -> set[str]:
    summary = read_summary(RunDir(folder))
    assert summary is not None
    return {device.id for device in summary.devices}


def test_a_validation_on_two_nodes_is_judged_like_any_other(
    tmp_path: Path, few_reads: Path, models: Path
) -> None:
    out_dir = tmp_path / "validation"
    arguments: dict[str, Any] = {
        "reads": [str(few_reads)],
        "out": out_dir,
        "models": models,
        "profile": "ci-smoke",
    }
    arguments |= {"devices": "cpu", "cluster": "local:2"}
    with pytest.raises(ConfigError, match="tune_rounds"):
        validate(**arguments, tune_rounds=1)
    state = validate(**arguments, return_state=True)
    assert (state.message or "").startswith("1 of 1 asked criteria met")
    assert {name.partition("@")[2] for name in devices(out_dir / "devices-2")} == {
        "local-0",
        "local-1",
    }
    assert devices(out_dir / "devices-1") < devices(out_dir / "devices-2")
    report = read_report(out_dir / "report" / "report.json")
    assert [check.verdict for check in report.checks if check.id == "same_bytes"] == ["pass"]
    assert verify_report(out_dir).ok
    table = Artifact.get(host_key("devices-few-cpu-2"))
    assert table is not None
    rows = json.loads(str(table.data))
    assert {row["node"] for row in rows} <= {"local-0", "local-1"}
    assert sum(int(row["shards"]) for row in rows) == len(
        [*(out_dir / "devices-2" / "shards").glob("0*.h5")]
    )


def test_scaling_goes_node_by_node_without_a_device_here(
    tmp_path: Path, few_reads: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_here(_: Devices) -> tuple[Device, ...]:
        raise DeviceError("no such device")

    monkeypatch.setattr("virnuc.flows.machines.resolve", none_here)
    out_dir = tmp_path / "curve"
    arguments: dict[str, Any] = {
        "reads": [str(few_reads)],
        "out": out_dir,
        "models": models,
        "devices": "cpu:2",
    }
    arguments |= {"cluster": "local:2", "transfer": True}
    scale(**arguments, return_state=True)
    assert len(devices(out_dir / "devices-1")) == 1
    assert {name.partition("@")[2] for name in devices(out_dir / "devices-2")} == {"local-0"}
    assert {name.partition("@")[2] for name in devices(out_dir / "devices-4")} == {
        "local-0",
        "local-1",
    }
    report = read_report(out_dir / "report" / "report.json")
    assert any(
        "this machine has no device as the nodes have" in warning for warning in report.warnings
    )
    assert verify_report(out_dir).ok


def test_a_fault_of_the_disk_here_is_not_a_lost_node(
    tmp_path: Path, few_reads: Path, models: Path
) -> None:
    out_dir = tmp_path / "run"
    # Nodes without a shared file system send their shards, which are written here.
    words = ["predict", str(few_reads), "-o", str(out_dir), "--models", str(models)]
    words += ["--devices", "cpu:1", "--cluster", "local:1", "--transfer", "--no-prefect"]
    process = subprocess.run(
        [*VIRNUC, *words],
        env=failing_calls(f"{out_dir}/shards/.00", errno.ESTALE, OPEN),
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE_S,
        check=False,
    )
    assert process.returncode == 1
    last_line = process.stderr.splitlines()[-1]
    assert last_line.startswith(f"virnuc: {out_dir}/shards/00")
    assert words_of(errno.ESTALE) in last_line
    assert "is lost" not in process.stderr
