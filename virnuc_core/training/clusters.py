"""Cluster genomes by similarity, so that related genomes are never in two sets of a split.

Genomes are compared by their k-mers, of which a sample is kept (MinHash; Ondov et al. 2016,
Genome Biology 17:132).
"""

import re
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components

from virnuc_core.config import TrainSpec
from virnuc_core.errors import InputError, join_first
from virnuc_core.reads.store import OrfStore
from virnuc_core.training.genomes import read_genomes
from virnuc_core.training.truth import read_groups

K: Final = 21  # bases of a k-mer; a shorter frame does not say which genome it is from
BLOCK_BASES: Final = 1 << 18  # bases whose k-mers are hashed together
MAX_HASHES: Final = 1 << 22  # k-mers that are compared, about

Indices = NDArray[np.int64]

# Names of windows of a longer sequence. The first form is that of samtools and bedtools. A number
# alone may count genomes (`virus_0001`), so it is a place only behind an accession with its version
# or behind a chromosome.
_WINDOW: Final = re.compile(
    r"""
      (?P<named>.+)[:_](?P<start>\d+)-(?P<end>\d+)                      # NC_000022.11:1-20000
    | (?P<placed>.*[A-Za-z_]\d{3,}\.\d+|chr[0-9A-Za-z]{1,5})[:_]\d+     # chr22_20000
    """,
    re.VERBOSE,
)

_UNKNOWN_CODE: Final = np.uint64(4)
_CODE_OF_LETTER: Final = np.full(256, _UNKNOWN_CODE)  # 0 to 3, so that A + T = C + G = 3
_CODE_OF_LETTER[np.frombuffer(b"ACGT", np.uint8)] = range(4)
_POWERS_OF_4: Final = np.uint64(4) ** np.arange(K, dtype=np.uint64)
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)  # spreads k-mers over all numbers


def cluster_genomes(
    rows: pd.DataFrame, store: OrfStore, genome_names: "pd.Index[str]", spec: TrainSpec
) -> Indices:
    """Put related genomes into one cluster.

    Two genomes are related if they have a read sequence in common (on either strand), if they are
    in the same group of the file `spec.groups`, or if they have enough k-mers in common: the share
    `spec.similarity` of the k-mers of the genome that has fewer. A chain of related genomes is one
    cluster.

    Args:
        rows: Translated frames of reads, with the columns unique (number of the distinct
            sequence), sequence (the same number for both strands) and genome (index into
            `genome_names`).
        store: The staged reads that the frames are from.
        genome_names: Name of each genome.
        spec: The files of groups and genomes, and the similarity.

    Returns:
        The cluster of each genome, [genomes].

    Raises:
        InputError: A file cannot be read, or has no group for a genome.
    """
    n_genomes = len(genome_names)
    kmers = _kmers_of_genomes(rows, store, genome_names, spec)
    pairs = [
        related(rows["genome"], rows["sequence"]),
        related(kmers["genome"], kmers["hash"], min_share=spec.similarity),
    ]
    if spec.groups is not None:
        group_of_genome = read_groups(spec.groups).set_index("genome")["group"]
        absent = genome_names.difference(group_of_genome.index)
        if len(absent):
            raise InputError(f"no line for genome {join_first(absent)}", file=spec.groups)
        pairs.append(related(np.arange(n_genomes), group_of_genome[genome_names]))
    return _connected(pairs, n_genomes)


def source_sequence(name: str) -> str:
    """Return the name of the sequence that a genome is a window of, else the name itself.

    `NAME:START-END`, `NAME_START-END`, `NAME:START` and `NAME_START` are windows of `NAME`. In the
    last two forms `NAME` must be an accession with its version (`NC_000022.11`) or a chromosome
    (`chr22`).
    """
    match = _WINDOW.fullmatch(name)
    if match is None:
        return name
    if match["placed"]:
        return match["placed"]
    if int(match["start"]) < int(match["end"]):
        return match["named"]
    return name  # no window ends before it begins, so the numbers mean something else


def independent_genomes(names: "pd.Series[str]", clusters: Indices) -> Indices:
    """Number the genomes that are independent of each other.

    Genomes of one cluster, and windows of one sequence, count as one. Windows may be in different
    sets of a split, but they say as much about other genomes as one genome does.

    Args:
        names: Name of each genome.
        clusters: Cluster of each genome, [genomes].

    Returns:
        The number of each genome, [genomes]; equal for those that count as one.
    """
    n_genomes = len(names)
    pairs = [
        related(np.arange(n_genomes), clusters),
        related(np.arange(n_genomes), names.map(source_sequence)),
    ]
    return _connected(pairs, n_genomes)


def _connected(pairs: list[tuple[Indices, Indices]], n_genomes: int) -> Indices:
    """Return the cluster of each genome, [genomes]. A chain of pairs is one cluster."""
    first_genomes = np.concatenate([first for first, _ in pairs])
    second_genomes = np.concatenate([second for _, second in pairs])
    # The graph has an edge between the two genomes of each pair, with the weight 1.
    edges = np.ones(len(first_genomes)), (first_genomes, second_genomes)
    graph = coo_array(edges, shape=(n_genomes, n_genomes))
    _, clusters = connected_components(graph, directed=False)
    return np.asarray(clusters, np.int64)


