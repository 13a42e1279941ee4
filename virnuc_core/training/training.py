"""Train a classifier (head) on labelled reads, from the embeddings that a run has stored.

Its figures are those of a repeated cross-validation, in which heads that never met a cluster of
genomes score it, and those of the final head on the test set. Two baselines are measured beside it:
they show if a head has learnt nothing. `train.json` keeps everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pandas as pd
import torch
from threadpoolctl import threadpool_limits

import virnuc_core
from virnuc_core.config import TrainSpec
from virnuc_core.encoder_names import RANDOM_ORIGIN
from virnuc_core.encoders.checkpoint import WEIGHTS, shape_of
from virnuc_core.encoders.convert import random_tensor
from virnuc_core.encoders.digests import fingerprint, part_digest
from virnuc_core.encoders.model_config import HeadCard, HeadShape, TrainingDomain, read_shape
from virnuc_core.encoders.model_files import write_part
from virnuc_core.encoders.registry import ENCODER_PARTS, PART_SHAPES
from virnuc_core.reads.simulate import LABELS
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RESULT_FILES, RunDir, discard
from virnuc_core.runfiles import RunSummary, now, read, write
from virnuc_core.training import evaluation
from virnuc_core.training.card import make_card, write_head
from virnuc_core.training.domain import describe_domain, judge_reads
from virnuc_core.training.evaluation import Figures, ScoredRows, by_level
from virnuc_core.training.familiarity import fit_composition, replace_composition
from virnuc_core.training.features import Features, load_features
from virnuc_core.training.fitting import (
    BATCH_ROWS,
    HEAD_METHOD,
    FittedHead,
    cross_validate,
    fit_methods,
)
from virnuc_core.training.fragments import (
    LENGTHS,
    NO_FRAGMENTS,
    NO_GENOMES,
    EvaluationSet,
    closed_fragments,
    fragments_name,
    read_fragments,
)
from virnuc_core.training.splits import Examples
from virnuc_core.training.train_file import TRAIN_FILE, TRAIN_PAGE, TrainFile
from virnuc_core.training.truth import KIND, SIDES, TEST_SIDE

MODELS_FOLDER: Final = "encoders"  # in a training directory: the models of its embeddings
HEAD_FOLDER: Final = "head"
CROSS_VALIDATION: Final = "cross-validation"  # a test set, of all rows
FINAL_TEST: Final = SIDES[TEST_SIDE]
# Multiplications of one training step from which several threads are worth it. Below, handing the
# work round takes three times as long.
MIN_SHARED_PRODUCTS: Final = 100_000_000


# --- A training directory -------------------------------------------------------------------------


def link_models(models: Path, out: Path, shape: HeadShape) -> Path:
    """Make a models directory with the encoders of another one (as links) and a random head.

    The run that embeds the training reads needs a head, the classifier, although embeddings do
    not depend on it. With a random one, training needs no earlier head, and no result can be
    mistaken for one of an earlier head.

    Args:
        models: The models directory with the encoders.
        out: The training directory.
        shape: Sizes of the head that will be trained.

    Returns:
        The new models directory, in `out`.
    """
    folder = out / MODELS_FOLDER
    # Remove what an earlier training has left.
    discard(folder, *ENCODER_PARTS, f"{HEAD_FOLDER}/config.json", f"{HEAD_FOLDER}/{WEIGHTS}")
    small_shape = shape.model_copy(update={"hidden": 1, "card": None})  # its size does not matter
    tensors = partial(random_tensor, small_shape)
    write_part(folder, small_shape, tensors, f"{RANDOM_ORIGIN}, for training", "fp32")
    for part in ENCODER_PARTS:
        (folder / part).symlink_to((models / part).resolve())
    return folder


def remove_results(run: RunDir) -> None:
    """Remove the result files of a training's run, because its random head made them.

    The embeddings stay. The summary of the run no longer lists the files.
    """
    discard(run.root, *RESULT_FILES, "pairs.tsv")
    summary = read(run.summary, RunSummary)
    write(run.summary, summary.model_copy(update={"files": None}))


# --- Training -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """What a head is trained on, and how."""

    run: RunDir  # with the embeddings
    store: OrfStore
    examples: Examples
    spec: TrainSpec
    fragments_run: RunDir | str  # over fragments of the test genomes; or why there is none


@dataclass(frozen=True, slots=True)
class Scoring:
    """The scores that a method gave a test set."""

    test_set: str
    method: str
    repeats: list[ScoredRows]  # the same rows, scored once or, in a cross-validation, repeatedly


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How good a head is."""

    figures: list[Figures]
    scored_reads: dict[str, pd.DataFrame]  # by test set: reads as the head scored them
    card_test_set: str  # the test set whose figures the head's model card shows
    domain: TrainingDomain  # how the head judged reads of each kind, of the same test set

    @property
    def card_reads(self) -> pd.DataFrame:
        """Scored reads of the test set whose figures the model card shows."""
        return self.scored_reads[self.card_test_set]

    @property
    def card_figures(self) -> Figures:
        """The figures that the model card shows: the head's, for whole reads of one test set.

        Figures are computed twice: for the share of viral reads that the test set happens to have
        (`is_natural`), and for the share that the settings expect of real samples. The card shows
        the second.
        """
        return next(
            line
            for line in self.figures
            if line.test_set == self.card_test_set
            and line.method == HEAD_METHOD
            and line.level == "read"
            and not line.is_natural
        )


