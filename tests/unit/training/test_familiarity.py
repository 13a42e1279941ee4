"""Samples of kinds that a training did not have are told from those that it had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from virnuc_core.encoders.composition import COMPOSITION, TrainingComposition, compare_reads
from virnuc_core.encoders.digests import part_digest
from virnuc_core.training.familiarity import fit_composition, replace_composition

from .coding_genomes import reads_of_kind, rows_of_genomes, stage_reads
from .conftest import TrainingRun

GENOMES = 8  # of each kind in the training
READS = 30  # of each genome
VIRUS, HOST, FOREIGN = 1, 2, 3


@pytest.fixture(scope="module")
def composition(tmp_path_factory: pytest.TempPathFactory) -> TrainingComposition:
    """The composition of a training on eight viruses and eight host genomes."""
    reads: list[str] = []
    genomes: list[tuple[str, int]] = []
    for kind, name in ((VIRUS, "virus"), (HOST, "host")):
        for genome in range(GENOMES):
            reads += reads_of_kind(kind, genome, READS)
            genomes += [(name, 100 * kind + genome)] * READS
    store = stage_reads(reads, tmp_path_factory.mktemp("training"))
    fitted = fit_composition(store, rows_of_genomes(store, genomes), seed=0)
    assert fitted is not None
    return fitted


def test_it_says_what_was_seen(composition: TrainingComposition) -> None:
    assert list(composition.kinds) == ["host", "virus"]
    assert {kind.genomes for kind in composition.kinds.values()} == {GENOMES}
    assert {kind.reads for kind in composition.kinds.values()} == {GENOMES * READS}
    assert composition.genomes_held_out == 2 * GENOMES
    assert composition.usual_share <= composition.largest_share
    assert 1 < composition.usual_distance <= composition.largest_distance


def test_false_alarms_are_at_most_one_in_twenty_of_each_kind(
    composition: TrainingComposition,
) -> None:
    for kind in composition.kinds.values():
        assert kind.false_alarms is not None
        assert kind.false_alarms <= 0.0501


@pytest.mark.parametrize(
    ("kinds", "verdicts"),
    [
        ((VIRUS,), {"familiar"}),
        ((HOST,), {"familiar"}),
        ((VIRUS, HOST), {"familiar"}),
        ((FOREIGN,), {"unfamiliar"}),
        ((FOREIGN, HOST), {"unfamiliar"}),
    ],
)
def test_new_genomes_are_judged_by_their_kind(
    kinds: tuple[int, ...],
    verdicts: set[str],
    composition: TrainingComposition,
    tmp_path: Path,
) -> None:
    reads = [read for kind in kinds for read in reads_of_kind(kind, 99, 200)]
    compared = compare_reads(stage_reads(reads, tmp_path), composition)
    assert compared.sample.verdict in verdicts
    assert compared.sample.far == compared.is_far.sum()
    assert compared.sample.compared == len(reads)
    if "familiar" in verdicts:
        assert compared.sample.mean_distance == pytest.approx(1, abs=0.15)
    else:
        assert compared.sample.mean_distance > compared.sample.largest_distance > 1
        assert compared.sample.share > compared.sample.largest_share


def test_far_reads_are_those_of_the_foreign_kind(
    composition: TrainingComposition, tmp_path: Path
) -> None:
    reads = reads_of_kind(VIRUS, 98, 200) + reads_of_kind(FOREIGN, 98, 200)
    is_far = compare_reads(stage_reads(reads, tmp_path), composition).is_far
    assert is_far[:200].mean() < 0.1
    assert is_far[200:].mean() > 0.5


@pytest.mark.parametrize("n_codons", [20, 90])
def test_reads_of_another_length_are_not_compared(
    n_codons: int, composition: TrainingComposition, tmp_path: Path
) -> None:
    reads = reads_of_kind(FOREIGN, 97, 100, n_codons)
    compared = compare_reads(stage_reads(reads, tmp_path), composition)
    assert compared.sample.verdict == "too few reads"
    assert not compared.is_far.any()


def test_without_a_second_genome_of_any_kind_there_is_no_composition(tmp_path: Path) -> None:
    reads = reads_of_kind(VIRUS, 0, 150) + reads_of_kind(HOST, 0, 150)
    store = stage_reads(reads, tmp_path)
    genomes = [("virus", 0)] * 150 + [("host", 1)] * 150
    assert fit_composition(store, rows_of_genomes(store, genomes), seed=0) is None


def test_frames_of_many_lengths_have_the_same_false_alarms(tmp_path: Path) -> None:
    """A short frame has few codons, so that its shares vary more by chance."""
    reads: list[str] = []
    genomes: list[tuple[str, int]] = []
    for genome in range(10):
        for n_codons in (25, 50, 100):
            reads += reads_of_kind(VIRUS, genome, 40, n_codons)
            genomes += [("virus", genome)] * 40
    store = stage_reads(reads, tmp_path / "training")
    fitted = fit_composition(store, rows_of_genomes(store, genomes), seed=0)
    assert fitted is not None
    assert fitted.expected_distance[1] > 0
    for n_codons in (25, 100):
        new_reads = reads_of_kind(VIRUS, 50 + n_codons, 400, n_codons)
        compared = compare_reads(stage_reads(new_reads, tmp_path / str(n_codons)), fitted)
        assert compared.is_far.mean() < 0.15


def test_a_training_writes_it_as_a_part_of_the_head(training_run: TrainingRun) -> None:
    training = training_run.train(epochs=2)
    path = training_run.head / COMPOSITION
    assert path.stat().st_size < 200_000
    composition = TrainingComposition.model_validate_json(path.read_bytes())
    assert set(composition.kinds) == {"others", "virus"}
    assert training.digests["head"] == part_digest(training_run.head)
    text = path.read_text()
    path.write_text(text.replace('"far_from": ', '"far_from": 1'))
    assert training.digests["head"] != part_digest(training_run.head)
    path.write_text(text)


def test_an_earlier_composition_is_removed(
    composition: TrainingComposition, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replace_composition(composition, tmp_path)
    assert (tmp_path / COMPOSITION).exists()
    replace_composition(None, tmp_path)
    assert not (tmp_path / COMPOSITION).exists()
    assert "cannot tell whether their reads are like those of the training" in caplog.text
    assert np.isfinite(composition.far_from)
