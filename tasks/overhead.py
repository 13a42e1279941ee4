"""Overhead."""

from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import State

from virnuc.tasks.artifacts import host_key, progress_artifact, publish_table
from virnuc.tasks.server_connection import device_slots
from virnuc.tasks.task import completed, first_attempt, retrying_task
from virnuc_core.config import EngineSpec
from virnuc_core.engine.devices import resolve
from virnuc_core.report import messages
from virnuc_core.report.views.tools import overhead_rows
from virnuc_core.tools.bench import Bench, measure_overhead
from virnuc_core.validation import OverheadFile


@retrying_task("overhead", "overhead of {label} on {bench.devices}")
def measure_costs(
    out: Path, bench: Bench, engine: EngineSpec, *, label: str, force: bool = False, **asked: Any
) -> State[OverheadFile]:
    """`checkpoint_overhead.json` of a validate directory; a measurement of the same work is used as it is."""
    progress = progress_artifact(
        f"progress-{label}-overhead", f"Runs with and without what costs, of {label}"
    )
    with device_slots(resolve(bench.devices)), progress as show:
        found = measure_overhead(
            out, bench, engine, force=force and first_attempt(), on_run=show, **asked
        )
    rows = overhead_rows(found.pairs)
    publish_table(
        host_key(f"overhead-{label}"), rows, f"What these cost, {label} on {bench.devices}"
    )
    return completed(found, messages.overhead(found.pairs))
