"""The step that stages reads: files in, a store of open reading frames out."""

from pathlib import Path

from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.task import retrying_task
from virnuc_core.errors import join_first
from virnuc_core.pipeline import stage_reads
from virnuc_core.reads.stage import StageSpec, StageSummary


@retrying_task("stage", "stage {label}")
def stage(
    spec: StageSpec, store: Path, *, label: str, force: bool = False
) -> Outcome[StageSummary]:
    """Stage reads: write their open reading frames to a store. A store that has them is used.

    Args:
        spec: The reads, and how to cut them.
        store: The file to write.
        label: The name of the sample, for names in the UI.
        force: Stage again even if the store holds these reads.

    Returns:
        An outcome with the counts, named `Reused` if the store was there.

    Raises:
        InputError: The reads cannot be used; see `stage_reads`.
    """
    summary = stage_reads(spec, store, force=force)
    return completed(summary, _describe(summary), reused=summary.reused)


def _describe(summary: StageSummary) -> str:
    """Return one line on what was staged: numbers of reads and frames, and remarks on the reads."""
    counts = summary.counts
    action = "reused, content unchanged" if summary.reused else "staged"
    text = (
        f"{counts.n_reads:,} reads {action}: "
        f"{counts.n_rows:,} open frames, {counts.n_uniques:,} distinct"
    )
    if summary.n_pairs:
        text += f"; {summary.n_pairs:,} pairs"
    remarks = summary.warnings()
    if remarks:
        text += f"; {join_first(remarks)}"
    return text
