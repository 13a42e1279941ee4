"""Only a missed speed is tuned: no engine setting makes results more correct."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.report.small_reports import criterion, report
from virnuc.flows.tuning_rounds import tune_round
from virnuc_core.report.criteria import CHECKS, CORRECTNESS, CRITERIA, SAME_BYTES

ALL_SPECS = (*CRITERIA, *CHECKS, SAME_BYTES)


@pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.id)
def test_a_round_is_made_for_a_missed_speed_only(tmp_path: Path, spec: Any) -> None:
    missed = criterion(id=spec.id, perf_id=spec.perf_id, verdict="fail")
    settings: Any = SimpleNamespace(out=tmp_path, tune_rounds=3)
    tuning_round = tune_round(settings, report(missed, losses=()))
    assert (tuning_round is None) == (spec.perf_id == CORRECTNESS)
    assert (tmp_path / "tuning.json").exists() == (spec.perf_id != CORRECTNESS)
