"""Measure a classifier kind by kind: which reads it was trained for, and how it does with each.

One number for all reads hides that a classifier misses a whole kind of virus, or calls the reads of
a kind of organism viral that it has never met. The tables of this module are by kind, by GC content
and by read length. They count reads without an open frame, too: such reads are never called viral.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core import consensus
from virnuc_core.config import DEFAULT_THRESHOLD
from virnuc_core.encoders.model_config import DomainRow, Estimate, TrainingDomain
from virnuc_core.reads.simulate import LABELS
from virnuc_core.reads.store import OrfStore
from virnuc_core.training.evaluation import (
    ScoredRows,
    by_level,
    cluster_precision,
    cluster_share,
)
from virnuc_core.training.features import GC_BOUNDS
from virnuc_core.training.truth import KIND, VIRUS

LENGTH_BOUNDS: Final = (100, 150, 200, 300, 500, 1_000)  # first bases of the bins but the first
RANGE: Final = (0.05, 0.95)  # quantiles of GC content and read length that the card names
MAX_KINDS: Final = 40  # of a class that the card lists; the rarest of more are put together
MAX_KIND_LETTERS: Final = 60
FURTHER_KINDS: Final = "further kinds"


def judge_reads(
    store: OrfStore,
    genomes: pd.DataFrame,
    scorings: Sequence[ScoredRows],
    closed_reads: pd.DataFrame,
) -> pd.DataFrame:
    """Join scores of frames with what is known of their reads, and add reads without a frame.

    Args:
        store: The staged reads.
        genomes: The genomes by number, with the columns kind and source.
        scorings: Scores of the same frames, once for each repeat. The frames have a column gc.
        closed_reads: Reads without an open frame, with the columns read, label, genome and weight.
            Those of genomes without a scored read are left out.

    Returns:
        A row for each read, with the columns label, kind, source (number of the independent
        genome), bases, gc (NaN without a frame), has_frame, called (share of the scorings in which
        it was called viral) and weight (how many reads it stands for).
    """
    scored = (
        scorings[0]
        .rows.groupby("read")
        .agg(label=("label", "first"), genome=("genome", "first"), gc=("gc", "mean"))
    )
    called = np.zeros(len(scored))
    for scoring in scorings:
        reads = by_level(scoring.rows, scoring.scores)["read"]
        # Both tables are grouped by read, so they have the same order.
        called += consensus.is_viral(reads["score"].to_numpy(), DEFAULT_THRESHOLD)
    scored = scored.assign(called=called / len(scorings), has_frame=True, weight=1.0)

    is_tested = closed_reads["genome"].isin(scored["genome"])
    closed = closed_reads[is_tested].set_index("read")
    closed = closed.assign(gc=np.nan, called=0.0, has_frame=False)
    table = scored
    if len(closed):
        table = pd.concat([scored, closed[list(scored.columns)]])
    genome_of_read = table["genome"].to_numpy(np.int64)
    for column in (KIND, "source"):
        table[column] = genomes[column].to_numpy()[genome_of_read]
    table["bases"] = np.asarray(store.read_length[:])[table.index]
    return table.reset_index(drop=True)


def describe_domain(
    reads: pd.DataFrame, fragments: dict[str, pd.DataFrame], prevalence: float, seed: int
) -> TrainingDomain:
    """Return the tables of a classifier's card by kind, GC content and read length.

    Args:
        reads: Reads of genomes that the classifier did not learn from, as `judge_reads` returns
            them.
        fragments: The same for fragments of the genomes of the test, by the name of their length.
        prevalence: Share of viral reads that the precision holds for.
        seed: Seed of the bootstrap.
    """
    table = _with_few_kinds(reads)
    framed = table[table["has_frame"]]
    length_bins = np.digitize(table["bases"].to_numpy(), LENGTH_BOUNDS)
    lengths = _rows_by_bin(table, length_bins, _length_names(), seed)
    for name, fragment_reads in fragments.items():
        names = np.full(len(fragment_reads), f"fragments of {name}", object)
        lengths += _rows_by(fragment_reads, names, seed)
    viral_reads = table[table["label"] == VIRUS]
    clustered_reads = table.rename(columns={"source": "cluster"})
    return TrainingDomain(
        kinds=tuple(_rows_by(table, table[KIND].to_numpy(object), seed)),
        gc=tuple(_gc_rows(framed, seed)),
        lengths=tuple(lengths),
        gc_ranges={label: _range(part["gc"]) for label, part in _by_class(framed)},
        length_ranges={label: _length_range(part["bases"]) for label, part in _by_class(table)},
        prevalence=prevalence,
        recall_of_all=_share_called(viral_reads, seed),
        precision_of_all=cluster_precision(clustered_reads, prevalence, seed),
    )


def _with_few_kinds(table: pd.DataFrame) -> pd.DataFrame:
    """Return the reads with the rarest kinds of a class put together, and names not too long."""
    kinds = table[KIND].str.slice(0, MAX_KIND_LETTERS)
    for _, kinds_of_class in kinds.groupby(table["label"]):
        counts = kinds_of_class.value_counts()
        rare_kinds = counts.index[MAX_KINDS - 1 :]
        if len(counts) > MAX_KINDS:
            is_rare = kinds_of_class.isin(rare_kinds)
            kinds[kinds_of_class.index[is_rare]] = FURTHER_KINDS
    return table.assign(kind=kinds)


def _by_class(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return name and reads of each class that has reads: viruses first."""
    classes = []
    for label in reversed(range(len(LABELS))):
        part = table[table["label"] == label]
        if len(part):
            classes.append((LABELS[label], part))
    return classes


