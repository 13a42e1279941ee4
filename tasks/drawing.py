"""The steps that make reads for a flow: a subset of the user's reads, or synthetic reads."""

from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.retries import first_attempt
from virnuc.tasks.task import retrying_task
from virnuc_core.config import ReadsSpec
from virnuc_core.reads import drawn
from virnuc_core.reads.drawn import DrawnReads
from virnuc_core.rundir import RunDir


@retrying_task("subset", "draw {n_reads} reads of {label}")
def draw_subset(
    run: RunDir, source: ReadsSpec, n_reads: int, *, seed: int, label: str, force: bool = False
) -> Outcome[DrawnReads]:
    """Draw reads, so that their lengths are distributed as in all reads. Mates stay together.

    Args:
        run: The output directory of the flow.
        source: The files of reads, and which of them hold mates.
        n_reads: How many reads to draw.
        seed: Equal seeds draw equal reads.
        label: The name of the sample, for names in the UI.
        force: Draw again even if the subset is there.

    Returns:
        An outcome with the files, named `Reused` if they were there.

    Raises:
        VirnucError: The reads cannot be used; see `drawn.draw_subset`.
    """
    reads = drawn.draw_subset(run, source, n_reads, seed, force=force and first_attempt())
    return completed(reads, reads.description, reused=reads.reused)


@retrying_task("simulate", "simulate {n_reads} reads")
def simulate_reads(
    run: RunDir, n_reads: str, *, seed: int, pairs: bool = False, force: bool = False
) -> Outcome[DrawnReads]:
    """Make labelled synthetic reads.

    Args:
        run: The output directory of the flow.
        n_reads: How many, or the name of a size such as `small`.
        seed: Equal seeds give equal reads.
        pairs: Make pairs of mates.
        force: Make them again even if they are there.

    Returns:
        An outcome with the files, named `Reused` if they were there.

    Raises:
        ConfigError: There is no such size.
    """
    force = force and first_attempt()
    reads = drawn.simulate_reads(run, n_reads, seed, pairs=pairs, force=force)
    return completed(reads, reads.description, reused=reads.reused)
