"""A head fitted on labelled reads from the embeddings a run has stored, and all that tells how good it is.

The figures are those of a repeated cross-validation, in which every cluster of genomes is asked about by heads that
never met it, and of the final head's own test. Beside them stand two baselines, so that a head that has learnt nothing
is seen. `train.json` keeps everything."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

import virnuc_core
from virnuc_core.config import TrainSpec
from virnuc_core.encoders.checkpoint import WEIGHTS, shape_of
from virnuc_core.encoders.classifier import Classifier, probabilities
from virnuc_core.encoders.convert import random_tensor
from virnuc_core.encoders.digests import fingerprint, part_digest
from virnuc_core.encoders.model_config import (
    RANDOM_ORIGIN,
    HeadCard,
    HeadShape,
    read_shape,
    write_shape,
)
from virnuc_core.encoders.model_files import write_part, write_tensors
from virnuc_core.encoders.registry import ENCODER_PARTS, PART_SHAPES
from virnuc_core.engine import shards
from virnuc_core.errors import VirnucError
from virnuc_core.reads.simulate import LABELS
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RESULT_FILES, RunDir, discard, write_text_atomically
from virnuc_core.runfiles import RunFile, RunSummary, now, read, sha256_of, write
from virnuc_core.training import evaluation
from virnuc_core.training.evaluation import (
    SIDES,
    Examples,
    Figures,
    Floats,
    Scored,
    by_level,
    deal,
    draw,
    thresholds,
)

TRAINED: Final = "train.json"
ENCODERS: Final = "encoders"  # in a training directory: the models that its embeddings are made by
LENGTHS: Final = (150, 300, 500)  # bases that the test's genomes are cut to
CUTS: Final = 40  # of a genome and length, at most
NO_GENOMES: Final = "the genomes' sequences were not given (--genomes)"
FALSE_SHARES: Final = (0.001, 0.01, 0.05, 0.1)  # false discovery rates that thresholds are kept for
DOUBT: Final = 0.05  # share of wrong verdicts from which scores are uncertain
HEAD, CROSS, TEST = "head", "cross-validation", "test"  # who scored, and who was asked
BATCH_ROWS: Final = 128
STEP_EPOCHS, STEP_DECAY = 10, 0.85  # the learning rate falls by the second after so many epochs
# multiplications of one step from which several threads pay; below, handing them round takes three times as long
SHARED_FROM: Final = 100_000_000
BASELINE_ROWS: Final = 2_500  # of a class that a baseline learns from
WORDS: Final = tuple(
    map("".join, product("ACGT", repeat=4))
)  # of the DNA, for the baseline on those


class TrainFile(RunFile):
    """`train.json`: what a head was made of, and how good it is."""

    schema_version: int = 1
    created: str
    virnuc_version: str
    settings: dict[str, Any]
    model_length: int
    encoders: str  # where each comes from; of random ones no figure means anything
    digests: dict[str, str]  # of the encoders and of the head
    realised: dict[
        float, float | None
    ]  # by rate of the card's thresholds: that of the final head's test reads
    card: HeadCard  # as the head has it; from the cross-validation, or from the test where there was none
    clusters: dict[str, dict[str, int]]  # of genomes, by side and class
    shared_sequences: int  # between sides, on either strand
    genomes: dict[
        str, dict[str, int | str]
    ]  # label, cluster, side ("": not used) and frames of each
    left_out: dict[str, int]
    learnt_from: int  # frames, as many of either class
    epochs: int
    best_epoch: int
    validation_loss: float
    figures: tuple[Figures, ...]
    curves: dict[str, evaluation.Points]
    histograms: dict[
        str, tuple[tuple[int, ...], tuple[int, ...]]
    ]  # by who was asked: reads by score, others and virus
    not_run: dict[str, str]  # what could not be measured, and why


class Inputs(NamedTuple):
    """Rows and what is learnt from."""

    rows: pd.DataFrame
    vectors: Tensor  # [rows, width] float32
    words: Floats  # [rows, words that occur] shares of the DNA

    def part(self, wanted: NDArray[Any]) -> "Inputs":  # places, or where it is true
        return Inputs(
            self.rows.iloc[wanted], self.vectors[torch.tensor(wanted)], self.words[wanted]
        )


Scorer = Callable[[Inputs], Floats]
BASELINES: Final[dict[str, Callable[[Inputs], Any]]] = {
    "logistic regression on the vectors": lambda of: of.vectors.numpy(),
    "logistic regression on 4-mers": lambda of: of.words,
}


def inputs_of(run: RunDir, store: OrfStore, rows: pd.DataFrame, width: int) -> tuple[Inputs, int]:
    """The rows with vectors and words, and how many were left out because their embedding is not finite. Errors:
    `VirnucError` when those are more than one in a hundred; `ShardError` for a missing or damaged shard."""
    wanted, place = np.unique(rows["unique"], return_inverse=True)
    plan, vectors = shards.read_plan(run), torch.full((len(wanted), width), torch.nan)
    for shard in range(len(plan)):
        result, (low, high) = shards.read_shard(run, plan, shard), plan.range(shard)
        here = np.flatnonzero((wanted >= low) & (wanted < high))
        vectors[here] = torch.from_numpy(result.embeddings[wanted[here] - low])
    texts = [store.dna(one, one + 1)[0].decode() for one in wanted.tolist()]
    four = {"analyzer": "char", "ngram_range": (4, 4), "lowercase": False, "vocabulary": WORDS}
    words = TfidfVectorizer(norm="l1", use_idf=False, **four).fit_transform(texts).toarray()
    sound = np.flatnonzero(vectors.isfinite().all(dim=1)[place])
    if (lost := len(rows) - len(sound)) > len(rows) / 100:
        raise VirnucError(
            f"{run.root}: {lost} of {len(rows)} frames have no finite embedding; see its failed.tsv"
        )
    return Inputs(rows, vectors[place], words[place]).part(sound), lost


def stand_in(models: Path, out: Path, shape: HeadShape) -> Path:
    """A models directory in `out` with the encoders of `models` and a random head: embeddings depend on no head. So
    training needs none, and no result can be mistaken for one of an earlier head."""
    folder = out / ENCODERS
    discard(folder, *ENCODER_PARTS, "head/config.json", f"head/{WEIGHTS}")
    shape = shape.model_copy(update={"hidden": 1, "card": None})
    write_part(
        folder, shape, partial(random_tensor, shape), f"{RANDOM_ORIGIN}, for training", "fp32"
    )
    for part in ENCODER_PARTS:
        (folder / part).symlink_to((models / part).resolve())
    return folder


def remove_results(run: RunDir) -> None:
    """Remove the result files of a training run, which are of its stand-in head."""
    discard(run.root, *RESULT_FILES, "pairs.tsv")
    write(run.summary, read(run.summary, RunSummary).model_copy(update={"files": None}))


def write_cuts(examples: Examples, sequences: Path, out: Path) -> str | None:
    """Fragments of each length of the test's genomes as reads `genome_length_place`; or why there are none."""
    found, lines = evaluation.read_genomes(sequences), []
    of_test = examples.genomes[examples.genomes["side"] == TEST]
    if absent := [name for name in of_test["genome"] if name not in found]:
        return f"{len(absent)} of the test's {len(of_test)} genomes have no sequence in {sequences.name}"
    for number, name in of_test["genome"].items():
        for length in LENGTHS:
            room = len(found[name]) - length
            places = (
                np.linspace(0, room, min(CUTS, room // length + 1)).astype(int) if room >= 0 else ()
            )
            lines += [
                f">{number}_{length}_{at}\n{found[name][at : at + length]}\n"
                for at in sorted(set(places))
            ]
    write_text_atomically(out, "".join(lines))
    return None


def train_head(
    run: RunDir,
    store: OrfStore,
    examples: Examples,
    spec: TrainSpec,
    cuts: RunDir | str = NO_GENOMES,
) -> TrainFile:
    """Fit a head on the run's embeddings, judge it, and write `head/` and `train.json` into the run. `cuts`: the run
    over fragments of the test's genomes, or why there is none. The same run, truth and settings give the same head on
    the same machine. Errors: `ShardError` for missing embeddings."""
    encoders = run.root / ENCODERS
    shape = read_shape(encoders / "head" / "config.json", HeadShape).model_copy(
        update={"hidden": spec.hidden}
    )
    inputs, lost = inputs_of(run, store, examples.rows, shape.width)
    side = inputs.rows["side"].to_numpy()
    threads = 1 if BATCH_ROWS * shape.width * shape.hidden < SHARED_FROM else None
    with threadpool_limits(threads), torch.random.fork_rng(devices=[]):
        scored = cross_validate(inputs, shape, spec)
        network, told, learnt = learn(inputs, side, shape, spec, spec.seed)
        asked = [
            (TEST, inputs.part(side == SIDES.index(TEST))),
            *_cut_inputs(cuts, examples, shape.width),
        ]
        scored |= {
            (name, method): [(some.rows, by(some))]
            for name, some in asked
            for method, by in learnt.items()
        }
    share, seed = spec.prevalence, spec.seed
    figures = [
        line for key, found in scored.items() for line in evaluation.judge(*key, found, share, seed)
    ]
    reads = {
        name: by_level(*found[0])["read"]
        for (name, method), found in scored.items()
        if method == HEAD
    }
    best, wrong = CROSS if spec.repeats else TEST, evaluation.false_share
    told_of = next(
        one for one in figures if one.asked == best and one.level == "read" and not one.natural
    )
    digests = {part: digest for part, digest in fingerprint(encoders).items() if part != HEAD}
    card = _card(store, inputs.rows, spec, reads[best], told_of).model_copy(
        update={"encoders": digests}
    )
    _write_head(network, shape, card, run.root)
    rows, counted = examples.rows, examples.rows.groupby(["side", "label"])["cluster"].nunique()
    genomes = examples.genomes.assign(label=[LABELS[label] for label in examples.genomes["label"]])
    genomes["frames"] = rows["genome"].value_counts().reindex(genomes.index, fill_value=0)
    why = (
        cuts if isinstance(cuts, str) else "no fragment of this length of a class has an open frame"
    )
    found = TrainFile(
        created=now(),
        virnuc_version=virnuc_core.__version__,
        settings=spec.model_dump(mode="json", include=set(TrainSpec.model_fields)),
        model_length=store.model_length,
        encoders="; ".join(
            f"{part}: {shape_of(encoders, PART_SHAPES[part]).origin}" for part in ENCODER_PARTS
        ),
        digests=digests | {HEAD: part_digest(run.root / HEAD)},
        realised={
            rate: wrong(reads[TEST], at, spec.prevalence) for rate, at in card.thresholds.items()
        },
        card=card,
        clusters=counted.unstack()
        .set_axis(SIDES)
        .set_axis(LABELS, axis="columns")
        .to_dict("index"),
        shared_sequences=int((rows.groupby("sequence")["side"].nunique() > 1).sum()),
        genomes=genomes.set_index("genome").to_dict("index"),
        left_out=examples.left_out | ({"frames without a finite embedding": lost} if lost else {}),
        **told,
        figures=tuple(figures),
        curves=evaluation.curves(reads[best]),
        histograms={name: evaluation.histogram(table) for name, table in reads.items()},
        not_run={f"{length} bases": why for length in LENGTHS if f"{length} bases" not in reads}
        | ({} if spec.repeats else {CROSS: "no repeats were asked for"}),
    )
    write(run.root / TRAINED, found)
    return found


def _card(
    store: OrfStore, rows: pd.DataFrame, spec: TrainSpec, reads: pd.DataFrame, of: Figures
) -> HeadCard:
    """What the head says of itself, by the figures and scores of whole reads."""
    lengths = np.asarray(store.read_length)[rows["read"].unique()]
    asked = sha256(store.fingerprint.encode())
    asked.update(rows[["read", "label", "cluster", "side"]].to_numpy(np.int64).tobytes())
    own, turned = (
        float(reads["label"].mean()),
        reads.assign(score=1 - reads["score"], label=1 - reads["label"]),
    )
    high, low = (
        thresholds(reads, (DOUBT,), own).get(DOUBT),
        thresholds(turned, (DOUBT,), 1 - own).get(DOUBT),
    )
    metrics = {name: found for name, found in of.metrics.items() if found is not None}
    return HeadCard(
        reads=store.fingerprint,
        truth=sha256_of(spec.truth),
        test=asked.hexdigest(),
        lengths=(int(lengths.min()), int(np.median(lengths)), int(lengths.max())),
        prevalence=spec.prevalence,
        auroc=metrics.pop("auroc"),
        metrics=metrics,
        thresholds=thresholds(reads, FALSE_SHARES, spec.prevalence),
        uncertain=None
        if high is None or low is None
        else (1 - low, max(high, 1 - low)),  # perhaps no score at all
    )


def _write_head(network: nn.Module, shape: HeadShape, card: HeadCard, out: Path) -> None:
    """Write `out/head`; what an earlier training told of its own head is removed before."""
    discard(out, TRAINED, "train.html")
    (out / HEAD / "README.md").unlink(missing_ok=True)
    (out / HEAD).mkdir(parents=True, exist_ok=True)
    state = network.state_dict()  # weights before sizes: a folder with a config has its weights
    write_tensors(out / HEAD / WEIGHTS, shape.tensors(), torch.float32, lambda name: state[name])
    made = {"origin": f"trained by virnuc {virnuc_core.__version__}", "card": card}
    write_shape(shape.model_copy(update=made), out / HEAD / "config.json")


def _cut_inputs(cuts: RunDir | str, examples: Examples, width: int) -> Iterator[tuple[str, Inputs]]:
    """The fragments of each length, by its name, where both classes have some."""
    if isinstance(cuts, str):
        return
    store = OrfStore.open(cuts.store)
    names = pd.Series(store.read_ids(0, store.n_reads)).str.split("_", expand=True).astype(np.int64)
    rows = pd.DataFrame(
        {"read": store.row_read[:], "chunk": store.row_chunk[:], "unique": store.row_unique[:]}
    )
    rows[["genome", "bases"]] = names.loc[rows["read"], [0, 1]].to_numpy()
    rows[["label", "cluster"]] = examples.genomes.loc[
        rows["genome"], ["label", "cluster"]
    ].to_numpy()
    inputs, _ = inputs_of(cuts, store, rows, width)
    for length in LENGTHS:
        part = inputs.part((inputs.rows["bases"] == length).to_numpy())
        if part.rows["label"].nunique() == len(LABELS):
            yield f"{length} bases", part


def cross_validate(
    inputs: Inputs, shape: HeadShape, spec: TrainSpec
) -> dict[tuple[str, str], list[Scored]]:
    """The scores of all rows by each method, once a repeat, each row's by who learnt from other clusters alone."""
    found = {(CROSS, method): list[Scored]() for method in (HEAD, *BASELINES) if spec.repeats}
    for repeat in range(spec.repeats):
        seed = spec.seed + 1_000 * (repeat + 1)
        fold, scores = (
            deal(inputs.rows, 1 / spec.folds, seed),
            {key: np.empty(len(inputs.rows)) for key in found},
        )
        for number in range(fold.max() + 1):
            rest, asked = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
            side = np.full(len(fold), SIDES.index(TEST))
            side[rest] = deal(inputs.rows.iloc[rest], spec.validation_share, seed + number) == 0
            for method, by in learn(inputs, side, shape, spec, seed + number)[2].items():
                scores[CROSS, method][asked] = by(inputs.part(asked))
        found = {key: [*before, (inputs.rows, scores[key])] for key, before in found.items()}
    return found


def learn(
    inputs: Inputs, side: NDArray[np.int64], shape: HeadShape, spec: TrainSpec, seed: int
) -> tuple[nn.Module, dict[str, Any], dict[str, Scorer]]:
    """A head, what fitting it tells, and what scores rows by it and by each baseline, all learnt from side 0 alone."""
    rng, rows, chosen = (
        np.random.default_rng(seed),
        inputs.rows.reset_index(drop=True).assign(rows=1),
        [],
    )
    for number in (0, 1):  # as many rows of either class
        limit = int(rows["label"][side == number].value_counts().min())
        chosen.append(
            inputs.part(
                rng.permutation(draw(rows[side == number], limit, spec.sampling, rng).to_numpy())
            )
        )
    torch.manual_seed(seed)
    own, stop = chosen
    network, told = _fit(shape, own, stop, spec)

    def by_head(of: Inputs) -> Floats:
        with torch.inference_mode():
            return probabilities(network(of.vectors))[:, 1].double().numpy()

    scorers: dict[str, Scorer] = {HEAD: by_head}
    few = own.part(np.arange(min(len(own.rows), 2 * BASELINE_ROWS)))
    for name, view in BASELINES.items():
        model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1_000))
        model.fit(view(few), few.rows["label"])
        scorers[name] = partial(
            lambda of, model, view: model.predict_proba(view(of))[:, 1], model=model, view=view
        )
    return network, told, scorers


