"""Commits really switched on and off, on tiny models: pairs whose rates can be computed again."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from virnuc_core.config import SWITCHES, ClassifySpec, EngineSpec
from virnuc_core.pipeline import classify
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.report.compare import compare_runs
from virnuc_core.report.raw_files import RawFolder
from virnuc_core.report.verification import Verification
from virnuc_core.report.verify_runs import verify_overhead
from virnuc_core.rundir import RunDir
from virnuc_core.telemetry.log import open_frame
from virnuc_core.tools.bench import Bench, embed_sample, measure_overhead, measure_precision


@pytest.mark.slow
def test_a_pair_leaves_its_telemetry_and_no_shards(
    tmp_path: Path, bench: Bench, engine: EngineSpec
) -> None:
    shares: list[float] = []
    found = measure_overhead(
        tmp_path, bench, engine, switches=SWITCHES, pairs=1, shards=2, on_run=shares.append
    )
    assert [pair.of for pair in found.pairs] == list(SWITCHES)
    assert found.shards == 2
    assert shares == [1.0]
    assert all(pair.with_tokens_per_s > 0 and pair.without_tokens_per_s > 0 for pair in found.pairs)
    kept, anew = (
        len(list(tmp_path.glob(f"overhead/1-models-{way}/telemetry/*.h5"))) for way in ("on", "off")
    )
    assert (kept, anew) == (1, 2), "one start of the workers, and two"
    unsampled = open_frame(tmp_path / "overhead/1-sampler-off", "host")
    assert len(unsampled) < len(open_frame(tmp_path / "overhead/1-sampler-on", "host"))
    verify_overhead(again := Verification(), RawFolder(tmp_path))
    assert again.ok, again.differences
    assert not list(tmp_path.rglob("shards"))
    written = (tmp_path / "checkpoint_overhead.json").stat().st_mtime_ns
    assert measure_overhead(tmp_path, bench, engine, pairs=1) == found
    assert (tmp_path / "checkpoint_overhead.json").stat().st_mtime_ns == written, (
        "nothing was measured again"
    )


@pytest.mark.slow
def test_a_part_in_fp32_is_what_a_run_is_held_against(
    tmp_path: Path, bench: Bench, engine: EngineSpec
) -> None:
    reads = StageSpec(reads=(str(bench.store.with_name("reads.fasta")),), model_length=300)
    spec = ClassifySpec(models=bench.models, devices=bench.devices, engine=engine)
    classify(RunDir(tmp_path / "devices-1"), stage(reads, bench.store), spec)
    part = RunDir(tmp_path / "fp32")
    large = engine.model_copy(
        update={"attention": "reference", "shard_tokens": 1 << 20}
    )  # as of very many reads
    embed_sample(part, bench.job(part, large), 150, "of this test")
    assert not list(part.shards.glob("*.h5"))
    (found,) = compare_runs(tmp_path, ("devices-1",), tolerance=0.01, subset=False)
    assert (found.a, found.b, found.bitwise) == ("fp32", "devices-1", None)
    joined = found.cosines[0]
    assert 150 <= joined.n < OrfStore.open(bench.store).n_uniques
    with h5py.File(part.embeddings) as file:
        ends = np.flatnonzero(np.diff(file["uniques"][:]) > 1)
    assert len(ends), "from one place only"
    assert joined.minimum > 0.9999
    for compared in (found.frames, found.consensus):
        assert compared is not None
        assert (compared.agreement, compared.only_in_a, compared.only_in_b) == (1.0, 0, 0)
        assert compared.in_both > 20
    assert not measure_precision(tmp_path, bench, engine, 150), "cores compute in fp32"
    assert compare_runs(tmp_path, ("devices-1",), tolerance=0.01, subset=False) == ()
