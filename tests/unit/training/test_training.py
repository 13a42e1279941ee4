"""A head is trained on stored embeddings and measured on genomes that it has never met."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from virnuc_core.encoders.checkpoint import check_models, open_part
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.encoders.model_config import Estimate, HeadShape, read_shape
from virnuc_core.engine import shards
from virnuc_core.errors import ShardError, VirnucError
from virnuc_core.rundir import RESULT_FILES, RunDir
from virnuc_core.runfiles import RunSummary, read, write
from virnuc_core.training.evaluation import Figures
from virnuc_core.training.features import load_features
from virnuc_core.training.fitting import BASELINES, HEAD_METHOD
from virnuc_core.training.train_file import TrainFile
from virnuc_core.training.training import (
    CROSS_VALIDATION,
    FINAL_TEST,
    link_models,
    remove_results,
)

from .conftest import SHARD_ROWS, TrainingRun
from .origins import read_fasta, reverse_complement, write_fasta


def select(
    training: TrainFile, test_set: str, method: str, level: str, *, natural: bool = True
) -> Figures:
    """Return a line of the table of figures."""
    [line] = [
        line
        for line in training.figures
        if (line.test_set, line.method, line.level, line.is_natural)
        == (test_set, method, level, natural)
    ]
    return line


def read_auroc(training: TrainFile, test_set: str, method: str = HEAD_METHOD) -> Estimate:
    """Return the AUROC of reads."""
    auroc = select(training, test_set, method, "read").metrics["auroc"]
    assert auroc is not None
    return auroc


def metric(line: Figures, name: str) -> float:
    """Return the value of a metric."""
    estimate = line.metrics[name]
    assert estimate is not None
    return estimate.value


@dataclass(frozen=True)
class CrossValidation:
    """A training with cross-validations.

    Attributes:
        training: Its record.
        head_shape: The description of the head that it wrote. Other trainings replace the head.
    """

    training: TrainFile
    head_shape: HeadShape


@pytest.fixture(scope="module")
def cross_validation(training_run: TrainingRun) -> CrossValidation:
    """A training with two cross-validations."""
    training = training_run.train(epochs=12, folds=3, repeats=2)
    head_shape = read_shape(training_run.head / "config.json", HeadShape)
    return CrossValidation(training, head_shape)


@pytest.fixture(scope="module")
def cross_validated(cross_validation: CrossValidation) -> TrainFile:
    """The record of that training."""
    return cross_validation.training


@pytest.fixture(scope="module")
def plain_digest(training_run: TrainingRun) -> str:
    """The digest of a head after two epochs, in which nothing was balanced."""
    return training_run.train(epochs=2).digests["head"]


def test_the_record_is_written(training_run: TrainingRun) -> None:
    training = training_run.train(epochs=3)
    assert read(training_run.run.root / "train.json", TrainFile) == training


@pytest.mark.parametrize("method", [HEAD_METHOD, next(iter(BASELINES))])
def test_a_signal_is_learnt_by_the_head_and_by_a_baseline(
    cross_validated: TrainFile, method: str
) -> None:
    of_cross_validation = read_auroc(cross_validated, CROSS_VALIDATION, method)
    assert of_cross_validation.value > 0.85
    assert of_cross_validation.low > 0.8
    of_test = read_auroc(cross_validated, FINAL_TEST, method)
    assert of_test.value > 0.85
    assert of_test.low == 0, "the test has one cluster of each class"


def test_figures_are_given_for_each_method_level_and_prevalence(
    cross_validated: TrainFile,
) -> None:
    lines = [line for line in cross_validated.figures if line.test_set == CROSS_VALIDATION]
    assert {(line.method, line.level, line.is_natural) for line in lines} == {
        (method, level, natural)
        for method in (HEAD_METHOD, *BASELINES)
        for level in ("frame", "chunk", "read")
        for natural in (True, False)
    }
    assert {line.clusters for line in lines} == {13}, "every genome is tested"


def test_the_record_says_what_was_not_measured(cross_validated: TrainFile) -> None:
    assert cross_validated.shared_sequences == 0
    assert cross_validated.encoders == "esm2: random, seed 1; dnabert_s: random, seed 1"
    assert set(cross_validated.not_run) == {"150 bases", "300 bases", "500 bases"}


def test_the_card_is_that_of_the_cross_validation(
    cross_validation: CrossValidation, models: Path
) -> None:
    training = cross_validation.training
    card = cross_validation.head_shape.card
    assert card is not None
    assert card == training.card
    line = select(training, CROSS_VALIDATION, HEAD_METHOD, "read", natural=False)
    assert card.auroc == line.metrics["auroc"]
    assert set(card.thresholds) <= set(card.expected_fdr) <= {0.001, 0.01, 0.05, 0.1, 0.2}
    assert card.lengths == (150, 150, 150)
    encoders = fingerprint(models)
    del encoders["head"]
    assert card.encoders == encoders


@pytest.mark.parametrize(("method", "hidden"), [("network", 32), ("linear", 2), ("mean", 34)])
def test_the_head_file_has_the_tensors_of_virnucpro(
    training_run: TrainingRun, method: str, hidden: int
) -> None:
    """A logistic regression is two hidden units more, or two alone."""
    training = training_run.train(epochs=3, method=method, repeats=0)
    assert set(load_file(training_run.head / "model.safetensors")) == {
        "hidden_layer.weight",
        "hidden_layer.bias",
        "bn1.weight",
        "bn1.bias",
        "bn1.running_mean",
        "bn1.running_var",
        "output_layer.weight",
        "output_layer.bias",
    }
    shape = read_shape(training_run.head / "config.json", HeadShape)
    assert (shape.hidden, shape.model_length) == (hidden, 500)
    assert (shape.dna_width, shape.protein_width) == (64, 64)
    assert shape.card is not None
    assert shape.card.method == (None if method == "network" else method)
    assert (training.method, training.penalty is None) == (method, method == "network")


def test_the_written_head_has_the_figures_of_the_record(
    training_run: TrainingRun, tmp_path: Path, models: Path
) -> None:
    training = training_run.train()
    (tmp_path / "models").mkdir()
    for part in ("esm2", "dnabert_s"):
        (tmp_path / "models" / part).symlink_to(models / part)
    (tmp_path / "models" / "head").symlink_to(training_run.head)
    rows = training_run.choose_examples().rows
    test_rows = rows[rows["side"] == 2]
    features = load_features(training_run.run, training_run.store, test_rows)
    head = Head(*open_part(tmp_path / "models", HeadShape), torch.device("cpu"))
    scores = head.scores(features.embeddings)[:, 1].numpy()

    is_called = scores >= 0.5
    is_virus = test_rows["label"].to_numpy() == 1
    n_right = (is_called & is_virus).sum()
    frames = select(training, FINAL_TEST, HEAD_METHOD, "frame")
    assert metric(frames, "recall") == pytest.approx(n_right / is_virus.sum())
    assert metric(frames, "precision") == pytest.approx(n_right / is_called.sum())
    brier = np.mean((scores - is_virus) ** 2)
    assert metric(frames, "brier") == pytest.approx(brier, rel=1e-4)  # float32


def test_noise_is_not_learnt_from_the_other_strand_of_a_genome_under_another_name(
    tmp_path: Path, models: Path
) -> None:
    """A head that met the twin of a sequence would know its label by heart.

    A split by the names of genomes would let that happen.
    """
    noise = TrainingRun(tmp_path, models, signal=0.0)
    reads_file = noise.simulated.reads_file
    reads = read_fasta(reads_file.read_text())
    twins = {f"twin_{name}": reverse_complement(bases) for name, bases in reads.items()}
    write_fasta(reads_file, reads | twins)
    header, *lines = noise.truth.read_text().splitlines()
    truth = ["\t".join(header.split("\t")[:3])]
    for line in lines:
        read_id, label, genome = line.split("\t")[:3]
        truth.append(f"{read_id}\t{label}\t{genome}")
        truth.append(f"twin_{read_id}\t{label}\ttwin_{genome}")
    noise.truth.write_text("\n".join(truth) + "\n")
    noise.embed(signal=0.0)

    training = noise.train(hidden=64, epochs=20, folds=3, repeats=1, patience=20)
    n_clusters = {line.clusters for line in training.figures if line.test_set == CROSS_VALIDATION}
    assert n_clusters == {13}, "26 names, 13 genomes"
    assert training.shared_sequences == 0
    auroc = training.card.auroc
    assert auroc.value == pytest.approx(0.5, abs=0.1)
    assert auroc.low < 0.5 < auroc.high


def test_the_written_head_is_the_best_one_not_the_last(training_run: TrainingRun) -> None:
    """With so large a step the head overfits, and the loss rises again."""
    training = training_run.train(hidden=64, learning_rate=0.2, patience=3, epochs=40)
    assert training.best_epoch < training.epochs


def test_the_same_seed_gives_the_same_bytes(training_run: TrainingRun) -> None:
    random_state = torch.random.get_rng_state()
    heads = []
    for seed in (0, 0, 1):
        training_run.train(seed=seed, epochs=3)
        heads.append((training_run.head / "model.safetensors").read_bytes())
    assert heads[0] == heads[1]
    assert heads[0] != heads[2]
    is_unchanged = torch.equal(torch.random.get_rng_state(), random_state)
    assert is_unchanged, "the caller's random numbers are left alone"


def test_a_run_without_all_embeddings_is_refused(tmp_path: Path, models: Path) -> None:
    incomplete = TrainingRun(tmp_path, models, signal=1.0)
    shards.shard_path(incomplete.run, 1).unlink()
    with pytest.raises(ShardError, match="00001"):
        incomplete.train()
    assert not incomplete.head.exists()


def spoil_embeddings(training: TrainingRun, unique: int, count: int) -> None:
    """Overwrite up to `count` embeddings, from that of `unique` to the end of its shard."""
    plan = shards.read_plan(training.run)
    shard = unique // SHARD_ROWS
    start, _ = plan.range(shard)
    embeddings = shards.read_shard(training.run, plan, shard).embeddings.copy()
    embeddings[unique - start :][:count] = np.nan
    scores = np.full((len(embeddings), 2), 0.5, dtype=np.float32)
    shards.shard_path(training.run, shard).unlink()
    shards.commit(training.run, plan, shard, shards.ShardResult(embeddings, scores))


def test_a_frame_without_a_finite_embedding_is_left_out_and_counted(
    tmp_path: Path, models: Path
) -> None:
    training_run = TrainingRun(tmp_path, models, signal=1.0)
    unique = int(training_run.choose_examples().rows["unique"].iloc[3])
    spoil_embeddings(training_run, unique, 1)
    assert training_run.train().left_out["frames without a finite embedding"] >= 1


def test_many_frames_without_a_finite_embedding_are_an_error(tmp_path: Path, models: Path) -> None:
    training_run = TrainingRun(tmp_path, models, signal=1.0)
    unique = int(training_run.choose_examples().rows["unique"].iloc[3])
    spoil_embeddings(training_run, unique, SHARD_ROWS)
    with pytest.raises(VirnucError, match="have no finite embedding"):
        training_run.train()


def test_a_models_directory_for_training_needs_no_head_and_no_result_of_it_stays(
    tmp_path: Path, models: Path
) -> None:
    shape = check_models(models, 300)
    for _ in range(2):  # the second replaces the first
        folder = link_models(models, tmp_path, shape)
    head = Head(*open_part(folder, HeadShape), torch.device("cpu"))
    assert head.shape.model_length == 300
    assert (folder / "esm2").resolve() == (models / "esm2").resolve()

    run = RunDir(tmp_path)
    write(run.summary, RunSummary(files={}))
    for name in RESULT_FILES:
        (tmp_path / name).write_text("of another head")
    remove_results(run)
    assert not [name for name in RESULT_FILES if (tmp_path / name).exists()]
    assert read(run.summary, RunSummary).files is None


def test_a_training_that_fails_leaves_no_figures_of_another_head(
    training_run: TrainingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    training_run.train()
    old_config = (training_run.head / "config.json").read_text()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("virnuc_core.training.card.write_shape", fail)
    with pytest.raises(OSError, match="disk full"):
        training_run.train()
    assert (training_run.head / "config.json").read_text() == old_config
    assert not list(training_run.head.glob(".*"))
    assert not (training_run.run.root / "train.json").exists()


@pytest.mark.parametrize("balance", ["kind", "gc", "kind-gc"])
def test_a_balanced_training_is_recorded_and_gives_another_head(
    training_run: TrainingRun, plain_digest: str, balance: str
) -> None:
    """The kinds are those of the labels, so that only GC content can be balanced here."""
    training = training_run.train(epochs=2, balance=balance)
    assert training.settings["balance"] == balance
    assert (training.digests["head"] == plain_digest) == (balance == "kind")


def test_the_recorded_loss_is_lower_than_that_of_guessing(training_run: TrainingRun) -> None:
    loss_of_guessing = nn.functional.cross_entropy(torch.zeros(1, 2), torch.tensor([0])).item()
    assert training_run.train().validation_loss < loss_of_guessing
