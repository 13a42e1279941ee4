"""Use of codons: counted, compared with slow twins, and kept beside a classifier."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from scipy.spatial.distance import mahalanobis
from threadpoolctl import threadpool_info, threadpool_limits

from virnuc_core.encoders.composition import (
    COMPOSITION,
    N_CODONS,
    Floats,
    KindComposition,
    TrainingComposition,
    codon_features,
    count_codons,
    distances_by_group,
    judge_sample,
    nearest_distances,
    read_composition,
    read_distances,
    unique_distances,
    write_composition,
)
from virnuc_core.errors import WeightsError
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore

CODONS = ["".join(codon) for codon in product("ACGT", repeat=3)]


@pytest.fixture(scope="module")
def composition() -> TrainingComposition:
    """A composition with one kind, whose limits are round numbers."""
    mean = (0.125,) * N_CODONS
    rows = tuple(tuple(row) for row in np.eye(N_CODONS).tolist())
    return TrainingComposition(
        kinds={"virus": KindComposition(genomes=3, reads=90, false_alarms=0.05, mean=mean)},
        whitening=rows,
        expected_distance=(1.0, 0.0),
        codons=(40, 60),
        far_from=2.0,
        usual_share=0.1,
        largest_share=0.2,
        usual_distance=1.25,
        largest_distance=1.5,
        genomes_held_out=3,
    )


def test_codons_are_counted_in_the_frame(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    letters = np.array(list("ACGTN"))
    texts = [
        "".join(rng.choice(letters, size=size, p=(0.3, 0.3, 0.2, 0.19, 0.01)))
        for size in (7, 61, 150, 302)
    ]
    path = tmp_path / "reads.fasta"
    path.write_text("".join(f">{i}\n{text}\n" for i, text in enumerate(texts)))
    stage(StageSpec(reads=(str(path),), model_length=100), tmp_path / "orfs.h5")
    store = OrfStore.open(tmp_path / "orfs.h5")
    assert store.n_uniques > 10
    counts = count_codons(store, 2, store.n_uniques)
    for row, dna in zip(counts, store.dna(2, store.n_uniques), strict=True):
        text = dna.decode()
        expected = Counter(text[place : place + 3] for place in range(0, len(text) - 2, 3))
        assert row.tolist() == [expected[codon] for codon in CODONS]


def test_no_sequences_have_no_codons(tmp_path: Path) -> None:
    path = tmp_path / "reads.fasta"
    path.write_text(">r\nTAATTAATTAA\n")
    stage(StageSpec(reads=(str(path),)), tmp_path / "orfs.h5")
    store = OrfStore.open(tmp_path / "orfs.h5")
    assert count_codons(store, 0, 0).shape == (0, N_CODONS)


def test_letters_behind_the_last_codon_do_not_move_the_next_sequence() -> None:
    sequences = [b"ACGTT", b"", b"TTTGGGC", b"GG", b"CCC"]
    store = SimpleNamespace(
        dna_offsets=np.cumsum([0, *map(len, sequences)]),
        dna_bytes=np.frombuffer(b"".join(sequences), np.uint8),
    )
    counts = count_codons(cast(OrfStore, store), 0, len(sequences))
    codons = [[CODONS[codon] for codon in np.flatnonzero(row)] for row in counts]
    assert codons == [["ACG"], [], ["GGG", "TTT"], [], ["CCC"]]


def store_of_random_reads(
    folder: Path, *, n_reads: int, length: int, model_length: int
) -> OrfStore:
    """Return staged reads of random bases."""
    rng = np.random.default_rng(2)
    reads = ["".join(rng.choice(list("ACGT"), length)) for _ in range(n_reads)]
    path = folder / "reads.fasta"
    path.write_text("".join(f">{i}\n{read}\n" for i, read in enumerate(reads)))
    stage(StageSpec(reads=(str(path),), model_length=model_length), folder / "orfs.h5")
    return OrfStore.open(folder / "orfs.h5")


def test_threads_find_the_same_distances_as_one_sequence_after_another(
    tmp_path: Path, composition: TrainingComposition, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of_random_reads(tmp_path, n_reads=200, length=150, model_length=150)
    expected = [
        composition.distances(count_codons(store, unique, unique + 1))[0].astype(np.float32)
        for unique in range(store.n_uniques)
    ]
    assert np.isfinite(expected).any()
    monkeypatch.setattr("virnuc_core.encoders.composition.BLOCK_UNIQUES", 7)
    np.testing.assert_allclose(unique_distances(store, composition), expected, rtol=1e-6)


def test_each_thread_multiplies_on_one_core(tmp_path: Path) -> None:
    """Eight threads that use 32 cores each take longer than one thread."""
    path = tmp_path / "reads.fasta"
    path.write_text(f">r\n{'ACG' * 50}\n")
    stage(StageSpec(reads=(str(path),), model_length=150), tmp_path / "orfs.h5")
    store = OrfStore.open(tmp_path / "orfs.h5")
    cores_used = []

    def note_cores(codons: Floats) -> Floats:
        cores_used.extend(blas_threads())
        return np.zeros(len(codons))

    with threadpool_limits(2, user_api="blas"):
        unique_distances(store, cast(TrainingComposition, SimpleNamespace(distances=note_cores)))
        assert set(blas_threads()) == {2}  # as before
    assert set(cores_used) == {1}


def blas_threads() -> list[int]:
    """Return the number of threads of each library that multiplies matrices for numpy."""
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


def test_distances_are_those_of_scipy() -> None:
    rng = np.random.default_rng(1)
    features = codon_features(rng.integers(0, 5, size=(6, N_CODONS)).astype(float))
    means = codon_features(rng.integers(1, 5, size=(3, N_CODONS)).astype(float))
    factor = rng.normal(size=(N_CODONS, 2 * N_CODONS))
    inverse = np.linalg.inv(factor @ factor.T)
    got = nearest_distances(features, means, np.linalg.cholesky(inverse))
    for row, distance in zip(features, got, strict=True):
        expected = min(mahalanobis(row, mean, inverse) ** 2 for mean in means)
        assert distance == pytest.approx(expected)


def test_a_read_has_the_mean_of_its_nearest_frames() -> None:
    distances = np.array([3.0, 1.0, 5.0, np.nan, np.nan, 7.0])
    chunks = np.array([0, 0, 1, 0, 0, 0])
    reads = np.array([4, 4, 4, 6, 6, 9])
    expected = [(1.0 + 5.0) / 2, np.nan, 7.0]
    np.testing.assert_array_equal(distances_by_group(distances, chunks, reads), expected)


def test_frames_that_cannot_be_compared_do_not_count() -> None:
    """Neither beside other frames of their chunk, nor as a chunk of their own."""
    distances = np.array([np.nan, 3.0, 2.0, np.nan, np.nan, 4.0])
    chunks = np.array([0, 0, 1, 1, 2, 3])
    reads = np.zeros(6, np.int64)
    assert distances_by_group(distances, chunks, reads).tolist() == [(3.0 + 2.0 + 4.0) / 3]


@pytest.mark.parametrize("block_rows", [1, 3, 10])
def test_reads_have_the_same_distance_wherever_blocks_of_rows_end(
    block_rows: int,
    tmp_path: Path,
    composition: TrainingComposition,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = store_of_random_reads(tmp_path, n_reads=10, length=360, model_length=120)
    monkeypatch.setattr("virnuc_core.encoders.composition.BLOCK_ROWS", block_rows)

    frame_distances = unique_distances(store, composition)
    frames: dict[tuple[int, int], list[float]] = defaultdict(list)
    for read, chunk, unique in zip(store.row_read, store.row_chunk, store.row_unique, strict=True):
        frames[read, chunk].append(frame_distances[unique])
    chunks: dict[int, list[float]] = defaultdict(list)
    for (read, _), distances in frames.items():
        chunks[read].append(min(distances))
    expected = [np.mean(chunks[read]) if read in chunks else np.nan for read in range(10)]
    assert np.isfinite(expected).sum() > 5
    np.testing.assert_allclose(read_distances(store, composition), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("n_codons", "is_compared"), [(31, False), (32, True), (75, True), (76, False)]
)
def test_frames_a_quarter_shorter_or_longer_than_the_training_are_compared(
    n_codons: int, is_compared: bool, composition: TrainingComposition
) -> None:
    """The training has frames of 40 to 60 codons: 40 / 1.25 = 32, and 60 * 1.25 = 75."""
    codons = np.zeros((1, N_CODONS))
    codons[0, 0] = n_codons
    assert np.isfinite(composition.distances(codons)).tolist() == [is_compared]


@pytest.mark.parametrize(
    ("n_reads", "n_far", "verdict"),
    [
        (1000, 100, "familiar"),
        (1000, 101, "partly unfamiliar"),
        (1000, 200, "partly unfamiliar"),
        (1000, 201, "unfamiliar"),
        (49, 49, "too few reads"),
        (0, 0, "too few reads"),
    ],
)
def test_a_sample_is_judged_by_its_share_of_far_reads(
    n_reads: int, n_far: int, verdict: str, composition: TrainingComposition
) -> None:
    distances = np.full(n_reads, 0.5)  # so near that the mean stays usual
    distances[:n_far] = 2.0
    sample = judge_sample(composition, distances)
    assert (sample.verdict, sample.far) == (verdict, n_far)


@pytest.mark.parametrize(
    ("n_reads", "mean_distance", "verdict"),
    [
        (1000, 1.25, "familiar"),
        (1000, 1.2501, "partly unfamiliar"),
        (1000, 1.5, "partly unfamiliar"),
        (1000, 1.5001, "unfamiliar"),
        (49, 9.0, "too few reads"),
        (0, 0.0, "too few reads"),
    ],
)
def test_a_sample_is_judged_by_its_mean_distance(
    n_reads: int, mean_distance: float, verdict: str, composition: TrainingComposition
) -> None:
    distances = np.full(n_reads, mean_distance)
    not_compared = np.full(10, np.nan)  # reads without an open frame
    sample = judge_sample(composition, np.concatenate([not_compared, distances]))
    assert sample.verdict == verdict
    assert sample.compared == n_reads
    assert sample.far == n_reads * (mean_distance >= composition.far_from)
    assert sample.mean_distance == pytest.approx(mean_distance)


def test_many_reads_a_little_too_far_make_a_sample_unfamiliar(
    composition: TrainingComposition,
) -> None:
    """None of the reads is far enough to be told by itself, but all are farther than usual."""
    sample = judge_sample(composition, np.full(200, 1.6))
    assert (sample.far, sample.verdict) == (0, "unfamiliar")
    assert "1.60 times" in sample.remark
    assert "1.25" in sample.remark
    assert "1.50" in sample.remark


def test_a_head_of_an_older_version_judges_by_the_share_alone(
    composition: TrainingComposition,
) -> None:
    without_limits = {"usual_distance": None, "largest_distance": None}
    older = composition.model_copy(update=without_limits)
    assert judge_sample(older, np.full(200, 1.9)).verdict == "familiar"
    sample = judge_sample(older, np.full(200, 2.0))
    assert sample.verdict == "unfamiliar"
    assert "mean distance" not in sample.remark


def test_it_is_read_as_it_was_written(composition: TrainingComposition, tmp_path: Path) -> None:
    write_composition(composition, tmp_path)
    assert read_composition(tmp_path) == composition


def test_an_older_head_has_none(tmp_path: Path) -> None:
    assert read_composition(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"{", b'{"kinds": {}}', b"\xff\xfe", b"[]"])
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / COMPOSITION).write_bytes(content)
    with pytest.raises(WeightsError, match=COMPOSITION):
        read_composition(tmp_path)