def train_head(
    run: RunDir,
    store: OrfStore,
    examples: Examples,
    spec: TrainSpec,
    fragments_run: RunDir | str = NO_GENOMES,
) -> TrainFile:
    """Fit a head on the embeddings of a run, evaluate it, and write `head/` and `train.json`.

    The head is the classifier. An earlier head in the directory and its pages are replaced. The
    same run, table of origins and settings give the same head on the same machine.

    Args:
        run: The run with the embeddings; the files are written to its directory.
        store: The staged reads of the run.
        examples: The split of the reads.
        spec: Settings of the training.
        fragments_run: The run over fragments of the test genomes; or the reason why there is none.

    Returns:
        The content of `train.json`.

    Raises:
        ShardError: Embeddings are missing.
        VirnucError: Too many embeddings are not finite.
    """
    models = run.root / MODELS_FOLDER
    # The random head of the run has the sizes of the new one, except for the hidden layer.
    old_shape = read_shape(models / HEAD_FOLDER / "config.json", HeadShape)
    shape = old_shape.model_copy(update={"hidden": spec.hidden})
    features = load_features(run, store, examples.rows)
    job = TrainingJob(run, store, examples, spec, fragments_run)
    fitted, scorings = _fit_and_score(job, features, shape)
    head_evaluation = _evaluate(scorings, job)
    encoder_digests = fingerprint(models)
    encoder_digests.pop(HEAD_FOLDER)  # the random head says nothing of the new one
    card = make_card(
        store,
        features.rows,
        spec,
        _with_genomes(head_evaluation.card_reads, examples),
        head_evaluation.scored_reads[FINAL_TEST],
        head_evaluation.card_figures,
        head_evaluation.domain,
        encoder_digests,
    )
    # Nothing of an earlier head may stand beside the new one.
    discard(run.root, TRAIN_FILE, TRAIN_PAGE)
    (run.root / HEAD_FOLDER / "README.md").unlink(missing_ok=True)
    composition = fit_composition(store, features.rows, spec.seed)
    replace_composition(composition, run.root / HEAD_FOLDER)
    fitted_shape = shape.model_copy(update={"hidden": fitted.network.hidden_layer.out_features})
    write_head(fitted.network, fitted_shape, card, run.root / HEAD_FOLDER)

    n_lost = len(examples.rows) - len(features.rows)
    record = _make_record(job, fitted, head_evaluation, card, n_lost)
    write(run.root / TRAIN_FILE, record)
    return record


