"""Measurements as rows people read."""

from __future__ import annotations

import json
from typing import Any

from virnuc.tasks.artifacts import Rows, bounded_rows
from virnuc.tasks.report import with_verdict_marks
from virnuc.tasks.run_tables import fate_rows, stage_rows
from virnuc_core.profiles import Target, load_profile
from virnuc_core.report.model import Report
from virnuc_core.report.views.correctness import agreement_rows
from virnuc_core.report.views.criteria import criteria_section
from virnuc_core.report.views.speed import scaling_rows
from virnuc_core.runfiles import RunSummary
from virnuc_core.telemetry.tables import STAGES
from virnuc_core.validation import BitwiseEquality, Comparison, LabelAgreement

from ..report.small_reports import criterion, report, scaling_figure


def summary(**changes: Any) -> RunSummary:
    """A run of ten reads that took two seconds."""
    fields: dict[str, Any] = {
        "total_s": 2.0,
        "n_reads": 10,
        "stages": {"Sequence Chunking": 0.5, "Nucleotide Splitting": None, "ESM-2": 1.0},
        "fates": {"viral": 3, "others": 3, "no_open_frame": 4, "empty": 0, "failed": 0},
    }
    return RunSummary(**(fields | changes))


def shown_criteria(judged: Report) -> Rows:
    """The criteria as Prefect shows them."""
    return with_verdict_marks(criteria_section(judged).rows)


def test_all_nine_stages_are_named_measured_fused_or_neither() -> None:
    rows = {str(row["stage"]): row for row in stage_rows(summary())}
    assert len(rows) == len(STAGES) + 1
    assert rows["Stage 1: Sequence Chunking"] == {
        "stage": "Stage 1: Sequence Chunking",
        "seconds": "0.50",
        "share": "25.0 %",
    }
    assert rows["Stage 3: Nucleotide Splitting"]["seconds"] == "fused"
    assert rows["Stage 9: Consensus Scoring"]["seconds"] == "not measured"


def test_a_run_of_no_time_has_no_shares() -> None:
    assert {row["share"] for row in stage_rows(summary(total_s=0.0))[:-1]} == {None}


def test_fates_add_up_to_the_reads() -> None:
    rows = fate_rows(summary())
    assert rows[0] == {"fate": "viral", "reads": 3, "share": "30.0 %"}
    assert rows[-1]["reads"] == 10
    assert fate_rows(summary(n_reads=0, fates={"viral": 0}))[0]["share"] is None


def test_remarks_of_staging_stand_below_the_fates() -> None:
    counts = RunSummary(n_reads=4, fates={"viral": 1, "others": 3})
    rows = fate_rows(counts, {"reads": 4, "ambiguous": 2, "skipped": 0})
    assert [row["fate"] for row in rows] == [
        "viral",
        "others",
        "**all reads**",
        "remark: ambiguous",
        "remark: skipped",
    ]
    assert rows[3] == {"fate": "remark: ambiguous", "reads": 2, "share": "50.0 %"}


def test_a_criterion_shows_its_verdict_value_and_threshold() -> None:
    bare = criterion(value=None, target=None, samples=None, verdict="not run", reason="no GPU")
    row, row_without = bounded_rows(shown_criteria(report(criterion(), bare)))
    assert row["Verdict"] == "✗ **FAIL**"
    assert (row["Measured"], row["Required"]) == ("89.5%", "\\>90%")
    assert row["Samples"] == "12,345 batches"
    assert [row_without[name] for name in ("Measured", "Required", "Samples", "Why")] == [
        "–",
        "none",
        "–",
        "no GPU",
    ]


def test_the_ui_rounds_no_figure_across_its_target() -> None:
    (row,) = shown_criteria(report(criterion(value=89.99996, target=Target(op=">=", value=90))))
    assert row["Measured"] == "89.99996%"


def test_scaling_shows_time_speedup_and_efficiency() -> None:
    figure = scaling_figure(
        time_seconds=2025.0,
        times_s=(2025.0,),
        speedup=1.58,
        efficiency=0.79,
        protein_scaling=1.87,
        judged=criterion(unit="x", value=1.58, target=Target(op=">=", value=1.9)),
    )
    (row,) = scaling_rows(report(scaling=(figure,), profile=load_profile("ci-smoke")))
    assert row["Runs"] == "one run"
    assert [row[name] for name in ("Time", "Speedup", "Efficiency", "DNABERT-S")] == [
        "2,025.0 s",
        "1.58x",
        "79.0%",
        None,
    ]


def test_a_comparison_shows_agreement_and_equal_bytes() -> None:
    agreement = LabelAgreement(
        in_both=100, only_in_a=0, only_in_b=0, agreeing=99, agreement=0.99, score=None, examples=()
    )
    equal = BitwiseEquality(identical=True, files_compared=3, shards_compared=2, differing=())
    comparison = Comparison(
        a="devices-1", b="devices-2", tolerance=0.01, consensus=agreement, bitwise=equal
    )
    (row,) = agreement_rows([comparison])
    assert [row[name] for name in ("Pair", "What", "Agreement")] == [
        "devices-1 / devices-2",
        "consensus",
        "99.000 %",
    ]
    assert row["Same bytes"] == "yes"
    assert json.dumps(bounded_rows([row]))
