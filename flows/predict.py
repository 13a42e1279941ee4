"""The daily work: reads in, VirNucPro's two result files out."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from flows.flow_run import named, staged_run, takes
from flows.parameters import PredictSettings
from tasks.artifacts import publish_table
from tasks.events import emit
from tasks.step import done
from tasks.tables import fate_rows
from tasks.viral import viral_reads
from virnuc_core.pipeline import read_summary
from virnuc_core.runfiles import RunSummary


@flow(name="predict", flow_run_name=named("reads", "devices"))
@takes(PredictSettings)
def predict(settings: PredictSettings) -> State[RunSummary]:
    """Says which reads are viral. A run that stopped goes on where it was; a complete one is not computed again."""
    with staged_run(settings) as staged:
        run, label = staged.run, staged.label
        before = read_summary(run)
        summary = staged.embed(threshold=settings.threshold)
        if settings.write_viral:
            viral_reads(run, staged.staging, threshold=settings.threshold, on_error=settings.on_error).result()
        fates = fate_rows(summary, staged.staging.tally)
        publish_table(f"reads-{label}", fates, f"What became of the reads of {label}: {run.root}")
        viral = summary.fates.get("viral", 0)
        payload = {"reads": summary.n_reads, "viral": viral, "run": str(run.root.absolute())}
        emit("prediction.done", f"prediction.{label}", label, payload)
    already = "; nothing had to be computed" if summary == before else ""
    failed = summary.fates.get("failed", 0)
    lost = f"; {failed:,} reads have rows that had to be set aside (failed.tsv)" if failed else ""
    return done(summary, f"{viral:,} of {summary.n_reads:,} reads are viral{lost}{already}")