def _range(values: "pd.Series[float]") -> tuple[float, float]:
    """Return the values between which nine in ten lie."""
    low, high = values.quantile(list(RANGE)).tolist()
    return low, high


def _length_range(bases: "pd.Series[float]") -> tuple[int, int]:
    """Return the lengths between which nine in ten reads lie."""
    low, high = _range(bases)
    return round(low), round(high)


def _gc_names() -> list[str]:
    """Return the names of the bins of GC content."""
    percents = [round(100 * bound) for bound in GC_BOUNDS]
    lowest = percents[0]
    highest = percents[-1]
    names = [f"below {lowest} %"]
    for low, high in pairwise(percents):
        names.append(f"{low} to {high} %")
    names.append(f"{highest} % and more")
    return names


def _length_names() -> list[str]:
    """Return the names of the bins of read length."""
    names = [f"below {LENGTH_BOUNDS[0]} bases"]
    for low, high in pairwise(LENGTH_BOUNDS):
        names.append(f"{low} to {high - 1} bases")
    return [*names, f"{LENGTH_BOUNDS[-1]} bases and more"]


def _rows_by_bin(
    table: pd.DataFrame, bins: NDArray[np.int64], names: list[str], seed: int
) -> list[DomainRow]:
    """Return a row for each class and bin that has reads, in the order of the bins."""
    rows = []
    for number, name in enumerate(names):
        part = table[bins == number]
        rows += _rows_by(part, np.full(len(part), name, object), seed)
    return rows


def _rows_by(table: pd.DataFrame, names: NDArray[np.object_], seed: int) -> list[DomainRow]:
    """Return a row for each class and name, viruses first and then by the number of reads."""
    rows = []
    for label, part in _by_class(table.assign(name=names)):
        for name in part["name"].value_counts().index:
            rows.append(_row(str(name), label, part[part["name"] == name], seed))
    return rows


def _row(name: str, label: str, reads: pd.DataFrame, seed: int) -> DomainRow:
    """Return the row of a table: how many of some reads of a class were called viral."""
    framed = reads[reads["has_frame"]]
    weights = reads["weight"].to_numpy()
    share_with_frame = float(weights @ reads["has_frame"] / weights.sum())
    return DomainRow(
        name=name,
        label=label,
        genomes=int(framed["source"].nunique()),
        reads=len(framed),
        share_with_frame=min(share_with_frame, 1.0),
        called=_share_called(framed, seed),
        called_of_all=_share_called(reads, seed),
    )


def _gc_rows(framed: pd.DataFrame, seed: int) -> list[DomainRow]:
    """Return the rows of the table by GC content, which is known of reads with a frame only."""
    bins = np.digitize(framed["gc"].to_numpy(), GC_BOUNDS)
    rows = _rows_by_bin(framed, bins, _gc_names(), seed)
    unknown = {"share_with_frame": None, "called_of_all": None}
    return [row.model_copy(update=unknown) for row in rows]


def _share_called(reads: pd.DataFrame, seed: int) -> Estimate | None:
    """Return the share of reads that were called viral, with its interval over genomes."""
    return cluster_share(
        reads["called"].to_numpy(), reads["weight"].to_numpy(), reads["source"].to_numpy(), seed
    )
