"""Commands that make files of reads: `virnuc simulate` and `virnuc sample`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from pydantic import Field

from virnuc.flows.cli.options import Flag, Mates1, Mates2, Out, command
from virnuc.flows.parameters import build
from virnuc_core.config import OnError, ReadsSpec
from virnuc_core.reads.simulate import SimulateSpec
from virnuc_core.reads.simulate import simulate as write_simulated


class SimulateSettings(SimulateSpec):
    """Where simulated reads go."""

    out: Path = Field(
        description="reads: .fastq or .fasta, with .gz or without; of pairs OUT_R1 and OUT_R2"
    )
    force: Flag = Field(False, description="write over files that are there")


@command(SimulateSettings, "out")
def simulate(settings: SimulateSettings) -> None:
    """Write labelled synthetic reads, a table of what each is, and their genomes."""
    simulation = write_simulated(settings, settings.out, force=settings.force)
    genomes = settings.viral_genomes + settings.other_genomes
    files = ", ".join(simulation.reads.all_inputs)
    print(
        f"{files}: {simulation.n_reads:,} reads, "
        f"{simulation.viral_reads:,} viral, of {genomes} genomes"
    )
    print(f"{simulation.truth_file}: what each read is")
    print(f"{simulation.genomes_file}: the genomes")


def sample(
    *source: str | Path,
    reads: Annotated[int, Parameter(name=("--reads", "-n"))],
    out: Out,
    mates_1: Mates1 = (),
    mates_2: Mates2 = (),
    interleaved: Flag = False,
    pairs: bool = True,
    on_error: OnError = "stop",
    read_group: Annotated[str, Parameter(show_default=False)] = "",
    seed: int = 0,
    force: Flag = False,
) -> None:
    """Draw reads so that their lengths are distributed as in the whole. Mates stay together.

    Of pairs in two files, OUT_R1 and OUT_R2 are written in step. Interleaved pairs stay in one
    file. Reads without a mate beside pairs go to OUT_orphans.

    Args:
        source: FASTA, FASTQ or BAM files or folders; mates are found by the names of their files
        reads: how many, each mate counted; of an odd number of mates one is left out
        out: file to write; .gz packs it
        mates_1: files of first mates, each in step with one of --mates-2
        mates_2: files of second mates, as many
        interleaved: mates follow each other in SOURCE
        pairs: keep mates together
        on_error: a broken record, or a read without its mate: stop, or skip it and go on
        read_group: of BAM, CRAM or SAM: only reads of read groups of this sample (SM, else ID)
        seed: equal seeds draw equal reads
        force: write over files that are there
    """
    from virnuc_core.reads.sampling import sample as draw_sample

    values = {
        "reads": tuple(str(name) for name in source),
        "mates_1": tuple(str(name) for name in mates_1),
        "mates_2": tuple(str(name) for name in mates_2),
        "interleaved": interleaved,
        "pairs": pairs,
        "on_error": on_error,
        "read_group": read_group,
    }
    spec = build(ReadsSpec, values)
    summary = draw_sample(spec, reads, out, seed, force=force)
    print("\n".join(summary.lines()))
    if summary.pairs_before:
        print(f"written: {', '.join(str(path) for path in summary.files)}")
