"""Make the model card of a head, and write the head with it.

A head is the classifier that turns the embeddings of a sequence into scores. Its card says what it
was trained on, how well it classifies, and which thresholds suit it.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
import torch
from torch import nn

import virnuc_core
from virnuc_core.config import TrainSpec
from virnuc_core.encoders.checkpoint import WEIGHTS
from virnuc_core.encoders.model_config import HeadCard, HeadShape, TrainingDomain, write_shape
from virnuc_core.encoders.model_files import write_tensors
from virnuc_core.lease import make_folder
from virnuc_core.reads.store import OrfStore
from virnuc_core.runfiles import sha256_of
from virnuc_core.training.evaluation import Figures, fdr_thresholds
from virnuc_core.training.thresholds import choose_thresholds

FALSE_DISCOVERY_RATES: Final = (0.001, 0.01, 0.05, 0.1, 0.2)  # that thresholds are kept for
MAX_WRONG_SHARE: Final = 0.05  # of verdicts; scores where more are wrong are uncertain


def make_card(
    store: OrfStore,
    rows: pd.DataFrame,
    spec: TrainSpec,
    scored_reads: pd.DataFrame,
    tested_reads: pd.DataFrame,
    figures: Figures,
    domain: TrainingDomain,
    encoder_digests: Mapping[str, str],
) -> HeadCard:
    """Return the card of a head: facts on its training data, and how well it classifies.

    Args:
        store: The training reads.
        rows: The translated frames of the reads that were trained and tested with. The columns are
            read, label, cluster (of genomes) and side (training, validation or test set).
        spec: The table of origins, and the prevalence that the card's numbers hold for.
        scored_reads: Whole reads of genomes that the head did not learn from, with the columns
            score, label, source (number of the independent genome) and kind.
        tested_reads: The reads of the final test, as the final head scored them.
        figures: The metrics of these reads at `spec.prevalence`.
        domain: How the head judged reads of each kind, GC content and length.
        encoder_digests: Digests of the encoders that the head was trained with.
    """
    n_bases = np.asarray(store.read_length)[rows["read"].unique()]  # of each read
    metrics = {name: value for name, value in figures.metrics.items() if value is not None}
    auroc = metrics.pop("auroc")  # it has a field of its own
    thresholds = choose_thresholds(
        scored_reads, tested_reads, FALSE_DISCOVERY_RATES, spec.prevalence
    )
    method = None if spec.method == "network" else spec.method
    return HeadCard(
        method=method,
        reads=store.fingerprint,
        truth=sha256_of(spec.truth),
        encoders=dict(encoder_digests),
        test=_split_digest(store, rows),
        lengths=(int(n_bases.min()), int(np.median(n_bases)), int(n_bases.max())),
        prevalence=spec.prevalence,
        auroc=auroc,
        metrics=metrics,
        thresholds=thresholds.scores,
        expected_fdr=thresholds.expected_rates,
        uncertain=_uncertain_scores(scored_reads),
        domain=domain,
    )


def _split_digest(store: OrfStore, rows: pd.DataFrame) -> str:
    """Return a digest of the reads and of how they were split into training and test sets.

    The metrics of two heads can be compared if they have the same digest.
    """
    digest = sha256(store.fingerprint.encode())
    split = rows[["read", "label", "cluster", "side"]].to_numpy(np.int64)
    digest.update(split.tobytes())
    return digest.hexdigest()


def _uncertain_scores(reads: pd.DataFrame) -> tuple[float, float] | None:
    """Return the range of scores for which too many verdicts would be wrong.

    Among reads with a score above the range, at most `MAX_WRONG_SHARE` are not viral. Among reads
    below it, at most the same share is viral.

    Args:
        reads: Scored reads with the columns score (P(virus)) and label (0 others, 1 virus).

    Returns:
        The lowest score of the range, and the score at which it ends. Both are equal if no score is
        uncertain. None if not even the most extreme scores are right often enough.
    """
    # The lower end is found like the upper end, with the two classes exchanged: the score is then
    # P(others), and viral reads are the wrong ones.
    prevalence = float(reads["label"].mean())
    exchanged = reads.assign(score=1 - reads["score"], label=1 - reads["label"])
    viral_thresholds = fdr_thresholds(reads, (MAX_WRONG_SHARE,), prevalence)
    others_thresholds = fdr_thresholds(exchanged, (MAX_WRONG_SHARE,), 1 - prevalence)
    if not viral_thresholds or not others_thresholds:
        return None
    viral_from = viral_thresholds[MAX_WRONG_SHARE]
    others_up_to = 1 - others_thresholds[MAX_WRONG_SHARE]  # as P(virus) again
    # If the classes are separated well, `viral_from` is below `others_up_to`: every score gives a
    # good enough verdict. Then the range is empty, and both its ends are `others_up_to`.
    return others_up_to, max(viral_from, others_up_to)


def write_head(network: nn.Module, shape: HeadShape, card: HeadCard, folder: Path) -> None:
    """Write a head with its card to a folder.

    The weights are written first. So a folder that has a `config.json` also has its weights, even
    if the program was killed in between.
    """
    make_folder(folder)
    tensors = network.state_dict()
    write_tensors(folder / WEIGHTS, shape.tensors(), torch.float32, lambda name: tensors[name])
    origin = f"trained by virnuc {virnuc_core.__version__}"
    shape_with_card = shape.model_copy(update={"origin": origin, "card": card})
    write_shape(shape_with_card, folder / "config.json")
