"""The step that runs the baseline, which is v1.0 or the original algorithm, or takes its recorded
results.
"""

from virnuc.tasks.artifacts import progress_artifact
from virnuc.tasks.device_slots import device_slots
from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.retries import first_attempt
from virnuc.tasks.task import retrying_task
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
) -> Outcome[BaselineSummary]:
    """Measure the baseline's time and write its result files.

    A baseline of the same reads, weights and devices that is already there is used.

    Args:
        run: The run directory of the baseline.
        bench: The reads, models and devices.
        spec: Which baseline, and how many reads of it.
        label: The name of the sample, for names in the UI.
        force: Measure again.

    Returns:
        An outcome with the times and the numbers of reads, named `Reused` if they were there.
    """
    if force and first_attempt():
        # Old results are removed first. If the measurement fails, they must not be taken for new.
        with run_lock(run.root):
            discard(run.root, *RUN_FILES)
    progress = progress_artifact(f"progress-{label}-baseline", f"Baseline {spec.name} of {label}")
    with device_slots(resolve(bench.devices)), progress as show:
        if spec.source == "recorded" and spec.results is not None:
            # Nothing is run: the result files of an earlier run are taken over.
            take_results(spec.results, run, OrfStore.open(bench.store))
        summary = run_baseline(
            run, bench.store, bench.models, bench.devices, spec, on_progress=show
        )
        show(1.0)
    return completed(
        summary, messages.baseline_message(summary, spec.results), reused=summary.reused
    )
