"""Choose the reads that a classifier is trained, stopped and tested with.

A classifier is tested on genomes that it has never met. Genomes are therefore clustered by
similarity, and whole clusters are assigned to the training, validation and test sets.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.model_selection import StratifiedGroupKFold

from virnuc_core.config import TrainSpec
from virnuc_core.errors import InputError
from virnuc_core.reads.fingerprint import digests
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.subsets import find_second_mates
from virnuc_core.training.clusters import K, cluster_genomes, independent_genomes
from virnuc_core.training.genomes import in_coding_regions
from virnuc_core.training.truth import (
    KIND,
    OTHERS,
    SIDES,
    TEST_SIDE,
    TRAIN_SIDE,
    VALIDATION_SIDE,
    VIRUS,
    genome_kinds,
    read_truth,
    require_classes,
    require_same_origin_of_mates,
    truth_lines,
)

BLOCK_UNIQUES: Final = 1 << 14  # distinct sequences that are read together
_COMPLEMENT: Final = bytes.maketrans(b"ACGT", b"TGCA")


@dataclass(frozen=True, slots=True)
class Examples:
    """The frames that a classifier is trained and tested with.

    Attributes:
        rows: Frames with the columns read, fragment (equal for the two reads of a pair), chunk,
            unique, label, genome (index into `genomes`), sequence (equal for the same DNA on either
            strand), kind (such as `phage`), cluster and side.
        genomes: By number: genome (the name), label, kind, cluster, source (equal for genomes that
            count as one, see `independent_genomes`) and side ("" for an unused genome).
        left_out: Number of reads, frames or lines that were left out, by reason.
        closed_reads: Reads without an open frame, with the columns read, label, genome and weight.
            If only some of a genome's other reads are used, the weight is their share.
    """

    rows: pd.DataFrame
    genomes: pd.DataFrame
    left_out: dict[str, int]
    closed_reads: pd.DataFrame = field(
        default_factory=lambda: pd.DataFrame(columns=["read", "label", "genome", "weight"])
    )


def choose_examples(store: OrfStore, spec: TrainSpec) -> Examples:
    """Choose the frames to train and to test with, and assign them to sets. No embedding is needed.

    A frame is a translated reading frame of a read, the unit that the classifier scores. Whole
    clusters of related genomes are assigned to the training, validation and test sets, so that
    the classifier is tested on genomes that it has never met.

    Args:
        store: The staged reads.
        spec: The files that describe the reads, and how to split them.

    Raises:
        InputError: The table of origins and the reads do not fit each other, a sequence has both
            labels, or a class has too few genomes.
    """
    rng = np.random.default_rng(spec.seed)
    truth = read_truth(spec.truth)
    line_of_read = truth_lines(truth, store)  # [reads]
    require_same_origin_of_mates(truth, line_of_read, store)
    # The genomes are in the order of `genome_names`, so their row is their number.
    genomes = truth.drop_duplicates("genome")[["genome", "label", KIND]].reset_index(drop=True)
    genomes[KIND] = genome_kinds(genomes, spec.groups)
    genome_names = pd.Index(genomes["genome"])
    rows = _labelled_rows(store, truth, line_of_read, genome_names)
    left_out = {
        "lines of the truth without a read": len(truth) - len(np.unique(line_of_read)),
        "reads without an open frame": store.n_reads - store.counts.n_open_reads,
    }

    n_bases = np.diff(store.dna_offsets)  # of each distinct sequence
    is_long = n_bases[rows["unique"]] >= K
    left_out[f"frames of fewer than {K} bases"] = int((~is_long).sum())  # they have no k-mer
    rows = rows[is_long]
    _require_one_label(rows, store)
    require_classes(rows.groupby("label")["genome"].nunique(), what=" have open frames")

    open_reads = rows[["read", "genome"]].drop_duplicates()
    cluster_of_genome = cluster_genomes(rows, store, genome_names, spec)
    kind_of_row = genomes[KIND].to_numpy()[rows["genome"]]
    rows = rows.assign(kind=kind_of_row, cluster=cluster_of_genome[rows["genome"]])
    if spec.coding_only is not None and spec.genomes is not None:
        is_coding = in_coding_regions(rows, store, genome_names, spec.coding_only, spec.genomes)
        left_out["frames outside coding regions"] = int((~is_coding).sum())
        rows = rows[is_coding]

    n_reads = rows["read"].nunique()
    rows = _limit_rows(rows, spec, rng)
    n_dropped_reads = n_reads - rows["read"].nunique()
    left_out[f"reads beyond {spec.rows_per_class:,} frames of a class"] = n_dropped_reads
    # Each of the three sets needs a cluster of each class.
    n_clusters = rows.groupby("label")["cluster"].nunique()
    require_classes(n_clusters, what=" remain, kin ones counted once")

    rows["side"] = _assign_sides(rows, spec)
    sources = independent_genomes(genomes["genome"], cluster_of_genome)
    genomes = genomes.assign(cluster=cluster_of_genome, source=sources, side="")
    side_names = rows["side"].map(SIDES.__getitem__)
    genomes.loc[rows["genome"], "side"] = side_names.to_numpy()
    left_out = {reason: count for reason, count in left_out.items() if count}
    genome_of_read = genome_names.get_indexer(pd.Index(truth["genome"]))[line_of_read]
    closed_reads = _closed_reads(genome_of_read, open_reads, rows)
    closed_reads["label"] = genomes["label"].to_numpy()[closed_reads["genome"]]
    return Examples(rows, genomes, left_out, closed_reads)


def _closed_reads(
    genome_of_read: NDArray[np.int64], open_reads: pd.DataFrame, rows: pd.DataFrame
) -> pd.DataFrame:
    """Return the reads without an open frame, and how many reads each of them stands for.

    If only half of the reads with a frame of a genome are used, half of those without one belong to
    them. Each then has the weight 0.5.

    Args:
        genome_of_read: The genome of each read, [reads].
        open_reads: Reads with an open frame, with the columns read and genome.
        rows: The frames that are used, with the same columns.

    Returns:
        The columns read, genome and weight. Genomes of which no read is used are left out.
    """
    is_open = np.zeros(len(genome_of_read), bool)
    is_open[open_reads["read"]] = True
    reads = np.flatnonzero(~is_open)
    closed = pd.DataFrame({"read": reads, "genome": genome_of_read[reads]})
    n_open = open_reads["genome"].value_counts()
    n_used = rows[["read", "genome"]].drop_duplicates()["genome"].value_counts()
    closed["weight"] = closed["genome"].map(n_used / n_open)
    return closed.dropna().reset_index(drop=True)


def _labelled_rows(
    store: OrfStore,
    truth: pd.DataFrame,
    line_of_read: NDArray[np.int64],
    genome_names: "pd.Index[str]",
) -> pd.DataFrame:
    """Return all translated frames of the reads, with the origin that the truth gives them.

    Args:
        store: The staged reads.
        truth: The table of origins, with the columns label and genome.
        line_of_read: The row of each read in `truth`, [reads].
        genome_names: Name of each genome.

    Returns:
        The columns read, fragment (the same number for the two reads of a pair), chunk, unique
        (number of the distinct sequence), label, genome (index into `genome_names`) and sequence
        (the same number for both strands).
    """
    read_of_row = np.asarray(store.row_read)
    unique_of_row = np.asarray(store.row_unique)
    label_of_read = truth["label"].to_numpy()[line_of_read]
    genome_of_read = genome_names.get_indexer(pd.Index(truth["genome"]))[line_of_read]
    return pd.DataFrame(
        {
            "read": read_of_row,
            "fragment": _fragment_numbers(store)[read_of_row],
            "chunk": np.asarray(store.row_chunk),
            "unique": unique_of_row,
            "label": label_of_read[read_of_row],
            "genome": genome_of_read[read_of_row],
            "sequence": _sequence_numbers(store)[unique_of_row],
        }
    )


def _fragment_numbers(store: OrfStore) -> NDArray[np.int64]:
    """Return a number for each fragment, [reads]. The two reads of a pair are of one fragment."""
    begins_fragment = ~find_second_mates(store)
    return np.cumsum(begins_fragment, dtype=np.int64) - 1


def _sequence_numbers(store: OrfStore) -> NDArray[np.int64]:
    """Return a number for each distinct sequence, [uniques].

    A sequence and its reverse complement get the same number.
    """
    hashes_of_blocks = [np.zeros(0, np.uint64)]  # empty, for a store without a sequence
    for start in range(0, store.n_uniques, BLOCK_UNIQUES):
        end = min(start + BLOCK_UNIQUES, store.n_uniques)
        # The alphabetically first one of the two strands stands for both.
        first_strands = [min(dna, _reverse_complement(dna)) for dna in store.dna(start, end)]
        hashes = digests(first_strands)[:, 0]  # the first 64 bits of each digest
        hashes_of_blocks.append(hashes)
    numbers, _ = pd.factorize(np.concatenate(hashes_of_blocks))
    return np.asarray(numbers)


def _reverse_complement(dna: bytes) -> bytes:
    """Return the reverse complement of a sequence."""
    return dna.translate(_COMPLEMENT)[::-1]


def _require_one_label(rows: pd.DataFrame, store: OrfStore) -> None:
    """Raise an `InputError` if the same sequence, on either strand, has both labels.

    The message names a read of each label with the first such sequence.
    """
    n_labels = rows.groupby("sequence")["label"].transform("nunique")
    mixed_rows = rows[n_labels > 1]
    if mixed_rows.empty:
        return
    first_sequence = mixed_rows["sequence"].iloc[0]
    examples = mixed_rows[mixed_rows["sequence"] == first_sequence].drop_duplicates("label")
    read_of_label = examples.set_index("label")["read"]
    others_read = read_of_label[OTHERS]
    virus_read = read_of_label[VIRUS]
    others_id = store.read_ids(others_read, others_read + 1)[0]
    virus_id = store.read_ids(virus_read, virus_read + 1)[0]
    n_more = mixed_rows["sequence"].nunique() - 1
    raise InputError(
        f"reads {virus_id!r} (virus) and {others_id!r} (others) hold the same sequence, "
        f"on either strand, as do {n_more} more",
        hint="correct the truth or leave reads out",
    )


def _limit_rows(rows: pd.DataFrame, spec: TrainSpec, rng: np.random.Generator) -> pd.DataFrame:
    """Return at most `spec.rows_per_class` frames of each class, chosen at random.

    A read is chosen with all its frames, and a pair with both its reads, or not at all.
    """
    fragments = rows.groupby("fragment").agg(
        label=("label", "first"), genome=("genome", "first"), rows=("label", "size")
    )
    kept_fragments = subsample(fragments, spec.rows_per_class, spec.sampling, rng)
    return rows[rows["fragment"].isin(kept_fragments)].reset_index(drop=True)


def subsample(
    table: pd.DataFrame, limit: int, sampling: str, rng: np.random.Generator
) -> "pd.Index[int]":
    """Choose entries of a table at random, with at most `limit` rows of each class.

    Args:
        table: Entries with the columns label, genome and rows (how many rows the entry stands for).
        limit: Maximum number of rows of each class.
        sampling: "natural": all entries are equally likely. "even": one entry of each genome in
            turn, so that a large genome does not contribute more than needed.
        rng: The random number generator.

    Returns:
        Index labels of the chosen entries.
    """
    table = table.iloc[rng.permutation(len(table))]
    if sampling == "even":
        turns = table.groupby("genome").cumcount()  # 0 for the first entry of each genome
        table = table.iloc[np.argsort(turns, kind="stable")]
    # Entries are taken in this order, as long as the rows of their class stay within the limit.
    n_rows_so_far = table.groupby("label")["rows"].cumsum()
    return table.index[n_rows_so_far <= limit]


def _assign_sides(rows: pd.DataFrame, spec: TrainSpec) -> NDArray[np.int64]:
    """Return the set of each row (index into SIDES: training, validation or test), [rows].

    The test set is chosen first. The other rows are then split into training and validation.
    """
    sides = np.full(len(rows), TRAIN_SIDE)
    is_test = assign_folds(rows, spec.test_share, spec.seed) == 0  # fold 0 is held back
    sides[is_test] = TEST_SIDE
    other_rows = np.flatnonzero(~is_test)
    sides[other_rows] = assign_training_sides(
        rows.iloc[other_rows], spec.validation_share, spec.seed
    )
    return sides


def assign_training_sides(
    rows: pd.DataFrame, validation_share: float, seed: int
) -> NDArray[np.int64]:
    """Return the set of rows that are not tested: training or validation, [rows].

    Args:
        rows: The rows that are not in the test set, with the columns label and cluster.
        validation_share: Share of these rows that the validation set should have.
        seed: Seed of the random assignment.
    """
    # Fold 0 is the one to hold back.
    is_validation = assign_folds(rows, validation_share, seed) == 0
    return np.where(is_validation, VALIDATION_SIDE, TRAIN_SIDE)


def assign_folds(rows: pd.DataFrame, share: float, seed: int) -> NDArray[np.int64]:
    """Split rows into folds with about the same share of each class; no cluster is in two folds.

    Fold 0 is the one to hold back: the fold with the most clusters of its rarer class, so that no
    single cluster dominates it.

    Args:
        rows: Rows with the columns label and cluster.
        share: Share of the rows that a fold should have.
        seed: Seed of the random assignment.

    Returns:
        The fold of each row, [rows].

    Raises:
        InputError: Clusters hold both classes, so that some fold would lack a class.
    """
    # Each fold needs a cluster of each class, so there cannot be more folds than clusters.
    min_clusters = int(rows.groupby("label")["cluster"].nunique().min())
    n_folds = max(2, min(round(1 / share), min_clusters))
    splitter = StratifiedGroupKFold(n_folds, shuffle=True, random_state=seed)
    folds = np.empty(len(rows), np.int64)
    splits = splitter.split(rows, rows["label"], rows["cluster"])
    for number, (_, members) in enumerate(splits):
        folds[members] = number

    # Count the clusters by fold and class. Without an entry, a fold has no row of a class.
    n_clusters = rows.assign(fold=folds).groupby(["fold", "label"])["cluster"].nunique()
    if len(n_clusters) < 2 * n_folds:  # one entry for each of the two classes
        raise InputError(
            "similar genomes are in both classes, so they cannot be split; see --similarity"
        )
    # Number the folds anew, so that the one with the most clusters of its rarer class is 0.
    n_clusters_of_rarer_class = n_clusters.groupby("fold").min().to_numpy()
    folds_by_rank = np.argsort(-n_clusters_of_rarer_class, kind="stable")
    rank_of_fold = np.argsort(folds_by_rank)  # the inverse: the place of each fold in that order
    return rank_of_fold[folds]
