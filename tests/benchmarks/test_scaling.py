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
        requested_devices, source = devices(count), reads(SCALE)
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
                requested_devices,
                *budgets,
            )
            virnuc(*words, "--force", "--no-prefect")

        benchmark.group = f"scaling over devices ({KIND}), {SCALES[SCALE]} reads"
        benchmark.pedantic(predict, rounds=ROUNDS, warmup_rounds=1)
        median_s = benchmark.stats.stats.median
        one_device_s = next(
            (
                one_device_s["time_seconds"]
                for one_device_s in kept(results)
                if one_device_s.get("num_gpus") == 1
            ),
            median_s,
        )
        result = ScalingResult(
            count, median_s, one_device_s / median_s, one_device_s / median_s / count
        )
        figures = {name: getattr(result, name) for name in ScalingResult.__slots__}
        benchmark.extra_info.update(figures)
        keep(results, figures)

    def test_validate_scaling_ratios(self, results: Path) -> None:
        needs_gpus(2)
        bands = load_profile("phase6-scaling").scaling_bands
        speedups = {
            str(row["num_gpus"]): row["speedup"] for row in kept(results) if "num_gpus" in row
        }
        short = {
            count: speedups[count]
            for count, (lowest, _) in bands.items()
            if count in speedups and speedups[count] < lowest
        }
        assert not short, f"below their bands: {short}"

    def test_scaling_with_persistent_models(
        self, benchmark: Any, job: Callable[[str], Job], tmp_path: Path
    ) -> None:
        """The same shards by workers that keep their models, and by workers that load them anew halfway."""
        staged_job = job(SCALE)
        bench = Bench(staged_job.store.path, staged_job.spec.models, Devices.parse(devices(1)))
        result = benchmark.pedantic(
            lambda: measure_overhead(
                tmp_path, bench, staged_job.engine, switches=("models",), shards=4
            ),
            rounds=1,
        )
        shares = [pair.overhead for pair in result.pairs if pair.overhead is not None]
        benchmark.extra_info["share_of_loading_anew"] = median(shares)
        assert (
            all(pair.with_tokens_per_s > pair.without_tokens_per_s for pair in result.pairs)
            or not GPUS
        )
