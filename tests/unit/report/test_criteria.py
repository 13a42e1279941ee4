"""Verdicts: a pass needs a number that was measured, on enough reads, on the device that is meant."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import pytest

from tests.damage import edit_json, list_again
from virnuc_core.profiles import TARGET_NAMES, Profile, Target, load_profile, profile_names
from virnuc_core.report import messages
from virnuc_core.report.build import build_report, write_report
from virnuc_core.report.compare import compare_runs
from virnuc_core.report.criteria import CHECKS, CORRECTNESS, CRITERIA, PACKING, Finding
from virnuc_core.report.judging import judge
from virnuc_core.report.model import Criterion, Report
from virnuc_core.report.regression import entry_of
from virnuc_core.report.render import further_text, report_text
from virnuc_core.report.verify import verify_report
from virnuc_core.report.warnings import warnings
from virnuc_core.runfiles import Device, write
from virnuc_core.telemetry.statistics import device_time_spread
from virnuc_core.validation import BaselineSummary

from .validate_directory import Recipe, build, write_json

pytestmark = pytest.mark.usefixtures("telemetry_once")

SEVEN = (
    "one_device_time",
    "two_device_time",
    "scaling",
    "speedup",
    "consensus",
    "gpu_utilisation",
    "packing",
)
IDS = ("PERF-01", "PERF-01", "PERF-03", "PERF-01", "correctness", "PERF-02", "PERF-05")


def by_id(report: Report) -> dict[str, Criterion]:
    return {criterion.id: criterion for criterion in (*report.criteria, *report.checks)}


def test_seven_criteria_with_everything_they_stand_on(
    finished: tuple[Path, Profile], judged: Report
) -> None:
    assert tuple(c.id for c in judged.criteria) == SEVEN
    assert tuple(c.perf_id for c in judged.criteria) == IDS
    for criterion in judged.criteria:
        assert criterion.value is not None
        assert criterion.definition
        assert criterion.samples
        assert criterion.samples_of
        assert criterion.device in ("1x RTX 4090", "2x RTX 4090")
        assert criterion.target is not None
        assert f"{criterion.target.value:g}" in criterion.profile_line
        assert criterion.raw
        assert all((finished[0] / path).is_file() for path in criterion.raw)


def test_scaling_and_its_efficiency_are_one_criterion(judged: Report) -> None:
    alone_figure, figure = judged.scaling
    assert (alone_figure.num_gpus, alone_figure.speedup, alone_figure.judged) == (1, 1.0, None)
    assert figure.speedup == pytest.approx(80 / 44)
    assert figure.efficiency == pytest.approx(40 / 44)
    assert figure.protein_scaling == pytest.approx(2.0)
    assert len(judged.criteria) == 7


@pytest.mark.parametrize("name", profile_names())
def test_nothing_measured_passes_nothing(tmp_path: Path, name: str) -> None:
    report = build_report(tmp_path, load_profile(name))
    assert {c.verdict for c in report.criteria} == {"not run"}
    assert all(c.reason for c in report.criteria)
    assert report.outcome == "not judged"
    assert report.failed_criteria == ()


def test_the_smoke_profile_asks_for_correctness_only(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(gpu=None), load_profile("ci-smoke"))
    report = build_report(tmp_path, profile)
    verdicts = {c.id: c.verdict for c in report.criteria}
    assert verdicts.pop("consensus") == "pass"
    assert verdicts.pop("gpu_utilisation") == "not run", "it could not be measured"
    assert set(verdicts.values()) == {"not asked"}, "it was measured, and is shown"
    assert by_id(report)["same_bytes"].verdict == "pass"
    assert (report.outcome, report.num_met, len(report.requested)) == ("passed", 1, 1)
    assert any("asks for no performance" in note for note in report.notes)


MISSING: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no single run": (
        lambda out: shutil.rmtree(out / "devices-1"),
        ("one_device_time", "scaling", "same_bytes", "consensus"),
    ),
    "no run of two": (
        lambda out: shutil.rmtree(out / "devices-2"),
        ("two_device_time", "scaling", "consensus", "speedup", "gpu_utilisation", "packing"),
    ),
    "no baseline": (lambda out: shutil.rmtree(out / "baseline"), ("speedup",)),
    "no comparison": (lambda out: (out / "comparison.json").unlink(), ("consensus", "same_bytes")),
    "no telemetry": (
        lambda out: shutil.rmtree(out / "devices-2" / "telemetry"),
        ("gpu_utilisation", "packing"),
    ),
    "no wall time": (
        lambda out: edit_json(out / "devices-2" / "summary.json", lambda b: b.pop("wall_s")),
        ("two_device_time", "scaling", "speedup"),
    ),
    "a time that is none": (
        lambda out: edit_json(
            out / "devices-2" / "summary.json", lambda b: b.update(wall_s="fast")
        ),
        ("two_device_time", "scaling", "speedup", "gpu_utilisation", "packing"),
    ),
    "a clock that ran backwards": (
        lambda out: edit_json(out / "devices-2" / "summary.json", lambda b: b.update(wall_s=-3.0)),
        ("two_device_time", "scaling", "speedup", "gpu_utilisation", "packing"),
    ),
    "no reads": (
        lambda out: edit_json(out / "devices-2" / "summary.json", lambda b: b.pop("n_reads")),
        ("two_device_time", "scaling", "speedup", "gpu_utilisation", "packing"),
    ),
    "no devices": (
        lambda out: [
            edit_json(out / "devices-2" / name, lambda b: b.pop("devices"))
            for name in ("run.json", "summary.json")
        ],
        ("two_device_time", "scaling", "speedup", "gpu_utilisation"),
    ),
    "no baseline time": (
        lambda out: edit_json(out / "baseline" / "summary.json", lambda b: b.pop("measured_s")),
        ("speedup",),
    ),
    "a subset of unknown size": (
        lambda out: edit_json(
            out / "baseline" / "summary.json", lambda b: b.update(subset={"reads": 5})
        ),
        ("speedup",),
    ),
    "a resumed run": (
        lambda out: edit_json(
            out / "devices-2" / "summary.json",
            lambda b: b.update(resumed=True, shards_reused=3, shards_computed=9),
        ),
        ("two_device_time", "scaling", "speedup"),
    ),
    "a run that was killed before its first commit": (
        lambda out: edit_json(
            out / "devices-2" / "summary.json",
            lambda b: b.update(
                attempts=[{"started": "", "devices": [], "wall_s": b["wall_s"] / 2}] * 2
            ),
        ),
        ("two_device_time", "scaling", "speedup"),
    ),
    "other work": (
        lambda out: edit_json(out / "devices-1" / "summary.json", lambda b: b.update(n_rows=7)),
        ("scaling",),
    ),
    "a broken summary": (
        lambda out: (out / "devices-2" / "summary.json").write_text("{", encoding="utf-8"),
        ("two_device_time", "scaling", "speedup", "gpu_utilisation", "packing"),
    ),
    "a broken comparison": (
        lambda out: write_json(out / "comparison.json", {"comparisons": 3}),
        ("consensus", "same_bytes"),
    ),
    "a broken telemetry": (
        lambda out: next((out / "devices-2" / "telemetry").glob("*.h5")).write_bytes(b"x"),
        ("gpu_utilisation", "packing"),
    ),
}


# Changes that leave every file in place, with less in it: what it does not say was not measured.
NOT_MEASURED = {
    "no wall time",
    "no reads",
    "no devices",
    "no baseline time",
    "a resumed run",
    "a run that was killed before its first commit",
    "other work",
}


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_no_pass_and_nothing_else_changes(
    copied: tuple[Path, Profile], judged: Report, name: str
) -> None:
    """A number that nobody measured is not run. A measurement that was lost is a failure."""
    out_dir, profile = copied
    before_by_id = by_id(judged)
    change, affected_ids = MISSING[name]
    change(out_dir)
    report = build_report(out_dir, profile)
    after_by_id = by_id(report)
    verdict = "not run" if name in NOT_MEASURED else "fail"
    for identity in affected_ids:
        if identity in after_by_id:
            assert after_by_id[identity].verdict == verdict, identity
            assert after_by_id[identity].reason
    assert bool(report.missing_evidence) == (name not in NOT_MEASURED)
    for sentence in report.missing_evidence.values():
        assert f"Raw file problem: {sentence}." in report.warnings
    # Without the run of two another run is judged; without its devices or reads all is in doubt.
    if name not in ("no run of two", "no reads", "no devices"):
        assert {i: c.verdict for i, c in after_by_id.items() if i not in affected_ids} == {
            i: c.verdict for i, c in before_by_id.items() if i not in affected_ids
        }


@pytest.fixture(scope="module")
def all_failing(finished: tuple[Path, Profile]) -> tuple[Profile, tuple[Criterion, ...]]:
    """A profile that no validation can meet, and what fails with it while all files are there."""
    out_dir, profile = finished
    unreachable = {key: Target(op=">", value=1e12) for key in profile.targets}
    for key in ("one_device_seconds", "two_device_seconds"):
        unreachable[key] = Target(op="<", value=1e-9)
    strict_profile = profile.model_copy(update={"targets": unreachable})
    return strict_profile, build_report(out_dir, strict_profile).failed_criteria


@pytest.mark.parametrize("name", sorted(MISSING.keys() - NOT_MEASURED))
def test_no_removed_file_turns_a_failure_into_something_else(
    copied: tuple[Path, Profile], all_failing: tuple[Profile, tuple[Criterion, ...]], name: str
) -> None:
    """Whatever is lost, a criterion that failed with all files does not become `not run`."""
    out_dir, _ = copied
    strict_profile, failures = all_failing
    assert len(failures) > 5
    change, _ = MISSING[name]
    change(out_dir)
    after = by_id(build_report(out_dir, strict_profile))
    for criterion in failures:
        if criterion.id in after:  # a check of several devices goes with the run on them
            assert after[criterion.id].verdict == "fail", criterion.title


def test_a_broken_raw_file_is_a_warning(copied: tuple[Path, Profile]) -> None:
    (copied[0] / "devices-2" / "summary.json").write_text("{", encoding="utf-8")
    assert any(
        "devices-2/summary.json: invalid JSON" in warning
        for warning in build_report(*copied).warnings
    )


def test_targets_for_other_hardware_are_for_reference_only(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(gpu="NVIDIA H200"))
    verdicts = by_id(build_report(tmp_path, profile))
    for identity in ("one_device_time", "two_device_time", "scaling", "speedup", "gpu_utilisation"):
        assert verdicts[identity].verdict == "not run"
        assert "for reference only" in verdicts[identity].reason
        assert verdicts[identity].value is not None, "the figure is shown all the same"
    assert verdicts["consensus"].verdict == verdicts["packing"].verdict == "pass"


def test_cpu_cores_are_no_gpus(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(gpu=None))
    no_names = profile.model_copy(update={"device_names": ()})
    verdicts = by_id(build_report(tmp_path, no_names))
    assert verdicts["scaling"].verdict == "not run"
    assert "meant for GPUs" in verdicts["scaling"].reason
    assert verdicts["gpu_utilisation"].verdict == "not run"
    named_profile = profile.model_copy(update={"device_names": ("CPU",)})
    assert by_id(build_report(tmp_path, named_profile))["scaling"].verdict == "fail", (
        "a profile may ask it of CPU cores"
    )


def test_too_few_reads_are_no_evidence(finished: tuple[Path, Profile]) -> None:
    out_dir, profile = finished
    verdicts = by_id(build_report(out_dir, profile.model_copy(update={"min_reads": 301})))
    for identity in SEVEN:
        if identity != "consensus":
            assert verdicts[identity].verdict == "not run"
            assert "300 reads; the profile needs 301" in verdicts[identity].reason


def test_too_few_chunks_are_no_evidence(finished: tuple[Path, Profile]) -> None:
    out_dir, profile = finished
    verdict = by_id(
        build_report(out_dir, profile.model_copy(update={"min_compared_chunks": 10_000}))
    )["consensus"]
    assert verdict.verdict == "not run"


def test_a_time_from_fewer_reads_is_projected_and_never_passes(
    finished: tuple[Path, Profile],
) -> None:
    out_dir, profile = finished
    verdicts = by_id(build_report(out_dir, profile.model_copy(update={"target_reads": 600})))
    criterion_ = verdicts["one_device_time"]
    assert criterion_.verdict == "projected"
    assert criterion_.value == pytest.approx(160.0)
    assert "no measurement" in criterion_.reason
    assert verdicts["speedup"].verdict == "pass", "a ratio needs no projection"
    just_enough = by_id(build_report(out_dir, profile.model_copy(update={"target_reads": 300})))
    assert just_enough["one_device_time"].verdict == "pass"


def test_a_run_ended_at_the_limit_fails(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    edit_json(out_dir / "devices-2" / "summary.json", lambda b: b.update(stopped_at_limit=True))
    verdicts = by_id(build_report(out_dir, profile))
    assert verdicts["two_device_time"].verdict == "fail"
    assert "limit of 3600 s" in verdicts["two_device_time"].reason
    assert verdicts["scaling"].verdict == verdicts["speedup"].verdict == "not run"


def test_a_run_that_was_cut_off_gives_no_derived_figure(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    for name in ("devices-1", "devices-2"):
        edit_json(
            out_dir / name / "summary.json",
            lambda b: b.update(stopped_at_limit=True, wall_s=0.4, total_s=5.4),
        )
    report = build_report(out_dir, profile.model_copy(update={"price_per_device_hour": 1.0}))
    assert {
        identity: by_id(report)[identity].value for identity in ("scaling", "speedup", "packing")
    } == {
        "scaling": None,
        "speedup": None,
        "packing": None,
    }
    for run in report.runs:
        derived_criteria = (
            "sequences_per_hour",
            "hours_projected",
            "device_hours_per_million",
            "kwh_per_million",
            "price_per_million",
        )
        assert {getattr(run, name) for name in derived_criteria} == {None}
    assert report.scaling == ()
    assert entry_of(report) is None, "it is no history either"
    assert report.outcome == "failed"
    no_times = {
        name: target
        for name, target in profile.targets.items()
        if not name.endswith("_device_seconds")
    }
    report_without_times = build_report(out_dir, profile.model_copy(update={"targets": no_times}))
    assert report_without_times.failures == (
        "time limit on 1x RTX 4090",
        "time limit on 2x RTX 4090",
    )


def test_more_than_two_devices_and_two_are_each_judged_by_their_own_run(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(devices=4, shards=16, between=(2,)))
    report = build_report(tmp_path, profile)
    criteria = by_id(report)
    assert [run.name for run in report.runs] == ["devices-1", "devices-2", "devices-4"]
    assert (criteria["two_device_time"].device, criteria["two_device_time"].verdict) == (
        "2x RTX 4090",
        "pass",
    )
    assert criteria["two_device_time"].raw == ("devices-2/summary.json",)
    assert (criteria["scaling"].device, criteria["scaling"].profile_line) == (
        "2x RTX 4090",
        "scaling: >= 1.9",
    )
    assert [(f.judged.title, f.judged.device) for f in report.scaling if f.judged] == [
        ("Scaling", "2x RTX 4090"),
        ("Scaling on 4 devices", "4x RTX 4090"),
    ]
    assert criteria["speedup"].device == "4x RTX 4090"
    page = report_text(report)
    for text in ("2x RTX 4090:  ", "Scaling on 4 devices:"):
        assert text in page, page
    slow = profile.model_copy(update={"scaling_bands": {"4": (3.99, 4.0)}})
    slow_report = build_report(tmp_path, slow)
    assert by_id(slow_report)["scaling"].verdict == criteria["scaling"].verdict
    assert "Scaling on 4 devices" in slow_report.failures, (
        "a band that is missed fails, whatever the two-device run did"
    )
    path = tmp_path / "devices-2" / "prediction_results_highestscore.csv"
    path.write_text(
        path.read_text(encoding="utf-8").replace("\tTrue\t", "\tFalse\t"), encoding="utf-8"
    )
    list_again(tmp_path / "devices-2")
    compare_runs(tmp_path, ("devices-1", "devices-2", "devices-4"), tolerance=0.01, subset=False)
    assert by_id(build_report(tmp_path, profile))["same_bytes"].verdict == "fail", (
        "the run between counts, too"
    )


def test_all_that_the_profile_asks_for_is_counted_and_nothing_else(tmp_path: Path) -> None:
    profile = load_profile("production-6m").model_copy(
        update={"min_reads": 1, "min_compared_chunks": 1}
    )
    build(tmp_path, Recipe(), profile)
    report = build_report(tmp_path, profile)
    assert {c.id for c in report.requested} == {
        name.replace("packing_efficiency", "packing")
        .replace("seconds", "time")
        .replace("_agreement", "")
        for name in profile.targets
    }
    assert by_id(report)["one_device_time"].verdict == "not asked"
    assert report.outcome == "failed", "scaling is 1.8 here"
    assert messages.criteria_message(report) == (
        "6 of 12 asked criteria met; not met: Scaling; not judged here: Time on two devices, Checkpoint overhead, "
        "Worst centred cosine to fp32, Mean centred cosine to fp32, Verdicts as in fp32"
    )


def test_on_other_hardware_no_performance_is_judged_and_that_is_no_success(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(gpu="NVIDIA H200"), load_profile("phase10-1m"))
    report = build_report(tmp_path, profile.model_copy(update={"min_compared_chunks": 1}))
    assert report.outcome == "not judged"
    assert messages.criteria_message(report).startswith("not judged here: Time on one device, ")
    assert messages.criteria_message(report).endswith("; 1 of 7 asked criteria met")


def test_a_scaled_baseline_is_marked(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(baseline_reads=100))
    report = build_report(tmp_path, profile)
    speedup = by_id(report)["speedup"]
    assert speedup.verdict == "pass"
    assert speedup.samples == 100
    assert "measured on 100 reads and scaled by tokens" in speedup.reason
    assert report.baseline is not None
    assert report.baseline.source == "scaled"
    assert any("scaled by tokens" in note for note in report.notes)


@pytest.mark.parametrize(
    ("device", "devices", "reads", "verdict"),
    [
        ("RTX 4090", 2, 300, "pass"),
        ("RTX 3090", 2, 300, "not run"),
        ("RTX 4090", 4, 300, "not run"),
        ("RTX 4090", 2, 301, "not run"),
    ],
)
def test_a_recorded_baseline_only_where_the_device_matches(
    finished: tuple[Path, Profile], device: str, devices: int, reads: int, verdict: str
) -> None:
    out_dir, profile = finished
    spec = profile.baseline.model_copy(
        update={
            "source": "recorded",
            "recorded_seconds": 900.0,
            "recorded_device": device,
            "recorded_devices": devices,
        }
    )
    recorded_profile = profile.model_copy(update={"baseline": spec, "target_reads": reads})
    speedup = by_id(build_report(out_dir, recorded_profile))["speedup"]
    assert speedup.verdict == verdict
    assert speedup.reason


def test_a_recorded_time_that_was_given_counts_whatever_the_profile_measures(
    copied: tuple[Path, Profile],
) -> None:
    out_dir, profile = copied
    for name, verdict in (("RTX 4090", "pass"), ("RTX 3090", "not run")):
        devices = [Device(id=f"recorded-{n}", kind="cuda", name=name) for n in range(2)]
        summary = BaselineSummary(
            name="v1",
            source="recorded",
            wall_s=900.0,
            n_reads=300,
            recorded_reads=300,
            devices=tuple(devices),
        )
        write(out_dir / "baseline" / "summary.json", summary)
        speedup = by_id(build_report(out_dir, profile))["speedup"]
        assert speedup.verdict == verdict
        assert speedup.value is not None, "for reference"
        assert ("for reference only" in speedup.reason) == (verdict == "not run")


@pytest.mark.parametrize("recorded_reads", [None, 1_000_000])
def test_a_recorded_time_counts_only_with_its_number_of_reads(
    copied: tuple[Path, Profile], recorded_reads: int | None
) -> None:
    """12,600 s for 300 reads would be a speed-up of 2,000; the time was of a million reads."""
    out_dir, profile = copied
    devices = tuple(Device(id=f"recorded-{n}", kind="cuda", name="RTX 4090") for n in range(2))
    summary = BaselineSummary(
        name="v1",
        source="recorded",
        wall_s=12_600.0,
        n_reads=300,
        recorded_reads=recorded_reads,
        devices=devices,
    )
    write(out_dir / "baseline" / "summary.json", summary)
    speedup = by_id(build_report(out_dir, profile))["speedup"]
    assert speedup.verdict == "not run"
    known_reads = "unknown" if recorded_reads is None else recorded_reads
    assert f"the recorded time is of {known_reads} reads, this run had 300" in speedup.reason


@pytest.mark.parametrize(
    ("worked_s", "restarts", "verdict"),
    [(100.0, 0, "not run"), (4_000.0, 0, "fail"), (4_000.0, 1, "not run")],
    ids=["short", "longer than the target", "longer, but workers died"],
)
def test_an_interrupted_run_fails_if_its_committed_work_alone_took_too_long(
    copied: tuple[Path, Profile], worked_s: float, restarts: int, verdict: str
) -> None:
    """The target is an hour. The total time of two attempts says nothing, their work does."""
    out_dir, profile = copied
    attempt = {"started": "2026-03-01T12:00:00+00:00", "devices": [], "wall_s": 9_000.0}
    attempts = [attempt | {"worked_s": worked_s / 2} for _ in range(2)]
    changes = {"attempts": attempts, "resumed": True, "shards_reused": 3, "restarts": restarts}
    edit_json(out_dir / "devices-1" / "summary.json", lambda body: body.update(changes))
    criterion = by_id(build_report(out_dir, profile))["one_device_time"]
    assert criterion.verdict == verdict
    if verdict == "fail":
        assert criterion.value == worked_s + 5.0  # and staging
        assert "its committed work alone took 4,005.0 s" in criterion.reason


def test_reads_without_an_open_frame_are_no_evidence_of_speed(
    copied: tuple[Path, Profile],
) -> None:
    """Nothing was embedded, so no time says anything: neither a pass nor a failure."""
    out_dir, profile = copied
    for name in ("devices-1", "devices-2"):
        edit_json(out_dir / name / "summary.json", lambda body: body.update(n_rows=0, n_uniques=0))
    report = build_report(out_dir, profile)
    for criterion in report.criteria:
        if criterion.id not in ("consensus", "correctness"):
            assert criterion.verdict == "not run", criterion.title
            assert "no read has an open reading frame" in criterion.reason
    assert report.outcome == "not judged"


def test_a_baseline_on_other_devices_is_not_compared(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    edit_json(
        out_dir / "baseline" / "summary.json", lambda b: b["devices"][0].update(name="NVIDIA L4")
    )
    speedup = by_id(build_report(out_dir, profile))["speedup"]
    assert speedup.verdict == "not run"
    assert "L4" in speedup.reason


def test_the_lowest_device_gates_utilisation(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(utilisation=(99.0, 71.0)))
    verdict = by_id(build_report(tmp_path, profile))["gpu_utilisation"]
    assert verdict.verdict == "fail"
    assert verdict.value == pytest.approx(71, abs=0.2)


def test_few_samples_say_nothing(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(shards=2, seconds_a_shard=2.0))
    verdict = by_id(build_report(tmp_path, profile))["gpu_utilisation"]
    assert verdict.verdict == "not run"
    assert "10 are needed" in verdict.reason


def test_the_worst_of_both_runs_gates_agreement(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    path = out_dir / "devices-1" / "prediction_results_highestscore.csv"
    path.write_text(
        path.read_text(encoding="utf-8").replace("\tTrue\t", "\tFalse\t"), encoding="utf-8"
    )
    list_again(out_dir / "devices-1")
    compare_runs(out_dir, ("devices-1", "devices-2"), tolerance=0.01, subset=False)
    verdicts = by_id(build_report(out_dir, profile))
    assert verdicts["consensus"].verdict == "fail"
    assert verdicts["same_bytes"].verdict == "fail"
    assert "prediction_results_highestscore.csv" in verdicts["same_bytes"].reason


def test_devices_of_two_models_need_not_agree_in_every_bit(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    edit_json(
        out_dir / "devices-2" / "run.json",
        lambda b: b["devices"][1].update(name="NVIDIA RTX 4090 D"),
    )
    verdict = by_id(build_report(out_dir, profile))["same_bytes"]
    assert verdict.verdict == "not run"
    assert "different models" in verdict.reason


def test_super_linear_scaling_warns_and_passes(tmp_path: Path) -> None:
    profile = build(tmp_path)
    edit_json(
        tmp_path / "devices-1" / "summary.json", lambda b: b.update(wall_s=95.0, total_s=100.0)
    )
    report = build_report(tmp_path, profile)
    assert by_id(report)["scaling"].verdict == "pass"
    assert "super-linear" in by_id(report)["scaling"].reason
    assert any("super-linear" in warning for warning in report.warnings)


def test_four_devices_are_judged_by_their_band(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(devices=4, shards=16), load_profile("phase6-scaling"))
    at_hand = profile.model_copy(update={"min_reads": 1, "scaling_bands": {"4": (2.5, 4.0)}})
    verdict = by_id(build_report(tmp_path, at_hand))["scaling"]
    assert (verdict.verdict, verdict.profile_line) == ("pass", "scaling_bands.4: >= 2.5")
    two = by_id(
        build_report(tmp_path, load_profile("phase10-1m").model_copy(update={"min_reads": 1}))
    )["two_device_time"]
    assert (two.verdict, two.reason) == ("not run", "there was no run on 2 devices")


def test_one_device_alone_is_judged_on_what_it_shows(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(devices=1))
    report = build_report(tmp_path, profile)
    verdicts = by_id(report)
    assert verdicts["one_device_time"].verdict == "pass"
    assert verdicts["two_device_time"].verdict == verdicts["scaling"].verdict == "not run"
    assert verdicts["packing"].verdict == "pass"
    assert "same_bytes" not in verdicts
    assert [figure.num_gpus for figure in report.scaling] == [1]


def test_more_tokens_than_slots_cannot_pass(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(packing=3.58))
    verdict = by_id(build_report(tmp_path, profile))["packing"]
    assert verdict.verdict == "not run"
    assert "the telemetry is wrong" in verdict.reason


def test_further_checks_of_the_production_profile(tmp_path: Path) -> None:
    profile = load_profile("production-6m").model_copy(
        update={"min_reads": 1, "target_reads": None}
    )
    build(tmp_path, Recipe(devices=2), profile)
    verdicts = by_id(build_report(tmp_path, profile))
    assert verdicts["starved_share"].verdict == "pass"
    assert verdicts["device_time_spread"].verdict == "pass"
    assert verdicts["checkpoint_overhead"].verdict == "not run"


@pytest.mark.parametrize(
    ("hours", "is_told"),
    [((3.2, 2.1), True), ((3.2, 3.0), False), ((0.1, 0.05), False)],
)
def test_devices_that_work_for_unlike_times_are_a_warning(
    judged: Report, hours: tuple[float, float], is_told: bool
) -> None:
    """3.2 h against 2.1 h is VirNucPro's own example; within 10 % and in short runs it is none."""
    report = judged
    assert report.run is not None
    assert report.run.telemetry is not None
    busy = tuple(
        device.model_copy(update={"busy_s": 3600.0 * device_hours})
        for device, device_hours in zip(report.run.telemetry.busy, hours, strict=True)
    )
    telemetry = report.run.telemetry.model_copy(
        update={"busy": busy, "device_time_spread": device_time_spread(busy)}
    )
    run = report.run.model_copy(update={"telemetry": telemetry})
    sentences = warnings(report.model_copy(update={"run": run}), problems=(), not_compared=())
    told = [sentence for sentence in sentences if sentence.startswith("Imbalance: ")]
    assert bool(told) == is_told
    if is_told:
        assert "3.20 h" in told[0]
        assert "2.10 h" in told[0]


