"""Stored embeddings scored again by another head."""

import logging
from pathlib import Path
from typing import Final

import numpy as np
import torch

from virnuc_core.config import Share, VerdictSpec
from virnuc_core.encoders.checkpoint import open_folder
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.digests import part_digest
from virnuc_core.encoders.head_card import score_thresholds, training_mismatches
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.engine import shards
from virnuc_core.errors import ConfigError
from virnuc_core.results import ResultSummary, write_results
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunFile, read_record, write

RESCORE: Final = "rescore.json"
DEFAULT_VERDICT: Final = VerdictSpec()
log = logging.getLogger(__name__)


class RescoreSummary(RunFile):
    """`rescore.json`: what the result files beside it stand on."""

    schema_version: int = 2
    run: str  # the run whose embeddings were scored
    reads: str  # fingerprint of its reads
    head: str  # fingerprint of the head that scored
    model_length: int
    results: ResultSummary
    uncertain: tuple[Share, Share] | None = None  # scores of which no verdict was wanted


def rescore(
    run: RunDir, new_head: Path | None, out: RunDir, asked: VerdictSpec = DEFAULT_VERDICT
) -> RescoreSummary:
    """Write the result files of `run` anew into `out`, scored by `new_head`, a folder or a models directory with it.
    Without it the run's own scores are kept and only the threshold moves. Errors: `WeightsError` when no head is there
    or it is not finite; `ConfigError` when the run is not finished, or is `out` itself, when the head is for another
    model length or other widths, or its card does not tell what is asked; `ShardError` for a damaged shard."""
    if out.root.resolve() == run.root.resolve():
        raise ConfigError(
            f"{out.root} is the run itself; give the new results a directory of their own"
        )
    if out.record.exists():
        raise ConfigError(f"{out.root} holds a run of its own; choose another directory")
    record = read_record(run)
    store, plan = shards.store_of(run, record), shards.read_plan(run)
    if missing := sum(not shards.shard_path(run, shard).exists() for shard in range(len(plan))):
        raise ConfigError(
            f"{run.root}: {missing} of {len(plan)} shards are not computed yet; finish the run first"
        )
    scores, failed = shards.read_scores(run)
    digest, threshold, uncertain = record.fingerprints["head"], asked.threshold, None
    if (
        new_head is None and (run.root / "train.json").exists()
    ):  # a training's own scores are of no head that is kept
        new_head = run.root
    if new_head is None and (asked.abstain or asked.fdr is not None):
        raise ConfigError("fdr and abstain: a head's card tells; name the head with --head")
    if new_head is not None:
        folder = new_head / "head" if (new_head / "head").is_dir() else new_head
        shape, read = open_folder(folder, HeadShape)
        if shape.model_length != (cut := store.model_length):
            problem = f"is for length {shape.model_length}, the run's reads were cut at {cut}"
            raise ConfigError(f"the head in {folder} {problem}")
        dna, protein = record.widths.get("dna"), record.widths.get("protein")
        if record.widths and (shape.dna_width, shape.protein_width) != (dna, protein):
            its = f"{shape.dna_width} (DNA) + {shape.protein_width} (protein)"
            problem = f"is for embeddings of {its}, the run has {dna} + {protein}; it belongs to other encoders"
            raise ConfigError(f"the head in {folder} {problem}")
        threshold, uncertain = score_thresholds(shape, asked)
        for remark in training_mismatches(
            shape, np.asarray(store.read_length), record.fingerprints
        ):
            log.warning("%s", remark)
        head, digest = Head(shape, read, torch.device("cpu")), part_digest(folder)
        for shard in range(len(plan)):
            result = shards.read_shard(run, plan, shard)
            scores[slice(*plan.range(shard))] = head.scores(
                torch.from_numpy(result.embeddings)
            ).numpy()
        failed = np.isnan(scores[:, 0])
    (out.root / RESCORE).unlink(missing_ok=True)  # it speaks of the files that are replaced now
    summary = RescoreSummary(
        run=str(run.root.resolve()),
        reads=store.fingerprint,
        head=digest,
        model_length=store.model_length,
        results=write_results(out, store, scores, failed, threshold=threshold, uncertain=uncertain),
        uncertain=uncertain,
    )
    write(out.root / RESCORE, summary)
    return summary
