"""Commands that make files of reads: `virnuc simulate` and `virnuc sample`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from pydantic import Field

from virnuc.flows.cli.options import Flag, Out, command
from virnuc_core.reads.simulate import SimulateSpec
from virnuc_core.reads.simulate import simulate as write_simulated


class SimulateSettings(SimulateSpec):
    """Where simulated reads go."""

    out: Path = Field(description="reads: .fastq or .fasta, with .gz or without")
    force: Flag = Field(False, description="write over files that are there")


@command(SimulateSettings, "out")
def simulate(settings: SimulateSettings) -> None:
    """Write labelled synthetic reads, a table of what each is, and their genomes."""
    simulation = write_simulated(settings, settings.out, force=settings.force)
    genomes = settings.viral_genomes + settings.other_genomes
    print(
        f"{simulation.reads_file}: {settings.reads:,} reads, "
        f"{simulation.viral_reads:,} viral, of {genomes} genomes"
    )
    print(f"{simulation.truth_file}: what each read is")


def sample(
    source: str | Path,
    /,
    *,
    reads: Annotated[int, Parameter(name=("--reads", "-n"))],
    out: Out,
    seed: int = 0,
    force: Flag = False,
) -> None:
    """Draw reads so that their lengths are distributed as in the whole.

    Args:
        source: FASTA or FASTQ file or folder
        reads: how many
        out: file to write; .gz packs it
        seed: equal seeds draw equal reads
        force: write over a file that is there
    """
    from virnuc_core.reads.subsets import sample as draw_sample

    sample_summary = draw_sample(str(source), reads, out, seed, force=force)
    print("\n".join(sample_summary.lines()))
