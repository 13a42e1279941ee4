"""How much faster than the method of before, on the same reads and devices; and that both say the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from virnuc_core.profiles import load_profile

from ..bare import validate
from .conftest import GPUS, devices


def test_speedup(
    benchmark: Any, models: Path, reads: Callable[[str], Path], tmp_path: Path
) -> None:
    arguments = (reads("medium"), models, tmp_path / "out", devices(1))
    report = benchmark.pedantic(lambda: validate(*arguments), rounds=1)
    assert report.baseline is not None
    assert report.run is not None
    assert report.baseline.seconds
    speedup = report.baseline.seconds / report.run.total_s
    benchmark.extra_info.update(
        speedup=speedup, baseline_seconds=report.baseline.seconds, seconds=report.run.total_s
    )
    consensus = [
        comparison.consensus.agreement
        for comparison in report.comparisons
        if comparison.consensus is not None
    ]
    assert min(agreement or 0.0 for agreement in consensus) >= 0.99
    if GPUS:
        assert speedup >= load_profile("phase10-1m").targets["speedup"].value
