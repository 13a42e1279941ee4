"""Sequences a second of each stage alone, at three scales, and which of them the 30 % rule points at."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from virnuc_core.encoders.checkpoint import load_encoder, open_part
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.engine.embedding import Job
from virnuc_core.engine.shards import ShardResult, commit
from virnuc_core.profiles import load_profile
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.results import write_results
from virnuc_core.rundir import RunDir

from .bench_engine import KINDS, batches_of
from .conftest import GPUS, SCALES, kept
from .pages import StageThroughputResult, judge_stages, stage_data, stage_page, write_page

Measured = Callable[..., StageThroughputResult]
STAGES = ("translation", "dnabert_s", "esm2", "merge", "prediction")
LEAST_UTILISATION = load_profile("phase6-stages").targets["gpu_utilisation"].value  # percent
DEVICE = torch.device("cuda:0" if GPUS else "cpu")


@pytest.mark.parametrize("scale", SCALES)
class TestStageThroughput:
    def test_translation_throughput(
        self, measured: Measured, reads: Callable[[str], Path], scale: str, tmp_path: Path
    ) -> None:
        spec = StageSpec(reads=(str(reads(scale)),), model_length=500)
        measured(
            "translation",
            scale,
            SCALES[scale],
            lambda: stage(spec, tmp_path / "orfs.h5", rebuild=True),
        )

    def test_dnabert_throughput(
        self, measured: Measured, job: Callable[[str], Job], scale: str
    ) -> None:
        self.embed(measured, job(scale), "dnabert_s", scale)

    def test_esm2_throughput(
        self, measured: Measured, job: Callable[[str], Job], scale: str
    ) -> None:
        self.embed(measured, job(scale), "esm2", scale)

    def embed(self, measured: Measured, job: Job, name: str, scale: str) -> None:
        encoder = load_encoder(
            KINDS[name], job.spec.models, DEVICE, job.engine.precision, job.engine.attention
        )
        batches = batches_of(job, name, DEVICE)
        rows = sum(batch.rows for batch in batches)
        result = measured(name, scale, rows, lambda: [encoder.embed(batch) for batch in batches])
        if GPUS and scale != "small":
            assert (result.gpu_util_avg or 0.0) >= LEAST_UTILISATION

    def test_merge_throughput(
        self, measured: Measured, job: Callable[[str], Job], scale: str
    ) -> None:
        """The embeddings of both encoders joined and committed, shard by shard."""
        staged_job, dice = job(scale), np.random.default_rng(0)
        parts = [np.zeros((staged_job.store.n_uniques, width), np.float32) for width in (768, 2560)]
        scores = dice.random((staged_job.store.n_uniques, 2), dtype=np.float32)

        def merge() -> None:
            for shard in range(len(staged_job.plan)):
                rows = slice(*staged_job.plan.range(shard))
                merged = np.concatenate([part[rows] for part in parts], axis=1)
                commit(staged_job.run, staged_job.plan, shard, ShardResult(merged, scores[rows]))

        staged_job.run.shards.mkdir(parents=True, exist_ok=True)
        measured("merge", scale, staged_job.store.n_rows, merge, rounds=3)
        shutil.rmtree(staged_job.run.shards)

    def test_prediction_throughput(
        self, measured: Measured, job: Callable[[str], Job], scale: str, tmp_path: Path
    ) -> None:
        """Scores of the head, and the result files."""
        staged_job = job(scale)
        head, uniques = (
            Head(*open_part(staged_job.spec.models, HeadShape), DEVICE),
            staged_job.store.n_uniques,
        )
        rows = torch.zeros(uniques, head.shape.width, device=DEVICE)

        def predict() -> None:
            with torch.inference_mode():
                scores = head.scores(rows).float().cpu().numpy()
            write_results(RunDir(tmp_path), staged_job.store, scores, np.zeros(uniques, bool))

        measured("prediction", scale, staged_job.store.n_rows, predict)


def test_identify_bottlenecks(results: Path, pages: Path) -> None:
    """Say of the largest scale that was measured which stages are bottlenecks, and what helps.

    Writes `stages_<time>.md` and `.json`.
    """
    measured = [StageThroughputResult(**row) for row in kept(results) if row.get("stage") in STAGES]
    scales = [scale for scale in SCALES if scale in {result.scale for result in measured}]
    if not scales:
        pytest.skip("no stage was measured in this session")
    stages = [result for result in measured if result.scale == scales[-1]]
    page = write_page(
        pages, "stages", "Stage Throughput Report", stage_page(stages), stage_data(stages)
    )
    print(page.read_text(encoding="utf-8"))
    verdicts = judge_stages(stages)
    # With three stages or fewer, one takes over 30 %, so that the rule must have named it.
    assert any(verdict.is_bottleneck for verdict in verdicts.values()) or len(verdicts) > 3
