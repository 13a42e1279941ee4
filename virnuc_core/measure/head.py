"""The head: fitted on labelled reads from embeddings a run has stored, and such embeddings scored again by another.

No genome is in two splits: the reads' genomes are dealt to three, each class by itself, one to learn from, one to say
when to stop, one that is looked at once, for the numbers in the summary. Each split holds as many viral rows as others.
"""

import copy
import csv
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from virnuc_core.config import Share, Spec, VerdictSpec
from virnuc_core.encoders.checkpoint import open_folder, part_digest
from virnuc_core.encoders.convert import write_tensors
from virnuc_core.encoders.model_config import (
    DnabertShape,
    Esm2Shape,
    HeadShape,
    read_shape,
    remarks,
    verdict,
    write_shape,
)
from virnuc_core.encoders.models import Head
from virnuc_core.engine import shards
from virnuc_core.errors import ConfigError, InputError, ShardError
from virnuc_core.reads.store import OrfStore
from virnuc_core.results import ResultSummary, write_results
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunFile, read_record, write

log = logging.getLogger(__name__)

HEAD_FILES: Final = ("config.json", "model.safetensors")
RESCORE: Final = "rescore.json"
AS_EVER: Final = VerdictSpec()
CLASSES: Final = ("others", "virus")
SPLITS: Final = ("train", "validation", "test")
TRUTH_COLUMNS: Final = ("read", "label", "genome")
SHARES: Final = {2: 0.1, 1: 0.1}  # of a class's rows: to test with, to stop by
BATCH_ROWS: Final = 128
MOMENTUM: Final = 0.9
STEP_EPOCHS, STEP_DECAY = 10, 0.85  # the learning rate falls by the second after so many epochs
DROPOUT: Final = 0.5
# multiplications of one step from which several threads pay; below, handing them round takes three times as long
SHARED_FROM: Final = 100_000_000


class TrainSpec(Spec):
    """How the head is fitted. Optimiser and stopping rule are the original's, the batch and the step are larger."""

    hidden: int = Field(512, ge=1)
    learning_rate: float = Field(5e-3, gt=0)
    max_epochs: int = Field(200, ge=1)
    patience: int = Field(5, ge=1, description="epochs without a lower validation loss before stopping")
    max_rows_per_class: int = Field(25_000, ge=2, description="rows of a class to learn from; the rest is left out")


@dataclass(frozen=True, slots=True)
class TrainSummary:
    """What was learnt, and how well it does on genomes it has never met."""

    rows: dict[str, int]  # by split
    genomes: dict[str, int]  # by split
    epochs: int
    best_epoch: int
    validation_loss: float
    test_accuracy: float
    test_auc: float
    head: Path

    def __str__(self) -> str:
        seen = f"on {self.genomes['test']} unseen genomes after {self.epochs} epochs"
        return f"accuracy {self.test_accuracy:.3f}, AUC {self.test_auc:.3f} {seen}"


def read_truth(path: Path) -> pd.DataFrame:
    """What each read is known to be, from a TAB-separated file: columns `read`, `label` (index into CLASSES), `genome`.

    In the file a label is `virus` or `others`. Errors: `InputError` names the line and what is wrong with it.
    """
    rows = []
    try:
        with path.open(encoding="utf-8", newline="") as handle:
            lines = csv.DictReader(handle, delimiter="\t", quoting=csv.QUOTE_NONE)
            missing = [name for name in TRUTH_COLUMNS if name not in (lines.fieldnames or ())]
            if missing:
                raise InputError(f"no column {', '.join(missing)}", file=path, line=1)
            for line in lines:
                read, label, genome = (line[name] for name in TRUTH_COLUMNS)
                if read is None or label not in CLASSES or genome is None:
                    wanted = "wanted read, label (virus or others) and genome"
                    raise InputError(wanted, file=path, line=lines.line_num)
                rows.append((read, CLASSES.index(label), genome))
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path) from error
    return pd.DataFrame(rows, columns=TRUTH_COLUMNS)


