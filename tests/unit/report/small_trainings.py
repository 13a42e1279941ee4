"""Small records of trainings that the tests of pages share."""

from __future__ import annotations

from typing import Any

from virnuc_core.encoders.model_config import Estimate, HeadCard
from virnuc_core.report.training_pages import METRICS
from virnuc_core.training.evaluation import Figures
from virnuc_core.training.train_file import TrainFile

GOOD = Estimate(value=0.98, low=0.95, high=0.99)
CHANCE = Estimate(value=0.5, low=0.4, high=0.6)


def figures(method: str, estimate: Estimate | None = GOOD, **changes: Any) -> Figures:
    base = Figures(
        method=method,
        test_set="cross-validation",
        level="read",
        prevalence=0.5,
        is_natural=True,
        rows=1_000,
        clusters=30,
        metrics=dict.fromkeys(METRICS, estimate),
    )
    return base.model_copy(update=changes)


def card(**changes: Any) -> HeadCard:
    base = HeadCard(
        reads="ab" * 32,
        truth="cd" * 32,
        test="ef" * 32,
        lengths=(100, 250, 500),
        prevalence=0.01,
        auroc=GOOD,
        thresholds={0.01: 0.98765},
        expected_fdr={0.01: Estimate(value=0.009, low=0.002, high=0.028)},
        uncertain=(0.4, 0.6),
    )
    return base.model_copy(update=changes)


def training(**changes: Any) -> TrainFile:
    """Return a training on enough genomes, whose head does better than its baseline."""
    base = TrainFile(
        created="2026-01-01T00:00:00+00:00",
        virnuc_version="1.2.3",
        settings={"similarity": 0.05},
        model_length=500,
        encoders="esm2: real; dnabert_s: real",
        digests={"esm2": "1" * 64, "dnabert_s": "2" * 64, "head": "3" * 64},
        realised_fdr={0.01: 0.0123},
        card=card(),
        clusters={
            "train": {"others": 30, "virus": 40},
            "validation": {"others": 10, "virus": 12},
            "test": {"others": 11, "virus": 15},
        },
        shared_sequences=0,
        genomes={"g<1>": {"label": "virus", "cluster": 1, "side": "test", "frames": 10}},
        left_out={},
        learnt_from=1_000,
        epochs=20,
        best_epoch=10,
        validation_loss=0.5,
        figures=(figures("head"), figures("4-mers", CHANCE)),
        curves={"ROC": ((0.0, 0.5, 1.0), (0.0, 1.0, 1.0))},
        histograms={"test": ((4, 0), (1, 2))},
        not_run={},
    )
    return base.model_copy(update=changes)
