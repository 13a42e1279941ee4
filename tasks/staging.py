"""The step that stages reads."""

from pathlib import Path

from prefect.client.schemas.objects import State

from virnuc.tasks.task import completed, retrying_task
from virnuc_core.errors import join_first
from virnuc_core.pipeline import stage_reads
from virnuc_core.reads.stage import StageSpec, StageSummary


@retrying_task("stage", "stage {label}")
def stage(spec: StageSpec, store: Path, *, label: str, force: bool = False) -> State[StageSummary]:
    """The store at `store` holds the reads of `spec`; one that does is used as it is. Errors: of `stage_reads`."""
    summary = stage_reads(spec, store, force=force)
    counts, how = summary.counts, "reused, content unchanged" if summary.reused else "staged"
    text = f"{counts.n_reads:,} reads {how}: {counts.n_rows:,} open frames, {counts.n_uniques:,} distinct"
    text += f"; {summary.n_pairs:,} pairs" if summary.n_pairs else ""
    text += f"; {join_first(remarks)}" if (remarks := summary.warnings()) else ""
    return completed(summary, text, reused=summary.reused)
