"""`virnuc simulate` and `virnuc sample`: reads to try things on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from flows.forms import build
from flows.options import add_options, command_parser, given


def simulate(words: Sequence[str]) -> int:
    """Write labelled reads, and beside them the truth table and the genomes."""
    from virnuc_core.reads.simulate import PRESETS, SimulateSpec
    from virnuc_core.reads.simulate import simulate as write

    parser = command_parser("simulate", "Write labelled synthetic reads, a table of what each is, and their genomes.")
    parser.add_argument("out", metavar="OUT", type=Path, help="reads: .fastq or .fasta, with .gz or without")
    parser.add_argument("--preset", choices=tuple(PRESETS), help="number of reads by name; --reads overrides it")
    add_options(parser, SimulateSpec)
    arguments = parser.parse_args(words)
    values = given(arguments, SimulateSpec)
    if arguments.preset is not None:
        values.setdefault("reads", PRESETS[arguments.preset])
    summary = write(build(SimulateSpec, values), arguments.out)
    sys.stdout.write(
        f"{summary.reads_file}: {summary.reads:,} reads, {summary.viral_reads:,} viral, of {summary.genomes} genomes\n"
        f"{summary.truth_file}: what each read is\n"
    )
    return 0


def sample(words: Sequence[str]) -> int:
    """Draw a subset of reads with the same length distribution."""
    parser = command_parser("sample", "Draw reads so that their lengths are distributed as in the whole.")
    parser.add_argument("source", metavar="IN", help="FASTA or FASTQ file or folder; - is standard input")
    parser.add_argument("-n", "--reads", type=int, required=True, help="how many")
    parser.add_argument("-o", "--out", metavar="PATH", type=Path, required=True, help="file to write; .gz packs it")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds draw equal reads")
    arguments = parser.parse_args(words)
    from virnuc_core.reads.sample import sample as draw

    summary = draw(arguments.source, arguments.reads, arguments.out, arguments.seed)
    sys.stdout.write("\n".join(summary.lines()) + "\n")
    return 0
