"""What a run writes of `--devices auto` where that takes no GPU: on the terminal and in its files."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path

import pynvml
import pytest

from tests.fake_gpus import FakeGpus, build_fake_nvml
from virnuc.flows.prefect_flows.validate import validate
from virnuc_core import gpus
from virnuc_core.gpus import Nvml
from virnuc_core.report.build import read_report
from virnuc_core.runfiles import version_of

from .processes import PATIENCE_S, ROOT, VIRNUC

NO_CUDA = f"torch {version_of('torch')} is built without CUDA"


def run_virnuc(environment: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, and return what it printed."""
    return subprocess.run(
        [*VIRNUC, *map(str, words)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )


@pytest.mark.parametrize(
    ("n_gpus", "visible", "absence"),
    [
        # the sentence of each reason is also in tests/unit/test_gpus.py
        pytest.param(None, None, "(libnvidia-ml.so.1 is not installed)", marks=pytest.mark.slow),
        pytest.param(
            0,
            None,
            "the NVIDIA driver 570.86.15 works and reports 0 GPUs",
            marks=pytest.mark.slow,
        ),
        (2, "", "CUDA_VISIBLE_DEVICES='' hides all 2 GPUs of this machine"),
        pytest.param(1, None, NO_CUDA, marks=pytest.mark.slow),
    ],
)
def test_why_auto_takes_a_core_is_said_once_and_recorded(
    n_gpus: int | None,
    visible: str | None,
    absence: str,
    few_reads: Path,
    models: Path,
    tmp_path: Path,
) -> None:
    if n_gpus is None and not Nvml().search().absence.startswith("this machine has no"):
        pytest.skip("this machine has a driver")
    if absence == NO_CUDA and Nvml().torch_cuda():
        pytest.skip("this torch has CUDA")
    names = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    if n_gpus is not None:
        build_fake_nvml(tmp_path)
        environment |= {"LD_LIBRARY_PATH": str(tmp_path), "FAKE_GPUS": str(n_gpus)}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible

    out_dir = tmp_path / "run"
    words = (
        "predict",
        few_reads,
        "-o",
        out_dir,
        "--models",
        models,
        "--no-prefect",
        "--no-progress",
    )
    printed = run_virnuc(environment, *words)
    text = " ".join((printed.stdout + printed.stderr).split())
    assert text.count("--devices auto takes one CPU core") == 1
    assert absence in text

    summary = json.loads((out_dir / "summary.json").read_text())
    (warning,) = summary["warnings"]
    assert warning.startswith("--devices auto takes one CPU core")
    assert absence in warning


def hidden_gpus(folder: Path) -> dict[str, str]:
    """Return the variables of a machine with a driver for two GPUs, which both are hidden."""
    build_fake_nvml(folder)
    return os.environ | {
        "LD_LIBRARY_PATH": str(folder),
        "FAKE_GPUS": "2",
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.mark.slow
def test_a_device_that_the_user_names_needs_no_reason(
    few_reads: Path, models: Path, tmp_path: Path
) -> None:
    environment = hidden_gpus(tmp_path)
    out_dir = tmp_path / "run"
    words = ("predict", few_reads, "-o", out_dir, "--models", models, "--no-prefect")
    printed = run_virnuc(environment, *words, "--no-progress", "--devices", "cpu:1")
    assert "CUDA_VISIBLE_DEVICES" not in printed.stdout + printed.stderr
    assert not json.loads((out_dir / "summary.json").read_text())["warnings"]


@pytest.mark.usefixtures("prefect_backend", "forked_workers")
def test_the_report_of_a_validation_says_why_auto_took_a_core(
    few_reads: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absence = "CUDA_VISIBLE_DEVICES='' hides all 2 GPUs of this machine"
    monkeypatch.setattr(gpus, "NVML", FakeGpus(absence=absence))
    state = validate(
        reads=[str(few_reads)],
        out=tmp_path,
        models=models,
        devices="auto",
        profile="ci-smoke",
        return_state=True,
    )
    assert state.is_completed(), state.message
    report = read_report(tmp_path / "report" / "report.json")
    (warning,) = [warning for warning in report.warnings if absence in warning]
    assert warning.startswith("devices-1: --devices auto takes one CPU core")


@pytest.mark.slow
def test_why_auto_takes_cores_of_a_node_is_said_with_its_machine(
    few_reads: Path, models: Path, tmp_path: Path
) -> None:
    environment = hidden_gpus(tmp_path)
    out_dir = tmp_path / "run"
    words = ("predict", few_reads, "-o", out_dir, "--models", models, "--no-prefect")
    printed = run_virnuc(environment, *words, "--no-progress", "--cluster", "local:1")
    text = " ".join((printed.stdout + printed.stderr).split())
    assert text.count("--devices auto takes CPU cores of the nodes") == 1
    (warning,) = json.loads((out_dir / "summary.json").read_text())["warnings"]
    assert f"{platform.node()}: CUDA_VISIBLE_DEVICES='' hides all 2 GPUs" in warning


@pytest.mark.slow
def test_nodes_compute_on_cores_beside_a_driver_that_does_not_work(
    few_reads: Path, models: Path, tmp_path: Path
) -> None:
    build_fake_nvml(tmp_path)
    fault = str(pynvml.NVML_ERROR_UNKNOWN)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "FAKE_INIT": fault}
    words = ("predict", few_reads, "--models", models, "--no-prefect", "--cluster", "local:1")
    run_virnuc(environment, *words, "-o", tmp_path / "cores", "--devices", "cpu:1")
    with pytest.raises(subprocess.CalledProcessError) as raised:
        run_virnuc(environment, *words, "-o", tmp_path / "auto")
    assert raised.value.returncode == 4
    assert "Unknown Error; look for NVRM" in " ".join(raised.value.stderr.split())
