"""The viral reads themselves, in the input's own format."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from tasks.logs import core_logs
from tasks.retries import POLICY
from tasks.states import done
from virnuc_core.reads.parse import OnError
from virnuc_core.reads.stage import StageSummary
from virnuc_core.reads.store import OrfStore
from virnuc_core.results import ViralReads, write_viral
from virnuc_core.rundir import RunDir


@task(name="viral reads", cache_policy=NO_CACHE, **POLICY)
def viral_reads(run: RunDir, staging: StageSummary, *, threshold: float, on_error: OnError) -> State[ViralReads]:
    """Write `viral.fastq.gz` or `viral.fasta.gz` in `run`, from the files that were staged."""
    with core_logs():
        written = write_viral(run, OrfStore.open(staging.store), staging.files, threshold=threshold, on_error=on_error)
    return done(written, f"{written.reads:,} viral reads written")
