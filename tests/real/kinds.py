"""Reads of many kinds of organism, some of them rare, to measure what balancing brings.

`python -m tests.real.kinds WHEELS DATA OUT` trains on the same reads with each way of balancing,
and writes a table of the figures by kind to OUT/balancing.md. WHEELS is the folder that
`make real-data` fills; DATA has the folders `viral` and `host` with genomes as FASTA files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from xopen import xopen

from .genomes import Genome, Read, cut, hosts, spread, viruses, write_tables

# The kind of each file in DATA, by the beginning of its name.
KIND_OF_FILE: Final = {
    "viral/aav1": "DNA virus",
    "viral/human_herpesvirus_3": "DNA virus",
    "viral/mimivirus": "DNA virus",
    "viral/monkeypox": "DNA virus",
    "viral/polyomavirus": "DNA virus",
    "viral/porcine_circovirus_2": "DNA virus",
    "viral/microviruses_100": "phage",
    "viral/phage_": "phage",
    "host/akkermansia": "bacteria",
    "host/corynebacterium": "bacteria",
    "host/ecoli_0": "bacteria",
    "host/haemophilus": "bacteria",
    "host/staphylococcus_aureus.": "bacteria",
    "host/streptococcus": "bacteria",
    "host/thermodesulfatator": "bacteria",
    "host/archaeon": "archaea",
    "host/arabidopsis_chr1": "plant",
    "host/rice": "plant",
    "host/chicken": "vertebrate",
    "host/chimpanzee": "vertebrate",
    "host/cow": "vertebrate",
    "host/yeast": "fungus",
    "host/leishmania": "protozoa",
    "host/c_elegans": "invertebrate",
    "host/drosophila": "invertebrate",
}
# Reads of each kind: uneven, as collections of genomes are. Few reads of a host have an open frame.
READS_OF_KIND: Final = {
    "RNA virus": 1_200,
    "DNA virus": 300,
    "phage": 300,
    "vertebrate": 2_600,
    "bacteria": 500,
    "archaea": 150,
    "plant": 400,
    "fungus": 200,
    "protozoa": 200,
    "invertebrate": 150,
}
SAME_GROUP: Final = {"chimpanzee": "human"}  # as the windows of human chromosome 22
VIRUSES_OF_FAMILY: Final = 2
WINDOWS: Final = 40  # of chromosome 22


def read_records(path: Path) -> list[tuple[str, bytes]]:
    """Return name and bases of each record of a FASTA file."""
    with xopen(path, "rb", threads=0) as file:
        records = file.read().split(b">")[1:]
    sequences = []
    for record in records:
        title, _, lines = record.partition(b"\n")
        name = title.split()[0].decode()
        sequences.append((name, b"".join(lines.split()).upper()))
    return sequences


def all_genomes(wheels: Path, data: Path) -> list[Genome]:
    """Return the genomes of both sources. All records of a file are one group.

    Microviruses of one file are two groups, by their families.
    """
    genomes = list(viruses(wheels, VIRUSES_OF_FAMILY))
    for genome in hosts(wheels, WINDOWS):
        genomes.append(genome._replace(group="human"))  # one chromosome is one sequence
    for beginning, kind in KIND_OF_FILE.items():
        label = "others" if beginning.startswith("host") else "virus"
        for path in sorted(data.glob(f"{beginning}*")):
            stem = path.name.split(".")[0]
            for number, (title, letters) in enumerate(read_records(path)):
                group = SAME_GROUP.get(stem.split("_")[0], stem)
                if "microviruses" in stem:
                    group = title.split("_")[0]
                genomes.append(Genome(f"{stem}.{number}", label, group, letters, kind))
    return genomes


def cut_by_kind(genomes: list[Genome], length: int) -> list[Read]:
    """Return reads of each kind, equally many of each genome of a kind.

    Args:
        genomes: The genomes to cut.
        length: Bases of a read.
    """
    reads = []
    for kind, count in READS_OF_KIND.items():
        members = [genome for genome in genomes if genome.kind == kind]
        # With fewer reads than genomes, genomes that are spread over the list have one each.
        members = [members[place] for place in spread(len(members), count)]
        for number, genome in enumerate(members):
            n_reads = count // len(members) + (number < count % len(members))
            reads += cut([genome], length, n_reads, seed=number)
    return reads


def write_reads_of_kinds(wheels: Path, data: Path, out: Path, length: int) -> Path:
    """Write labelled reads of all kinds.

    Args:
        wheels: The folder that `make real-data` fills.
        data: The folder with the genomes of other kinds.
        out: The folder to write to.
        length: Bases of a read.

    Returns:
        The beginning of the names of the files.
    """
    genomes = all_genomes(wheels, data)
    write_tables(genomes, cut_by_kind(genomes, length), out / "reads")
    return out / "reads"
