"""Score the stored embeddings of a finished run again, with another head or another threshold.

The head is the small classifier that turns embeddings into scores.
"""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from virnuc_core.answer import HEAD, Answer, answer_of
from virnuc_core.config import Share, VerdictSpec
from virnuc_core.encoders.checkpoint import open_folder
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.composition import ComparedReads, compare_with_training
from virnuc_core.encoders.digests import part_digest
from virnuc_core.encoders.head_card import (
    domain_note,
    require_domain,
    score_thresholds,
    training_mismatches,
)
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.engine import shards
from virnuc_core.engine.shards import ShardPlan
from virnuc_core.errors import ConfigError
from virnuc_core.pipeline import read_summary
from virnuc_core.reads.store import OrfStore
from virnuc_core.results import ResultSummary, write_results
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import (
    Count,
    FileDigest,
    RunFile,
    RunRecord,
    RunSummary,
    digest,
    read_record,
    write,
)
from virnuc_core.sample_familiarity import SampleFamiliarity
from virnuc_core.system_errors import is_folder, path_exists

DEFAULT_VERDICT: Final = VerdictSpec()
# Shards that are scored at the same time: so many at most, and so many bytes of embeddings.
MAX_SCORING_THREADS: Final = 4
MAX_EMBEDDING_BYTES: Final = 1 << 28
log = logging.getLogger(__name__)


class RescoreSummary(RunFile):
    """`rescore.json`: what the result files beside it were made of."""

    schema_version: int = 2
    run: str  # the run whose embeddings were scored
    reads: str  # fingerprint of its reads
    head: str  # fingerprint of the head that scored
    model_length: int
    results: ResultSummary
    uncertain: tuple[Share, Share] | None = None  # scores for which no verdict was wanted
    files: dict[str, FileDigest] | None = None  # the result files by name; None in older versions
    # What decides whether the verdicts can be trusted; see `answer`
    n_short: Count | None = None  # reads shorter than half of the head's length
    origins: dict[str, str] = Field(
        default_factory=dict
    )  # of the weights, by the folder of the model
    has_card: bool | None = None  # of the head
    familiarity: SampleFamiliarity | None = None  # with the reads of the head's training
    remarks: tuple[str, ...] = ()  # how the reads differ from those of the head's training

    @property
    def n_reads(self) -> int:
        """The number of reads."""
        return sum(self.results.fates.values())

    @property
    def fates(self) -> dict[str, int]:
        """The number of reads by fate."""
        return self.results.fates

    @property
    def pairs(self) -> dict[str, int]:
        """The number of pairs by fate; empty for single reads."""
        return self.results.pairs

    @property
    def answer(self) -> Answer:
        """The result of the new scores, and what to know before using its figures."""
        return answer_of(self)


@dataclass(frozen=True, slots=True)
class _FinishedRun:
    """A run all of whose shards are computed."""

    run: RunDir
    record: RunRecord
    store: OrfStore
    plan: ShardPlan


@dataclass(frozen=True, slots=True)
class _Scoring:
    """Scores of all sequences, and how reads are judged by them."""

    scores: NDArray[np.float32]  # [uniques, 2] P(others) and P(virus)
    is_failed: NDArray[np.bool_]  # [uniques] without a score
    head_digest: str
    threshold: float
    uncertain: tuple[float, float] | None
    head_origin: str
    has_card: bool | None
    remarks: tuple[str, ...]
    compared: ComparedReads


