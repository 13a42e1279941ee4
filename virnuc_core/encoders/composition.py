"""Tell how much reads are like those that a classifier was trained on, by their use of codons.

A classifier gives every sequence a score, also one of a kind that its training did not contain. So
the training stores which codons the reading frames of each kind of genome used, and how much they
varied. A run compares its own frames with that.

The distance of a frame is its squared Mahalanobis distance to the nearest kind (Lee et al. 2018, A
simple unified framework for detecting out-of-distribution samples, NeurIPS 31), over the square
roots of its 64 shares of codons. The distance of a chunk is that of its nearest frame, and the
distance of a read is the mean over its chunks. A sample is judged by two numbers: the share of its
reads that are far, and the mean distance of all its reads. The mean also tells a sample whose reads
are each a little too far.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from virnuc_core.config import Spec, refuse_unreadable
from virnuc_core.errors import WeightsError
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import write_text_atomically
from virnuc_core.sample_familiarity import MIN_READS, UNKNOWN_DOMAIN, SampleFamiliarity, Verdict
from virnuc_core.system_errors import path_exists, read_with_retries

COMPOSITION: Final = "composition.json"  # in the folder of a classifier, and of a run
N_CODONS: Final = 64
# Frames up to this factor shorter or longer than all those of the training are compared.
MAX_CODONS_FACTOR: Final = 1.25
BLOCK_UNIQUES: Final = 1 << 14  # distinct sequences that are compared together
BLOCK_ROWS: Final = 1 << 18  # rows whose reads are judged together
# Threads that compare blocks. The GPUs wait for them at the start of a run. With more, a block's
# 50 MB of intermediate arrays would add up.
MAX_THREADS: Final = 8

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Numbers = Annotated[tuple[float, ...], Field(min_length=N_CODONS, max_length=N_CODONS)]

_UNKNOWN_CODE: Final = 64  # so large that a codon with an unknown base is never below 64
# The code of a codon is 21 times this at most, which 16 bits can hold.
_CODE_OF_LETTER: Final = np.full(256, _UNKNOWN_CODE, np.int16)
_CODE_OF_LETTER[np.frombuffer(b"ACGT", np.uint8)] = range(4)


class KindComposition(Spec):
    """One kind of genome in a training, such as `phage`."""

    genomes: int  # clusters of genomes that its reads are from
    reads: int
    # Share of its own reads that are far, although their genomes were held out; None if it has a
    # single cluster of genomes, so that none can be held out.
    false_alarms: float | None
    mean: Numbers  # of the square roots of the shares of codons, in the order AAA, AAC, …


class TrainingComposition(Spec):
    """`composition.json`: the use of codons in the training of a classifier."""

    schema_version: int = 1
    kinds: dict[str, KindComposition]
    whitening: Annotated[tuple[Numbers, ...], Field(min_length=N_CODONS, max_length=N_CODONS)]
    # The mean distance of a read with frames of n codons is the first number plus the second one
    # ÷ n.
    expected_distance: tuple[float, float]
    codons: tuple[int, int]  # of the shortest and the longest frame of the training
    far_from: float  # a read with this distance ÷ the expected one, or more, is far
    # Shares of far reads among those of one genome, measured on genomes that were held out: the
    # share that 95 % of these genomes do not exceed, and the largest one.
    usual_share: float
    largest_share: float
    # The same of the mean distance of the reads of one genome. Heads that were trained by an older
    # version have no such limit.
    usual_distance: float | None = None
    largest_distance: float | None = None
    genomes_held_out: int

    @model_validator(mode="after")
    def _has_kinds(self) -> "TrainingComposition":
        """Refuse a file without any kind of genome, to which no distance can be measured."""
        if not self.kinds:
            raise ValueError("kinds: at least one is needed")
        return self

    def distances(self, codons: Floats) -> Floats:
        """Return how far frames are from the nearest kind, as a multiple of the expected distance.

        Args:
            codons: How often each frame has each codon, [frames, 64].

        Returns:
            Distances, [frames]; NaN for frames much shorter or longer than all of the training.
        """
        n_codons = codons.sum(axis=1)
        shortest, longest = self.codons
        is_comparable = (n_codons * MAX_CODONS_FACTOR >= shortest) & (
            n_codons <= longest * MAX_CODONS_FACTOR
        )
        result = np.full(len(codons), np.nan)
        whitening = np.array(self.whitening)
        means = np.array([kind.mean for kind in self.kinds.values()])
        features = codon_features(codons[is_comparable])
        base, per_codon = self.expected_distance
        expected = base + per_codon / n_codons[is_comparable]
        result[is_comparable] = nearest_distances(features, means, whitening) / expected
        return result

    def is_far(self, distances: Floats) -> NDArray[np.bool_]:
        """Return which reads are far from the training, [reads].

        Args:
            distances: What `read_distances` returns, [reads]. A read with NaN is not far.
        """
        return distances >= self.far_from


class ComparedReads(NamedTuple):
    """The reads of a run, compared with the training."""

    is_far: NDArray[np.bool_] | None  # [reads]; None: the training is unknown
    sample: SampleFamiliarity
    kinds: tuple[str, ...] = ()  # of genomes in the training


UNKNOWN_TRAINING: Final = ComparedReads(None, UNKNOWN_DOMAIN)


def write_composition(composition: TrainingComposition, folder: Path) -> None:
    """Write the composition of the training data to the folder of a classifier, or of a run."""
    write_text_atomically(folder / COMPOSITION, composition.model_dump_json(indent=1) + "\n")


def read_composition(folder: Path) -> TrainingComposition | None:
    """Read the composition of a classifier's training data, or return None if it has none.

    Args:
        folder: Folder of the classifier, or of a run. Classifiers of other programs and of older
            versions have no such file.

    Raises:
        WeightsError: The file is damaged or cannot be read.
    """
    path = folder / COMPOSITION
    if not path_exists(path):
        return None
    with refuse_unreadable(path, "composition of the training data", WeightsError):
        text = read_with_retries(path, path.read_text)
        return TrainingComposition.model_validate_json(text)


def codon_features(codons: Floats) -> Floats:
    """Return the square roots of the shares of each codon, whose noise does not depend on them.

    Args:
        codons: How often each frame has each codon, [frames, 64].
    """
    n_codons = np.maximum(1, codons.sum(axis=1, keepdims=True))
    features: Floats = np.sqrt(codons / n_codons)
    return features


def nearest_distances(features: Floats, means: Floats, whitening: Floats) -> Floats:
    """Return the squared Mahalanobis distance of each frame to the nearest mean, [frames].

    Args:
        features: What `codon_features` returns, [frames, 64].
        means: The mean of each kind, [kinds, 64].
        whitening: A matrix, [64, 64]; its product with its own transpose is the inverse covariance.
    """
    whitened = features @ whitening
    nearest = np.full(len(features), np.inf)
    for mean in means @ whitening:
        squares = (whitened - mean) ** 2
        np.minimum(nearest, squares.sum(axis=1), out=nearest)
    return nearest


def count_codons(store: OrfStore, low: int, high: int) -> Floats:
    """Count the codons of distinct sequences of a store. Codons with other letters do not count.

    Args:
        store: The staged reads.
        low: The first sequence.
        high: One past the last sequence.

    Returns:
        How often each sequence has each codon, in the order AAA, AAC, …, [high - low, 64].
    """
    n_sequences = high - low
    offsets = np.asarray(store.dna_offsets[low : high + 1], np.int64)
    letters = np.asarray(store.dna_bytes[offsets[0] : offsets[-1]])
    starts = offsets[:-1] - offsets[0]  # of each sequence, in `letters`

    # The three letters are the digits of a number to the base 4. It is computed at every letter,
    # because that is faster than to pick the letters of the codons first.
    codes = _CODE_OF_LETTER[letters]
    codons_at_letters = 16 * codes[:-2]
    codons_at_letters += 4 * codes[1:-1]
    codons_at_letters += codes[2:]

    # All codons of all sequences stand in one list, [codons].
    n_codons = np.diff(offsets) // 3
    n_codons_before = np.cumsum(n_codons) - n_codons  # those of earlier sequences
    # Letters between the codons of earlier sequences, which belong to no codon.
    n_letters_skipped = starts - 3 * n_codons_before
    first_letters = 3 * np.arange(n_codons.sum())
    if n_letters_skipped.any():
        first_letters += np.repeat(n_letters_skipped, n_codons)
    codons = codons_at_letters[first_letters]

    # Each cell of the table stands for one codon of one sequence.
    cells = np.repeat(N_CODONS * np.arange(n_sequences), n_codons)
    cells += codons
    is_unknown = codons >= N_CODONS
    if is_unknown.any():
        cells = cells[~is_unknown]
    counts = np.bincount(cells, minlength=N_CODONS * n_sequences)
    return counts.reshape(-1, N_CODONS).astype(np.float64)


def distances_by_group(distances: Floats, chunks: Indices, reads: Indices) -> Floats:
    """Return the distance of each read from those of its frames.

    Args:
        distances: Distances of the frames, those of a chunk together; NaN if unknown, [frames].
        chunks: Number of the chunk within the read, [frames].
        reads: Number of the read, ascending, [frames].

    Returns:
        The mean over its chunks of the smallest distance of their frames, for each read that
        `reads` names, in order; NaN if no frame of it has a distance.
    """
    if len(distances) == 0:
        return np.empty(0)
    is_first = np.ones(len(reads), bool)
    is_first[1:] = (np.diff(reads) != 0) | (np.diff(chunks) != 0)
    first_frames = np.flatnonzero(is_first)
    chunk_distances = np.fmin.reduceat(distances, first_frames)  # ignores NaN
    _, read_of_chunk = np.unique(reads[first_frames], return_inverse=True)
    is_known = ~np.isnan(chunk_distances)
    n_reads = int(read_of_chunk[-1]) + 1
    n_chunks = np.bincount(read_of_chunk[is_known], minlength=n_reads)
    sums = np.bincount(read_of_chunk[is_known], chunk_distances[is_known], minlength=n_reads)
    means = np.full(n_reads, np.nan)
    np.divide(sums, n_chunks, out=means, where=n_chunks > 0)
    return means


def compare_with_training(store: OrfStore, folder: Path) -> ComparedReads:
    """Compare the reads of a store with what a classifier was trained on, if that is known.

    Args:
        store: The staged reads.
        folder: Folder of the classifier, or of a run that keeps a copy of the composition.

    Raises:
        WeightsError: The file with the composition is damaged or cannot be read.
    """
    composition = read_composition(folder)
    if composition is None:
        return UNKNOWN_TRAINING
    return compare_reads(store, composition)


def compare_reads(store: OrfStore, composition: TrainingComposition) -> ComparedReads:
    """Compare the reads of a store with the training data of a classifier.

    Beside the store, which is mapped, this needs four bytes for each distinct sequence, and nine
    for each read.

    Args:
        store: The staged reads.
        composition: The composition of the training data.
    """
    distances = read_distances(store, composition)
    is_far = composition.is_far(distances)
    sample = judge_sample(composition, distances)
    return ComparedReads(is_far, sample, tuple(composition.kinds))


def read_distances(store: OrfStore, composition: TrainingComposition) -> Floats:
    """Return how far each read of a store is from the training data of a classifier.

    Args:
        store: The staged reads.
        composition: The composition of the training data.

    Returns:
        Multiples of the expected distance, [reads]; NaN for reads that cannot be compared.
    """
    distances = unique_distances(store, composition)
    distances_of_reads = np.full(store.n_reads, np.nan)
    for rows in _row_blocks(store):
        reads = np.asarray(store.row_read[rows], np.int64)
        chunks = np.asarray(store.row_chunk[rows], np.int64)
        frame_distances = distances[store.row_unique[rows]].astype(np.float64)
        is_first_row = np.diff(reads, prepend=-1) != 0
        read_means = distances_by_group(frame_distances, chunks, reads)
        distances_of_reads[reads[is_first_row]] = read_means
    return distances_of_reads


def unique_distances(store: OrfStore, composition: TrainingComposition) -> NDArray[np.float32]:
    """Return how far each distinct sequence of a store is from the training data of a classifier.

    Threads compare the blocks side by side; numpy lets them run at the same time. Each multiplies
    its matrices on one core. Otherwise numpy would use all cores for each of them, and on a machine
    with many cores they would mostly wait for each other.

    Args:
        store: The staged reads.
        composition: The composition of the training data.

    Returns:
        Multiples of the expected distance, [uniques]; NaN for those that cannot be compared.
    """
    from threadpoolctl import threadpool_limits  # small runs need not wait for it at their start

    distances = np.full(store.n_uniques, np.nan, np.float32)

    def compare_block(low: int) -> None:
        """Fill in the distances of one block."""
        high = min(low + BLOCK_UNIQUES, store.n_uniques)
        distances[low:high] = composition.distances(count_codons(store, low, high))

    block_starts = range(0, store.n_uniques, BLOCK_UNIQUES)
    n_cores = len(os.sched_getaffinity(0))  # cores that this process may use
    n_threads = min(n_cores, MAX_THREADS)
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(n_threads) as threads:
        # `list` waits for all blocks, and raises the error of one that failed.
        list(threads.map(compare_block, block_starts))
    return distances


def _row_blocks(store: OrfStore) -> Iterator[slice]:
    """Yield consecutive ranges of rows. All rows of a read are in one range."""
    row = 0
    while row < store.n_rows:
        last_row = min(row + BLOCK_ROWS, store.n_rows) - 1
        end = int(np.searchsorted(store.row_read, store.row_read[last_row], side="right"))
        yield slice(row, end)
        row = end


def judge_sample(composition: TrainingComposition, distances: Floats) -> SampleFamiliarity:
    """Say whether the reads of a sample are farther from the training than a known genome's.

    Either number is enough: the share of far reads, or the mean distance of all reads.

    Args:
        composition: The composition of the training data.
        distances: What `read_distances` returns, [reads]; reads with NaN are not counted.
    """
    compared = distances[~np.isnan(distances)]
    n_far = int(composition.is_far(compared).sum())
    share = n_far / max(1, len(compared))
    mean_distance = 0.0
    if len(compared):
        mean_distance = float(compared.mean())
    largest_distance = _limit(composition.largest_distance)
    usual_distance = _limit(composition.usual_distance)
    is_beyond_all = share > composition.largest_share or mean_distance > largest_distance
    is_unusual = share > composition.usual_share or mean_distance > usual_distance
    verdict: Verdict = "familiar"
    if len(compared) < MIN_READS:
        verdict = "too few reads"
    elif is_beyond_all:
        verdict = "unfamiliar"
    elif is_unusual:
        verdict = "partly unfamiliar"
    return SampleFamiliarity(
        verdict=verdict,
        compared=len(compared),
        far=n_far,
        usual_share=composition.usual_share,
        largest_share=composition.largest_share,
        mean_distance=mean_distance,
        usual_distance=composition.usual_distance,
        largest_distance=composition.largest_distance,
    )


def _limit(distance: float | None) -> float:
    """Return a limit of the mean distance, which no sample exceeds if there is none."""
    if distance is None:
        return np.inf
    return distance


def composition_rows(values: NDArray[Any]) -> tuple[tuple[float, ...], ...]:
    """Return the rows of a matrix as numbers of seven digits, which keep a file small."""
    return tuple(tuple(float(f"{value:.7g}") for value in row) for row in values.tolist())
