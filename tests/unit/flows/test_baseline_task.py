"""What the baseline's task does beside the baseline: starting over."""

from __future__ import annotations

from pathlib import Path

from virnuc.tasks.baseline import measure_baseline
from virnuc_core.config import Devices
from virnuc_core.errors import VirnucError
from virnuc_core.profiles import BaselineSpec
from virnuc_core.rundir import RunDir
from virnuc_core.tools.bench import Bench


def test_an_old_baseline_that_cannot_be_removed_is_not_taken_for_the_new_one(
    tmp_path: Path,
) -> None:
    run = RunDir(tmp_path / "baseline")
    run.root.write_text("a file")
    bench = Bench(tmp_path, tmp_path, Devices.parse("cpu:1"))
    outcome = measure_baseline.fn(run, bench, BaselineSpec(), label="x", force=True)
    assert isinstance(outcome.error, VirnucError)
    assert "cannot be written" in outcome.message
    assert run.root.read_text() == "a file"