def _fit_and_score(
    job: TrainingJob, features: Features, shape: HeadShape
) -> tuple[FittedHead, list[Scoring]]:
    """Cross-validate, then fit the final head, and let it and the baselines score the test sets.

    The test sets are the reads that were held back, and the fragments of their genomes if there
    are any.

    Args:
        job: The run, the split and the settings.
        features: All rows of the split, with their embeddings.
        shape: Sizes of the head.

    Returns:
        The final head, and the scores of each test set by each method.
    """
    spec = job.spec
    sides = features.rows["side"].to_numpy()
    n_products = BATCH_ROWS * shape.width * shape.hidden
    max_threads = None
    if n_products < MIN_SHARED_PRODUCTS:
        max_threads = 1
    # The random numbers of the caller stay as they are.
    with threadpool_limits(max_threads), torch.random.fork_rng(devices=[]):
        cross_validation = cross_validate(features, shape, spec)
        scorings = [
            Scoring(CROSS_VALIDATION, method, repeats)
            for method, repeats in cross_validation.items()
        ]
        fitted = fit_methods(features, sides, shape, spec, spec.seed)
        test_sets = [EvaluationSet(FINAL_TEST, features.select(sides == TEST_SIDE))]
        if isinstance(job.fragments_run, RunDir):
            test_sets += read_fragments(job.fragments_run, job.examples)
        for test_set in test_sets:
            for method, scorer in fitted.scorers.items():
                scores = scorer(test_set.features)
                scored_rows = ScoredRows(test_set.features.rows, scores)
                scorings.append(Scoring(test_set.name, method, repeats=[scored_rows]))
    return fitted.head, scorings


def _evaluate(scorings: Sequence[Scoring], job: TrainingJob) -> Evaluation:
    """Measure how good the scores of each method are on each test set.

    Scored reads are kept for the head only, those of the first repeat. The card of the head speaks
    of the cross-validation, or of the final test if there was none.
    """
    spec = job.spec
    figures = []
    scored_reads = {}
    for scoring in scorings:
        figures += evaluation.bootstrap_metrics(
            scoring.test_set, scoring.method, scoring.repeats, spec.prevalence, spec.seed
        )
        if scoring.method == HEAD_METHOD:
            first_repeat = scoring.repeats[0]
            tables = by_level(first_repeat.rows, first_repeat.scores)
            scored_reads[scoring.test_set] = tables["read"]
    card_test_set = FINAL_TEST
    if spec.repeats:
        card_test_set = CROSS_VALIDATION
    domain = _describe_domain(scorings, card_test_set, job)
    return Evaluation(figures, scored_reads, card_test_set, domain)


def _with_genomes(reads: pd.DataFrame, examples: Examples) -> pd.DataFrame:
    """Return scored reads with the columns source (number of the independent genome) and kind.

    Args:
        reads: Scored reads, indexed by their numbers.
        examples: The frames of the reads, and the genomes.
    """
    genome_of_read = examples.rows.groupby("read")["genome"].first()
    genomes = examples.genomes.loc[genome_of_read[reads.index]]
    return reads.assign(source=genomes["source"].to_numpy(), kind=genomes[KIND].to_numpy())


def _describe_domain(
    scorings: Sequence[Scoring], card_test_set: str, job: TrainingJob
) -> TrainingDomain:
    """Return how the head judged reads of each kind, GC content and length.

    Args:
        scorings: The scores of all test sets.
        card_test_set: The test set that the tables are of. Fragments of the test genomes follow in
            the table of lengths.
        job: The reads and their genomes.
    """
    genomes = job.examples.genomes
    scorings_of_head = {
        scoring.test_set: scoring.repeats for scoring in scorings if scoring.method == HEAD_METHOD
    }
    reads = judge_reads(
        job.store, genomes, scorings_of_head[card_test_set], job.examples.closed_reads
    )
    fragments = {}
    if isinstance(job.fragments_run, RunDir):
        store = OrfStore.open(job.fragments_run.store)
        for length in LENGTHS:
            name = fragments_name(length)
            if name in scorings_of_head:
                closed = closed_fragments(job.fragments_run, genomes, length)
                fragments[name] = judge_reads(store, genomes, scorings_of_head[name], closed)
    return describe_domain(reads, fragments, job.spec.prevalence, job.spec.seed)


