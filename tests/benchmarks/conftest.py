"""The benchmark suite of `make bench`: what it measures on, and how a stage's figures are kept.

It is collected only where pytest-benchmark is loaded, which `make test` never does. What needs a GPU skips itself where
there is none. On a GPU the weights are of the real sizes, on cores they are tiny; `VIRNUC_MODELS` names others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from virnuc_core.config import ClassifySpec, Devices, EngineSpec
from virnuc_core.encoders.checkpoint import shape_of
from virnuc_core.encoders.convert import init_random
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.engine.embedding import Job
from virnuc_core.pipeline import prepare
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.rundir import RunDir
from virnuc_core.telemetry.sampler import Sampler

from .pages import StageThroughputResult

SCALES = {
    "small": 100,
    "medium": 1_000,
    "large": 10_000,
}  # reads: overhead rules, typical, memory or time rules
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
KIND = "cuda" if GPUS else "cpu"
BUDGET = 16_384 if GPUS else 2_048
ROUNDS = 5 if GPUS else 3


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """As a worker on a core has it."""
    if not GPUS:
        torch.set_num_threads(1)


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return None if config.pluginmanager.hasplugin("benchmark") else True


def devices(count: int) -> str:
    """`--devices` for so many of this machine's devices; skips where it has fewer."""
    have = GPUS or len(os.sched_getaffinity(0))
    if count > have:
        pytest.skip(f"{count} devices are needed, this machine has {have} ({KIND})")
    return ",".join(f"cuda:{number}" for number in range(count)) if GPUS else f"cpu:{count}"


def needs_gpus(count: int = 1) -> None:
    """Skip where there are fewer GPUs."""
    if count > GPUS:
        pytest.skip(f"{count} GPUs are needed, this machine has {GPUS}")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if models_dir := os.environ.get("VIRNUC_MODELS"):
        return Path(models_dir)
    folder = tmp_path_factory.mktemp("models")
    init_random(
        folder,
        *(("t36_3B", "base") if GPUS else ("tiny", "tiny")),
        seed=0,
        dtype="fp16" if GPUS else "fp32",
    )
    return folder


@pytest.fixture(scope="session")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The reads of a scale, the same in every run."""
    folder = tmp_path_factory.mktemp("reads")

    def of(scale: str) -> Path:
        path = folder / f"{scale}.fastq"
        return (
            path
            if path.exists()
            else simulate(SimulateSpec(reads=SCALES[scale], seed=7), path).reads_file
        )

    return of


@pytest.fixture(scope="session")
def job(
    models: Path, reads: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Job]:
    """The reads of a scale staged, and a fresh run over them on one device."""
    folder = tmp_path_factory.mktemp("jobs")

    def of(scale: str, *, on: str | None = None, **settings: Any) -> Job:
        store = folder / f"{scale}.h5"
        stage(
            StageSpec(
                reads=(str(reads(scale)),), model_length=shape_of(models, HeadShape).model_length
            ),
            store,
        )
        engine = EngineSpec(
            token_budget=BUDGET, dna_token_budget=BUDGET, shard_tokens=16 * BUDGET, **settings
        )
        spec = ClassifySpec(
            models=models, devices=Devices.parse(on or devices(1)), engine=engine, force=True
        )
        return prepare(RunDir(folder / scale), store, spec)

    return of


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file by which one benchmark tells others: one JSON object a line."""
    return tmp_path_factory.mktemp("results") / "results.jsonl"


@pytest.fixture(scope="session")
def pages() -> Path:
    """The folder for pages and their JSON, which git ignores; `VIRNUC_BENCH_REPORTS` names another."""
    return Path(os.environ.get("VIRNUC_BENCH_REPORTS", "bench-out/reports"))


@pytest.fixture
def measured(benchmark: Any, results: Path) -> Callable[..., StageThroughputResult]:
    """Time `work` in rounds after one to warm up; its figures go to the table, to the JSON and to `results`."""

    def measure(
        name: str,
        scale: str,
        sequences: int,
        work: Callable[[], object],
        *,
        rounds: int = ROUNDS,
        setup: Any = None,
    ) -> StageThroughputResult:
        benchmark.group = f"{name} ({KIND})"
        used: list[float] = []
        if GPUS:
            torch.cuda.reset_peak_memory_stats()
        with _sampled(used):
            benchmark.pedantic(
                lambda: settled(work), setup=setup, rounds=rounds, warmup_rounds=1, iterations=1
            )
        stats = benchmark.stats.stats
        result = StageThroughputResult(
            stage=name,
            scale=scale,
            total_sequences=sequences,
            total_time_seconds=stats.median,
            mean_time_seconds=stats.mean,
            std_time_seconds=stats.stddev if rounds > 1 else 0.0,
            throughput_seq_per_sec=sequences / stats.median,
            avg_time_per_sequence_ms=1000 * stats.median / max(1, sequences),
            gpu_util_min=min(used, default=None),
            gpu_util_avg=sum(used) / len(used) if used else None,
            gpu_util_max=max(used, default=None),
            peak_memory_gb=torch.cuda.max_memory_allocated() / 1e9 if GPUS else None,
        )
        benchmark.extra_info.update(asdict(result))
        keep(results, asdict(result))
        return result

    return measure


def settled(work: Callable[[], object]) -> None:
    """Run `work` and wait until the GPU has done it."""
    work()
    if GPUS:
        torch.cuda.synchronize()


class _sampled:  # noqa: N801 - used as a function
    """Collects the utilisation of the first GPU meanwhile; of cores nothing."""

    def __init__(self, used: list[float]) -> None:
        ids = [f"GPU-{torch.cuda.get_device_properties(0).uuid}"] if GPUS else []
        self._used = used
        self._sampler = Sampler(ids, every_s=0.1, on_samples=self._note)

    def _note(self, *samples: Any) -> None:
        utilisations = (getattr(sample, "utilisation", None) for sample in samples)
        self._used += [percent for percent in utilisations if percent is not None]

    def __enter__(self) -> None:
        self._sampler.__enter__()

    def __exit__(self, *_: object) -> None:
        self._sampler.__exit__()


def keep(results: Path, found: dict[str, Any]) -> None:
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")


def kept(results: Path) -> Iterator[dict[str, Any]]:
    """What benchmarks before this one kept."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return map(json.loads, lines)


def virnuc(*words: object) -> float:
    """Seconds of a command as a user types it."""
    started_s = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "virnuc.flows.cli", *map(str, words)],
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - started_s
