"""What the baseline's task does beside the baseline: starting over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.validate import start_over
from virnuc_core.rundir import RunDir


def test_starting_over_removes_everything_or_says_why_not(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "baseline")
    start_over(run)  # nothing there: nothing to do
    run.root.mkdir()
    (run.root / "prediction_results.txt").write_text("old")
    start_over(run)
    assert not run.root.exists()
    run.root.write_text("a file")
    with pytest.raises(NotADirectoryError):
        start_over(run)
