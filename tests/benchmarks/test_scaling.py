"""Time against the number of devices, by the command that users type, and what persistent models save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from virnuc_core.config import Devices
from virnuc_core.engine.embedding import Job
from virnuc_core.profiles import load_profile
from virnuc_core.report.metrics import metrics_of_run
from virnuc_core.rundir import RunDir
from virnuc_core.tools.bench import Bench
from virnuc_core.tools.overhead import measure_overhead

from .conftest import BUDGET, GPUS, KIND, SCALES, devices, keep, kept, virnuc
from .pages import ScalingResult, judge_scaling, scaling_data, scaling_page, write_page

SCALE = "medium"
ROUNDS = 3


def gpu_use(out: Path) -> tuple[float | None, float | None]:
    """Return the utilisation of the least used GPU of a run in percent, and the highest peak memory
    in bytes. Both are None on cores.
    """
    metrics = metrics_of_run(RunDir(out))
    assert metrics is not None
    assert metrics.telemetry is not None
    uses = [device.gpu_util_avg for device in metrics.telemetry.devices]
    peaks = [device.mem_used_peak for device in metrics.telemetry.devices]
    lowest = min((use for use in uses if use is not None), default=None)
    return lowest, max((peak for peak in peaks if peak is not None), default=None)


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
        speedup = one_device_s / median_s
        lowest_use, peak_bytes = gpu_use(tmp_path / "out")
        result = ScalingResult(
            count,
            median_s,
            speedup,
            speedup / count,
            gpu_util_avg=lowest_use,
            mem_used_peak=peak_bytes,
        )
        figures = asdict(result)
        benchmark.extra_info.update(figures)
        keep(results, figures)

    def test_validate_scaling_ratios(self, results: Path, pages: Path) -> None:
        """Judge the speed-ups measured above by their bands. Writes `scaling_<time>.md` and `.json`.

        On cores the page is written, but nothing is judged.
        """
        names = {field.name for field in fields(ScalingResult)}
        measured = [ScalingResult(**row) for row in kept(results) if names == set(row)]
        if not measured:
            pytest.skip("no number of devices was measured in this session")
        bands = load_profile("phase6-scaling").scaling_bands
        body = scaling_page(measured, bands, kind=KIND, sequences=SCALES[SCALE])
        page = write_page(pages, "scaling", "Scaling Report", body, scaling_data(measured))
        print(page.read_text(encoding="utf-8"))
        why_not = "" if GPUS else "cores"
        failed = []
        for result in measured:
            verdict = judge_scaling(result.num_gpus, result.speedup, bands, why_not=why_not)
            if verdict.status == "FAIL":
                failed.append(f"{result.num_gpus} GPUs: {result.speedup:.2f}x, {verdict.reason}")
        assert not failed, failed

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
