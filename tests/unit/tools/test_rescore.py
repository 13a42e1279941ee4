"""Stored embeddings scored again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from virnuc_core import runfiles
from virnuc_core.config import VerdictSpec
from virnuc_core.encoders.checkpoint import check_models, open_part
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.convert import init_random, random_tensor
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.encoders.model_config import Estimate, HeadCard, HeadShape, read_shape, write_shape
from virnuc_core.encoders.model_files import write_part
from virnuc_core.engine import shards
from virnuc_core.errors import ConfigError, ShardError, WeightsError
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.results import write_results
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import write
from virnuc_core.tools.rescore import rescore

FILES = ("prediction_results.txt", "prediction_results_highestscore.csv", "reads.tsv", "failed.tsv")


def new_models(folder: Path, seed: int, model_length: int = 500) -> Path:
    init_random(folder, esm2="tiny", dnabert_s="tiny", model_length=model_length, seed=seed)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_models(tmp_path_factory.mktemp("models"), seed=1)


@pytest.fixture
def run(tmp_path: Path, models: Path) -> RunDir:
    """A finished run with random embeddings, one of its sequences failed."""
    run = RunDir(tmp_path / "run")
    made = simulate(SimulateSpec(reads=300, genome_length=3_000, seed=2), tmp_path / "reads.fasta")
    stage(StageSpec(reads=(str(made.reads_file),)), run.store)
    store = OrfStore.open(run.store)
    record = runfiles.new_record(
        runfiles.RunRecord,
        (),
        model_length=500,
        fingerprints={"reads": store.fingerprint, "head": fingerprint(models)["head"]},
        store="orfs.h5",
        widths={"dna": 64, "protein": 64},
    )
    write(run.record, record)
    plan = shards.ShardPlan(
        bounds=(*range(0, store.n_uniques, 53), store.n_uniques), fingerprint="made"
    )
    shards.write_plan(run, plan)
    rng = np.random.default_rng(0)
    head = Head(*open_part(models, HeadShape), torch.device("cpu"))
    embeddings = rng.normal(size=(store.n_uniques, head.shape.width)).astype(np.float32)
    embeddings[7] = np.nan
    scores = head.scores(torch.from_numpy(embeddings)).numpy()
    for shard in range(len(plan)):
        lo, hi = plan.range(shard)
        shards.commit(run, plan, shard, shards.ShardResult(embeddings[lo:hi], scores[lo:hi]))
    write_results(run, store, *shards.read_scores(run))
    return run


def content(run: RunDir) -> list[bytes]:
    return [(run.root / name).read_bytes() for name in FILES]


def test_the_same_head_gives_the_same_bytes(tmp_path: Path, run: RunDir, models: Path) -> None:
    out = RunDir(tmp_path / "again")
    summary = rescore(run, models, out)
    assert content(out) == content(run)
    assert summary.results.fates["failed"] > 0, "the failed sequence stays failed"
    assert summary.head == fingerprint(models)["head"]


def test_another_head_gives_its_own_scores(tmp_path: Path, run: RunDir) -> None:
    other = new_models(tmp_path / "other", seed=9)
    before = content(run)
    out = RunDir(tmp_path / "new")
    summary = rescore(run, other, out)
    assert content(run) == before, "the run itself is left alone"
    assert content(out) != before
    store, plan = OrfStore.open(run.store), shards.read_plan(run)
    embeddings = np.concatenate(
        [shards.read_shard(run, plan, shard).embeddings for shard in range(len(plan))]
    )
    scores = (
        Head(*open_part(other, HeadShape), torch.device("cpu"))
        .scores(torch.from_numpy(embeddings))
        .numpy()
    )
    lines = [line.split("\t") for line in (out.root / FILES[0]).read_text().splitlines()[1:]]
    unique = store.row_unique[:]
    kept = unique[~np.isnan(scores[unique, 0])]
    assert np.array_equal(np.array([np.float32(line[3]) for line in lines]), scores[kept, 1])
    written = json.loads((out.root / "rescore.json").read_text())
    assert written["schema_version"] == 2
    assert written["head"] == summary.head == fingerprint(other)["head"]
    assert sum(written["results"]["fates"].values()) == 300


def test_the_threshold_alone_moves_reads_only(tmp_path: Path, run: RunDir) -> None:
    low, high = RunDir(tmp_path / "low"), RunDir(tmp_path / "high")
    few = rescore(run, None, high, VerdictSpec(threshold=0.9))
    many = rescore(run, None, low, VerdictSpec(threshold=0.1))
    assert few.results.fates["viral"] < many.results.fates["viral"]
    assert content(low)[:2] == content(high)[:2] == content(run)[:2]


def test_a_rescoring_that_is_cut_short_leaves_no_record_of_the_one_before(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = RunDir(tmp_path / "out")
    rescore(run, None, out, VerdictSpec(threshold=0.9))
    monkeypatch.setattr("os.replace", stopped_at("reads.tsv"))
    with pytest.raises(KeyboardInterrupt):
        rescore(run, None, out, VerdictSpec(threshold=0.1))
    assert not (out.root / "rescore.json").exists(), (
        "it would speak of files that are no longer there"
    )


def stopped_at(name: str) -> Callable[[Path, Path], None]:
    """Renames up to one file, where the user has had enough."""

    def replace(source: Path, target: Path) -> None:
        if target.name == name:
            raise KeyboardInterrupt
        source.rename(target)

    return replace


def test_the_files_of_another_run_are_not_replaced(tmp_path: Path, run: RunDir) -> None:
    other = RunDir(tmp_path / "other")
    shutil.copytree(run.root, other.root)
    before = content(other)
    with pytest.raises(ConfigError, match="holds a run"):
        rescore(run, None, other, VerdictSpec(threshold=0.9))
    assert content(other) == before


def test_what_does_not_fit_is_refused(tmp_path: Path, run: RunDir, models: Path) -> None:
    with pytest.raises(ConfigError, match="length 300"):
        rescore(
            run, new_models(tmp_path / "short", seed=1, model_length=300), RunDir(tmp_path / "out")
        )
    wide = tmp_path / "wide"
    init_random(wide, esm2="t6_8M", dnabert_s="tiny", model_length=500)
    with pytest.raises(ConfigError, match="other encoders"):
        rescore(run, wide, RunDir(tmp_path / "out"))
    with pytest.raises(ConfigError, match="the run itself"):
        rescore(run, models, run)
    with pytest.raises(ConfigError, match="not a run directory"):
        rescore(RunDir(tmp_path / "nothing"), models, RunDir(tmp_path / "out"))
    with pytest.raises(WeightsError):
        rescore(run, tmp_path / "nothing", RunDir(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_unfinished_or_damaged_run_is_refused(tmp_path: Path, run: RunDir, models: Path) -> None:
    plan = shards.read_plan(run)
    path = shards.shard_path(run, 1)
    kept = path.read_bytes()
    path.unlink()
    with pytest.raises(ConfigError, match=f"1 of {len(plan)} shards"):
        rescore(run, models, RunDir(tmp_path / "out"))
    damaged = bytearray(kept)
    damaged[len(kept) // 2] ^= 0xFF
    path.write_bytes(bytes(damaged))
    with pytest.raises(ShardError, match="00001"):
        rescore(run, models, RunDir(tmp_path / "out"))


def test_another_store_in_its_place_is_refused(tmp_path: Path, run: RunDir, models: Path) -> None:
    made = simulate(SimulateSpec(reads=20, genome_length=3_000, seed=3), tmp_path / "others.fasta")
    shutil.rmtree(run.store, ignore_errors=True)
    run.store.unlink(missing_ok=True)
    stage(StageSpec(reads=(str(made.reads_file),)), run.store)
    with pytest.raises(ConfigError, match="other reads"):
        rescore(run, models, RunDir(tmp_path / "out"))


def test_a_head_of_other_widths_is_refused_whatever_its_sum(
    tmp_path: Path, run: RunDir, models: Path
) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(models, odd)
    shutil.rmtree(odd / "head")
    shape = HeadShape(model_length=500, dna_width=60, protein_width=68)
    write_part(odd, shape, partial(random_tensor, shape), "random", "fp32")
    with pytest.raises(ConfigError, match=r"60 \(DNA\) \+ 68 \(protein\), the run has 64 \+ 64"):
        rescore(run, odd, RunDir(tmp_path / "out"))


def test_a_heads_own_folder_will_do(tmp_path: Path, run: RunDir, models: Path) -> None:
    shutil.copytree(models / "head", tmp_path / "new")
    summary = rescore(run, tmp_path / "new", RunDir(tmp_path / "out"))
    assert content(RunDir(tmp_path / "out")) == content(run)
    assert summary.head == fingerprint(models)["head"]
    with pytest.raises(WeightsError, match="no head here"):
        rescore(run, tmp_path, RunDir(tmp_path / "other"))


def test_the_card_of_the_new_head_tells_threshold_and_uncertain_scores(
    tmp_path: Path, run: RunDir, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = Path(shutil.copytree(models / "head", tmp_path / "head"))
    chance = Estimate(value=0.5, low=0.4, high=0.6)
    told = {
        "lengths": (900, 950, 990),
        "prevalence": 0.5,
        "auroc": chance,
        "thresholds": {0.01: 0.7},
    }
    card = HeadCard(reads="a", truth="b", test="c", uncertain=(0.65, 0.75), **told)
    shape = read_shape(head / "config.json", HeadShape)
    write_shape(shape.model_copy(update={"card": card}), head / "config.json")
    plain = rescore(run, head, RunDir(tmp_path / "plain"), VerdictSpec(threshold=0.7)).results
    asked = rescore(run, head, RunDir(tmp_path / "asked"), VerdictSpec(fdr=0.01)).results
    assert (asked.fates, asked.threshold) == (plain.fates, 0.7)
    assert "trained on reads of 900 to 990 bases" in caplog.text
    unsure = rescore(run, head, RunDir(tmp_path / "unsure"), VerdictSpec(fdr=0.01, abstain=True))
    assert unsure.uncertain == (0.65, 0.75)
    assert unsure.results.fates["uncertain"] > 0
    assert sum(unsure.results.fates.values()) == sum(plain.fates.values())
    with pytest.raises(ConfigError, match="fdr, abstain: the head has no card"):
        rescore(run, models, RunDir(tmp_path / "none"), VerdictSpec(fdr=0.01))
    with pytest.raises(ConfigError, match="give the head with --head"):
        rescore(run, None, RunDir(tmp_path / "none"), VerdictSpec(abstain=True))


def test_a_head_that_is_not_finite_is_refused_as_predict_refuses_it(
    tmp_path: Path, run: RunDir, models: Path
) -> None:
    bad = Path(shutil.copytree(models, tmp_path / "bad"))
    tensors = load_file(bad / "head" / "model.safetensors")
    tensors["bn1.weight"][3] = torch.inf
    save_file(tensors, bad / "head" / "model.safetensors")
    said = "head: tensor bn1.weight holds NaN or infinity"
    with pytest.raises(WeightsError, match=said):
        rescore(run, bad, RunDir(tmp_path / "out"))
    with pytest.raises(WeightsError, match=said):
        check_models(bad)
