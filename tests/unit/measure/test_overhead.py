"""Commits really switched on and off, on tiny models: pairs whose rates can be computed again."""

from __future__ import annotations

from pathlib import Path

import pytest

from virnuc_core.config import Devices, EngineSpec
from virnuc_core.encoders.checkpoint import init_random
from virnuc_core.errors import ConfigError
from virnuc_core.measure.bench import Bench
from virnuc_core.measure.overhead import measure_again, measure_overhead
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.report.overhead import contradictions

ENGINE = EngineSpec(token_budget=1024, dna_token_budget=1024, shard_tokens=4096, heartbeat_s=0.2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A store and models."""
    folder = tmp_path_factory.mktemp("overhead")
    init_random(folder / "models", "tiny", "tiny", model_length=300, seed=3)
    simulate(SimulateSpec(reads=300, read_length=300, duplicate_share=0.0), folder / "reads.fasta")
    stage(StageSpec(reads=(str(folder / "reads.fasta"),), model_length=300), folder / "orfs.h5")
    return folder / "orfs.h5", folder / "models"


def test_a_pair_leaves_its_telemetry_and_no_shards(tmp_path: Path, made: tuple[Path, Path]) -> None:
    store, models = made
    shares: list[float] = []
    bench = Bench(store, models, Devices.parse("cpu:1"))
    found = measure_overhead(tmp_path, bench, ENGINE, pairs=1, shards_a_device=2, on_run=shares.append)
    (pair,) = found.pairs
    assert found.shards == 2
    assert shares == [1.0]
    assert pair.with_tokens_per_s > 0
    assert pair.without_tokens_per_s > 0
    assert contradictions(tmp_path) == []
    assert not list(tmp_path.rglob("shards"))
    written = (tmp_path / "checkpoint_overhead.json").stat().st_mtime_ns
    assert measure_overhead(tmp_path, bench, ENGINE, pairs=1) == found
    assert (tmp_path / "checkpoint_overhead.json").stat().st_mtime_ns == written, "nothing was measured again"


def test_a_folder_that_is_no_validation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run virnuc validate first"):
        measure_again(tmp_path, models=None, devices=None, pairs=1, shards_a_device=2)