def test_runs_on_more_devices_than_were_given_now_are_of_an_earlier_start(
    copied: tuple[Path, Profile],
) -> None:
    out_dir, profile = copied
    edit_json(out_dir / "run.json", lambda body: body["devices"].pop())
    compare_runs(out_dir, ("devices-1",), tolerance=0.01, subset=False)
    report = write_report(out_dir, profile)
    assert [run.name for run in report.runs] == ["devices-1"]
    assert by_id(report)["consensus"].verdict == "pass"
    assert by_id(report)["two_device_time"].verdict == "not run"
    assert report.run is not None
    assert report.run.name == "devices-1"


def test_what_a_precision_keeps_is_measured_beside_fp32(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = (
        copied[0],
        load_profile("h200-1m").model_copy(update={"device_names": (), "min_reads": 1}),
    )
    ids, names = ("centred_worst", "centred_mean", "verdicts_held"), ("devices-1", "devices-2")
    silent = by_id(build_report(out_dir, profile))
    assert {silent[name].verdict for name in ids} == {"not run"}
    assert "fp32 themselves" in silent["centred_worst"].reason
    shutil.copytree(out_dir / "devices-1", out_dir / "fp32")
    compare_runs(out_dir, names, tolerance=0.01, subset=False)
    verdicts = by_id(build_report(out_dir, profile))
    assert [verdicts[name].verdict for name in ids] == ["pass", "pass", "not run"]
    assert verdicts["verdicts_held"].samples == verdicts["consensus"].samples
    with h5py.File(out_dir / "devices-2" / "embeddings.h5", "r+") as file:
        values = file["embeddings"][:]
        values[3] = (
            2 * values.mean(0) - values[3]
        )  # one of many on the other side: the mean keeps, the worst does not
        file["embeddings"][...] = values
    list_again(out_dir / "devices-2")
    compare_runs(out_dir, names, tolerance=0.01, subset=False)
    report = build_report(out_dir, profile)
    verdict = by_id(report)["centred_worst"]
    assert (verdict.verdict, verdict.samples) == ("fail", len(values))
    assert verdict.value is not None
    assert verdict.value < -0.9
    assert any("at worst" in note for note in report.notes)
    text = further_text(report)
    assert f"{verdict.value:.4f} (target: >=0.97) [FAIL]" in text
    assert text.count("Same bytes on all devices") == 1, "each check goes by its own name"
    edit_json(
        out_dir / "comparison.json",
        lambda body: body["comparisons"][-1]["cosines"][-1].update(minimum=0.99),
    )
    write_report(out_dir, profile)
    differences = "\n".join(verify_report(out_dir).differences)
    assert "comparison.json: fp32 and devices-2.cosines[1].minimum: says 0.99" in differences


def test_starved_batches_fail(tmp_path: Path) -> None:
    profile = load_profile("production-6m").model_copy(
        update={"min_reads": 1, "target_reads": None}
    )
    build(tmp_path, Recipe(wait_ms=80.0), profile)
    edit_json(
        tmp_path / "devices-2" / "summary.json",
        lambda body: body["stages"].update({"Waiting for batches": 20.0}),
    )
    report = build_report(tmp_path, profile)
    assert by_id(report)["starved_share"].verdict == "fail"
    assert report.losses[0].kind == "loader"


def test_all_criteria_can_be_met(tmp_path: Path) -> None:
    profile = build(tmp_path)
    edit_json(
        tmp_path / "devices-1" / "summary.json", lambda b: b.update(wall_s=80.0, total_s=85.0)
    )
    report = build_report(tmp_path, profile)
    assert report.outcome == "passed"
    assert report.num_met == len(report.requested) == len(report.criteria) == 7


def test_a_target_on_the_line_is_met_or_missed_by_its_sign() -> None:
    assert Target(op=">=", value=90).met(90)
    assert not Target(op=">", value=90).met(90)
    assert not Target(op="<", value=3600).met(3600)


@pytest.mark.parametrize("samples", [None, 0])
def test_a_number_of_which_nothing_was_counted_is_not_run(
    tmp_path: Path, samples: int | None
) -> None:
    profile = load_profile("phase10-1m")
    spec = replace(PACKING, perf_id=CORRECTNESS, measure=lambda *_: Finding(99.0, samples))
    criterion_ = judge(spec, build_report(tmp_path, profile))
    assert criterion_.verdict == "not run"
    assert criterion_.reason == "nothing was counted"


def test_a_profile_can_set_a_target_for_each_criterion_and_for_nothing_else() -> None:
    assert {spec.target for spec in (*CRITERIA, *CHECKS)} == set(TARGET_NAMES)


@pytest.mark.parametrize("removed", ["devices-2/summary.json", "comparison.json", "baseline"])
def test_verify_names_what_the_validation_left_and_is_gone(
    copied: tuple[Path, Profile], removed: str
) -> None:
    """Also after the report was made again from what remains."""
    out_dir, profile = copied
    path = out_dir / removed
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    write_report(out_dir, profile)
    differences = "\n".join(verify_report(out_dir, None).differences)
    assert f"{removed}/summary.json" in differences or f"{removed} is missing" in differences


def test_a_validation_that_did_not_come_to_its_end_is_not_judged(
    copied: tuple[Path, Profile],
) -> None:
    """Without a comparison and a report nothing was lost: the second run was never made."""
    out_dir, profile = copied
    shutil.rmtree(out_dir / "report")
    (out_dir / "comparison.json").unlink()
    shutil.rmtree(out_dir / "devices-2")
    report = build_report(out_dir, profile)
    assert by_id(report)["two_device_time"].verdict == "not run"
    assert report.missing_evidence == {}
    assert (
        "The validation did not come to its end: devices-2/summary.json was not written."
        in report.warnings
    )


def test_a_repetition_keeps_no_embeddings_and_misses_none(copied: tuple[Path, Profile]) -> None:
    """Of a repetition only the measurements and the result tables are kept."""
    out_dir, profile = copied
    shutil.copytree(out_dir / "devices-2", out_dir / "devices-2.2")
    (out_dir / "devices-2.2" / "embeddings.h5").unlink()
    assert build_report(out_dir, profile).missing_evidence == {}
    (out_dir / "devices-2.2" / "prediction_results.txt").unlink()
    assert list(build_report(out_dir, profile).missing_evidence) == [
        "devices-2.2/prediction_results.txt"
    ]
