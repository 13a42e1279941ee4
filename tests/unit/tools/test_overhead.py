"""Pairs of runs on tiny models: what costs is really switched, and rates can be computed again."""

from __future__ import annotations

from pathlib import Path

import pytest

from virnuc_core.config import SWITCHES, EngineSpec
from virnuc_core.report.raw_files import RawFolder
from virnuc_core.report.verification import Verification
from virnuc_core.report.verify_runs import verify_overhead
from virnuc_core.telemetry.log import open_frame
from virnuc_core.tools.bench import Bench
from virnuc_core.tools.overhead import measure_overhead
from virnuc_core.validation import OverheadFile


def count_starts(run: Path) -> int:
    """Return how often the workers of a run were started: each start has a telemetry file."""
    return len(list(run.glob("telemetry/*.h5")))


@pytest.mark.slow
def test_pairs_of_runs_are_measured_and_only_their_telemetry_stays(
    tmp_path: Path, bench: Bench, engine: EngineSpec
) -> None:
    shares_done: list[float] = []
    overhead = measure_overhead(
        tmp_path, bench, engine, switches=SWITCHES, pairs=1, shards=2, on_run=shares_done.append
    )
    assert [pair.switch for pair in overhead.pairs] == list(SWITCHES)
    assert overhead.shards == 2
    assert shares_done == [1.0]
    for pair in overhead.pairs:
        assert pair.with_tokens_per_s > 0
        assert pair.without_tokens_per_s > 0
    assert not list(tmp_path.rglob("shards"))
    check_switches(tmp_path / "overhead")
    check_record(tmp_path, bench, engine, overhead)


def check_switches(overhead: Path) -> None:
    """Check that workers were started anew, and that the sampler was off."""
    assert count_starts(overhead / "1-models-on") == 1
    assert count_starts(overhead / "1-models-off") == 2
    n_samples_without = len(open_frame(overhead / "1-sampler-off", "host"))
    n_samples_with = len(open_frame(overhead / "1-sampler-on", "host"))
    assert n_samples_without < n_samples_with


def check_record(out: Path, bench: Bench, engine: EngineSpec, measured: OverheadFile) -> None:
    """Check that the rates follow from the telemetry, and that a second call measures nothing."""
    verification = Verification()
    verify_overhead(verification, RawFolder(out))
    assert verification.ok, verification.differences
    record = out / "checkpoint_overhead.json"
    written_ns = record.stat().st_mtime_ns
    assert measure_overhead(out, bench, engine, pairs=1) == measured
    assert record.stat().st_mtime_ns == written_ns


@pytest.mark.slow
def test_measuring_one_feature_keeps_what_was_measured_of_others(
    tmp_path: Path, bench: Bench, engine: EngineSpec
) -> None:
    """A criterion stands on the cost of commits: measuring the models must not erase it."""
    commits = measure_overhead(tmp_path, bench, engine, switches=("commits",), pairs=1, shards=2)
    both = measure_overhead(tmp_path, bench, engine, switches=("models",), pairs=1, shards=2)
    assert [pair.switch for pair in both.pairs] == ["commits", "models"]
    assert both.pairs[0] == commits.pairs[0]
    again = measure_overhead(
        tmp_path, bench, engine, switches=("models",), pairs=1, shards=2, force=True
    )
    assert [pair.switch for pair in again.pairs] == ["commits", "models"]
    assert again.pairs[1] != both.pairs[1]
    other_shards = measure_overhead(
        tmp_path, bench, engine, switches=("models",), pairs=1, shards=1, force=True
    )
    assert [pair.switch for pair in other_shards.pairs] == ["models"]
