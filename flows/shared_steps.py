"""Steps that several flows take: staging the reads of a run, and publishing a prediction."""

from virnuc.flows.settings.shared import RunSettings
from virnuc.tasks.artifacts import publish_table
from virnuc.tasks.events import emit
from virnuc.tasks.run_tables import fate_rows
from virnuc.tasks.staging import stage
from virnuc_core.pipeline import stage_spec
from virnuc_core.reads.stage import StageSummary
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunSummary


def stage_reads_of(settings: RunSettings, label: str) -> StageSummary:
    """Stage the reads of a flow in its output directory.

    Args:
        settings: The settings of the flow.
        label: The name of the sample, for names in the UI.

    Raises:
        InputError: The reads cannot be used.
    """
    spec = stage_spec(settings, settings.models)
    store = RunDir(settings.out).store
    return stage(spec, store, label=label, force=settings.force).result()


def publish_prediction(run: RunDir, label: str, summary: RunSummary, staging: StageSummary) -> None:
    """Show in Prefect what became of the reads of a run, and send the event `prediction.done`.

    Without a server nothing happens.

    Args:
        run: The run directory.
        label: The name of the sample, for names in the UI.
        summary: The summary of the run. Its fates are the numbers of reads by what became of them.
        staging: The summary of the staging, which has remarks on the reads.
    """
    description = f"What became of the reads of {label}: {run.root}"
    publish_table(f"reads-{label}", fate_rows(summary, staging.tally), description)
    payload = {
        "reads": summary.n_reads,
        "viral": summary.fates.get("viral", 0),
        "run": str(run.root.absolute()),
    }
    emit("prediction.done", f"prediction.{label}", label, payload)