def _fit(
    shape: HeadShape, learnt: Inputs, held: Inputs, spec: TrainSpec
) -> tuple[nn.Module, dict[str, Any]]:
    """The head that was best when the validation loss had stayed up for `patience` epochs, to be used and not to learn,
    and what its training tells. It learns from columns of equal spread, as steps of one size want them, and its first
    layer then takes them as they are; one that hardly varies stays small."""
    network = Classifier(shape)
    for layer in (network.hidden_layer, network.output_layer):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    middle, spread = learnt.vectors.mean(0), learnt.vectors.std(0, correction=0).clamp_min(1e-3)
    own, asked = ((of.vectors - middle) / spread for of in (learnt, held))
    labels, answers = (torch.tensor(of.rows["label"].to_numpy(np.int64)) for of in (learnt, held))
    optimiser = torch.optim.SGD(network.parameters(), lr=spec.learning_rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, STEP_EPOCHS, STEP_DECAY)
    epoch, best_loss, best_epoch, best = 0, float("inf"), 0, copy.deepcopy(network.state_dict())
    for epoch in range(1, spec.epochs + 1):
        network.train()
        for batch in torch.randperm(len(labels)).split(BATCH_ROWS):
            if len(batch) > 1:  # batch norm cannot learn from one row
                optimiser.zero_grad()
                nn.functional.cross_entropy(network(own[batch]), labels[batch]).backward()
                optimiser.step()
        schedule.step()
        network.eval()
        with torch.inference_mode():
            loss = float(nn.functional.cross_entropy(network(asked), answers))
        if loss < best_loss:
            best_loss, best_epoch, best = loss, epoch, copy.deepcopy(network.state_dict())
        elif epoch - best_epoch >= spec.patience:
            break
    best["hidden_layer.weight"] /= spread
    best["hidden_layer.bias"] -= best["hidden_layer.weight"] @ middle
    network.load_state_dict(best)
    told = {
        "learnt_from": len(learnt.rows),
        "epochs": epoch,
        "best_epoch": best_epoch,
        "validation_loss": best_loss,
    }
    return network.eval(), told
