"""A whole prediction at three scales, weights loaded and all, as a user runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import BUDGET, SCALES, devices, virnuc
from .pages import StageThroughputResult


@pytest.mark.parametrize("scale", SCALES)
def test_prediction(
    measured: Callable[..., StageThroughputResult],
    models: Path,
    reads: Callable[[str], Path],
    tmp_path: Path,
    scale: str,
) -> None:
    words = (
        "predict",
        reads(scale),
        "-o",
        tmp_path / "out",
        "--models",
        models,
        "--devices",
        devices(1),
    )
    budgets = ("--token-budget", BUDGET, "--dna-token-budget", BUDGET)
    result = measured(
        "end to end",
        scale,
        SCALES[scale],
        lambda: virnuc(*words, *budgets, "--force", "--no-prefect"),
        rounds=3,
    )
    assert result.throughput_seq_per_sec > 0
    assert (tmp_path / "out" / "prediction_results_highestscore.csv").is_file()
