"""Stage: reads to the columnar store of open frames."""

from __future__ import annotations

from pathlib import Path

from prefect.client.schemas.objects import State

from tasks.step import done, step
from virnuc_core.pipeline import stage_reads
from virnuc_core.reads.remote import fetch_all
from virnuc_core.reads.stage import StageSpec, StageSummary


@step("stage", "stage {label}")
def stage(
    spec: StageSpec, store: Path, *, label: str, email: str | None = None, force: bool = False
) -> State[StageSummary]:
    """The store at `store` holds the reads of `spec`; one that already does is used as it is.

    Remote reads are fetched into `downloads` beside the store; `email` is what NCBI is told.
    """
    local = fetch_all(spec.reads, store.parent / "downloads", email=email)
    summary = stage_reads(spec.model_copy(update={"reads": local}), store, force=force)
    return done(summary, describe(summary), reused=summary.reused)


def describe(summary: StageSummary) -> str:
    """What was staged, in a sentence."""
    how = "reused, content unchanged" if summary.reused else "staged"
    counts = summary.counts
    odd = (
        (summary.skipped_records, "broken records skipped"),
        (counts.n_empty, "reads without bases"),
        (counts.n_duplicate_ids, "reads with the id of an earlier one"),
    )
    remarks = "".join(f"; {number:,} {what}" for number, what in odd if number)
    return f"{counts.n_reads:,} reads {how}: {counts.n_rows:,} open frames, {counts.n_uniques:,} distinct{remarks}"