def _make_record(
    job: TrainingJob, fitted: FittedHead, head_evaluation: Evaluation, card: HeadCard, n_lost: int
) -> TrainFile:
    """Return the content of `train.json`.

    Args:
        job: What the head was trained on.
        fitted: The head, and the record of its training.
        head_evaluation: How well it classifies.
        card: Its card, with a score threshold for each false discovery rate.
        n_lost: Number of frames that were left out because their embedding is not finite.
    """
    spec, examples = job.spec, job.examples
    models = job.run.root / MODELS_FOLDER
    origins = [f"{part}: {shape_of(models, PART_SHAPES[part]).origin}" for part in ENCODER_PARTS]
    scored_reads = head_evaluation.scored_reads
    # The thresholds may come from the cross-validation. What they do in the final test is recorded
    # beside the rate that they were chosen for.
    realised_fdr = {}
    for rate, threshold in card.thresholds.items():
        realised_fdr[rate] = evaluation.false_discovery_rate(
            scored_reads[FINAL_TEST], threshold, spec.prevalence
        )
    left_out = dict(examples.left_out)
    if n_lost:
        left_out["frames without a finite embedding"] = n_lost
    # A sequence in more than one of the three sets would be a leak.
    n_sets_of_sequence = examples.rows.groupby("sequence")["side"].nunique()
    histograms = {name: evaluation.histogram(reads) for name, reads in scored_reads.items()}
    return TrainFile(
        created=now(),
        virnuc_version=virnuc_core.__version__,
        settings=spec.model_dump(mode="json", include=set(TrainSpec.model_fields)),
        model_length=job.store.model_length,
        encoders="; ".join(origins),
        digests=card.encoders | {HEAD_FOLDER: part_digest(job.run.root / HEAD_FOLDER)},
        realised_fdr=realised_fdr,
        card=card,
        clusters=_count_clusters(examples.rows),
        shared_sequences=int((n_sets_of_sequence > 1).sum()),
        genomes=_describe_genomes(examples),
        left_out=left_out,
        method=spec.method,
        penalty=fitted.penalty,
        learnt_from=fitted.n_rows,
        epochs=fitted.n_epochs,
        best_epoch=fitted.best_epoch,
        validation_loss=fitted.validation_loss,
        figures=tuple(head_evaluation.figures),
        curves=evaluation.curves(head_evaluation.card_reads),
        histograms=histograms,
        not_run=_why_not_run(scored_reads, spec, job.fragments_run),
    )


def _count_clusters(rows: pd.DataFrame) -> dict[str, dict[str, int]]:
    """Return the number of genome clusters in each set (training, validation, test) by class."""
    counts = rows.groupby(["side", "label"])["cluster"].nunique().unstack()  # [sides, labels]
    # Sides and labels are numbers. All of them occur, so they are in the order of their names.
    counts.index = pd.Index(SIDES)
    counts.columns = pd.Index(LABELS)
    by_side: dict[Any, Any] = counts.to_dict("index")
    return by_side


def _describe_genomes(examples: Examples) -> dict[str, dict[str, int | str]]:
    """Return label, cluster, side and number of frames of each genome, by its name.

    The side is its set: training, validation or test, or "" if none of its frames is used.
    """
    labels = [LABELS[label] for label in examples.genomes["label"]]
    genomes = examples.genomes.assign(label=labels)
    n_frames = examples.rows["genome"].value_counts()  # by the number of the genome, its row
    genomes["frames"] = n_frames.reindex(genomes.index, fill_value=0)
    by_name: dict[Any, Any] = genomes.set_index("genome").to_dict("index")
    return by_name


def _why_not_run(
    scored_reads: dict[str, pd.DataFrame], spec: TrainSpec, fragments_run: RunDir | str
) -> dict[str, str]:
    """Return the test sets that were not scored, with the reasons.

    Args:
        scored_reads: The scores, by test set.
        spec: Settings of the training.
        fragments_run: The run over fragments of the test genomes; or the reason why there is none.
    """
    # If there was a run over fragments, a length is absent because a class has no such fragment.
    reason = NO_FRAGMENTS
    if isinstance(fragments_run, str):
        reason = fragments_run
    not_run = {}
    for length in LENGTHS:
        name = fragments_name(length)
        if name not in scored_reads:
            not_run[name] = reason
    if not spec.repeats:
        not_run[CROSS_VALIDATION] = "no repeats were asked for"
    return not_run
