"""Tokens a second of the encoders and of the loader that feeds them, by torch's timer and in rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.benchmark import Timer

from virnuc_core.encoders.model_config import DNABERT_SIZES, ESM2_SIZES
from virnuc_core.engine.embedding import Job
from virnuc_core.engine.loader import Batch, Loader

from .bench_encoders import batch_of, build
from .conftest import BUDGET, GPUS, KIND, SCALES

DEVICE = torch.device("cuda:0" if GPUS else "cpu")
LENGTHS = {"esm2": 52, "dnabert_s": 35}  # tokens of a row of 150 bases


@pytest.mark.parametrize("slots", [BUDGET // 4, BUDGET, 2 * BUDGET])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"] if GPUS else ["fp32"])
@pytest.mark.parametrize("name", ["dnabert_s", "esm2"])
def test_encoder_throughput(benchmark: Any, name: Any, precision: Any, slots: int) -> None:
    sizes: Any = (
        ESM2_SIZES["t36_3B" if GPUS else "tiny"]
        if name == "esm2"
        else DNABERT_SIZES["base" if GPUS else "tiny"]
    )
    encoder = build(
        sizes, precision, "fused" if GPUS and precision != "fp32" else "reference", DEVICE
    )
    batch = batch_of(name, sizes.vocab, LENGTHS[name], slots, max(1, slots // 8), DEVICE)
    result = Timer(
        "embed(batch)", globals={"embed": encoder.embed, "batch": batch}
    ).blocked_autorange(min_run_time=0.5)
    benchmark.group = f"tokens/s of {name} ({KIND})"
    tokens = {"tokens": batch.real_tokens, "tokens_per_s": batch.real_tokens / result.median}
    benchmark.extra_info.update(
        tokens, timer_median_s=result.median, timer_mean_s=result.mean, timer_iqr_s=result.iqr
    )

    def once() -> None:
        encoder.embed(batch)
        if GPUS:
            torch.cuda.synchronize()

    benchmark.pedantic(once, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("scale", SCALES)
def test_loader_throughput(benchmark: Any, job: Callable[[str], Job], scale: str) -> None:
    staged_job = job(scale)
    loader = Loader(staged_job.spec.models, staged_job.engine, pin=False)

    def load() -> int:
        tasks = staged_job.tasks(range(len(staged_job.plan)))
        return sum(
            item.packed.real_tokens
            for task in tasks
            for item in loader.load(task)
            if isinstance(item, Batch)
        )

    benchmark.group = "tokens/s of the loader"
    benchmark.extra_info["tokens"] = benchmark.pedantic(load, rounds=5, warmup_rounds=1)
