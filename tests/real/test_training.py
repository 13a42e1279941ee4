"""A head trained on real embeddings: no family on two sides, far from chance, the same verdicts in half precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from virnuc_core.encoders.checkpoint import open_folder, open_part
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.model_config import Esm2Shape, HeadShape
from virnuc_core.encoders.models import Esm2
from virnuc_core.encoders.precision import Resolved
from virnuc_core.encoders.tokenize import Esm2Tokenizer
from virnuc_core.engine import shards
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.training.train_file import TrainFile

from ..unit.encoders.encoder_batches import packed
from .training import make_models, make_reads, table, train

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainFile]:
    """Where it was trained, and what it found."""
    folder = tmp_path_factory.mktemp("training")
    reads = make_reads(wheels, folder, of_family=2, windows=150, viral=1_000, others=5_000)
    return folder, train(reads, make_models(wheels, folder)[0], folder / "out", "--repeats", "1")


def test_no_family_of_viruses_is_on_two_sides(trained: tuple[Path, TrainFile]) -> None:
    folder, found = trained
    groups = pd.read_csv(folder / "reads.groups.tsv", sep="\t", index_col="genome")["group"]
    used = pd.Series({name: of["side"] for name, of in found.genomes.items() if of["side"]})
    assert (used.groupby(groups[used.index].to_numpy()).nunique() == 1).all()
    assert found.shared_sequences == 0
    assert min(found.clusters["test"].values()) >= 10


def test_reads_of_unknown_families_are_told_from_the_host(
    trained: tuple[Path, TrainFile], capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"\n{table({'real 8M': trained[1]})}")
    auroc = {
        one.asked: one.metrics["auroc"]
        for one in trained[1].figures
        if (one.method, one.level, one.natural) == ("head", "read", True)
    }
    for length, least in {"150 bases": 0.85, "300 bases": 0.95, "500 bases": 0.95}.items():
        assert (of := auroc[length]) is not None
        assert of.value > least
        assert 0.5 < of.low < of.value < of.high < 1  # an interval that tells


@pytest.mark.parametrize(("precision", "least"), [("fp16", 0.99), ("bf16", 0.98)])
def test_half_precision_keeps_the_verdicts(
    precision: Resolved,
    least: float,
    trained: tuple[Path, TrainFile],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = RunDir(trained[0] / "out")
    store, plan = OrfStore.open(run.store), shards.read_plan(run)
    vectors = np.concatenate(
        [shards.read_shard(run, plan, shard).embeddings for shard in range(len(plan))]
    )
    wide, few = (
        torch.from_numpy(vectors),
        torch.arange(0, store.n_uniques, 6),
    )  # half precision on a core is slow
    shape, read = open_part(trained[0] / "real", Esm2Shape)
    half = Esm2(shape, read, CPU, precision=precision, attention="reference")
    proteins = [store.protein(one, one + 1)[0] for one in few.tolist()]
    turned = torch.cat(
        [wide[few, : -shape.width], half.embed(packed(Esm2Tokenizer(), proteins))], dim=1
    )
    head = Head(*open_folder(trained[0] / "out" / "head", HeadShape), CPU)
    scores, theirs = (head.scores(of)[:, 1] for of in (wide[few], turned))
    same = ((scores >= 0.5) == (theirs >= 0.5)).double().mean()
    told = f"{same:.4f} of {len(few)} verdicts as in fp32, scores differ by at most {(scores - theirs).abs().max():.4f}"
    with capsys.disabled():
        print(f"\n{precision}: {told}")
    assert same >= least
