"""The test genomes are cut to several lengths, and the fragments are scored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from virnuc_core.reads.simulate import LABELS
from virnuc_core.rundir import RunDir
from virnuc_core.training.fragments import write_fragments
from virnuc_core.training.training import CROSS_VALIDATION, FINAL_TEST

from .conftest import TrainingRun, write_embeddings


def test_genomes_are_cut_to_lengths_and_scored(training_run: TrainingRun, tmp_path: Path) -> None:
    examples = training_run.choose_examples()
    fasta = tmp_path / "cuts.fasta"
    assert write_fragments(examples, training_run.simulated.genomes_file, fasta) is None

    def is_virus(read: str) -> bool:
        number = int(read.split("_", maxsplit=1)[0])
        return LABELS[examples.genomes.loc[number, "label"]] == "virus"

    run = RunDir(tmp_path / "lengths")
    store = write_embeddings(run, fasta, is_virus, signal=1.5)
    assert store.n_reads > 100
    training = training_run.train(run)

    test_sets = {line.test_set for line in training.figures}
    all_lengths = {"150 bases", "300 bases", "500 bases"}
    assert test_sets | set(training.not_run) == all_lengths | {FINAL_TEST, CROSS_VALIDATION}
    [reads_of_150] = [
        line
        for line in training.figures
        if (line.test_set, line.method, line.level, line.is_natural)
        == ("150 bases", "head", "read", True)
    ]
    auroc = reads_of_150.metrics["auroc"]
    assert auroc is not None
    assert auroc.value > 0.95


def test_without_a_sequence_of_each_test_genome_no_fragments_are_written(
    training_run: TrainingRun, tmp_path: Path
) -> None:
    examples = training_run.choose_examples()
    unknown = replace(examples, genomes=examples.genomes.assign(genome="nobody"))
    fasta = tmp_path / "none.fasta"
    reason = write_fragments(unknown, training_run.simulated.genomes_file, fasta)
    assert reason is not None
    assert "have no sequence in reads.genomes.fasta.gz" in reason
    assert not fasta.exists()
