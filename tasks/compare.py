"""Compare: every run against the baseline, and the run on many devices against the run on one, bit for bit."""

from __future__ import annotations

from pathlib import Path

from prefect.client.schemas.objects import State

from tasks.artifacts import publish_table
from tasks.step import done, step
from tasks.tables import percent, rows_of
from virnuc_core.report.build import write_comparisons
from virnuc_core.report.compare import bitwise, cosines
from virnuc_core.report.compare import compare as hold
from virnuc_core.report.model import Comparison
from virnuc_core.report.verify import dna_width
from virnuc_core.report.views import agreements
from virnuc_core.rundir import RunDir

BASELINE = "baseline"


@step("compare", "compare {label}")
def compare(
    out: Path, names: tuple[str, ...], *, tolerance: float, subset: bool, label: str
) -> State[tuple[Comparison, ...]]:
    """`comparison.json` of a validate directory. `subset`: the baseline covers a part of the reads only."""
    found = comparisons(out, names, tolerance=tolerance, subset=subset)
    write_comparisons(out, found)
    publish_table(f"comparison-{label}", rows_of(agreements(found)), f"Agreement of the runs of {label}")
    return done(found, describe(found))


def comparisons(out: Path, names: tuple[str, ...], *, tolerance: float, subset: bool) -> tuple[Comparison, ...]:
    """The runs `names` against the baseline, where that left results, and against the first of them."""
    found = []
    if RunDir(out / BASELINE).predictions.is_file():
        found += [
            hold(out / BASELINE, out / name, tolerance=tolerance, subset_of_a=subset, names=(BASELINE, name))
            for name in names
        ]
    for name in names[1:]:
        first = names[0]
        a, b = out / first, out / name
        exact = {"cosines": cosines(a, b, dna_width(a)), "bitwise": bitwise(a, b)}
        found.append(hold(a, b, tolerance=tolerance, names=(first, name)).model_copy(update=exact))
    return tuple(found)


def describe(found: tuple[Comparison, ...]) -> str:
    """The agreements, in a sentence."""
    parts = []
    for comparison in found:
        if comparison.bitwise is not None:
            same = "equal bit for bit" if comparison.bitwise.identical else "NOT equal bit for bit"
            parts.append(f"{comparison.a} and {comparison.b} {same}")
        elif comparison.consensus is not None:
            parts.append(f"{comparison.b} agrees with {comparison.a} to {percent(comparison.consensus.agreement)}")
    return "; ".join(parts) or "nothing to compare"
