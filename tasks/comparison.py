"""The step that compares the runs of a validation with each other and with the baseline."""

from pathlib import Path

from virnuc.tasks.artifacts import publish_table
from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.task import retrying_task
from virnuc_core.report import messages
from virnuc_core.report.compare import compare_runs
from virnuc_core.report.views.correctness import agreement_rows
from virnuc_core.validation import Comparison


@retrying_task("compare", "compare {label}")
def compare_results(
    out: Path, names: tuple[str, ...], *, tolerance: float, subset: bool, label: str
) -> Outcome[tuple[Comparison, ...]]:
    """Compare the runs of a validation, and write `comparison.json`.

    Args:
        out: The directory of the validation.
        names: Names of the runs.
        tolerance: The difference of scores that counts as equal.
        subset: Whether the baseline covers only a part of the reads.
        label: The name of the sample, for names in the UI.
    """
    comparisons = compare_runs(out, names, tolerance=tolerance, subset=subset)
    rows = agreement_rows(comparisons)
    publish_table(f"comparison-{label}", rows, f"Agreement of the runs of {label}")
    return completed(comparisons, messages.comparison_message(comparisons))
