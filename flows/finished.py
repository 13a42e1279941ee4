"""Whether a flow over several runs had anything to compute: said in its state, so that nobody takes old for new."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from virnuc_core.report.build import RUN_PREFIX
from virnuc_core.rundir import RunDir

NOTHING: Final = "; nothing had to be computed"


def finished_runs(out: Path) -> dict[str, int]:
    """When each complete run in `out` ended; a run that is used as it is keeps its time."""
    found = {folder.name: RunDir(folder).summary for folder in sorted(out.glob(f"{RUN_PREFIX}*"))}
    return {name: summary.stat().st_mtime_ns for name, summary in found.items() if summary.is_file()}


def unless_computed(out: Path, before: dict[str, int]) -> str:
    """`; nothing had to be computed`, or nothing, given what `finished_runs` said at the start."""
    return NOTHING if before and finished_runs(out) == before else ""
