"""Train: a head fitted to the embeddings of labelled reads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from tasks.logs import core_logs
from tasks.retries import POLICY
from tasks.states import done
from virnuc_core.measure.train import TrainSpec, TrainSummary, train_head
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir


@task(name="train", task_run_name="train {label}", cache_policy=NO_CACHE, **POLICY)
def train(
    run: RunDir, *, store: Path, truth: Path, models: Path, spec: TrainSpec, seed: int, label: str
) -> State[TrainSummary]:
    """The head in `run/head`, and how well it does on genomes it has never met."""
    with core_logs():
        summary = train_head(run, OrfStore.open(store), truth, run.root, models=models, seed=seed, spec=spec)
    return done(summary, describe(summary))


def describe(summary: TrainSummary) -> str:
    """How good the head is, in a sentence."""
    return (
        f"accuracy {summary.test_accuracy:.3f}, AUC {summary.test_auc:.3f} on {summary.genomes['test']} unseen genomes "
        f"after {summary.epochs} epochs"
    )


def install_head(new: Path, models: Path) -> Path | None:
    """Put `new` in place as `models/head`; the head that was there becomes `head.before`, which is returned."""
    target, before = models / "head", models / "head.before"
    aside = models / ".head.new"
    _remove(aside)
    shutil.copytree(new, aside)
    kept = None
    if target.exists():
        _remove(before)
        os.replace(target, before)
        kept = before
    os.replace(aside, target)
    return kept


def _remove(folder: Path) -> None:
    """Remove what an earlier run left; what cannot be removed is an `OSError`, not an older head taken for the new."""
    if folder.exists():
        shutil.rmtree(folder)
