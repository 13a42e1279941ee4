"""A whole validation without Prefect: the steps of the flow, called as functions."""

from __future__ import annotations

import sys
from pathlib import Path

from virnuc_core.baseline.run import run_baseline
from virnuc_core.config import ClassifySpec, Devices
from virnuc_core.encoders.checkpoint import shape_of
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.engine.devices import resolve
from virnuc_core.pipeline import classify, stage_reads
from virnuc_core.profiles import load_profile
from virnuc_core.reads.stage import StageSpec
from virnuc_core.report.build import write_report
from virnuc_core.report.compare import compare_runs
from virnuc_core.report.model import Report
from virnuc_core.report.regression import HISTORY
from virnuc_core.rundir import RunDir
from virnuc_core.validation import record_validation

PROFILE = "ci-smoke"


def validate(
    reads: Path, models: Path, out: Path, devices_text: str, shard_tokens: int | None = None
) -> Report:
    """Stage, baseline, a run on one device and one on all, comparisons and report in `out`; its report."""
    profile, devices = load_profile(PROFILE), Devices.parse(devices_text)
    engine = profile.engine.model_copy(
        update={"shard_tokens": shard_tokens or profile.engine.shard_tokens}
    )
    store = RunDir(out).store
    staging = stage_reads(
        StageSpec(reads=(str(reads),), model_length=shape_of(models, HeadShape).model_length), store
    )
    all_devices = ClassifySpec(models=models, devices=devices, engine=engine)
    record_validation(out, all_devices, profile, staging, resolve(devices))
    slow = run_baseline(RunDir(out / "baseline"), store, models, devices, profile.baseline)
    names = tuple(f"devices-{count}" for count in sorted({1, len(devices.ids)}))
    for name in names:
        fewer_devices = Devices(kind=devices.kind, ids=devices.ids[: int(name.rpartition("-")[2])])
        classify(
            RunDir(out / name), staging, all_devices.model_copy(update={"devices": fewer_devices})
        )
    compare_runs(out, names, tolerance=profile.score_tolerance, subset=slow.subset is not None)
    return write_report(out, profile, out.parent / HISTORY)


if __name__ == "__main__":
    validate(*map(Path, sys.argv[1:4]), sys.argv[4])
