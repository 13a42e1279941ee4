"""The head: learnt from stored embeddings, judged on genomes it has never met."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from virnuc_core.encoders.checkpoint import load_head
from virnuc_core.encoders.convert import init_random
from virnuc_core.encoders.model_config import DNABERT_SIZES, ESM2_SIZES, HeadShape, read_shape
from virnuc_core.engine import shards
from virnuc_core.errors import InputError, ShardError
from virnuc_core.measure import head as training
from virnuc_core.measure.head import (
    TrainSpec,
    auc,
    choose_rows,
    read_truth,
    split_genomes,
    stored_embeddings,
    train_head,
)
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir

WIDTH = ESM2_SIZES["tiny"].width + DNABERT_SIZES["tiny"].width
QUICK = TrainSpec(hidden=32, max_epochs=30)


class World:
    """Simulated reads with their truth, staged, and a run whose embeddings hold the class in a few columns."""

    def __init__(self, folder: Path, signal: float) -> None:
        spec = SimulateSpec(reads=900, viral_genomes=6, other_genomes=7, genome_length=4_000, seed=4)
        made = simulate(spec, folder / "reads.fasta")
        self.run, self.truth = RunDir(folder / "run"), made.truth_file
        stage(StageSpec(reads=(str(made.reads_file),)), self.run.store)
        self.store = OrfStore.open(self.run.store)
        truth = read_truth(self.truth)
        label = dict(zip(truth["read"], truth["label"], strict=True))
        names = self.store.read_ids(0, self.store.n_reads)
        virus = np.array([label[names[r]] for r in self.store.row_read[self.store.unique_row[:]].tolist()])
        rng = np.random.default_rng(0)
        self.embeddings = rng.normal(size=(self.store.n_uniques, WIDTH)).astype(np.float32)
        self.embeddings[:, :8] += signal * (virus[:, None] - 0.5).astype(np.float32)
        plan = shards.ShardPlan(bounds=(*range(0, self.store.n_uniques, 97), self.store.n_uniques), fingerprint="made")
        assert len(plan) > 2
        shards.write_plan(self.run, plan)
        for shard in range(len(plan)):
            lo, hi = plan.range(shard)
            half = np.full((hi - lo, 2), 0.5, dtype=np.float32)
            shards.commit(self.run, plan, shard, shards.ShardResult(self.embeddings[lo:hi], half))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), signal=1.5)


@pytest.fixture(scope="module")
def new_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    def make() -> Path:
        folder = tmp_path_factory.mktemp("models")
        init_random(folder, esm2="tiny", dnabert_s="tiny", model_length=500, seed=1)
        return folder

    return make


def test_a_signal_is_learnt_and_the_head_has_the_original_names(world: World, new_models: Callable[[], Path]) -> None:
    models = new_models()
    summary = train_head(world.run, world.store, world.truth, models, models=models, spec=QUICK)
    assert summary.test_accuracy > 0.85
    assert summary.test_auc > 0.95
    head = load_head(models, torch.device("cpu"))
    assert (head.shape.model_length, head.shape.dna_width, head.shape.protein_width) == (500, 64, 64)
    truth = read_truth(world.truth)
    splits, _ = choose_rows(world.store, truth, np.random.default_rng(0), limit=25_000)
    scores = head.scores(stored_embeddings(world.run, splits[2][0], WIDTH))
    found = (scores[:, 1] > 0.5).numpy() == (splits[2][1].numpy() == 1)
    assert found.mean() == pytest.approx(summary.test_accuracy), "what is written is what was judged"
    assert set(load_file(models / "head" / "model.safetensors")) == {
        "hidden_layer.weight",
        "hidden_layer.bias",
        "bn1.weight",
        "bn1.bias",
        "bn1.running_mean",
        "bn1.running_var",
        "output_layer.weight",
        "output_layer.bias",
    }
    assert read_shape(models / "head" / "config.json", HeadShape).hidden == 32


def test_noise_is_not_learnt(tmp_path: Path, new_models: Callable[[], Path]) -> None:
    noise = World(tmp_path, signal=0.0)
    summary = train_head(noise.run, noise.store, noise.truth, new_models(), models=new_models(), spec=QUICK)
    spread = 0.5 / np.sqrt(summary.rows["test"])
    assert abs(summary.test_accuracy - 0.5) < 5 * spread  # 5 standard deviations of guessing
    assert abs(summary.test_auc - 0.5) < 6 * spread


def test_the_written_head_is_the_best_one_not_the_last(world: World, new_models: Callable[[], Path]) -> None:
    models = new_models()
    spec = TrainSpec(hidden=64, learning_rate=0.2, patience=3, max_epochs=40)  # a step far too large: it overfits
    summary = train_head(world.run, world.store, world.truth, models, models=models, spec=spec)
    assert summary.best_epoch < summary.epochs, "the case needs a loss that rises again"
    splits, _ = choose_rows(world.store, read_truth(world.truth), np.random.default_rng(0), limit=25_000)
    features = stored_embeddings(world.run, splits[1][0], WIDTH)
    scores = load_head(models, torch.device("cpu")).scores(features)
    loss = nn.functional.nll_loss(scores.clamp(min=1e-30).log(), splits[1][1])
    assert float(loss) == pytest.approx(summary.validation_loss, rel=1e-4)  # softmax and logarithm in float32


def test_the_same_seed_gives_the_same_bytes(world: World, new_models: Callable[[], Path]) -> None:
    folders = [new_models() for _ in range(3)]
    before = torch.random.get_rng_state()
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        train_head(world.run, world.store, world.truth, folder, models=folder, seed=seed, spec=QUICK)
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's random numbers are left alone"
    heads = [(folder / "head" / "model.safetensors").read_bytes() for folder in folders]
    assert heads[0] == heads[1]
    assert heads[0] != heads[2]


def test_splits_are_balanced_and_share_no_genome(world: World) -> None:
    truth = read_truth(world.truth)
    splits, genomes = choose_rows(world.store, truth, np.random.default_rng(0), limit=25_000)
    assert sum(genomes.values()) == truth["genome"].nunique()
    for _, label in splits:
        assert len(label) > 0
        assert label.float().mean() == 0.5
    limited, _ = choose_rows(world.store, truth, np.random.default_rng(0), limit=20)
    assert [len(label) for _, label in limited] == [40, 10, 10]


@given(
    st.lists(st.integers(1, 400), min_size=3, max_size=12),
    st.lists(st.integers(1, 400), min_size=3, max_size=12),
    st.integers(0, 5),
)
def test_no_genome_is_in_two_splits_and_no_split_is_empty(others: list[int], virus: list[int], seed: int) -> None:
    sizes = [*others, *virus]
    genome = np.repeat(np.arange(len(sizes)), sizes)
    label = (genome >= len(others)).astype(np.int64)
    split = split_genomes(genome, label, np.random.default_rng(seed))
    for number in range(len(sizes)):
        assert len(set(split[genome == number].tolist())) == 1
    for value in (0, 1):
        assert set(split[label == value].tolist()) == {0, 1, 2}


def test_equal_genomes_are_dealt_by_their_shares() -> None:
    genome = np.repeat(np.arange(40), 50)
    label = (genome >= 20).astype(np.int64)
    split = split_genomes(genome, label, np.random.default_rng(0))
    assert [(split == number).mean() for number in range(3)] == pytest.approx([0.8, 0.1, 0.1])


def test_too_few_genomes_and_mixed_genomes_are_refused() -> None:
    genome = np.array([0, 0, 1, 2, 3, 4])
    with pytest.raises(InputError, match="2 genomes labelled others"):
        split_genomes(genome, np.array([0, 0, 0, 1, 1, 1]), np.random.default_rng(0))
    with pytest.raises(InputError, match="both labels"):
        split_genomes(genome, np.array([0, 1, 0, 0, 1, 1]), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("read\tlabel\n", "line 1|:1: no column genome"),
        ("read\tlabel\tgenome\nr1\tvirus\n", ":2: wanted read"),
        ("read\tlabel\tgenome\nr1\tViral\tg\n", ":2: wanted read"),
        ("", "no column read, label, genome"),
    ],
)
def test_a_bad_truth_file_is_named_by_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "truth.tsv"
    path.write_text(text)
    with pytest.raises(InputError, match=problem):
        read_truth(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_truth(tmp_path / "absent.tsv")


def test_reads_without_truth_and_reads_named_twice_are_refused(
    tmp_path: Path, world: World, new_models: Callable[[], Path]
) -> None:
    lines = world.truth.read_text().splitlines(keepends=True)
    short = tmp_path / "short.tsv"
    short.write_text("".join(lines[:-2]))
    last = lines[-1].split("\t")[0]
    with pytest.raises(InputError, match=f"2 reads have no line in the truth file, among them .*{last}"):
        train_head(world.run, world.store, short, new_models(), models=new_models(), spec=QUICK)
    short.write_text("".join([*lines, lines[-1]]))
    with pytest.raises(InputError, match="names a read twice"):
        train_head(world.run, world.store, short, new_models(), models=new_models(), spec=QUICK)


def test_a_run_without_all_embeddings_is_refused(tmp_path: Path, new_models: Callable[[], Path]) -> None:
    part = World(tmp_path, signal=1.0)
    shards.shard_path(part.run, 1).unlink()
    models = new_models()
    before = (models / "head" / "model.safetensors").read_bytes()
    with pytest.raises(ShardError, match="00001"):
        train_head(part.run, part.store, part.truth, models, models=models, spec=QUICK)
    assert (models / "head" / "model.safetensors").read_bytes() == before


def test_stored_embeddings_finds_each_row_in_its_shard(world: World) -> None:
    wanted = np.random.default_rng(2).integers(0, world.store.n_uniques, 200)
    assert np.array_equal(stored_embeddings(world.run, wanted, WIDTH).numpy(), world.embeddings[wanted])


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=40))
def test_auc_counts_pairs(rows: list[tuple[int, bool]]) -> None:
    scores = np.array([s for s, _ in rows], dtype=np.float32)
    label = np.array([int(v) for _, v in rows])
    virus, others = scores[label == 1], scores[label == 0]
    if len(virus) and len(others):
        pairs = [(1.0 if v > o else 0.5 if v == o else 0.0) for v in virus for o in others]
        assert auc(scores, label) == pytest.approx(np.mean(pairs))


def test_training_writes_whole_files(
    world: World, new_models: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = new_models()
    before = (models / "head" / "config.json").read_text()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(training, "write_shape", fail)
    with pytest.raises(OSError, match="disk full"):
        train_head(world.run, world.store, world.truth, models, models=models, spec=TrainSpec(max_epochs=1))
    assert (models / "head" / "config.json").read_text() == before
    assert not list((models / "head").glob(".*"))
