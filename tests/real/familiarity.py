"""Leave one kind of genome out, each in turn: are its reads told from those of known kinds?

`python -m tests.real.familiarity WHEELS DATA OUT` writes the tables to OUT/familiarity.md. Only
the use of codons is measured, so nothing is embedded. The arguments are those of `kinds`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.encoders.composition import (
    TrainingComposition,
    judge_sample,
    read_distances,
)
from virnuc_core.proportions import wilson_interval
from virnuc_core.training.familiarity import fit_composition

from ..unit.training.coding_genomes import rows_of_genomes, stage_reads
from .genomes import Genome, cut
from .kinds import all_genomes
from .material import argument_parser

LENGTHS: Final = (300, 150)
SAMPLE_SIZES: Final = (200, 1000)
READS_OF_GENOME: Final = 250
READS_OF_VERTEBRATE: Final = 1_500  # of which few have an open frame
FOLDS: Final = 4
NARROW: Final = ("RNA virus", "vertebrate")  # a training on two kinds


@dataclass(frozen=True, slots=True)
class Material:
    """Reads of one length, staged, with the kind and the cluster of each."""

    store_reads: list[str]
    kinds: NDArray[np.object_]  # [reads]
    clusters: NDArray[np.int64]  # [reads]
    folder: Path

    def train(self, is_training: NDArray[np.bool_], name: str) -> TrainingComposition:
        """Measure the composition of some of the reads."""
        chosen = np.flatnonzero(is_training).tolist()
        store = stage_reads([self.store_reads[read] for read in chosen], self.folder / name)
        genomes = [(str(self.kinds[read]), int(self.clusters[read])) for read in chosen]
        composition = fit_composition(store, rows_of_genomes(store, genomes), seed=0)
        assert composition is not None
        return composition

    def ask(
        self, composition: TrainingComposition, is_asked: NDArray[np.bool_], name: str
    ) -> pd.DataFrame:
        """Return kind, cluster and distance of reads that can be compared with a training."""
        chosen = np.flatnonzero(is_asked)
        store = stage_reads([self.store_reads[read] for read in chosen], self.folder / name)
        table = pd.DataFrame({"kind": self.kinds[chosen], "cluster": self.clusters[chosen]})
        return table.assign(distance=read_distances(store, composition)).dropna()


def cut_material(genomes: Iterable[Genome], length: int, folder: Path) -> Material:
    """Cut reads from genomes, equally many of each group."""
    groups: dict[tuple[str, str], list[Genome]] = {}
    for genome in genomes:
        groups.setdefault((genome.kind or "RNA virus", genome.group), []).append(genome)
    reads: list[str] = []
    kinds: list[str] = []
    clusters: list[int] = []
    for number, ((kind, _), members) in enumerate(sorted(groups.items())):
        count = READS_OF_VERTEBRATE if kind == "vertebrate" else READS_OF_GENOME
        cut_reads = [read.letters.decode() for read in cut(members, length, count, seed=number)]
        reads += cut_reads
        kinds += [kind] * len(cut_reads)
        clusters += [number] * len(cut_reads)
    return Material(reads, np.array(kinds, object), np.array(clusters), folder / str(length))


@dataclass(frozen=True, slots=True)
class Asked:
    """A genome whose reads a training was asked about, which it did not contain."""

    composition: TrainingComposition
    distances: NDArray[np.float64]  # [reads that could be compared]

    @property
    def far_share(self) -> float:
        """Return the share of reads that are far by themselves."""
        return float((self.distances >= self.composition.far_from).mean())

    def is_told(self, size: int, rng: np.random.Generator) -> bool:
        """Return whether a sample of some of the reads, drawn with replacement, is outside."""
        sample = rng.choice(self.distances, size=size)
        return judge_sample(self.composition, sample).is_outside


def genomes_of(composition: TrainingComposition, asked: pd.DataFrame) -> list[Asked]:
    """Return the genomes of a table of distances, with the training that was asked."""
    return [
        Asked(composition, distances.to_numpy())
        for _, distances in asked.groupby("cluster")["distance"]
    ]


def row_of(title: str, genomes: list[Asked], length: int) -> str:
    """Return a line of the table: share of far reads, and of samples that are told, by genomes."""
    rng = np.random.default_rng(0)
    shares = np.array([genome.far_share for genome in genomes])
    means = rng.choice(shares, size=(1000, len(shares))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    cells = [f"{shares.mean():.2f} [{low:.2f}, {high:.2f}]"]
    for size in SAMPLE_SIZES:
        n_told = sum(genome.is_told(size, rng) for genome in genomes)
        interval = wilson_interval(n_told / len(shares), len(shares))
        cells.append(f"{n_told} of {len(shares)} [{interval.low:.2f}, {interval.high:.2f}]")
    return f"| {title} | {length} | {' | '.join(cells)} |"


def ask_known(material: Material, kinds: Iterable[str], title: str) -> dict[str, list[Asked]]:
    """Return the genomes of each known kind, which are held out in folds."""
    is_known = np.isin(material.kinds, list(kinds))
    genomes_of_kind: dict[str, list[Asked]] = {}
    for fold in range(FOLDS):
        is_asked = is_known & (material.clusters % FOLDS == fold)
        name = f"{title}-{fold}".replace(" ", "_")
        composition = material.train(is_known & ~is_asked, f"{name}-train")
        asked = material.ask(composition, is_asked, f"{name}-asked")
        for kind, of_kind in asked.groupby("kind"):
            # A kind with a single genome is unknown where that is held out.
            if str(kind) in composition.kinds:
                genomes = genomes_of(composition, of_kind)
                genomes_of_kind.setdefault(str(kind), []).extend(genomes)
    return genomes_of_kind


def known_rows(material: Material, kinds: Iterable[str], title: str, length: int) -> list[str]:
    """Return the lines of known kinds."""
    genomes_of_kind = ask_known(material, kinds, title)
    return [
        row_of(f"{title}: known {kind}", genomes, length)
        for kind, genomes in sorted(genomes_of_kind.items())
    ]


def measure(wheels: Path, data: Path, out: Path) -> list[str]:
    """Return the lines of the table for all lengths and kinds."""
    lines = []
    genomes = all_genomes(wheels, data)
    for length in LENGTHS:
        material = cut_material(genomes, length, out)
        all_kinds = sorted(set(material.kinds.tolist()))
        is_narrow = np.isin(material.kinds, NARROW)
        composition = material.train(is_narrow, "narrow")
        lines += known_rows(material, NARROW, "two kinds", length)
        for kind in all_kinds:
            is_kind = material.kinds == kind
            if kind not in NARROW:
                asked = material.ask(composition, is_kind, f"narrow-{kind}".replace(" ", "_"))
                lines.append(
                    row_of(f"two kinds: foreign {kind}", genomes_of(composition, asked), length)
                )
        lines += known_rows(material, all_kinds, "all kinds", length)
        for kind in all_kinds:
            is_kind = material.kinds == kind
            name = f"without-{kind}".replace(" ", "_")
            without = material.train(~is_kind, name)
            asked = material.ask(without, is_kind, f"{name}-asked")
            lines.append(row_of(f"all but it: foreign {kind}", genomes_of(without, asked), length))
    return lines


def table_of(lines: list[str]) -> str:
    """Return the lines as a table in Markdown."""
    sizes = " | ".join(f"samples of {size} reads told" for size in SAMPLE_SIZES)
    head = f"| training: reads asked | bases | far reads | {sizes} |\n| --- | ---: | --- | --- | --- |\n"
    return head + "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the table."""
    arguments = argument_parser().parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    table = table_of(measure(arguments.wheels, arguments.data, arguments.out))
    (arguments.out / "familiarity.md").write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
