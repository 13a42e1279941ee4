"""The messages that the states of tasks and flows show, word by word."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from virnuc.flows.settings.tune import KNOBS
from virnuc_core.profiles import QUESTIONS, Target, load_profile
from virnuc_core.report import messages
from virnuc_core.report.bottlenecks import TUNABLE_LOSSES
from virnuc_core.report.model import Bottleneck, Criterion, Report, RunMetrics
from virnuc_core.report.views.speed import measured_runs, unmeasured_device_counts
from virnuc_core.runfiles import ModelFlops, ProductRate
from virnuc_core.training.splits import Examples
from virnuc_core.validation import (
    BaselineSubset,
    BaselineSummary,
    BitwiseEquality,
    Comparison,
    LabelAgreement,
    OverheadPair,
)

from .small_reports import criterion, report, scaling_figure


def overhead_pair(**changes: object) -> OverheadPair:
    base = OverheadPair(
        with_run="",
        without_run="",
        with_tokens_per_s=98,
        without_tokens_per_s=100,
        seconds=1,
        restarts=0,
    )
    return base.model_copy(update=changes)


def test_a_verdict_names_what_was_missed_and_what_was_not_judged() -> None:
    passed_criterion = criterion(title="Scaling", verdict="pass")
    missed_criterion = criterion()
    skipped_criterion = criterion(title="Time", verdict="not run")
    not_asked = criterion(title="Speed", verdict="not asked", target=None)
    assert (
        messages.criteria_message(report(passed_criterion, not_asked))
        == "1 of 1 asked criteria met"
    )
    assert messages.criteria_message(
        report(passed_criterion, missed_criterion, skipped_criterion)
    ) == ("1 of 3 asked criteria met; not met: Packing efficiency; not judged here: Time")


def test_what_was_not_judged_comes_first_if_nothing_was_missed() -> None:
    passed_criterion = criterion(title="Scaling", verdict="pass")
    skipped_criterion = criterion(title="Time", verdict="not run")
    message = messages.criteria_message(report(passed_criterion, skipped_criterion))
    assert message == "not judged here: Time; 1 of 2 asked criteria met"
    assert report().outcome == "not judged"
    assert report(criterion(verdict="not asked", target=None)).outcome == "not judged"


def test_scaling_names_speedup_efficiency_and_runs_of_each_number_of_devices() -> None:
    figures = (scaling_figure(num_gpus=1), scaling_figure())
    scaled_report = report(scaling=figures, profile=load_profile("ci-smoke"))
    assert messages.scaling_message(scaled_report) == "2 devices: 1.96x (98.0%), one run"


def judged_curve(scaling: str, same_bytes: str, *others: Criterion) -> Report:
    """Return the report on a curve over one and two devices, with these verdicts."""
    band = criterion(id="scaling", title="Scaling", verdict=scaling, unit="x")
    equality = criterion(id="same_bytes", title="Same bytes", verdict=same_bytes, unit="")
    figures = (scaling_figure(num_gpus=1), scaling_figure(judged=band))
    profile = load_profile("phase6-scaling")
    curve = report(band, *others, scaling=figures, profile=profile)
    return curve.model_copy(update={"checks": (equality,)})


@pytest.mark.parametrize(
    ("scaling", "same_bytes", "outcome"),
    [
        ("pass", "pass", "passed"),
        ("fail", "pass", "failed"),
        ("pass", "fail", "failed"),
        ("not run", "pass", "not judged"),
        ("pass", "not run", "not judged"),
    ],
)
def test_a_curve_is_judged_by_its_bands_and_equal_bytes(
    scaling: str, same_bytes: str, outcome: str
) -> None:
    baseline_criteria = [
        criterion(id=name, title=name, verdict="not run") for name in ("speedup", "consensus")
    ]
    curve = judged_curve(scaling, same_bytes, *baseline_criteria)
    assert curve.scaling_outcome == outcome
    message = messages.scaling_message(curve)
    assert f"one run: {scaling.upper()} (required " in message
    assert f"same bytes on all devices: {same_bytes.upper()}" in message


def test_a_curve_with_another_missed_or_unjudged_target_has_not_passed() -> None:
    missed = criterion(id="gpu_utilisation", title="GPU utilisation", verdict="fail")
    assert judged_curve("pass", "pass", missed).scaling_outcome == "failed"
    unjudged = criterion(id="gpu_utilisation", title="GPU utilisation", verdict="not run")
    assert judged_curve("pass", "pass", unjudged).scaling_outcome == "not judged"


def test_scaling_of_one_device_has_no_curve() -> None:
    assert messages.scaling_message(report(profile=load_profile("ci-smoke"))) == (
        "one device only: there is no curve"
    )


def test_numbers_of_devices_without_a_figure_have_a_reason() -> None:
    devices = (None, None)  # only their number counts
    run = RunMetrics.model_construct(
        name="devices-2", devices=devices, resumed=True, shards_reused=3, stopped_at_limit=False
    )
    profile = load_profile("phase6-scaling").model_copy(
        update={"scaling_bands": {"2": (1.6, 2.0), "4": (3.0, 4.0)}}
    )
    report_without_scaling = report(runs=(run,), profile=profile)
    assert unmeasured_device_counts(report_without_scaling) == {
        2: "devices-2 was resumed (3 shards are of an earlier run): its time is not whole",
        4: "there were 2 devices",
    }
    assert "4 devices: skipped, there were 2 devices" in messages.scaling_message(
        report_without_scaling
    )


def test_a_time_of_several_runs_is_their_median() -> None:
    assert measured_runs((41.0,)) == "one run"
    assert measured_runs((41.0, 40.2, 43.1)) == "median of 3 runs, 40.2 to 43.1 s"


@pytest.mark.parametrize(
    ("summary", "results", "message"),
    [
        (
            BaselineSummary(name="v1", source="recorded", wall_s=2700),
            Path("there"),
            "v1: 2,700.0 s, recorded; results taken from there",
        ),
        (
            BaselineSummary(
                name="v1",
                wall_s=20,
                measured_s=2,
                subset=BaselineSubset(reads=2_000, tokens=10, total_tokens=100),
            ),
            None,
            "v1: 2.0 s measured on 2,000 reads, 20.0 s scaled by tokens",
        ),
        (BaselineSummary(name="v1", wall_s=20), None, "v1: 20.0 s measured on all reads"),
    ],
    ids=["recorded", "subset", "all reads"],
)
def test_the_baseline_says_how_its_time_is_known(
    summary: BaselineSummary, results: Path | None, message: str
) -> None:
    assert messages.baseline_message(summary, results) == message


@pytest.mark.parametrize(
    ("identical", "differing", "message"),
    [
        (True, (), "a and b equal bit for bit"),
        (False, ("x.txt",), "a and b NOT equal bit for bit"),
        (False, (), "nothing to compare"),
    ],
)
def test_a_compared_pair_is_equal_or_not(
    identical: bool, differing: tuple[str, ...], message: str
) -> None:
    equality = BitwiseEquality(
        identical=identical, files_compared=3, shards_compared=0, differing=differing
    )
    pair = Comparison(a="a", b="b", tolerance=1, bitwise=equality)
    assert messages.comparison_message([pair]) == message


def test_a_pair_that_need_not_be_equal_agrees_to_some_percent() -> None:
    agreement = LabelAgreement(
        in_both=100, only_in_a=0, only_in_b=0, agreeing=99, agreement=0.99, score=None, examples=()
    )
    pair = Comparison(a="baseline", b="devices-1", tolerance=1, consensus=agreement)
    assert messages.comparison_message([pair]) == "devices-1 agrees with baseline to 99.0 %"


def test_overheads_are_medians_of_undisturbed_pairs() -> None:
    pairs = [
        overhead_pair(),
        overhead_pair(with_tokens_per_s=96),
        overhead_pair(with_tokens_per_s=97),
        overhead_pair(with_tokens_per_s=1, restarts=1),
        overhead_pair(switch="sampler", with_tokens_per_s=99.5),
    ]
    assert messages.overhead_message(pairs) == (
        "of the tokens/s, commits cost 3.0 %, the sampler costs 0.5 %"
    )
    assert messages.overhead_message([]) == "nothing could be timed"


def test_the_ceiling_names_the_rate_of_each_device() -> None:
    rates = {"GPU-0": 51_234.4, "GPU-1": 49_000.0}
    expected = "linear layers of ESM-2 alone: 51,234, 49,000 tokens/s"
    assert messages.ceiling_message(ModelFlops(protein_ceilings=rates)) == expected
    assert messages.ceiling_message(ModelFlops()) == "no GPU, no ceiling"


def test_the_ceiling_names_the_fastest_product() -> None:
    def rate(product: str, role: str, tokens_per_s: float) -> ProductRate:
        return ProductRate(
            encoder="esm2", device="GPU-0", product=product, role=role, tokens_per_s=tokens_per_s
        )

    products = (
        rate("ours", "own", 230_000.0),
        rate("cuBLAS, int8", "library", 239_000.0),
        rate("fp8", "reference", 250_000.0),
    )
    flops = ModelFlops(protein_ceilings={"GPU-0": 239_000.0}, products=products)
    assert messages.ceiling_message(flops).endswith("alone: 239,000 tokens/s (cuBLAS, int8)")


def test_a_split_names_what_was_left_out() -> None:
    genomes = pd.DataFrame({"genome": ["a", "b", "c"], "cluster": [0, 0, 1]})
    examples = Examples(pd.DataFrame({"read": range(1_234)}), genomes, {"short frames": 1_000})
    assert messages.split_message(examples) == (
        "1,234 frames of 3 genomes in 2 clusters; left out: 1,000 short frames"
    )


def test_the_reviewer_sees_the_share_of_other_work() -> None:
    stages = {"ESM-2": 6.0, "DNABERT-S": 3.0, "Sequence Chunking": 1.0}
    run = RunMetrics.model_construct(stages=stages, total_s=10.0)
    question = "How large is the share of non-GPU work?"
    assert messages.encoder_shares(run) == (
        f"{question} **ESM-2 60.0 %, DNABERT-S 30.0 %, other work 10.0 %**"
    )
    assert messages.encoder_shares(None) == f"{question} Stage times are not known."


def test_the_reviewer_sees_missed_targets() -> None:
    missed_report = report(criterion(target=Target(op=">", value=90)))
    assert messages.missed_targets(missed_report) == "Not met: Packing efficiency 89.5% (&gt;90%)"
    assert messages.missed_targets(report(criterion(verdict="pass"))) == ""


def test_every_question_to_the_reviewer_has_a_hint() -> None:
    hints = messages.question_hints(report(run=None, losses=()))
    assert set(hints) == set(QUESTIONS)
    hints.pop("target_realistic")  # without a missed target there is nothing to say
    assert all(hints.values())


def test_the_reviewer_sees_what_settings_mend_and_what_they_do_not() -> None:
    losses = (
        Bottleneck(kind="start-up", detail="", advice="", share=0.4),
        Bottleneck(kind="packing", detail="", advice="", share=0.03),
        Bottleneck(kind="commits", detail="", advice=""),
    )
    hints = messages.question_hints(report(run=None, losses=losses))
    assert hints["tuning_could_help"] == "Time that settings act on: packing 3.0 %, commits"
    assert hints["code_fix_needed"] == "Time that no setting mends: start-up 40.0 %"
    assert frozenset(KNOBS) == TUNABLE_LOSSES, "a sweep has values to try against each of them"