def split_genomes(genome: NDArray[np.int64], label: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Which split each row is in, [rows] index into `SPLITS`; rows of one genome are in one split.

    Within a class, genomes in random order fill the test split and then the validation split to their share; a genome
    far larger than the share is passed over unless no other is left. Errors: `InputError` when a class has fewer than
    three genomes, or a genome has both labels.
    """
    split = np.zeros(len(genome), dtype=np.int64)
    for value, name in enumerate(CLASSES):
        members, sizes = np.unique(genome[label == value], return_counts=True)
        if np.isin(members, genome[label != value]).any():
            raise InputError("a genome has reads of both labels; give the parts different genome names")
        if len(members) < len(SPLITS):
            problem = f"{len(members)} genomes labelled {name} have open frames"
            raise InputError(f"{problem}; three are needed: to learn, stop and test")
        free = np.arange(len(members))
        for number, share in SHARES.items():
            chosen: list[int] = []
            target = share * float(sizes.sum())
            for index in rng.permutation(free).tolist():
                held = sizes[chosen].sum()
                if held >= target or len(free) - len(chosen) <= number:  # so many are left for the other splits
                    break
                if held + sizes[index] <= 2 * target:
                    chosen.append(index)
            chosen = chosen or [int(free[np.argmin(sizes[free])])]
            free = np.setdiff1d(free, chosen)
            split[np.isin(genome, members[chosen])] = number
    return split


def choose_rows(
    store: OrfStore, truth: pd.DataFrame, rng: np.random.Generator, *, limit: int
) -> tuple[list[tuple[NDArray[np.int64], Tensor]], dict[str, int]]:
    """Each split's rows, balanced and in random order: where their embeddings are, and labels; and numbers of genomes.

    Of a class at most `limit` rows are learnt from, and a quarter of it elsewhere. Errors: `InputError` names reads of
    the store that the truth file does not know, and one that it names twice.
    """
    names = pd.Index(truth["read"])
    if not names.is_unique:
        raise InputError("the truth file names a read twice; ids must be unique")
    reads = store.read_ids(0, store.n_reads)
    line = names.get_indexer(reads)
    unknown = np.flatnonzero(line < 0)
    if len(unknown):
        said = ", ".join(reads[place] for place in unknown[:3])
        raise InputError(f"{len(unknown)} reads have no line in the truth file, among them {said}")
    row = line[np.asarray(store.row_read)]
    label, genome = truth["label"].to_numpy()[row], pd.factorize(truth["genome"])[0][row]
    unique = np.asarray(store.row_unique)
    split = split_genomes(genome, label, rng)
    found, genomes = [], {}
    for number, name in enumerate(SPLITS):
        rows = [rng.permutation(np.flatnonzero((split == number) & (label == value))) for value in (0, 1)]
        count = min(limit if number == 0 else max(2, limit // 4), *map(len, rows))
        chosen = rng.permutation(np.concatenate([part[:count] for part in rows]))
        found.append((unique[chosen], torch.from_numpy(label[chosen])))
        genomes[name] = len(np.unique(genome[split == number]))
    return found, genomes


def stored_embeddings(run: RunDir, wanted: NDArray[np.int64], width: int) -> Tensor:
    """Embeddings of the wanted uniques, float32 [len(wanted), width], read shard by shard.

    Errors: `ShardError` when a shard is missing, damaged, or a wanted sequence failed.
    """
    plan, found = shards.read_plan(run), np.full((len(wanted), width), np.nan, dtype=np.float32)
    for shard in range(len(plan)):
        result = shards.read_shard(run, plan, shard)
        lo, hi = plan.range(shard)
        here = np.flatnonzero((wanted >= lo) & (wanted < hi))
        found[here] = result.embeddings[wanted[here] - lo]
    if not np.isfinite(found).all():
        raise ShardError(f"{run.root}: some of the sequences have no embedding; finish the run first")
    return torch.from_numpy(found)


def train_head(
    run: RunDir, store: OrfStore, truth: Path, out: Path, *, models: Path, seed: int = 0, spec: TrainSpec | None = None
) -> TrainSummary:
    """Fit a head on the run's embeddings and write `out/head/config.json` and `out/head/model.safetensors`.

    `models` is the directory whose encoders made the embeddings; the head is bound to the store's model length. The
    same run, truth, settings and seed give the same head on the same machine. Errors: `InputError` for truth that does
    not fit the reads or has too few genomes; `ShardError` for missing embeddings.
    """
    spec, rng = spec or TrainSpec(), np.random.default_rng(seed)
    splits, genomes = choose_rows(store, read_truth(truth), rng, limit=spec.max_rows_per_class)
    shape = HeadShape(
        model_length=store.model_length,
        dna_width=read_shape(models / "dnabert_s" / "config.json", DnabertShape).width,
        protein_width=read_shape(models / "esm2" / "config.json", Esm2Shape).width,
        hidden=spec.hidden,
    )
    labels = [label for _, label in splits]
    features = stored_embeddings(run, np.concatenate([uniques for uniques, _ in splits]), shape.width)
    learnt, held_out, test = zip(features.split([len(label) for label in labels]), labels, strict=True)
    threads = torch.get_num_threads()
    if BATCH_ROWS * shape.width * shape.hidden < SHARED_FROM:
        torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = _network(shape)
            epochs, best_epoch, loss = _fit(network, learnt, held_out, spec)
    finally:
        torch.set_num_threads(threads)
    with torch.inference_mode():
        virus = torch.softmax(network(test[0]), dim=-1)[:, 1]
    summary = TrainSummary(
        rows={name: len(label) for name, label in zip(SPLITS, labels, strict=True)},
        genomes=genomes,
        epochs=epochs,
        best_epoch=best_epoch,
        validation_loss=loss,
        test_accuracy=float(((virus > 0.5).long() == labels[2]).float().mean()),
        test_auc=auc(virus.numpy(), labels[2].numpy()),
        head=out / "head",
    )
    summary.head.mkdir(parents=True, exist_ok=True)
    state = network.state_dict()  # weights before sizes: a folder with a config has its weights
    write_tensors(summary.head / HEAD_FILES[1], shape.tensors(), torch.float32, lambda name: state[name])
    write_shape(shape, summary.head / HEAD_FILES[0])
    log.info("head: %s", summary)
    return summary


def _network(shape: HeadShape) -> nn.Sequential:
    """The head while it learns; its tensors bear the names of the head file."""
    hidden, output = nn.Linear(shape.width, shape.hidden), nn.Linear(shape.hidden, len(CLASSES))
    for layer in (hidden, output):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    norm = nn.BatchNorm1d(shape.hidden, eps=shape.norm_eps)
    parts = {"hidden_layer": hidden, "bn1": norm, "relu": nn.ReLU(), "dropout": nn.Dropout(DROPOUT)}
    return nn.Sequential(OrderedDict({**parts, "output_layer": output}))


def _fit(
    network: nn.Module, train: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor], spec: TrainSpec
) -> tuple[int, int, float]:
    """Train until the validation loss stays up for `patience` epochs: epochs, the best one, and its loss.

    The network is left with its best weights, to be used and not to learn.
    """
    features, labels = train
    optimiser = torch.optim.SGD(network.parameters(), lr=spec.learning_rate, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, STEP_EPOCHS, STEP_DECAY)
    epoch, best_loss, best_epoch, best = 0, float("inf"), 0, copy.deepcopy(network.state_dict())
    for epoch in range(1, spec.max_epochs + 1):
        network.train()
        for batch in torch.randperm(len(features)).split(BATCH_ROWS):
            if len(batch) > 1:  # batch norm cannot learn from one row
                optimiser.zero_grad()
                nn.functional.cross_entropy(network(features[batch]), labels[batch]).backward()
                optimiser.step()
        schedule.step()
        network.eval()
        with torch.inference_mode():
            loss = float(nn.functional.cross_entropy(network(validation[0]), validation[1]))
        if loss < best_loss:
            best_loss, best_epoch, best = loss, epoch, copy.deepcopy(network.state_dict())
        elif epoch - best_epoch >= spec.patience:
            break
    network.load_state_dict(best)
    return epoch, best_epoch, best_loss


def auc(scores: NDArray[np.float32], label: NDArray[np.int64]) -> float:
    """Chance that a viral row scores above one of the others, ties counted half.

    >>> round(auc(np.array([0.1, 0.4, 0.4, 0.9]), np.array([0, 0, 1, 1])), 3)
    0.875
    """
    rank = pd.Series(scores).rank().to_numpy()  # equal scores share their mean rank
    virus = label == 1
    wins = rank[virus].sum() - virus.sum() * (virus.sum() + 1) / 2
    return float(wins / (virus.sum() * (~virus).sum()))


class RescoreSummary(RunFile):
    """`rescore.json`: what the result files beside it stand on."""

    schema_version: int = 2
    run: str  # the run whose embeddings were scored
    reads: str  # fingerprint of its reads
    head: str  # fingerprint of the head that scored
    model_length: int
    results: ResultSummary
    uncertain: tuple[Share, Share] | None = None  # scores of which no verdict was wanted
    elapsed_s: float


def rescore(run: RunDir, new_head: Path | None, out: RunDir, asked: VerdictSpec = AS_EVER) -> RescoreSummary:
    """Write the result files of `run` anew into `out`, scored by `new_head`, a folder or a models directory with it.

    Without it the run's own scores are kept and only the threshold moves. Errors: `WeightsError` when no head is there
    or it is not finite; `ConfigError` when the run is not finished, when `out` is the run itself, when the head was
    trained for another model length or other widths, or its card does not tell what is asked; `ShardError` for a
    damaged shard.
    """
    started = time.perf_counter()
    if out.root.resolve() == run.root.resolve():
        raise ConfigError(f"{out.root} is the run itself; give the new results a directory of their own")
    if out.record.exists():
        raise ConfigError(f"{out.root} holds a run of its own; choose another directory")
    record = read_record(run)
    store = OrfStore.open(run.root / record.store)
    if store.fingerprint != record.fingerprints["reads"]:
        raise ConfigError(f"{store.path} holds other reads than the run was made from; give it back its store")
    plan = shards.read_plan(run)
    missing = sum(not shards.shard_path(run, shard).exists() for shard in range(len(plan)))
    if missing:
        raise ConfigError(f"{run.root}: {missing} of {len(plan)} shards are not computed yet; finish the run first")
    scores, failed = shards.read_scores(run)
    digest, threshold, uncertain = record.fingerprints["head"], asked.threshold, None
    if new_head is None and (asked.abstain or asked.fdr is not None):
        raise ConfigError("fdr and abstain: a head's card tells; name the head with --head")
    if new_head is not None:
        folder = new_head / "head" if (new_head / "head").is_dir() else new_head
        shape, read = open_folder(folder, HeadShape)
        if shape.model_length != store.model_length:
            cut = f"the run's reads were cut at {store.model_length}"
            raise ConfigError(f"the head in {folder} is for length {shape.model_length}, {cut}")
        dna, protein = record.widths.get("dna"), record.widths.get("protein")
        if record.widths and (shape.dna_width, shape.protein_width) != (dna, protein):
            raise ConfigError(
                f"the head in {folder} is for embeddings of {shape.dna_width} (DNA) + {shape.protein_width} (protein), "
                f"the run has {dna} + {protein}; it belongs to other encoders"
            )
        threshold, uncertain = verdict(shape, asked)
        for remark in remarks(shape, np.asarray(store.read_length)):
            log.warning("%s", remark)
        head, digest = Head(shape, read, torch.device("cpu")), part_digest(folder)
        for shard in range(len(plan)):
            result = shards.read_shard(run, plan, shard)
            scores[slice(*plan.range(shard))] = head.scores(torch.from_numpy(result.embeddings)).numpy()
        failed = np.isnan(scores[:, 0])
    (out.root / RESCORE).unlink(missing_ok=True)  # it speaks of the files that are replaced now
    summary = RescoreSummary(
        run=str(run.root.resolve()),
        reads=store.fingerprint,
        head=digest,
        model_length=store.model_length,
        results=write_results(out, store, scores, failed, threshold=threshold, uncertain=uncertain),
        uncertain=uncertain,
        elapsed_s=time.perf_counter() - started,
    )
    write(out.root / RESCORE, summary)
    return summary
