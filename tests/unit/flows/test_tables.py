"""Measurements as rows people read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from virnuc.tasks.artifacts import Rows, bounded_rows
from virnuc.tasks.report import with_verdict_marks
from virnuc.tasks.run_tables import fate_rows, stage_rows
from virnuc_core.profiles import Target, load_profile
from virnuc_core.report import messages
from virnuc_core.report.model import Criterion, Report, RunMetrics, ScalingMetrics
from virnuc_core.report.views.correctness import agreement_rows
from virnuc_core.report.views.criteria import criteria_section
from virnuc_core.report.views.speed import measured_runs, scaling_rows
from virnuc_core.runfiles import RunSummary
from virnuc_core.telemetry.tables import STAGES
from virnuc_core.validation import (
    BaselineSubset,
    BaselineSummary,
    BitwiseEquality,
    Comparison,
    LabelAgreement,
    OverheadPair,
)


def summary(**changes: Any) -> RunSummary:
    """A run of ten reads that took two seconds."""
    fields: dict[str, Any] = {
        "total_s": 2.0,
        "n_reads": 10,
        "stages": {"Sequence Chunking": 0.5, "Nucleotide Splitting": None, "ESM-2": 1.0},
        "fates": {"viral": 3, "others": 3, "no_open_frame": 4, "empty": 0, "failed": 0},
    }
    return RunSummary(**(fields | changes))


def criterion(**changes: Any) -> Criterion:
    base = Criterion(
        id="packing",
        perf_id="PERF-05",
        title="Packing efficiency",
        definition="real tokens ÷ slots",
        unit="%",
        value=89.5,
        target=Target(op=">", value=90),
        verdict="fail",
        reason="",
        samples=12_345,
        samples_of="batches",
        device="2x RTX 4090",
        profile_line="packing_efficiency > 90",
        raw=(),
    )
    return base.model_copy(update=changes)


def report(*criteria: Criterion, **parts: Any) -> Report:
    """A report of some criteria; what is not named is absent."""
    fields: dict[str, Any] = dict.fromkeys(Report.model_fields)
    fields |= {"scaling": (), "comparisons": (), "checks": (), "criteria": criteria, "runs": ()}
    return Report.model_construct(**(fields | parts))


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


def test_a_criterion_shows_its_verdict_value_and_threshold() -> None:
    bare = criterion(value=None, target=None, samples=None, verdict="not run", reason="no GPU")
    row, without = bounded_rows(shown_criteria(report(criterion(), bare)))
    assert row["Verdict"] == "✗ **FAIL**"
    assert (row["Measured"], row["Required"]) == ("89.5%", "\\>90%")
    assert row["Samples"] == "12,345 batches"
    assert [without[name] for name in ("Measured", "Required", "Samples", "Why")] == [
        "–",
        "none",
        "–",
        "no GPU",
    ]


def test_the_ui_rounds_no_figure_across_its_target() -> None:
    (row,) = shown_criteria(report(criterion(value=89.99996, target=Target(op=">=", value=90))))
    assert row["Measured"] == "89.99996%"


def test_the_sentence_of_a_verdict_names_what_was_missed_and_what_was_not_judged() -> None:
    passed, missed = criterion(title="Scaling", verdict="pass"), criterion()
    skipped = criterion(title="Time", verdict="not run")
    unasked = criterion(title="Speed", verdict="not asked", target=None)
    assert messages.met(report(passed, unasked)) == "1 of 1 asked criteria met"
    assert messages.met(report(passed, missed, skipped)) == (
        "1 of 3 asked criteria met; not met: Packing efficiency; not judged here: Time"
    )
    assert (
        messages.met(report(passed, skipped)) == "not judged here: Time; 1 of 2 asked criteria met"
    )
    assert report().outcome == report(unasked).outcome == "not judged"


def test_scaling_and_comparisons() -> None:
    figure = ScalingMetrics(
        num_gpus=2,
        time_seconds=2025.0,
        times_s=(2025.0,),
        speedup=1.58,
        efficiency=0.79,
        esm2_scaling=1.87,
        dnabert_scaling=None,
    )
    judged = criterion(unit="x", value=1.58, target=Target(op=">=", value=1.9))
    scaled = report(
        scaling=(figure.model_copy(update={"judged": judged}),), profile=load_profile("ci-smoke")
    )
    (row,) = scaling_rows(scaled)
    assert row["Runs"] == "one run", "which a figure of one run says"
    assert measured_runs((41.0, 40.2, 43.1)) == "median of 3 runs, 40.2 to 43.1 s"
    assert [row[name] for name in ("Time", "Speedup", "Efficiency", "DNABERT-S")] == [
        "2,025.0 s",
        "1.58x",
        "79.0%",
        None,
    ]
    agreement = LabelAgreement(
        in_both=100, only_in_a=0, only_in_b=0, agreeing=99, agreement=0.99, score=None, examples=()
    )
    equal = BitwiseEquality(identical=True, files_compared=3, shards_compared=2, differing=())
    found = Comparison(
        a="devices-1", b="devices-2", tolerance=0.01, consensus=agreement, bitwise=equal
    )
    (shown,) = agreement_rows([found])
    assert [shown[name] for name in ("Pair", "What", "Agreement")] == [
        "devices-1 / devices-2",
        "consensus",
        "99.000 %",
    ]
    assert shown["Same bytes"] == "yes"
    assert json.dumps(bounded_rows([shown]))


def test_the_reviewer_sees_the_share_of_other_work() -> None:
    stages = {"ESM-2": 6.0, "DNABERT-S": 3.0, "Sequence Chunking": 1.0}
    run = RunMetrics.model_construct(stages=stages, total_s=10.0)
    asked = "How large is the share of non-GPU work?"
    shown = messages.encoder_shares(run)
    assert shown == f"{asked} **ESM-2 60.0 %, DNABERT-S 30.0 %, other work 10.0 %**"
    assert messages.encoder_shares(None) == f"{asked} Stage times are not known."


def test_the_messages_of_states() -> None:
    figure = ScalingMetrics(
        num_gpus=2,
        time_seconds=5.0,
        times_s=(5.0,),
        speedup=1.96,
        efficiency=0.98,
        esm2_scaling=None,
        dnabert_scaling=None,
    )
    told = {"profile": load_profile("ci-smoke"), "criteria": ()}
    assert (
        messages.scaling(report(scaling=(figure, figure), **told))
        == "2 devices: 1.96x (98.0 %), one run"
    )
    assert messages.scaling(report(**told)) == "one device only: there is no curve"
    recorded = BaselineSummary(name="v1", source="recorded", wall_s=2700)
    assert (
        messages.baseline(recorded, Path("there"))
        == "v1: 2,700.0 s, recorded; results taken from there"
    )
    part = BaselineSubset(reads=2_000, tokens=10, total_tokens=100)
    scaled = BaselineSummary(name="v1", wall_s=20, measured_s=2, subset=part)
    assert (
        messages.baseline(scaled, None)
        == "v1: 2.0 s measured on 2,000 reads, 20.0 s scaled by tokens"
    )
    assert (
        messages.baseline(BaselineSummary(name="v1", wall_s=20), None)
        == "v1: 20.0 s measured on all reads"
    )
    for differing, said in (
        (("x.txt",), "a and b NOT equal bit for bit"),
        ((), "nothing to compare"),
    ):
        equal = BitwiseEquality(
            identical=False, files_compared=3, shards_compared=0, differing=differing
        )
        assert messages.compared([Comparison(a="a", b="b", tolerance=1, bitwise=equal)]) == said
    assert messages.compared([]) == "nothing to compare"
    pair = OverheadPair(
        with_run="",
        without_run="",
        with_tokens_per_s=98,
        without_tokens_per_s=100,
        seconds=1,
        restarts=0,
    )
    assert messages.overhead([pair]) == "of the tokens/s, commits cost 2.0 %"
    assert messages.overhead([]) == "nothing could be timed"
    missed = report(criterion(target=Target(op=">", value=90)))
    assert messages.missed_targets(missed) == "Not met: Packing efficiency 89.5% (&gt;90%)"