def rescore(
    run: RunDir,
    new_head: Path | None,
    out: RunDir,
    verdict_spec: VerdictSpec = DEFAULT_VERDICT,
) -> RescoreSummary:
    """Write the result files of a run again, by another head or with another threshold.

    The head is the classifier. Nothing is embedded again. `rescore.json` beside the new files
    says what they were made of.

    Args:
        run: The finished run with the embeddings.
        new_head: The folder of a head, or a models directory that has one. None: the scores of the
            run are kept, and only the threshold is new.
        out: The directory to write to.
        verdict_spec: How reads are judged by their scores: the threshold, or a false discovery
            rate, and whether unclear reads get no verdict.

    Returns:
        The content of `rescore.json`.

    Raises:
        WeightsError: There is no head, or it is not finite.
        ConfigError: The run is not finished, `out` holds a run, the head is for another model
            length or other encoders, or its card does not say what is needed.
        ShardError: A shard is damaged.
    """
    _require_own_directory(run, out)
    finished_run = _open_finished_run(run)
    if new_head is None and path_exists(run.root / "train.json"):
        # The scores that a training has stored are those of a random head.
        new_head = run.root
    if new_head is None:
        scoring = _keep_scores(finished_run, verdict_spec)
    else:
        scoring = _score_with(finished_run, new_head, verdict_spec)
    for path in (out.rescore, out.page, out.text_page):  # about the files that are now replaced
        path.unlink(missing_ok=True)
    results = write_results(
        out,
        finished_run.store,
        scoring.scores,
        scoring.is_failed,
        threshold=scoring.threshold,
        uncertain=scoring.uncertain,
        is_unfamiliar=scoring.compared.is_far,
    )
    digests = {path.name: digest(path, out.root) for path in out.tables}
    former = read_summary(run, set_aside=False) or RunSummary()
    origins = former.origins
    if origins:
        origins = origins | {HEAD: scoring.head_origin}
    summary = RescoreSummary(
        run=str(run.root.resolve()),
        reads=finished_run.store.fingerprint,
        head=scoring.head_digest,
        model_length=finished_run.store.model_length,
        results=results,
        uncertain=scoring.uncertain,
        files={name: content for name, content in digests.items() if content is not None},
        n_short=finished_run.store.counts.n_short,
        origins=origins,
        has_card=scoring.has_card,
        familiarity=scoring.compared.sample,
        remarks=scoring.remarks,
    )
    write(out.rescore, summary)
    return summary


def _require_own_directory(run: RunDir, out: RunDir) -> None:
    """Raise an error if the new results would replace those of this or of another run."""
    if out.root.resolve() == run.root.resolve():
        raise ConfigError(
            f"{out.root} is the run itself; give the new results a directory of their own"
        )
    if path_exists(out.record):
        raise ConfigError(f"{out.root} holds a run of its own; choose another directory")


def _open_finished_run(run: RunDir) -> _FinishedRun:
    """Open a run whose embeddings are all there.

    Raises:
        ConfigError: Some of its shards, which hold the embeddings, are not computed yet, or it
            keeps none.
    """
    record = read_record(run)
    shards.require_kept_shards(run, record)
    store = shards.store_of(run, record)
    plan = shards.read_plan(run)
    n_missing = sum(not path_exists(shards.shard_path(run, shard)) for shard in range(len(plan)))
    if n_missing:
        raise ConfigError(
            f"{run.root}: {n_missing} of {len(plan)} shards are not computed yet; "
            "finish the run first"
        )
    return _FinishedRun(run, record, store, plan)


def _keep_scores(finished: _FinishedRun, verdict_spec: VerdictSpec) -> _Scoring:
    """Return the scores that the run itself has stored, with the new threshold.

    Raises:
        ConfigError: The settings need the calibration of a head, and none was given.
    """
    scores, is_failed = shards.read_scores(finished.run)
    if verdict_spec.abstain or verdict_spec.fdr is not None:
        raise ConfigError(
            "--fdr and --abstain need the head's calibration; give the head with --head"
        )
    summary = read_summary(finished.run, set_aside=False) or RunSummary()
    return _Scoring(
        scores=scores,
        is_failed=is_failed,
        head_digest=finished.record.fingerprints["head"],
        threshold=verdict_spec.threshold,
        uncertain=None,
        head_origin=summary.origins.get(HEAD, ""),
        has_card=summary.has_card,
        remarks=summary.remarks,
        compared=compare_with_training(finished.store, finished.run.root),
    )


