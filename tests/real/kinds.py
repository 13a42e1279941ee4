"""Reads of many kinds of organism, some of them rare, to measure what balancing brings.

`python -m tests.real.kinds WHEELS DATA OUT` trains on the same reads with each way of balancing,
and writes a table of the figures by kind to OUT/balancing.md. WHEELS is the folder that
`make real-data` fills; DATA has the folders `viral` and `host` with genomes as FASTA files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, get_args

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from xopen import xopen

from virnuc_core import consensus
from virnuc_core.config import DEFAULT_THRESHOLD, TrainSpec
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.rundir import RunDir
from virnuc_core.training.evaluation import by_level, weighted_metrics
from virnuc_core.training.features import Features
from virnuc_core.training.fitting import HEAD_METHOD, cross_validate

from .genomes import Genome, Read, cut, hosts, spread, viruses, write_tables
from .material import argument_parser, load_material, spec_of
from .training import LENGTH, embed, make_models

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


def cut_by_kind(genomes: list[Genome], length: int, times: int = 1) -> list[Read]:
    """Return reads of each kind, equally many of each genome of a kind.

    Args:
        genomes: The genomes to cut.
        length: Bases of a read.
        times: How many times as many reads as `READS_OF_KIND` says.
    """
    reads = []
    for kind, n_reads_of_kind in READS_OF_KIND.items():
        count = times * n_reads_of_kind
        members = [genome for genome in genomes if genome.kind == kind]
        # With fewer reads than genomes, genomes that are spread over the list have one each.
        members = [members[place] for place in spread(len(members), count)]
        for number, genome in enumerate(members):
            n_reads = count // len(members) + (number < count % len(members))
            reads += cut([genome], length, n_reads, seed=number)
    return reads


def write_reads_of_kinds(wheels: Path, data: Path, out: Path, length: int, times: int = 1) -> Path:
    """Write labelled reads of all kinds.

    Args:
        wheels: The folder that `make real-data` fills.
        data: The folder with the genomes of other kinds.
        out: The folder to write to.
        length: Bases of a read.
        times: How many times as many reads as `READS_OF_KIND` says.

    Returns:
        The beginning of the names of the files.
    """
    genomes = all_genomes(wheels, data)
    write_tables(genomes, cut_by_kind(genomes, length, times), out / "reads")
    return out / "reads"


# --- Measuring ------------------------------------------------------------------------------------

BALANCES: Final = get_args(TrainSpec.model_fields["balance"].annotation)
REPEATS: Final = 3
SAMPLES: Final = 1_000  # of the bootstrap
GC_RICH: Final = 0.6


def measure(models: Path, reads: Path, run: RunDir) -> str:
    """Return a table of figures for each way of balancing, and of differences from none.

    Args:
        models: The models directory of the embeddings.
        reads: The beginning of the names of the files with reads and tables.
        run: The run with the embeddings.
    """
    material = load_material(models, run, spec_of(reads, method="network", repeats=REPEATS))
    figures_of_balance = {}
    for balance in BALANCES:
        balanced_spec = material.spec.model_copy(update={"balance": balance})
        table = _score_reads(material.features, material.shape, balanced_spec)
        figures_of_balance[balance] = _bootstrap(table)
    return _write_table(figures_of_balance)


def _score_reads(features: Features, shape: HeadShape, spec: TrainSpec) -> list[pd.DataFrame]:
    """Return a table of scored reads for each repeat of the cross-validation."""
    first_rows = features.rows.groupby("read").first()
    tables = []
    with threadpool_limits(1), torch.random.fork_rng(devices=[]):
        for scoring in cross_validate(features, shape, spec)[HEAD_METHOD]:
            reads = by_level(scoring.rows, scoring.scores)["read"]
            tables.append(reads.assign(**first_rows[["kind", "gc", "source"]]))
    return tables


def _bootstrap(tables: list[pd.DataFrame]) -> dict[str, NDArray[np.float64]]:
    """Return each figure for all reads and for resampled genomes, [1 + samples].

    The same genomes are drawn in each call, so figures of two trainings can be subtracted.
    """
    first = tables[0]
    cell_of_read = first.groupby(["label", "kind"]).ngroup().to_numpy()
    weights = weights_of_drawn_genomes(first, SAMPLES)
    totals = np.zeros((len(weights), cell_of_read.max() + 1))
    for cell in range(totals.shape[1]):
        totals[:, cell] = weights[:, cell_of_read == cell].sum(axis=1)
    even_weights = weights / np.maximum(totals, 1e-9)[:, cell_of_read]  # each kind alike
    is_virus = first["label"].to_numpy() == 1
    is_rich = first["gc"].to_numpy() >= GC_RICH
    sums: dict[str, NDArray[np.float64]] = {}
    for table in tables:
        called = consensus.is_viral(table["score"].to_numpy(), DEFAULT_THRESHOLD).astype(float)
        figures = {
            "AUROC": weighted_metrics(table, weights)["auroc"].to_numpy(),
            "AUROC, kinds alike": weighted_metrics(table, even_weights)["auroc"].to_numpy(),
            "AUROC at 60 % GC or more": weighted_metrics(table[is_rich], weights[:, is_rich])[
                "auroc"
            ].to_numpy(),
            "recall": _share(called, weights, is_virus),
            "recall, kinds alike": _share(called, even_weights, is_virus),
            "recall at 60 % GC or more": _share(called, weights, is_virus & is_rich),
            "false positives": _share(called, weights, ~is_virus),
            "false positives, kinds alike": _share(called, even_weights, ~is_virus),
            "false positives at 60 % GC or more": _share(called, weights, ~is_virus & is_rich),
        }
        for name, values in figures.items():
            sums[name] = sums.get(name, 0) + values / len(tables)
    return sums


def weights_of_drawn_genomes(reads: pd.DataFrame, samples: int) -> NDArray[np.float64]:
    """Return how often the genome of each read was drawn, [1 + samples, reads].

    Genomes are drawn within each kind, so that no kind is without reads. In row 0 each counts once.

    Args:
        reads: Reads with the columns label, kind and source (the independent genome).
        samples: How many times genomes are drawn.
    """
    cell_of_read = reads.groupby(["label", "kind"]).ngroup().to_numpy()
    source_numbers, _ = pd.factorize(reads["source"])
    kind_of_source = pd.Series(cell_of_read).groupby(source_numbers).first()
    rng = np.random.default_rng(0)
    draws = np.ones((1 + samples, len(kind_of_source)))
    for kind in kind_of_source.unique():
        members = np.flatnonzero(kind_of_source == kind)
        chances = [1 / len(members)] * len(members)
        draws[1:, members] = rng.multinomial(len(members), chances, samples)
    weights: NDArray[np.float64] = draws[:, source_numbers]
    return weights


def _share(
    called: NDArray[np.float64], weights: NDArray[np.float64], is_wanted: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return the weighted share of some reads that was called viral, [samples]."""
    shares: NDArray[np.float64] = (
        weights[:, is_wanted] @ called[is_wanted] / weights[:, is_wanted].sum(axis=1)
    )
    return shares


