"""Read sequences of genomes and their coding regions."""

import csv
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from Bio.Seq import Seq
from Bio.SeqIO.FastaIO import SimpleFastaParser
from numpy.typing import NDArray
from xopen import xopen

from virnuc_core.config import refuse_unreadable
from virnuc_core.errors import InputError
from virnuc_core.reads.store import OrfStore

GFF_COLUMNS = (
    "genome",
    "source",
    "type",
    "start",
    "end",
    "score",
    "strand",
    "phase",
    "attributes",
)


def read_genomes(path: Path) -> dict[str, str]:
    """Return the sequences of a FASTA file, plain or compressed, by the first word of the header.

    Letters are upper case. A sequence without a name is left out.

    Raises:
        InputError: The file cannot be read.
    """
    sequences = {}
    with refuse_unreadable(path, "FASTA", InputError), xopen(path, "rt", threads=0) as file:
        for title, letters in SimpleFastaParser(file):  # type: ignore[no-untyped-call]
            words = title.split()
            if words:
                sequences[words[0]] = letters.upper()
    return sequences


@dataclass(frozen=True, slots=True)
class CodingRegion:
    """A line of type CDS of a GFF file."""

    genome: str
    start: int  # first base, counted from 1
    end: int  # last base, counted from 1
    strand: str  # + or -
    phase: int  # bases before the first whole codon

    def protein(self, genome: str) -> str:
        """Translate the region.

        Args:
            genome: The sequence of the whole genome.

        Returns:
            The amino acids, with `*` for a stop codon. An incomplete codon at the end is dropped.
        """
        region = Seq(genome[self.start - 1 : self.end])
        if self.strand == "-":
            region = region.reverse_complement()  # type: ignore[no-untyped-call]
        frame = region[self.phase :]
        whole_codons = frame[: len(frame) // 3 * 3]
        return str(whole_codons.translate())  # type: ignore[no-untyped-call]


def in_coding_regions(
    rows: pd.DataFrame, store: OrfStore, genome_names: "pd.Index[str]", gff: Path, fasta: Path
) -> NDArray[np.bool_]:
    """Return which frames have a protein that is part of a coding region of their genome.

    Args:
        rows: Translated frames of reads, with the columns unique (number of the distinct sequence)
            and genome (index into `genome_names`).
        store: The staged reads that the frames are from.
        genome_names: Name of each genome.
        gff: The annotation of the genomes, a GFF file.
        fasta: The sequences of the genomes.

    Returns:
        A mask of the frames, [rows].

    Raises:
        InputError: A file cannot be read.
    """
    coded_proteins = _coded_proteins(gff, read_genomes(fasta))
    is_coding = np.zeros(len(rows), bool)
    names = genome_names[rows["genome"]]
    for row, (unique, name) in enumerate(zip(rows["unique"].tolist(), names, strict=True)):
        protein = store.protein(unique, unique + 1)[0].decode()
        is_coding[row] = protein in coded_proteins.get(name, "")
    return is_coding


def _coded_proteins(gff: Path, sequences: dict[str, str]) -> dict[str, str]:
    """Return the translated coding regions of each genome, joined into one text.

    A `*` before each region keeps a protein from matching across two of them.

    Args:
        gff: The annotation of the genomes, a GFF file.
        sequences: The sequence of each genome. A genome without one has empty regions.
    """
    proteins = defaultdict[str, list[str]](list)
    with refuse_unreadable(gff, "GFF", InputError):
        for region in _read_coding_regions(gff):
            sequence = sequences.get(region.genome, "")
            proteins[region.genome].append(f"*{region.protein(sequence)}")
    return {name: "".join(parts) for name, parts in proteins.items()}


def _read_coding_regions(gff: Path) -> Iterator[CodingRegion]:
    """Yield the coding regions of a GFF file, which are its lines of type CDS."""
    table = pd.read_csv(
        gff,
        sep="\t",
        comment="#",
        header=None,
        names=GFF_COLUMNS,
        dtype=str,
        quoting=csv.QUOTE_NONE,
    )
    for line in table[table["type"] == "CDS"].to_dict("records"):
        yield CodingRegion(
            genome=line["genome"],
            start=int(line["start"]),
            end=int(line["end"]),
            strand=line["strand"],
            phase=int(line["phase"]),
        )
