"""Baseline: the original algorithm on the same machine and reads, as the thing to beat and the oracle of labels."""

from __future__ import annotations

import shutil
from pathlib import Path

from prefect.client.schemas.objects import State

from tasks.guard import device_slots
from tasks.progress import ProgressArtifact
from tasks.step import done, first_attempt, step
from virnuc_core.baseline.run import BaselineProgress, run_baseline
from virnuc_core.config import BaselineSpec, Devices
from virnuc_core.engine.devices import resolve
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import BaselineSummary


@step("baseline", "baseline {spec.name} on {devices}")
def baseline(
    run: RunDir, *, store: Path, models: Path, devices: Devices, spec: BaselineSpec, label: str, force: bool = False
) -> State[BaselineSummary]:
    """The baseline's time and result files in `run`; one of the same reads, weights and devices is used as it is."""
    if force and first_attempt():
        start_over(run)
    progress = ProgressArtifact(f"progress-{label}-baseline", f"Baseline {spec.name} of {label}")

    def show(so_far: BaselineProgress) -> None:
        progress.show(so_far.rows / so_far.total_rows if so_far.total_rows else 1.0)

    with device_slots(resolve(devices)), progress:
        summary = run_baseline(run, store, models, devices, spec, on_progress=show)
        progress.show(1.0)
    return done(summary, describe(summary), reused=summary.reused)


def start_over(run: RunDir) -> None:
    """Remove an earlier baseline. Errors: `OSError`; what cannot be removed must not be taken for the new one's."""
    if run.root.exists():
        shutil.rmtree(run.root)


def describe(summary: BaselineSummary) -> str:
    """What the baseline's time is and how it is known."""
    if summary.source == "recorded":
        return f"{summary.name}: {summary.wall_s:,.1f} s, recorded in the profile"
    if summary.subset is None:
        return f"{summary.name}: {summary.wall_s:,.1f} s measured on all reads"
    return (
        f"{summary.name}: {summary.measured_s:,.1f} s measured on {summary.subset.reads:,} reads, "
        f"{summary.wall_s:,.1f} s scaled by tokens"
    )
