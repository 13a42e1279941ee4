"""Stored embeddings scored again: another head, another threshold, no GPU, nothing embedded."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from virnuc_core.encoders.checkpoint import open_head_folder, part_digest
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.encoders.models import Head
from virnuc_core.engine import shards
from virnuc_core.errors import ConfigError
from virnuc_core.reads.store import OrfStore
from virnuc_core.results import THRESHOLD, ResultSummary, write_results
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunFile, read_record, write


class RescoreSummary(RunFile):
    """`rescore.json`: what the result files beside it stand on."""

    schema_version: int = 2
    run: str  # the run whose embeddings were scored
    reads: str  # fingerprint of its reads
    head: str  # fingerprint of the head that scored
    model_length: int
    results: ResultSummary
    elapsed_s: float


def rescore(run: RunDir, new_head: Path | None, out: RunDir, *, threshold: float = THRESHOLD) -> RescoreSummary:
    """Write the result files of `run` anew into `out`, scored by `new_head`, a folder or a models directory with it.

    Without it the run's own scores are kept and only the threshold moves. Errors: `WeightsError` when no head is there;
    `ConfigError` when the run is not finished, when `out` is the run itself, or when the head was trained for another
    model length or other widths; `ShardError` for a damaged shard.
    """
    started = time.perf_counter()
    if out.root.resolve() == run.root.resolve():
        raise ConfigError(f"{out.root} is the run itself; give the new results a directory of their own")
    record = read_record(run)
    store = OrfStore.open(run.root / record.store)
    if store.fingerprint != record.fingerprints["reads"]:
        raise ConfigError(f"{store.path} holds other reads than the run was made from; give it back its store")
    plan = shards.read_plan(run)
    missing = sum(not shards.shard_path(run, shard).exists() for shard in range(len(plan)))
    if missing:
        raise ConfigError(f"{run.root}: {missing} of {len(plan)} shards are not computed yet; finish the run first")
    scores, failed = shards.read_scores(run)
    digest = record.fingerprints["head"]
    if new_head is not None:
        folder = new_head / "head" if (new_head / "head").is_dir() else new_head
        shape, tensors = open_head_folder(folder)
        _check_fit(shape, store, record.widths, folder)
        head, digest = Head(shape, tensors.read, torch.device("cpu")), part_digest(folder)
        for shard, result in shards.results(run, plan):
            scores[slice(*plan.range(shard))] = head.scores(torch.from_numpy(result.embeddings)).numpy()
        failed = np.isnan(scores[:, 0])
    summary = RescoreSummary(
        run=str(run.root.resolve()),
        reads=store.fingerprint,
        head=digest,
        model_length=store.model_length,
        results=write_results(out, store, scores, failed, threshold=threshold),
        elapsed_s=time.perf_counter() - started,
    )
    write(out.root / "rescore.json", summary)
    return summary


def _check_fit(shape: HeadShape, store: OrfStore, widths: Mapping[str, int], folder: Path) -> None:
    if shape.model_length != store.model_length:
        raise ConfigError(
            f"the head in {folder} is for length {shape.model_length}, the run's reads were cut at {store.model_length}"
        )
    made_for, has = (shape.dna_width, shape.protein_width), (widths.get("dna"), widths.get("protein"))
    if widths and made_for != has:
        raise ConfigError(
            f"the head in {folder} is for embeddings of {made_for[0]} (DNA) + {made_for[1]} (protein), "
            f"the run has {has[0]} + {has[1]}; it belongs to other encoders"
        )
