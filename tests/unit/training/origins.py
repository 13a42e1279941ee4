"""Helpers of the tests of training: reads of known origin that a test can change."""

from __future__ import annotations

import gzip
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from virnuc_core.config import TrainSpec
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.training.splits import Examples, choose_examples

COMPLEMENT = str.maketrans("ACGT", "TGCA")
HEADER = "read\tlabel\tgenome\n"


@dataclass(frozen=True, slots=True)
class Origin:
    """What a read is known to be."""

    label: str
    genome: str


@dataclass(slots=True)
class LabelledReads:
    """Reads and their origins by read id, which a test may change before it splits them."""

    reads: dict[str, str]  # bases
    origins: dict[str, Origin]
    genomes_file: Path
    kinds: dict[str, str] = field(default_factory=dict)  # of genomes; empty: no such column

    @classmethod
    def simulate(cls, folder: Path) -> LabelledReads:
        """Simulate reads of five viruses and five other genomes."""
        spec = SimulateSpec(
            reads=260, viral_genomes=5, other_genomes=5, genome_length=3_000, seed=3
        )
        simulation = simulate(spec, folder / "r.fasta")
        truth = pd.read_csv(simulation.truth_file, sep="\t", dtype=str)
        origins = {
            line["read"]: Origin(line["label"], line["genome"]) for line in truth.to_dict("records")
        }
        reads = read_fasta(simulation.reads_file.read_text())
        return cls(reads, origins, simulation.genomes_file)

    def genomes(self) -> dict[str, str]:
        """Return the sequences of the genomes by name."""
        return read_fasta(gzip.decompress(self.genomes_file.read_bytes()).decode())

    def write_truth(self, path: Path, *further_lines: str) -> None:
        """Write the table of origins, with a column of kinds if there are any."""
        header = HEADER
        lines = [
            f"{read_id}\t{origin.label}\t{origin.genome}"
            for read_id, origin in self.origins.items()
        ]
        if self.kinds:
            header = f"{HEADER.strip()}\tkind\n"
            kinds = [self.kinds.get(origin.genome, "") for origin in self.origins.values()]
            lines = [f"{line}\t{kind}" for line, kind in zip(lines, kinds, strict=True)]
        path.write_text(header + "".join(f"{line}\n" for line in [*lines, *further_lines]))

    def split(self, folder: Path, **settings: Path | int) -> Examples:
        """Stage the reads as they are now in `folder`, and split them."""
        write_fasta(folder / "r.fasta", self.reads)
        self.write_truth(folder / "truth.tsv")
        stage(StageSpec(reads=(str(folder / "r.fasta"),)), folder / "orfs.h5")
        spec = TrainSpec(truth=folder / "truth.tsv", **settings)
        return choose_examples(OrfStore.open(folder / "orfs.h5"), spec)


def read_fasta(text: str) -> dict[str, str]:
    """Return the sequences of FASTA text, one line each, by name."""
    words = text.split()
    names = [word.removeprefix(">") for word in words[::2]]
    return dict(zip(names, words[1::2], strict=True))


def write_fasta(path: Path, sequences: dict[str, str]) -> None:
    """Write sequences by name."""
    path.write_text("".join(f">{name}\n{bases}\n" for name, bases in sequences.items()))


def reverse_complement(bases: str) -> str:
    """Return the other strand."""
    return bases.translate(COMPLEMENT)[::-1]


def read_labels(truth: Path) -> dict[str, str]:
    """Return the label of each read."""
    table = pd.read_csv(truth, sep="\t", dtype=str, index_col="read")
    return table["label"].to_dict()


def cluster_of_genome(examples: Examples) -> dict[str, int]:
    """Return the cluster of each genome by name."""
    return examples.genomes.set_index("genome")["cluster"].to_dict()