def _write_table(figures_of_balance: dict[str, dict[str, NDArray[np.float64]]]) -> str:
    """Return a table in Markdown: the figures without balancing, and differences from them."""
    header = ["figure", *BALANCES]
    lines = [f"| {' | '.join(header)} |", f"| {' | '.join(['---'] * len(header))} |"]
    base = figures_of_balance["none"]
    for name, base_samples in base.items():
        cells = [name, _interval(base_samples)]
        for balance in BALANCES[1:]:
            difference = figures_of_balance[balance][name] - base_samples
            cells.append(_interval(difference, sign="+"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _interval(samples: NDArray[np.float64], sign: str = "") -> str:
    """Return the value for all reads, and the 95 % interval over resampled genomes."""
    low, high = np.nanquantile(samples[1:], (0.025, 0.975))
    return f"{samples[0]:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"


def main() -> None:
    """Cut reads, embed them once, and write the table."""
    arguments = argument_parser().parse_args()
    arguments.out.mkdir(parents=True)
    reads = write_reads_of_kinds(arguments.wheels, arguments.data, arguments.out, LENGTH)
    models = make_models(arguments.wheels, arguments.out).real
    run = embed(reads, models, arguments.out / "run")
    table = measure(models, reads, run)
    (arguments.out / "balancing.md").write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
