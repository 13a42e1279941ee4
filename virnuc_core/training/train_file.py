"""The record of a training, `train.json`."""

import re
from typing import Annotated, Any, Final

from pydantic import Field

from virnuc_core.encoder_names import DNA, PROTEIN, RANDOM_ORIGIN
from virnuc_core.encoders.model_config import HeadCard
from virnuc_core.runfiles import RunFile
from virnuc_core.training.evaluation import Counts, Figures, Points

TRAIN_FILE: Final = "train.json"
TRAIN_PAGE: Final = "train.html"


class TrainFile(RunFile):
    """`train.json`: what a head was made of, and how good it is."""

    schema_version: int = 1
    created: str
    virnuc_version: str
    settings: dict[str, Any]
    model_length: int
    encoders: str  # where each comes from; with random ones no figure means anything
    digests: dict[str, str]  # of the encoders and of the head
    # For each false discovery rate that the card has a threshold for: the rate that this threshold
    # gives among the final head's test reads.
    realised_fdr: Annotated[dict[float, float | None], Field(alias="realised")]
    # As the head has it: from the cross-validation, or from the test if there was none.
    card: HeadCard
    clusters: dict[str, dict[str, int]]  # of genomes, by side and class
    shared_sequences: int  # on two sides, on either strand
    # Label, cluster, side ("" for an unused genome) and number of frames of each.
    genomes: dict[str, dict[str, int | str]]
    left_out: dict[str, int]
    method: str = "network"  # older trainings had no other
    penalty: float | None = None  # of the logistic regression, if there is one
    learnt_from: int  # frames; both classes have the same weight
    epochs: int  # 0 without a network
    best_epoch: int
    validation_loss: float
    figures: tuple[Figures, ...]
    curves: dict[str, Points]
    histograms: dict[str, Counts]  # by test set: reads by score
    not_run: dict[str, str]  # what could not be measured, and why

    @property
    def random_encoders(self) -> list[str]:
        """Return the titles of the encoders whose weights are random, such as `DNABERT-S`."""
        titles: list[str] = []
        for encoder in (PROTEIN, DNA):
            # `encoders` has the origin of each, for example "esm2: random, seed 7; dnabert_s: …".
            pattern = rf"(^|; ){encoder.name}: {RANDOM_ORIGIN}\b"
            if re.search(pattern, self.encoders):
                titles.append(encoder.title)
        return titles
