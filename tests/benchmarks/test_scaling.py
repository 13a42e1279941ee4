"""Time against the number of devices, by the command that users type, and what persistent models save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from virnuc_core.config import Devices
from virnuc_core.engine.embedding import Job
from virnuc_core.profiles import load_profile
from virnuc_core.tools.bench import Bench
from virnuc_core.tools.overhead import measure_overhead

from .conftest import BUDGET, GPUS, KIND, SCALES, devices, keep, kept, needs_gpus, virnuc

SCALE = "medium"
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class ScalingResult:
    """One number of devices, under the names of the benchmark files."""

    num_gpus: int
    time_seconds: float
    speedup: float
    efficiency: float


class TestGPUScaling:
    @pytest.mark.parametrize("count", [1, 2, 4, 8])
    def test_linear_scaling_synthetic(
        self,
        benchmark: Any,
        models: Path,
        reads: Callable[[str], Path],
        results: Path,
        tmp_path: Path,
        count: int,
    ) -> None:
        on, source = devices(count), reads(SCALE)
        budgets = (
            "--token-budget",
            BUDGET,
            "--dna-token-budget",
            BUDGET,
            "--shard-tokens",
            8 * BUDGET,
        )

        def predict() -> None:
            words = (
                "predict",
                source,
                "-o",
                tmp_path / "out",
                "--models",
                models,
                "--devices",
                on,
                *budgets,
            )
            virnuc(*words, "--force", "--no-prefect")

        benchmark.group = f"scaling over devices ({KIND}), {SCALES[SCALE]} reads"
        benchmark.pedantic(predict, rounds=ROUNDS, warmup_rounds=1)
        spent = benchmark.stats.stats.median
        one = next(
            (one["time_seconds"] for one in kept(results) if one.get("num_gpus") == 1), spent
        )
        found = ScalingResult(count, spent, one / spent, one / spent / count)
        figures = {name: getattr(found, name) for name in ScalingResult.__slots__}
        benchmark.extra_info.update(figures)
        keep(results, figures)

    def test_validate_scaling_ratios(self, results: Path) -> None:
        needs_gpus(2)
        bands = load_profile("phase6-scaling").scaling_bands
        found = {str(one["num_gpus"]): one["speedup"] for one in kept(results) if "num_gpus" in one}
        short = {
            count: found[count]
            for count, (least, _) in bands.items()
            if count in found and found[count] < least
        }
        assert not short, f"below their bands: {short}"

    def test_scaling_with_persistent_models(
        self, benchmark: Any, job: Callable[[str], Job], tmp_path: Path
    ) -> None:
        """The same shards by workers that keep their models, and by workers that load them anew halfway."""
        made = job(SCALE)
        bench = Bench(made.store.path, made.spec.models, Devices.parse(devices(1)))
        found = benchmark.pedantic(
            lambda: measure_overhead(tmp_path, bench, made.engine, switches=("models",), shards=4),
            rounds=1,
        )
        shares = [pair.overhead for pair in found.pairs if pair.overhead is not None]
        benchmark.extra_info["share_of_loading_anew"] = median(shares)
        assert (
            all(pair.with_tokens_per_s > pair.without_tokens_per_s for pair in found.pairs)
            or not GPUS
        )
