"""The daily work: reads in, VirNucPro's two result files out."""

from __future__ import annotations

from prefect import flow, runtime
from prefect.client.schemas.objects import State

from flows.forms import takes
from flows.names import from_parameters
from flows.parameters import PredictSettings
from flows.staged import begin
from tasks.artifacts import publish_table
from tasks.events import emit
from tasks.guard import no_orphans
from tasks.logs import core_logs
from tasks.states import done
from tasks.tables import fate_rows
from tasks.viral import viral_reads
from virnuc_core.pipeline import read_summary
from virnuc_core.runfiles import RunSummary


def _run_name() -> str:
    return from_parameters(runtime.flow_run.parameters or {}, "reads", "devices")


@flow(name="predict", flow_run_name=_run_name)
@takes(PredictSettings)
def predict(settings: PredictSettings) -> State[RunSummary]:
    """Says which reads are viral. A run that stopped goes on where it was; a complete one is not computed again."""
    with no_orphans(), core_logs(), begin(settings) as begun:
        run, label = begun.run, begun.label
        before = read_summary(run)
        summary = begun.embed(threshold=settings.threshold)
        if settings.write_viral:
            viral_reads(run, begun.staging, threshold=settings.threshold, on_error=settings.on_error)
        publish_table(
            f"reads-{label}",
            fate_rows(summary, begun.staging.tally),
            f"What became of the reads of {label}: {run.root}",
        )
        viral = summary.fates.get("viral", 0)
        emit(
            "prediction.done",
            f"prediction.{label}",
            label,
            {"reads": summary.n_reads, "viral": viral, "run": str(run.root.absolute())},
        )
    already = "; nothing had to be computed" if summary == before else ""
    failed = summary.fates.get("failed", 0)
    lost = f"; {failed:,} reads have rows that had to be set aside (failed.tsv)" if failed else ""
    return done(summary, f"{viral:,} of {summary.n_reads:,} reads are viral{lost}{already}")
