"""Commits: pairs of runs with and without them, for the profiles that ask what they cost."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from tasks.artifacts import publish_table
from tasks.embed import first_attempt
from tasks.guard import device_slots
from tasks.logs import core_logs
from tasks.progress import ProgressArtifact
from tasks.retries import POLICY
from tasks.states import done
from tasks.tables import overhead_rows, overhead_sentence
from virnuc_core.config import Devices, EngineSpec
from virnuc_core.engine.devices import resolve
from virnuc_core.measure.overhead import measure_overhead
from virnuc_core.report.overhead import OverheadFile


@task(name="commits", task_run_name="commits of {label} on {devices}", cache_policy=NO_CACHE, **POLICY)
def overhead(
    out: Path, *, store: Path, models: Path, devices: Devices, engine: EngineSpec, label: str, force: bool = False
) -> State[OverheadFile]:
    """`checkpoint_overhead.json` of a validate directory; a measurement of the same work is used as it is."""
    progress = ProgressArtifact(f"progress-{label}-commits", f"Runs with and without commits of {label}")
    with core_logs(), device_slots(resolve(devices)), progress:
        found = measure_overhead(
            out,
            store=store,
            models=models,
            devices=devices,
            engine=engine,
            force=force and first_attempt(),
            on_run=progress.show,
        )
    publish_table(f"commits-{label}", overhead_rows(found), f"What commits cost, {label} on {devices}")
    return done(found, overhead_sentence(found))
