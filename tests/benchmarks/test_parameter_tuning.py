"""The sweep of settings: every candidate measured, and results that do not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from virnuc_core.config import Devices
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.engine.embedding import Job
from virnuc_core.profiles import load_profile
from virnuc_core.tools.bench import Bench
from virnuc_core.tools.tune import Sweep, make_candidates, recommend, schedule_trials

from .conftest import BUDGET, KIND, devices

SWEPT = {"token_budget": (BUDGET // 2, BUDGET), "prefetch_factor": (2, 4)}


def test_sweep(benchmark: Any, job: Callable[[str], Job], tmp_path: Path) -> None:
    staged_job, requested_devices = job("medium"), Devices.parse(devices(1))
    base = resolve_engine(staged_job.engine, resolve(requested_devices))
    bench = Bench(staged_job.store.path, staged_job.spec.models, requested_devices)
    candidates = make_candidates(base, SWEPT)
    sweep = Sweep(tmp_path, bench, base, load_profile("ci-smoke"), 1, "grid")

    def run() -> None:
        for candidate, repeat, _ in schedule_trials(candidates, 1, halving=False):
            candidate.add(sweep.trial(candidate, repeat))

    benchmark.group = f"sweep of settings ({KIND})"
    benchmark.pedantic(run, rounds=1)
    recommended = recommend(candidates, tolerance=0.01)
    benchmark.extra_info.update(
        {one.label: one.rate for one in candidates}, chosen=recommended.reason
    )
    assert all(one.rates for one in candidates)
