"""A head is trained on real embeddings, and keeps its verdicts in half precision."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from virnuc_core.encoders.checkpoint import open_folder, open_part
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.model_config import Esm2Shape, HeadShape
from virnuc_core.encoders.models import Esm2
from virnuc_core.encoders.precision import Resolved
from virnuc_core.encoders.tokenize import Esm2Tokenizer
from virnuc_core.engine import shards
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir

from ..unit.encoders.encoder_batches import packed
from .conftest import Training
from .training import figures_table

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
CPU = torch.device("cpu")
MIN_AUROC = {"150 bases": 0.85, "300 bases": 0.95, "500 bases": 0.95}
EVERY = 6  # of the sequences one is embedded again: half precision on a core is slow


def test_no_family_of_viruses_is_on_two_sides(training: Training) -> None:
    table = pd.read_csv(training.folder / "reads.groups.tsv", sep="\t", index_col="genome")
    genomes = pd.DataFrame.from_dict(training.record.genomes, orient="index")
    used = genomes[genomes["side"] != ""]
    family_of_genome = table["group"][used.index].to_numpy()
    assert (used["side"].groupby(family_of_genome).nunique() == 1).all()
    assert training.record.shared_sequences == 0
    assert min(training.record.clusters["test"].values()) >= 10


def test_reads_of_unknown_families_are_told_from_the_host(
    training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"\n{figures_table({'real 8M': training.record})}")
    auroc_of_test_set = {
        figures.test_set: figures.metrics["auroc"]
        for figures in training.record.figures
        if (figures.method, figures.level, figures.is_natural) == ("head", "read", True)
    }
    for length, min_auroc in MIN_AUROC.items():
        auroc = auroc_of_test_set[length]
        assert auroc is not None
        assert auroc.value > min_auroc
        assert 0.5 < auroc.low < auroc.value < auroc.high < 1, "the interval says something"


def stored_embeddings(run: RunDir) -> Tensor:
    """Return the embeddings of all distinct sequences of a run."""
    plan = shards.read_plan(run)
    results = [shards.read_shard(run, plan, shard) for shard in range(len(plan))]
    return torch.from_numpy(np.concatenate([result.embeddings for result in results]))


@pytest.mark.parametrize(("precision", "min_agreement"), [("fp16", 0.99), ("bf16", 0.98)])
def test_half_precision_keeps_the_verdicts(
    precision: Resolved,
    min_agreement: float,
    training: Training,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = RunDir(training.out)
    store = OrfStore.open(run.store)
    uniques = torch.arange(0, store.n_uniques, EVERY)
    embeddings = stored_embeddings(run)[uniques]
    shape, read_tensor = open_part(training.models, Esm2Shape)
    encoder = Esm2(shape, read_tensor, CPU, precision=precision, attention="reference")
    proteins = [store.protein(unique, unique + 1)[0] for unique in uniques.tolist()]
    half_embeddings = encoder.embed(packed(Esm2Tokenizer(), proteins))
    joined_half = torch.cat([embeddings[:, : -shape.width], half_embeddings], dim=1)

    head = Head(*open_folder(training.out / "head", HeadShape), CPU)
    scores = head.scores(embeddings)[:, 1]
    half_scores = head.scores(joined_half)[:, 1]
    is_same = (scores >= 0.5) == (half_scores >= 0.5)
    agreement = float(is_same.double().mean())
    max_difference = float((scores - half_scores).abs().max())
    with capsys.disabled():
        print(
            f"\n{precision}: {agreement:.4f} of {len(uniques)} verdicts as in fp32, "
            f"scores differ by at most {max_difference:.4f}"
        )
    assert agreement >= min_agreement
