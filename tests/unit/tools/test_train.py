"""The head: learnt from stored embeddings, judged on genomes it has never met."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from threadpoolctl import threadpool_limits
from torch import nn

from virnuc_core.config import TrainSpec
from virnuc_core.encoders.checkpoint import check_models, open_part
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.convert import init_random
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.encoders.model_config import (
    DNABERT_SIZES,
    ESM2_SIZES,
    Estimate,
    HeadShape,
    read_shape,
)
from virnuc_core.engine import shards
from virnuc_core.errors import ShardError, VirnucError
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RESULT_FILES, RunDir
from virnuc_core.runfiles import RunSummary, read, write
from virnuc_core.training import training
from virnuc_core.training.evaluation import Examples, choose
from virnuc_core.training.training import (
    BASELINES,
    CROSS,
    HEAD,
    TEST,
    Inputs,
    TrainFile,
    _fit,
    inputs_of,
    remove_results,
    stand_in,
    train_head,
    write_cuts,
)

WIDTH = ESM2_SIZES["tiny"].width + DNABERT_SIZES["tiny"].width
QUICK: dict[str, Any] = {"hidden": 32, "epochs": 30, "repeats": 0}


def embedded(run: RunDir, reads: Path, is_virus: Callable[[str], bool], signal: float) -> OrfStore:
    """The reads staged, and a run whose embeddings hold the class in a few columns."""
    stage(StageSpec(reads=(str(reads),)), run.store)
    store = OrfStore.open(run.store)
    names = store.read_ids(0, store.n_reads)
    virus = np.array([is_virus(names[r]) for r in store.row_read[store.unique_row[:]].tolist()])
    embeddings = np.random.default_rng(0).normal(size=(store.n_uniques, WIDTH)).astype(np.float32)
    embeddings[:, :8] += signal * (virus[:, None] - 0.5).astype(np.float32)
    plan = shards.ShardPlan(
        bounds=(*range(0, store.n_uniques, 97), store.n_uniques), fingerprint="made"
    )
    shards.write_plan(run, plan)
    for shard in range(len(plan)):
        lo, hi = plan.range(shard)
        half = np.full((hi - lo, 2), 0.5, dtype=np.float32)
        shards.commit(run, plan, shard, shards.ShardResult(embeddings[lo:hi], half))
    return store


class World:
    """Simulated reads with their truth, and a training directory that is embedded."""

    def __init__(self, folder: Path, models: Path, signal: float) -> None:
        spec = SimulateSpec(
            reads=900, viral_genomes=6, other_genomes=7, genome_length=4_000, seed=4
        )
        self.made = simulate(spec, folder / "reads.fasta")
        self.run, self.truth = RunDir(folder / "run"), self.made.truth_file
        label = dict(line.split("\t")[:2] for line in self.truth.read_text().splitlines())
        self.store = embedded(
            self.run, self.made.reads_file, lambda read: label[read] == "virus", signal
        )
        stand_in(models, self.run.root, check_models(models))
        self.head = self.run.root / "head"

    def spec(self, **given: Any) -> TrainSpec:
        return TrainSpec(truth=self.truth, **QUICK | given)

    def choose(self) -> Examples:
        return choose(self.store, self.spec())

    def train(self, *cuts: RunDir, **given: Any) -> TrainFile:
        spec = self.spec(**given)
        return train_head(self.run, self.store, choose(self.store, spec), spec, *cuts)


def auroc_of(found: TrainFile, asked: str, method: str = HEAD) -> Estimate | None:
    """Of reads."""
    lines = {
        (one.asked, one.method, one.level): one.metrics["auroc"]
        for one in found.figures
        if one.natural
    }
    return lines[asked, method, "read"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    init_random(folder, esm2="tiny", dnabert_s="tiny", model_length=500, seed=1)
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, models: Path) -> World:
    return World(tmp_path_factory.mktemp("world"), models, signal=1.5)


def test_a_signal_is_learnt_and_told_with_intervals_beside_baselines(
    world: World, models: Path
) -> None:
    found = world.train(epochs=12, folds=3, repeats=2)
    assert read(world.run.root / "train.json", TrainFile) == found
    for asked in (CROSS, TEST):
        for method in (HEAD, next(iter(BASELINES))):
            auroc = auroc_of(found, asked, method)
            assert auroc is not None
            assert auroc.value > 0.85
            assert auroc.low == 0 if asked == TEST else auroc.low > 0.8, (
                "the test has one cluster of each class"
            )
    assert {
        (one.method, one.level, one.natural) for one in found.figures if one.asked == CROSS
    } == {
        (method, level, natural)
        for method in (HEAD, *BASELINES)
        for level in ("frame", "chunk", "read")
        for natural in (True, False)
    }
    assert {one.clusters for one in found.figures if one.asked == CROSS} == {13}, (
        "every genome is asked about"
    )
    assert found.shared_sequences == 0
    card = read_shape(world.head / "config.json", HeadShape).card
    assert card == found.card
    assert (
        card.auroc
        == next(one for one in found.figures if one.level == "read" and not one.natural).metrics[
            "auroc"
        ]
    )
    assert set(card.thresholds) <= {0.001, 0.01, 0.05, 0.1}
    assert card.lengths == (150, 150, 150)
    assert card.encoders == {
        part: digest for part, digest in fingerprint(models).items() if part != "head"
    }
    assert found.encoders == "esm2: random, seed 1; dnabert_s: random, seed 1"
    assert set(found.not_run) == {"150 bases", "300 bases", "500 bases"}
    assert set(load_file(world.head / "model.safetensors")) == {
        "hidden_layer.weight",
        "hidden_layer.bias",
        "bn1.weight",
        "bn1.bias",
        "bn1.running_mean",
        "bn1.running_var",
        "output_layer.weight",
        "output_layer.bias",
    }
    shape = read_shape(world.head / "config.json", HeadShape)
    assert (shape.hidden, shape.model_length, shape.dna_width, shape.protein_width) == (
        32,
        500,
        64,
        64,
    )


def test_what_is_written_is_what_was_judged(world: World, tmp_path: Path, models: Path) -> None:
    found = world.train()
    (tmp_path / "models").mkdir()
    for part in ("esm2", "dnabert_s"):
        (tmp_path / "models" / part).symlink_to(models / part)
    (tmp_path / "models" / "head").symlink_to(world.head)
    rows = world.choose().rows
    test = rows[rows["side"] == 2]
    features = inputs_of(world.run, world.store, test, WIDTH)[0].vectors
    scores = (
        Head(*open_part(tmp_path / "models", HeadShape), torch.device("cpu"))
        .scores(features)[:, 1]
        .numpy()
    )
    called, virus = scores >= 0.5, test["label"].to_numpy() == 1
    frames: Any = next(
        one
        for one in found.figures
        if (one.method, one.level, one.natural) == (HEAD, "frame", True)
    )
    assert frames.metrics["recall"].value == pytest.approx((called & virus).sum() / virus.sum())
    assert frames.metrics["precision"].value == pytest.approx((called & virus).sum() / called.sum())
    assert frames.metrics["brier"].value == pytest.approx(
        np.mean((scores - virus) ** 2), rel=1e-4
    )  # float32


def test_columns_of_whatever_size_and_place_are_learnt_from_alike() -> None:
    """Embeddings of real weights lie around a mean far from zero, and some columns vary ten times as much as others."""
    torch.manual_seed(0)
    rows = pd.DataFrame({"label": np.arange(400) % 2})
    plain = torch.randn(400, 8)
    plain[:, 0] += 2 * torch.tensor(rows["label"].to_numpy())
    spec, found = TrainSpec(truth=Path(), epochs=20, patience=20), []
    shape = HeadShape(model_length=300, dna_width=4, protein_width=4, hidden=8)
    for vectors in (plain, plain * torch.logspace(-2, 1, 8) + torch.linspace(-5, 5, 8)):
        inputs = Inputs(rows, vectors, np.zeros((400, 0)))
        torch.manual_seed(1)
        with threadpool_limits(1):
            network, _ = _fit(
                shape, inputs.part(np.arange(300)), inputs.part(np.arange(300, 400)), spec
            )
        with torch.inference_mode():
            found.append(network(vectors).softmax(-1))
    assert torch.allclose(*found, atol=0.01)
    assert ((found[0][:, 1] > 0.5).numpy() == rows["label"]).mean() > 0.7


def test_noise_is_not_learnt_nor_are_the_same_genomes_on_the_other_strand_under_other_names(
    tmp_path: Path, models: Path
) -> None:
    """A head that met the twin of a sequence would know its label by heart: that is what a split by name let happen."""
    noise = World(tmp_path, models, signal=0.0)
    records = noise.made.reads_file.read_text().split()
    turned = {
        name: bases.translate(str.maketrans("ACGT", "TGCA"))[::-1]
        for name, bases in pairwise(records)
    }
    twins = "".join(f">twin_{name[1:]}\n{turned[name]}\n" for name in records[::2])
    noise.made.reads_file.write_text("\n".join(records) + "\n" + twins)
    header, *lines = noise.truth.read_text().splitlines()
    again = [
        "\t".join([f"twin_{cells[0]}", cells[1], f"twin_{cells[2]}"])
        for cells in map(str.split, lines)
    ]
    short = ["\t".join(line.split("\t")[:3]) for line in (header, *lines)]
    noise.truth.write_text("\n".join([*short, *again]) + "\n")
    label = dict(line.split("\t")[:2] for line in noise.truth.read_text().splitlines())
    noise.store = embedded(
        noise.run, noise.made.reads_file, lambda read: label[read] == "virus", 0.0
    )
    found = noise.train(hidden=64, epochs=20, folds=3, repeats=1, patience=20)
    auroc = found.card.auroc
    assert {one.clusters for one in found.figures if one.asked == CROSS} == {13}, (
        "26 names, 13 genomes"
    )
    assert found.shared_sequences == 0
    assert auroc.value == pytest.approx(0.5, abs=0.1)
    assert auroc.low < 0.5 < auroc.high


def test_the_written_head_is_the_best_one_not_the_last(world: World) -> None:
    found = world.train(
        hidden=64, learning_rate=0.2, patience=3, epochs=40
    )  # a step too large: it overfits
    assert found.best_epoch < found.epochs, "the case needs a loss that rises again"


def test_the_same_seed_gives_the_same_bytes(world: World) -> None:
    before, heads = torch.random.get_rng_state(), []
    for seed in (0, 0, 1):
        world.train(seed=seed, epochs=3)
        heads.append((world.head / "model.safetensors").read_bytes())
    assert torch.equal(torch.random.get_rng_state(), before), (
        "the caller's random numbers are left alone"
    )
    assert heads[0] == heads[1]
    assert heads[0] != heads[2]


def test_a_run_without_all_embeddings_is_refused(tmp_path: Path, models: Path) -> None:
    part = World(tmp_path, models, signal=1.0)
    shards.shard_path(part.run, 1).unlink()
    with pytest.raises(ShardError, match="00001"):
        part.train()
    assert not part.head.exists()


def test_a_row_without_a_finite_embedding_is_left_out_and_counted(
    tmp_path: Path, models: Path
) -> None:
    part = World(tmp_path, models, signal=1.0)
    rows = part.choose().rows
    bad = int(rows["unique"].iloc[3])
    plan = shards.read_plan(part.run)
    shard = next(number for number in range(len(plan)) if plan.range(number)[1] > bad)
    embeddings = shards.read_shard(part.run, plan, shard).embeddings.copy()
    for count, lost in ((1, True), (len(embeddings) - bad % 97, False)):
        embeddings[bad - plan.range(shard)[0] :][:count] = np.nan
        half = np.full((len(embeddings), 2), 0.5, dtype=np.float32)
        shards.shard_path(part.run, shard).unlink()
        shards.commit(part.run, plan, shard, shards.ShardResult(embeddings, half))
        if lost:
            assert part.train().left_out["frames without a finite embedding"] >= 1
        else:
            with pytest.raises(VirnucError, match="have no finite embedding"):
                part.train()


def test_rows_keep_their_embeddings_and_words(world: World) -> None:
    rows = world.choose().rows
    inputs, lost = inputs_of(world.run, world.store, rows, WIDTH)
    assert lost == 0
    plan = shards.read_plan(world.run)
    every = np.concatenate(
        [shards.read_shard(world.run, plan, shard).embeddings for shard in range(len(plan))]
    )
    assert np.array_equal(inputs.vectors.numpy(), every[rows["unique"]])
    assert inputs.words.sum(axis=1) == pytest.approx(1)
    dna = [world.store.dna(unique, unique + 1)[0] for unique in rows["unique"].tolist()]
    some = np.array([b"AAAA" in one for one in dna])
    column = inputs.words[:, 0]  # words in the order of the alphabet
    assert np.array_equal(column > 0, some)


def test_genomes_are_cut_to_lengths_and_scored(world: World, tmp_path: Path) -> None:
    examples = world.choose()
    assert write_cuts(examples, world.made.genomes_file, tmp_path / "cuts.fasta") is None
    label = {str(number): label for number, label in examples.genomes["label"].items()}
    run = RunDir(tmp_path / "lengths")
    store = embedded(run, tmp_path / "cuts.fasta", lambda read: label[read.split("_")[0]] == 1, 1.5)
    assert store.n_reads > 100
    found = world.train(run)
    made = {one.asked for one in found.figures} - {TEST}
    assert made | set(found.not_run) == {"150 bases", "300 bases", "500 bases", CROSS}
    assert "150 bases" in made
    auroc = auroc_of(found, "150 bases")
    assert auroc is not None
    assert auroc.value > 0.95
    absent = examples._replace(genomes=examples.genomes.assign(genome="nobody"))
    why = write_cuts(absent, world.made.genomes_file, tmp_path / "none.fasta")
    assert why is not None
    assert "have no sequence in reads.genomes.fasta.gz" in why
    assert not (tmp_path / "none.fasta").exists()


def test_a_stand_in_needs_no_head_and_no_result_of_it_stays(tmp_path: Path, models: Path) -> None:
    for _ in range(2):  # again over its own
        folder = stand_in(models, tmp_path, check_models(models, 300))
    assert Head(*open_part(folder, HeadShape), torch.device("cpu")).shape.model_length == 300
    assert (folder / "esm2").resolve() == (models / "esm2").resolve()
    run = RunDir(tmp_path)
    write(run.summary, RunSummary(files={}))
    for name in RESULT_FILES:
        (tmp_path / name).write_text("of another head")
    remove_results(run)
    assert not [name for name in RESULT_FILES if (tmp_path / name).exists()]
    assert read(run.summary, RunSummary).files is None


def test_a_training_that_fails_leaves_no_figures_of_another_head(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.train()
    before = (world.head / "config.json").read_text()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(training, "write_shape", fail)
    with pytest.raises(OSError, match="disk full"):
        world.train()
    assert (world.head / "config.json").read_text() == before
    assert not list(world.head.glob(".*"))
    assert not (world.run.root / "train.json").exists()


def test_the_loss_of_the_best_epoch_is_that_of_the_head(world: World, tmp_path: Path) -> None:
    found = world.train()
    assert (
        found.validation_loss
        < nn.functional.cross_entropy(torch.zeros(1, 2), torch.tensor([0])).item()
    )
