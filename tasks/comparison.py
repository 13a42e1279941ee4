"""Compare."""

from pathlib import Path

from prefect.client.schemas.objects import State

from virnuc.tasks.artifacts import publish_table
from virnuc.tasks.task import completed, retrying_task
from virnuc_core.report import messages
from virnuc_core.report.compare import compare_runs
from virnuc_core.report.views.correctness import agreement_rows
from virnuc_core.validation import Comparison


@retrying_task("compare", "compare {label}")
def compare_results(
    out: Path, names: tuple[str, ...], *, tolerance: float, subset: bool, label: str
) -> State[tuple[Comparison, ...]]:
    """`comparison.json` of a validate directory. `subset`: the baseline covers a part of the reads only."""
    found = compare_runs(out, names, tolerance=tolerance, subset=subset)
    rows = agreement_rows(found)
    publish_table(f"comparison-{label}", rows, f"Agreement of the runs of {label}")
    return completed(found, messages.compared(found))
