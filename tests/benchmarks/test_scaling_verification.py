"""Two GPUs against one: at least 1.9 times as fast on a large set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

from virnuc_core.profiles import load_profile

from .conftest import devices, needs_gpus, virnuc

ROUNDS = 3


def test_two_gpus_reach_the_target(
    models: Path, reads: Callable[[str], Path], tmp_path: Path
) -> None:
    needs_gpus(2)
    target = load_profile("phase10-1m").targets["scaling"]
    seconds = {}
    for count in (1, 2):
        words = (
            "predict",
            reads("large"),
            "--models",
            models,
            "--devices",
            devices(count),
            "--force",
            "--no-prefect",
        )
        seconds[count] = median(virnuc(*words, "-o", tmp_path / str(count)) for _ in range(ROUNDS))
    assert seconds[1] / seconds[2] >= target.value, seconds
