"""A staged store and tiny models to measure on."""

from __future__ import annotations

import pytest

from virnuc_core.config import Devices, EngineSpec
from virnuc_core.encoders.convert import init_random
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.tools.bench import Bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """300 simulated reads staged, on one core."""
    folder = tmp_path_factory.mktemp("bench")
    init_random(folder / "models", "tiny", "tiny", model_length=300, seed=3)
    simulate(SimulateSpec(reads=300, read_length=300, duplicate_share=0.0), folder / "reads.fasta")
    stage(StageSpec(reads=(str(folder / "reads.fasta"),), model_length=300), folder / "orfs.h5")
    return Bench(folder / "orfs.h5", folder / "models", Devices.parse("cpu:1"))


@pytest.fixture(scope="session")
def engine() -> EngineSpec:
    """Small batches and shards."""
    return EngineSpec(token_budget=1024, dna_token_budget=1024, shard_tokens=4096, heartbeat_s=0.2)
