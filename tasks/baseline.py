"""Baseline."""

from prefect.client.schemas.objects import State

from virnuc.tasks.artifacts import progress_artifact
from virnuc.tasks.server_connection import device_slots
from virnuc.tasks.task import completed, first_attempt, retrying_task
from virnuc_core.baseline.run import run_baseline
from virnuc_core.engine.devices import resolve
from virnuc_core.profiles import BaselineSpec
from virnuc_core.reads.store import OrfStore
from virnuc_core.report import messages
from virnuc_core.report.result_tables import take_results
from virnuc_core.rundir import RUN_FILES, RunDir, discard, run_lock
from virnuc_core.tools.bench import Bench
from virnuc_core.validation import BaselineSummary


@retrying_task("baseline", "baseline {spec.name} on {bench.devices}")
def measure_baseline(
    run: RunDir, bench: Bench, spec: BaselineSpec, *, label: str, force: bool = False
) -> State[BaselineSummary]:
    """The baseline's time and result files in `run`; one of the same reads, weights and devices is used as it is."""
    if force and first_attempt():
        with run_lock(run.root):
            discard(
                run.root, *RUN_FILES
            )  # an error stops here: what stays must not be taken for the new one's
    progress = progress_artifact(f"progress-{label}-baseline", f"Baseline {spec.name} of {label}")
    with device_slots(resolve(bench.devices)), progress as show:
        if spec.source == "recorded" and spec.results is not None:
            take_results(spec.results, run, OrfStore.open(bench.store))
        summary = run_baseline(
            run, bench.store, bench.models, bench.devices, spec, on_progress=show
        )
        show(1.0)
    return completed(summary, messages.baseline(summary, spec.results), reused=summary.reused)
