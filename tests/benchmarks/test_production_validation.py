"""The production load against its profile: six million reads on two GPUs within ten hours.

`VIRNUC_BENCH_READS` names the reads, `VIRNUC_MODELS` the weights; hours long, so nothing is simulated here.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from virnuc_core.profiles import load_profile
from virnuc_core.report.build import read_report
from virnuc_core.rundir import RunDir

from .conftest import devices, needs_gpus, virnuc

PROFILE = "production-6m"


def test_production_workload(tmp_path: Path) -> None:
    needs_gpus(2)
    values = [os.environ.get(name) for name in ("VIRNUC_BENCH_READS", "VIRNUC_MODELS")]
    if not all(values):
        pytest.skip(
            "VIRNUC_BENCH_READS and VIRNUC_MODELS name the reads and the weights of a production run"
        )
    assert load_profile(PROFILE).projection_reads
    words = (
        "validate",
        "--profile",
        PROFILE,
        "--reads",
        values[0],
        "--models",
        values[1],
        "--devices",
        devices(2),
    )
    virnuc(*words, "-o", tmp_path / "out", "--no-fail-on-criteria")
    report = read_report(RunDir(tmp_path / "out").report / "report.json")
    assert not report.failed_criteria, [criterion.title for criterion in report.failed_criteria]
