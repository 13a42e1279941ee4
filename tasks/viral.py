"""The viral reads themselves, in the input's own format."""

from __future__ import annotations

from prefect.client.schemas.objects import State

from tasks.step import done, step
from virnuc_core.reads.parse import OnError
from virnuc_core.reads.stage import StageSummary
from virnuc_core.reads.store import OrfStore
from virnuc_core.results import ViralReads, write_viral
from virnuc_core.rundir import RunDir


@step("viral reads", "viral reads")
def viral_reads(run: RunDir, staging: StageSummary, *, threshold: float, on_error: OnError) -> State[ViralReads]:
    """Write `viral.fastq.gz` or `viral.fasta.gz` in `run`, from the files that were staged."""
    written = write_viral(run, OrfStore.open(staging.store), staging.files, threshold=threshold, on_error=on_error)
    return done(written, f"{written.reads:,} viral reads written")
