"""The simulation of many GPUs: its clock agrees with a hand calculation, and its processes make a run."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.bench_scale_simulated import (
    FRAMES_PER_READ,
    REPOSITORY,
    RESIDUES,
    plan_of,
    run_clock,
)

TOKENS_PER_S = 50_000.0


def options(shard_tokens: int = 65_536) -> argparse.Namespace:
    return argparse.Namespace(shard_tokens=shard_tokens, tokens_per_s=TOKENS_PER_S)


def test_one_device_computes_all_tokens_without_a_gap(tmp_path: Path) -> None:
    run = run_clock(5_000, [1.0], 0, options(), tmp_path)
    n_frames = int(FRAMES_PER_READ * 5_000)
    n_tokens = n_frames * (np.mean(RESIDUES) + 2)  # and a token at each end of a protein
    assert run.device_s == pytest.approx(n_tokens / TOKENS_PER_S, rel=1e-3)
    assert run.makespan_s == pytest.approx(run.device_s)
    assert run.idle_share == pytest.approx(0.0, abs=1e-9)


def test_devices_take_shards_as_they_become_free(tmp_path: Path) -> None:
    """A device that is half as fast takes half as many, so that both end together."""
    run = run_clock(20_000, [1.0, 2.0], 1, options(32_768), tmp_path)
    plan, tokens = plan_of(20_000, 32_768)
    fast_s = tokens[-1] / TOKENS_PER_S
    assert run.shards == len(plan)
    # Work is shared 2 : 1 by speed, so that the run takes 2/3 of the fast device's time.
    assert run.makespan_s == pytest.approx(fast_s * 2 / 3, rel=0.1)
    assert 0 <= run.idle_share < 0.05


def test_more_devices_than_shards_have_no_work(tmp_path: Path) -> None:
    plan, _ = plan_of(1_000, 65_536)
    assert len(plan) < 8
    run = run_clock(1_000, [1.0] * 8, 2, options(), tmp_path)
    assert run.idle_share > 1 - len(plan) / 8


@pytest.mark.slow
def test_sleeping_processes_make_whole_runs(tmp_path: Path) -> None:
    record = tmp_path / "scale.json"
    words = ["--parts", "processes", "--reads", "600", "--devices", "1", "3"]
    words += ["--shard-tokens", "4096", "--shards-per-s", "100", "--full-commits", "0"]
    words += ["--json", str(record), "--scratch", str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.bench_scale_simulated", *words],
        check=True,
        capture_output=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    rows = json.loads(record.read_text())["processes"]
    assert [row["devices"] for row in rows] == [1, 3]
    assert rows[0]["shards"] == rows[1]["shards"] > 3
    for row in rows:
        assert row["commit_median_ms"] > 0
        shares = [row[f"idle_{part}_share"] for part in ("start", "between", "end")]
        assert 0 <= sum(shares) < 1
