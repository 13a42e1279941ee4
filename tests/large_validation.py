"""Make a finished validation of many reads within a minute, without embedding them all.

Reads, store, result files, summaries, comparison and report are made by the product's own steps. Only
the shards are short cuts: each run finds all of them but the last committed, with random embeddings and
scores, as if an earlier start had computed them. The run embeds the last shard itself and ends as every
resumed run does. So `verify` has all the work of a real validation of that many reads, with encoders
whose embeddings are narrow.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tests.bare import PROFILE
from virnuc_core.baseline.run import run_baseline
from virnuc_core.config import ClassifySpec, Devices
from virnuc_core.encoders.checkpoint import shape_of
from virnuc_core.encoders.convert import init_random
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.engine.devices import resolve
from virnuc_core.engine.shards import ShardResult, commit
from virnuc_core.pipeline import classify, prepare, stage_reads
from virnuc_core.profiles import load_profile
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec
from virnuc_core.report.build import write_report
from virnuc_core.report.compare import compare_runs
from virnuc_core.report.regression import HISTORY
from virnuc_core.rundir import RunDir
from virnuc_core.validation import record_validation

RUNS = {"devices-1": "cpu:1", "devices-2": "cpu:2"}


def make_large_validation(folder: Path, n_reads: int) -> Path:
    """Make a validation of simulated reads in `folder`, and return its directory."""
    reads = simulate(SimulateSpec(reads=n_reads, seed=11), folder / "reads.fastq.gz").reads_file
    models = folder / "models"
    init_random(models, seed=1)
    profile = load_profile(PROFILE)
    devices = Devices.parse("cpu:2")
    spec = ClassifySpec(models=models, devices=devices, engine=profile.engine)
    out = folder / "out"
    model_length = shape_of(models, HeadShape).model_length
    staging = stage_reads(
        StageSpec(reads=(str(reads),), model_length=model_length), RunDir(out).store
    )
    expected_files = [f"{name}/summary.json" for name in ("baseline", *RUNS)]
    record_validation(out, spec, profile, staging, resolve(devices), expected_files=expected_files)
    run_baseline(RunDir(out / "baseline"), RunDir(out).store, models, devices, profile.baseline)
    for name, devices_text in RUNS.items():
        run_spec = spec.model_copy(update={"devices": Devices.parse(devices_text)})
        job = prepare(RunDir(out / name), RunDir(out).store, run_spec, staging=staging)
        for shard in job.todo[:-1]:
            commit(job.run, job.plan, shard, _random_result(job.plan.range(shard), models))
        classify(RunDir(out / name), staging, run_spec)
    compare_runs(out, tuple(RUNS), tolerance=profile.score_tolerance, subset=True)
    write_report(out, profile, folder / HISTORY)
    return out


def _random_result(sequences: tuple[int, int], models: Path) -> ShardResult:
    """Return random embeddings and scores of a range of sequences, the same for each run."""
    first, end = sequences
    dice = np.random.default_rng(first)
    shape = shape_of(models, HeadShape)
    width = shape.dna_width + shape.protein_width
    virus_scores = dice.random(end - first, dtype=np.float32)
    scores = np.stack([np.float32(1) - virus_scores, virus_scores], axis=1)
    return ShardResult(dice.random((end - first, width), dtype=np.float32), scores)


if __name__ == "__main__":
    print(make_large_validation(Path(sys.argv[1]), int(sys.argv[2])))
