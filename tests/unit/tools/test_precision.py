"""A sample of the sequences in fp32 is what the runs are compared with."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from virnuc_core.config import ClassifySpec, Devices, EngineSpec
from virnuc_core.pipeline import classify
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.report.compare import compare_runs
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import Device
from virnuc_core.tools import bench as bench_module
from virnuc_core.tools import precision
from virnuc_core.tools.bench import Bench
from virnuc_core.tools.precision import embed_sample, measure_precision

pytestmark = pytest.mark.usefixtures("forked_workers")

N_SEQUENCES = 150
H200 = Device(id="GPU-1", kind="cuda", name="NVIDIA H200", capability=(9, 0))
OTHER_H200 = H200.model_copy(update={"id": "GPU-2"})
A100 = Device(id="GPU-3", kind="cuda", name="NVIDIA A100", capability=(8, 0))


@pytest.mark.slow
def test_a_sample_in_fp32_is_compared_with_a_run(
    tmp_path: Path, bench: Bench, engine: EngineSpec
) -> None:
    reads = StageSpec(reads=(str(bench.store.with_name("reads.fasta")),), model_length=300)
    spec = ClassifySpec(models=bench.models, devices=bench.devices, engine=engine)
    classify(RunDir(tmp_path / "devices-1"), stage(reads, bench.store), spec)
    sample = RunDir(tmp_path / "fp32")
    # As for very many reads, one shard of the run could hold all sequences.
    large_shards = engine.model_copy(update={"attention": "reference", "shard_tokens": 1 << 20})
    embed_sample(sample, bench.job(sample, large_shards), N_SEQUENCES, "of this test")
    assert not list(sample.shards.glob("*.h5"))
    with h5py.File(sample.embeddings) as file:
        gaps = np.flatnonzero(np.diff(file["uniques"][:]) > 1)
    assert len(gaps), "the sample is from several places"

    [comparison] = compare_runs(tmp_path, ("devices-1",), tolerance=0.01, subset=False)
    assert (comparison.a, comparison.b, comparison.bitwise) == ("fp32", "devices-1", None)
    cosine = comparison.cosines[0]
    assert N_SEQUENCES <= cosine.n < OrfStore.open(bench.store).n_uniques
    assert cosine.minimum > 0.9999
    for agreement in (comparison.frames, comparison.consensus):
        assert agreement is not None
        assert agreement.agreement == 1.0
        assert (agreement.only_in_a, agreement.only_in_b) == (0, 0)
        assert agreement.in_both > 20

    # CPU cores compute in fp32 anyway. The sample, made for runs in another precision, is removed.
    assert not measure_precision(tmp_path, bench, engine, N_SEQUENCES)
    assert compare_runs(tmp_path, ("devices-1",), tolerance=0.01, subset=False) == ()


def test_a_sample_is_embedded_again_on_another_gpu_model_only(
    tmp_path: Path, bench: Bench, engine: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs of one model give the same numbers, so that a validation may go on with either."""
    samples: list[str] = []

    def pretend_to_embed(run: RunDir, job: object, sequences: int, identity: str) -> None:
        samples.append(identity)
        with h5py.File(run.embeddings, "w") as file:
            file.attrs["fingerprint"] = identity

    monkeypatch.setattr(precision, "embed_sample", pretend_to_embed)
    monkeypatch.setattr(Bench, "job", lambda *_: None)

    def n_samples_after(device: Device, sequences: int = N_SEQUENCES) -> int:
        """Let the validation go on with a device, and return how often a sample was embedded."""
        for module in (precision, bench_module):
            monkeypatch.setattr(module, "resolve", lambda _: (device,))
        on_gpu = Bench(bench.store, bench.models, Devices.parse("cuda:0"))
        assert measure_precision(tmp_path, on_gpu, engine, sequences)
        return len(samples)

    assert n_samples_after(H200) == 1
    assert n_samples_after(H200) == 1
    assert n_samples_after(OTHER_H200) == 1
    assert n_samples_after(A100) == 2
    assert n_samples_after(A100, sequences=N_SEQUENCES + 1) == 3
