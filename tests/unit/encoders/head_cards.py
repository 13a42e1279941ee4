"""The card of a classifier that the tests of heads and cards share."""

from __future__ import annotations

from virnuc_core.encoders.model_config import Estimate, HeadCard

CARD = HeadCard(
    reads="a" * 64,
    truth="b" * 64,
    test="c" * 64,
    lengths=(60, 150, 300),
    prevalence=0.1,
    auroc=Estimate(value=0.9, low=0.85, high=0.94),
    thresholds={0.01: 0.93, 0.1: 0.6},
    expected_fdr={
        0.01: Estimate(value=0.01, low=0.002, high=0.029),
        0.05: Estimate(value=0.05, low=0.0, high=0.4),
        0.1: Estimate(value=0.1, low=0.05, high=0.2),
    },
    uncertain=(0.4, 0.6),
)
