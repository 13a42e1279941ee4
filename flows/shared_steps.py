"""Steps that several flows take: staging the reads of a run, and publishing a prediction."""

from contextlib import suppress

from virnuc.flows.settings.shared import RunSettings
from virnuc.tasks.artifacts import publish_markdown, publish_table
from virnuc.tasks.events import emit
from virnuc.tasks.result_links import with_links
from virnuc.tasks.run_tables import fate_rows
from virnuc.tasks.staging import stage
from virnuc_core.pipeline import stage_spec
from virnuc_core.reads.stage import StageSummary
from virnuc_core.rundir import RunDir, run_lock
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


def load_page_modules() -> None:
    """Load what the summary page needs before it is needed.

    A prediction calls this while it waits for something else. A damaged package may raise errors of
    any type here. None of them ends the run before its results: `publish_prediction` raises it.
    """
    with suppress(Exception):
        from virnuc_core.report.summary_page import load_templates

        load_templates()


def publish_prediction(run: RunDir, label: str, summary: RunSummary, staging: StageSummary) -> None:
    """Write the summary page of a run, show in Prefect what became of its reads, and send the
    event `prediction.done`.

    Without a server only the page is written.

    Args:
        run: The run directory.
        label: The name of the sample, for names in the UI.
        summary: The summary of the run. Its fates are the numbers of reads by what became of them.
        staging: The summary of the staging, which has remarks on the reads.
    """
    # it takes a while to import, which the start of a command need not wait for
    from virnuc_core.report.summary_page import write_summary_pages

    with run_lock(run.root):
        page = write_summary_pages(run, label, summary)
    text_page = page.with_suffix(".md")
    publish_markdown(
        f"summary-{label}",
        text_page.read_text(encoding="utf-8"),
        with_links(f"Summary of {label}.", result=page, kind="Page"),
        text_page,
    )
    answer = summary.answer
    text = f"{label}: {answer.message}. {' '.join(answer.remarks)}"
    description = with_links(text, result=run.root, kind="Results")
    publish_table(f"reads-{label}", fate_rows(summary, staging.tally), description)
    payload = {
        "reads": summary.n_reads,
        "viral": answer.viral,
        "scored": answer.scored,
        "without_verdict": answer.without_verdict,
        "random_weights": bool(answer.random_weights),
        "run": str(run.root.absolute()),
    }
    emit("prediction.done", f"prediction.{label}", label, payload)
