"""Commits really switched on and off, on tiny models: pairs whose rates can be computed again."""

from __future__ import annotations

from pathlib import Path

import pytest

from virnuc_core.config import EngineSpec
from virnuc_core.errors import ConfigError
from virnuc_core.measure.bench import Bench, measure_again, measure_overhead
from virnuc_core.report.files import RawFolder
from virnuc_core.report.verify import Verification, verify_overhead


@pytest.mark.slow
def test_a_pair_leaves_its_telemetry_and_no_shards(tmp_path: Path, bench: Bench, engine: EngineSpec) -> None:
    shares: list[float] = []
    found = measure_overhead(tmp_path, bench, engine, pairs=1, shards_a_device=2, on_run=shares.append)
    (pair,) = found.pairs
    assert found.shards == 2
    assert shares == [1.0]
    assert pair.with_tokens_per_s > 0
    assert pair.without_tokens_per_s > 0
    verify_overhead(again := Verification(), RawFolder(tmp_path))
    assert again.ok, again.differences
    assert not list(tmp_path.rglob("shards"))
    written = (tmp_path / "checkpoint_overhead.json").stat().st_mtime_ns
    assert measure_overhead(tmp_path, bench, engine, pairs=1) == found
    assert (tmp_path / "checkpoint_overhead.json").stat().st_mtime_ns == written, "nothing was measured again"


def test_a_folder_that_is_no_validation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run virnuc validate first"):
        measure_again(tmp_path, models=None, devices=None, pairs=1, shards_a_device=2)