def _score_with(finished: _FinishedRun, new_head: Path, verdict_spec: VerdictSpec) -> _Scoring:
    """Score the embeddings of the run with another head. Warn where it is used beyond its training.

    Args:
        finished: The run with the embeddings.
        new_head: The folder of the head, or a models directory that has one.
        verdict_spec: How reads are judged by their scores.
    """
    folder = new_head
    if is_folder(new_head / "head"):  # it is a models directory
        folder = new_head / "head"
    shape, read_tensor = open_folder(folder, HeadShape)
    _require_fitting_head(folder, shape, finished)
    threshold, uncertain = score_thresholds(shape, verdict_spec)
    read_lengths = np.asarray(finished.store.read_length)
    remarks = training_mismatches(shape, read_lengths, finished.record.fingerprints)
    for remark in remarks:
        log.warning("%s", remark)
    compared = compare_with_training(finished.store, folder)
    require_domain(shape, verdict_spec, read_lengths, compared.sample)
    note = domain_note(shape, verdict_spec, compared)
    if note:
        remarks = (*remarks, note)
    head = Head(shape, read_tensor, torch.device("cpu"))
    scores = _score_shards(finished, head)
    return _Scoring(
        scores=scores,
        is_failed=np.isnan(scores[:, 0]),  # a sequence without an embedding has no score
        head_digest=part_digest(folder),
        threshold=threshold,
        uncertain=uncertain,
        head_origin=shape.origin,
        has_card=shape.card is not None,
        remarks=remarks,
        compared=compared,
    )


def _score_shards(finished: _FinishedRun, head: Head) -> NDArray[np.float32]:
    """Return the scores of all sequences of a run by a head, float32 [uniques, 2].

    Several threads read and score a shard each. Within a shard torch uses one thread: the blocks of
    rows are so small that its threads would mostly wait for each other.
    """
    plan = finished.plan

    def score_shard(shard: int) -> NDArray[np.float32]:
        """Return the scores of one shard, float32 [rows, 2]."""
        embeddings = shards.read_shard(finished.run, plan, shard).embeddings
        scores: NDArray[np.float32] = head.scores(torch.from_numpy(embeddings)).numpy()
        return scores

    n_threads = _count_threads(plan, head.shape.width)
    with _one_torch_thread(), ThreadPoolExecutor(n_threads) as threads:
        # The empty array stands for a run without any shard.
        parts = [np.empty((0, 2), np.float32), *threads.map(score_shard, range(len(plan)))]
    return np.concatenate(parts)


def _count_threads(plan: ShardPlan, width: int) -> int:
    """Return how many shards may be scored at the same time.

    Args:
        plan: The plan of the run.
        width: Numbers of an embedding.
    """
    most_rows = max(np.diff(plan.bounds), default=0)
    shard_bytes = max(1, int(most_rows) * width * np.dtype(np.float32).itemsize)
    n_cores = len(os.sched_getaffinity(0))  # cores that this process may use
    return max(1, min(MAX_SCORING_THREADS, n_cores, MAX_EMBEDDING_BYTES // shard_bytes))


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Let each torch operation of the `with` block use one thread."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def _require_fitting_head(folder: Path, shape: HeadShape, finished: _FinishedRun) -> None:
    """Raise an error if the head is for other reads or other encoders than those of the run."""
    chunk_bases = finished.store.model_length
    if shape.model_length != chunk_bases:
        raise ConfigError(
            f"the head in {folder} is for length {shape.model_length}, "
            f"the run's reads were cut at {chunk_bases}"
        )
    widths = finished.record.widths  # of the embeddings; empty in records of old versions
    dna_width = widths.get("dna")
    protein_width = widths.get("protein")
    if widths and (shape.dna_width, shape.protein_width) != (dna_width, protein_width):
        raise ConfigError(
            f"the head in {folder} is for embeddings of {shape.dna_width} (DNA) + "
            f"{shape.protein_width} (protein), the run has {dna_width} + {protein_width}; "
            "it belongs to other encoders"
        )