def related(genomes: Any, items: Any, min_share: float = 0.0) -> tuple[Indices, Indices]:
    """Find pairs of genomes that have items in common. An item is a k-mer, a sequence or a group.

    `genomes` and `items` are two columns of a table: each entry says that a genome has an item.

    Args:
        genomes: Number of the genome, [entries].
        items: The item, [entries].
        min_share: How many items must be in common, as a share of the items of the genome that
            has fewer. At least one must always be.

    Returns:
        The first and the second genome of each pair, [pairs] each. Each pair is given twice, once
        in each order, and each genome is also paired with itself.
    """
    item_numbers, _ = pd.factorize(items)
    entries = pd.DataFrame({"genome": genomes, "item": item_numbers}).drop_duplicates()
    ones = np.ones(len(entries))
    has_item = csr_array((ones, (entries["genome"], entries["item"])))  # [genomes, items]
    n_items = np.diff(has_item.indptr)  # [genomes]; `indptr` counts the entries row by row
    # A product of two rows counts the items that both genomes have. Pairs without any are absent.
    n_shared = (has_item @ has_item.T).tocoo()  # [genomes, genomes]
    first, second = n_shared.coords
    fewer_items = np.minimum(n_items[first], n_items[second])
    is_related = n_shared.data >= min_share * fewer_items
    return first[is_related], second[is_related]


def _kmers_of_genomes(
    rows: pd.DataFrame, store: OrfStore, genome_names: "pd.Index[str]", spec: TrainSpec
) -> pd.DataFrame:
    """Return the k-mers of each genome, by which related genomes are found.

    The k-mers are those of the genome's own sequence, if it is given, and those of the reads from
    it. Few reads alone are a poor measure of how related two genomes are: they may come from
    different places of both genomes. Or they have so few k-mers that one repeat, which many genomes
    have, makes the genomes look related.

    Returns:
        A row for each k-mer of a sequence, with the columns unique (number of the sequence), genome
        (index into `genome_names`) and hash (of the k-mer).
    """
    known_sequences: dict[str, str] = {}
    if spec.genomes is not None:
        known_sequences = read_genomes(spec.genomes)
    genomes = [known_sequences.get(name, "").encode() for name in genome_names]
    # The genomes are put behind the sequences of the reads, and are numbered after them.
    genome_letters = np.frombuffer(b"".join(genomes), np.uint8)
    letters = np.concatenate([store.dna_bytes[:], genome_letters])
    genome_lengths = [len(genome) for genome in genomes]
    genome_ends = store.dna_offsets[-1] + np.cumsum(genome_lengths)
    offsets = np.append(store.dna_offsets, genome_ends)
    genome_numbers = np.arange(len(genomes))
    genomes_of_genomes = pd.DataFrame(
        {"unique": store.n_uniques + genome_numbers, "genome": genome_numbers}
    )
    genomes_of_reads = rows[["unique", "genome"]].drop_duplicates()
    genome_of_sequence = pd.concat([genomes_of_reads, genomes_of_genomes])
    return genome_of_sequence.merge(sample_kmers(letters, offsets), on="unique")


def sample_kmers(letters: NDArray[np.uint8], offsets: Indices) -> pd.DataFrame:
    """Return a sample of the k-mers of sequences. A k-mer is in it either everywhere or nowhere.

    Up to `MAX_HASHES` letters, the sample has all k-mers. Of more letters, it has about
    `MAX_HASHES` k-mers: those whose hash, mixed a second time, is below a limit. K-mers with a
    letter other than A, C, G and T are left out.

    Args:
        letters: The sequences end to end, ASCII, [bases].
        offsets: Where each sequence begins, and where the last one ends, [sequences + 1].

    Returns:
        The columns `unique` (number of the distinct sequence) and `hash`, without repeats. A k-mer
        has the same hash on both strands.
    """
    sampling_rate = 1 + len(letters) // MAX_HASHES
    largest_number = ~np.uint64(0)  # of 64 bits
    max_hash = largest_number // np.uint64(sampling_rate)
    blocks = []
    for start in range(0, len(letters) - K + 1, BLOCK_BASES):
        # The last k-mers of a block reach into the next one.
        block = letters[start : start + BLOCK_BASES + K - 1]
        windows = sliding_window_view(_CODE_OF_LETTER[block], K)  # [positions, K]
        hashes = _canonical_hashes(windows)
        is_known = (windows != _UNKNOWN_CODE).all(axis=1)
        is_sampled = hashes * _MIX <= max_hash
        positions = np.flatnonzero(is_known & is_sampled)
        # The sequences lie end to end, so a window may begin in one and end in the next.
        sequence_of_start = _sequence_at(start + positions, offsets)
        sequence_of_end = _sequence_at(start + positions + K - 1, offsets)
        is_within = sequence_of_start == sequence_of_end
        hashes = hashes[positions[is_within]]
        blocks.append(pd.DataFrame({"unique": sequence_of_start[is_within], "hash": hashes}))
    if not blocks:
        return pd.DataFrame(columns=["unique", "hash"])
    return pd.concat(blocks).drop_duplicates()


def _canonical_hashes(windows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each k-mer, the same for its reverse complement.

    Args:
        windows: Codes of the bases, 0 to 3, [k-mers, K]. A and T, and C and G, add up to 3. The
            hash of a k-mer with an unknown base means nothing.

    Returns:
        The hashes, [k-mers].
    """
    reverse_complements = np.uint64(3) - windows[:, ::-1]
    # A k-mer is a number with the base 4. The smaller one of the two strands stands for both.
    kmers = np.minimum(windows @ _POWERS_OF_4, reverse_complements @ _POWERS_OF_4)
    hashes: NDArray[np.uint64] = kmers * _MIX
    hashes ^= hashes >> np.uint64(32)  # mixes the upper bits into the lower ones
    return hashes


def _sequence_at(positions: Indices, offsets: Indices) -> Indices:
    """Return the number of the sequence that each position lies in.

    `offsets` says where each sequence begins. Empty sequences are passed over.
    """
    return np.asarray(np.searchsorted(offsets, positions, "right") - 1)
