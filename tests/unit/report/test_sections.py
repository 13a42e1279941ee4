"""What the report says beside the criteria: efficiency, cost, commits, reads, software, approval, warnings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from virnuc.tasks.run_tables import fate_rows
from virnuc_core.profiles import Profile, load_profile
from virnuc_core.report.build import build_report, rerender, write_report
from virnuc_core.report.model import EncoderMetrics, Report
from virnuc_core.report.raw_files import RawFolder
from virnuc_core.report.render import further_text, render
from virnuc_core.report.verification import Verification
from virnuc_core.report.verify import verify_report
from virnuc_core.report.verify_runs import verify_overhead
from virnuc_core.report.views.reads import fate_rows as report_fate_rows
from virnuc_core.report.views.tools import overhead_rows
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunSummary, read, write
from virnuc_core.telemetry.log import read_telemetry, write_telemetry
from virnuc_core.telemetry.statistics import committed_span_s
from virnuc_core.validation import OVERHEAD, OverheadFile, OverheadPair

from ..telemetry.measurements import telemetry_of
from .validate_directory import (
    ORIGIN_S,
    STARTED,
    Recipe,
    build,
    device_samples,
    edit_json,
    host_samples,
    shards_done,
    write_json,
)

GPUS = ("GPU-00000000-aaaa", "GPU-10000000-aaaa")


def encoder(report: Report, name: str) -> EncoderMetrics:
    assert report.run is not None
    assert report.run.telemetry is not None
    return next(figure for figure in report.run.telemetry.encoders if figure.encoder == name)


def with_flops(out: Path, ceilings: dict[str, float]) -> None:
    flops = {
        "esm2_per_token": 5.6e9,
        "dnabert_s_per_token": 1.7e8,
        "esm2_ceiling_tokens_s": ceilings,
        "dnabert_s_ceiling_tokens_s": {},
    }
    edit_json(out / "devices-2" / "summary.json", lambda body: body.update(flops=flops))


def test_mfu_stands_against_the_measured_ceiling_and_the_datasheet(tmp_path: Path) -> None:
    profile = build(tmp_path)
    with_flops(tmp_path, {GPUS[0]: 50_000.0, GPUS[1]: 60_000.0})
    report = build_report(tmp_path, profile)
    esm2, dnabert_s = encoder(report, "esm2"), encoder(report, "dnabert_s")
    assert esm2.device_s is not None
    assert esm2.ceiling_tokens_per_s == pytest.approx(55_000.0), "both devices worked for as long"
    assert esm2.mfu_of_ceiling == pytest.approx(esm2.tokens / (esm2.device_s * 55_000.0))
    assert esm2.mfu_of_datasheet == pytest.approx(esm2.tokens * 5.6e9 / esm2.device_s / 165.2e12)
    assert dnabert_s.mfu_of_ceiling is None
    assert dnabert_s.mfu_of_datasheet is not None
    forms = render(report)
    words = f"measured ceiling {100 * (esm2.mfu_of_ceiling or 0):.1f}%, datasheet"
    for name in ("report.txt", "report.md", "report.html"):
        assert words in forms[name], name
        assert "measured ceiling not run, datasheet" in forms[name], name
    (benchmark,) = [
        json.loads(text)
        for name, text in forms.items()
        if name.startswith("b") and name.endswith("json")
    ]
    assert benchmark["results"]["efficiency"]["mfu"]["esm2"]["of_ceiling"] == esm2.mfu_of_ceiling
    assert benchmark["results"]["efficiency"]["mfu"]["dnabert_s"]["of_ceiling"] is None


def test_a_device_without_a_ceiling_leaves_mfu_unknown(tmp_path: Path) -> None:
    profile = build(tmp_path)
    with_flops(tmp_path, {GPUS[0]: 50_000.0})
    assert encoder(build_report(tmp_path, profile), "esm2").mfu_of_ceiling is None


def test_more_than_the_ceiling_is_a_warning(tmp_path: Path) -> None:
    profile = build(tmp_path)
    with_flops(tmp_path, dict.fromkeys(GPUS, 100.0))
    assert any(
        "the ceiling is too low" in warning for warning in build_report(tmp_path, profile).warnings
    )


def test_what_was_not_measured_is_not_run(tmp_path: Path) -> None:
    text = further_text(build_report(tmp_path, load_profile("phase10-1m")))
    assert text.count("not run") >= 7
    assert "0.0" not in text


# --- commits ---------------------------------------------------------------------------------------------------------


def pairs_of_runs(
    out: Path, commit_s: tuple[float, ...] = (0.2, 0.25, 0.3), restarts: int = 0
) -> None:
    """Runs with and without commits, made by the product's own writer, and the file that names them."""
    recipe = Recipe(shards=6)
    pairs = []
    for number, spent in enumerate(commit_s, start=1):
        rates = {}
        for commit in (True, False):
            run = RunDir(out / "overhead" / f"{number}-{'on' if commit else 'off'}")
            done = shards_done(recipe, list(GPUS))
            spent_s = spent if commit else 1e-6
            done = [replace(shard, commit_s=spent_s) for shard in done]
            end_s = max(shard.finished_s for shard in done)
            samples = device_samples(recipe, list(GPUS), end_s)
            made = telemetry_of(
                done, samples, host_samples(end_s), (), origin_s=ORIGIN_S, started=STARTED
            )
            told = write_telemetry(run.telemetry, made, n_reads=300, wall_s=end_s - ORIGIN_S)
            write_json(run.record, {"spec": {"commit": commit}, "fingerprints": {}})
            measured = read_telemetry(told.with_suffix(".h5"))
            span_s = committed_span_s(measured.batches, measured.shards)
            rates[commit] = (float(measured.batches.tokens.sum()) / span_s, span_s)
        pairs.append(
            OverheadPair(
                with_run=f"overhead/{number}-on",
                without_run=f"overhead/{number}-off",
                with_tokens_per_s=rates[True][0],
                without_tokens_per_s=rates[False][0],
                seconds=min(rates[True][1], rates[False][1]),
                restarts=restarts,
            )
        )
    write(
        out / OVERHEAD,
        OverheadFile(job="0", devices=GPUS, shards=6, shard_tokens=262_144, pairs=tuple(pairs)),
    )


@pytest.fixture
def production(tmp_path: Path) -> Profile:
    profile = load_profile("production-6m").model_copy(
        update={"min_reads": 1, "target_reads": None}
    )
    return build(tmp_path, Recipe(shards=4), profile)


def overhead_of(out: Path, profile: Profile) -> tuple[str, float | None, str]:
    (check,) = [c for c in build_report(out, profile).checks if c.id == "checkpoint_overhead"]
    return check.verdict, check.value, check.reason


def test_cheap_commits_pass_on_the_median_of_the_pairs(tmp_path: Path, production: Profile) -> None:
    pairs_of_runs(tmp_path)
    verdict, value, _ = overhead_of(tmp_path, production)
    assert verdict == "pass"
    assert value == pytest.approx(
        100 * 0.25 / (18 + 0.25), rel=1e-3
    )  # three shards of 6 s a device, then the commit
    assert "Checkpoint overhead:" in render(build_report(tmp_path, production))["report.txt"]


def test_dear_commits_fail_and_say_what_to_try(tmp_path: Path, production: Profile) -> None:
    pairs_of_runs(tmp_path, (3.0, 4.0, 5.0))
    verdict, _, reason = overhead_of(tmp_path, production)
    assert verdict == "fail"
    assert "shard_tokens above 262,144" in reason


@pytest.mark.parametrize(("commit_s", "restarts"), [((0.2, 0.25), 0), ((0.2, 0.25, 0.3), 1)])
def test_too_few_or_disturbed_pairs_are_not_run(
    tmp_path: Path, production: Profile, commit_s: tuple[float, ...], restarts: int
) -> None:
    pairs_of_runs(tmp_path, commit_s, restarts)
    verdict, _, reason = overhead_of(tmp_path, production)
    assert verdict == "not run"
    assert "undisturbed pairs" in reason


def test_runs_too_short_to_tell_are_not_run(tmp_path: Path, production: Profile) -> None:
    pairs_of_runs(tmp_path)
    path = tmp_path / "checkpoint_overhead.json"
    edit_json(path, lambda body: [pair.update(seconds=1.5) for pair in body["pairs"]])
    verdict, value, reason = overhead_of(tmp_path, production)
    assert verdict == "not run"
    assert value is not None
    assert "a run took 1.5 s" in reason
    assert len(overhead_differences(tmp_path)) == 3, "the seconds are computed again too"


def overhead_differences(out: Path) -> list[str]:
    found = Verification()
    verify_overhead(found, RawFolder(out))
    return found.differences


def test_the_pairs_are_computed_again_by_verify(tmp_path: Path, production: Profile) -> None:
    pairs_of_runs(tmp_path)
    assert overhead_differences(tmp_path) == []
    edit_json(
        tmp_path / "checkpoint_overhead.json",
        lambda body: body["pairs"][1].update(with_tokens_per_s=9e9),
    )
    write_report(tmp_path, production)
    assert any(
        "2-on: tokens/s: says 9000000000.0" in line for line in verify_report(tmp_path).differences
    )


def test_a_side_that_is_not_what_it_says_is_named(tmp_path: Path) -> None:
    pairs_of_runs(tmp_path)
    edit_json(
        tmp_path / "overhead" / "3-off" / "run.json", lambda body: body["spec"].update(commit=True)
    )
    (line,) = overhead_differences(tmp_path)
    assert (
        line
        == "checkpoint_overhead.json: overhead/3-off: commits: says false, the raw files give true"
    )


def test_a_file_of_another_kind_is_a_problem_and_no_figure(
    tmp_path: Path, production: Profile
) -> None:
    write_json(tmp_path / "checkpoint_overhead.json", {"with_tokens_per_s": 1.0})
    report = build_report(tmp_path, production)
    assert report.overhead is None
    assert any("checkpoint_overhead.json" in warning for warning in report.warnings)


# --- reads -----------------------------------------------------------------------------------------------------------


def test_fates_and_remarks_are_counted_in_reads_tsv(copied: tuple[Path, Profile]) -> None:
    out, profile = copied
    table = out / "devices-2" / "reads.tsv"
    lines = table.read_text(encoding="utf-8").splitlines()
    lines[1] += (
        "short_for_model,duplicate_of=odd,ambiguous,id"  # the id holds commas, and words that are remarks
    )
    lines[2] += "ambiguous"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    edit_json(out / "run.json", lambda body: body.update(staging={"skipped": 1}))
    report = build_report(out, profile)
    found = report.accounting
    assert found is not None
    assert found.flags == {"short_for_model": 1, "ambiguous": 1, "duplicate_of": 1}
    assert found.adds_up
    assert sum(found.fates.values()) == found.reads == 300
    assert found.staging.skipped == 1
    assert found.staging.ignored_files is None
    assert [
        w for w in report.warnings if "skipped.tsv" in w or "the id of an earlier read" in w
    ] == list(report.warnings)
    forms = render(report)
    for form in ("report.md", "report.html"):
        for words in (
            "reads: duplicate_of",
            "records skipped",
            "reads that came in",
            "not recorded",
        ):
            assert words in forms[form]


def test_counts_of_staging_are_taken_from_the_record(copied: tuple[Path, Profile]) -> None:
    out, profile = copied
    staging = {
        "skipped": 7,
        "ignored_files": ["a", "b"],
        "warnings": ["x.fa: 7 broken records left out"],
    }
    edit_json(out / "run.json", lambda body: body.update(staging=staging))
    report = build_report(out, profile)
    assert report.accounting is not None
    assert (report.accounting.staging.skipped, report.accounting.staging.ignored_files) == (
        7,
        ("a", "b"),
    )
    assert report.warnings == ("Input: x.fa: 7 broken records left out.",)


def test_reads_that_do_not_add_up_are_a_warning(copied: tuple[Path, Profile]) -> None:
    out, profile = copied
    table = out / "devices-2" / "reads.tsv"
    table.write_text(
        "\n".join(table.read_text(encoding="utf-8").splitlines()[:-1]) + "\n", encoding="utf-8"
    )
    report = build_report(out, profile)
    assert report.accounting is not None
    assert not report.accounting.adds_up
    assert any("reads.tsv lists 299" in warning for warning in report.warnings)
    assert "does NOT add up" in further_text(report)


def test_how_the_run_went_is_warned_of(copied: tuple[Path, Profile]) -> None:
    out, profile = copied
    facts = {
        "rows_set_aside": 2,
        "restarts": 1,
        "damaged": ["shard 3"],
        "reduced_budgets": {"4": 2},
    }
    edit_json(out / "devices-2" / "summary.json", lambda body: body.update(facts))
    warnings = "\n".join(build_report(out, profile).warnings)
    for words in (
        "or were not finite (failed.tsv): 2",
        "started again: 1",
        "damaged and computed again: 1",
        "device memory: 1",
    ):
        assert words in warnings


def test_rows_repeated_in_fp16_are_said_beside_the_rates_that_they_lower(
    copied: tuple[Path, Profile],
) -> None:
    out, profile = copied
    assert "in fp16" not in render(build_report(out, profile))["report.md"]
    edit_json(out / "devices-2" / "summary.json", lambda body: body.update(rows_repeated=39_977))
    assert "Repeated in fp16: 39,977 sequences" in render(build_report(out, profile))["report.md"]


# --- approval --------------------------------------------------------------------------------------------------------

ANSWER = {
    "schema_version": 1,
    "when": "2026-03-02T09:00:00+00:00",
    "verdict": "approved",
    "reviewer": "R. Viewer",
    "note": "go\n<b>on</b>",
    "all_criteria_met": "no",
    "target_realistic": "yes",
}


def test_the_answer_is_shown_and_changes_no_figure(copied: tuple[Path, Profile]) -> None:
    out, _ = copied
    write_json(out / "report" / "approval.json", ANSWER)
    found = verify_report(out)
    assert found.ok, "an answer is no difference"
    assert any("a reviewer has answered" in line for line in found.remarks)
    shown = rerender(out)
    assert shown.approval is not None
    assert (shown.approval.all_criteria_met, shown.approval.esm2_still_bottleneck) == (
        "no",
        "not answered",
    )
    page = (out / "report" / "report.html").read_text(encoding="utf-8")
    assert "APPROVED" in page
    assert "&lt;b&gt;on&lt;/b&gt;" in page
    assert "R. Viewer" in (out / "report" / "report.md").read_text(encoding="utf-8")
    again = verify_report(out)
    assert again.ok
    assert not any("a reviewer has answered" in line for line in again.remarks)


def test_a_changed_or_removed_answer_is_a_difference(copied: tuple[Path, Profile]) -> None:
    out, _ = copied
    answer = out / "report" / "approval.json"
    write_json(answer, {**ANSWER, "verdict": "rejected"})
    rerender(out)
    write_json(answer, ANSWER)
    assert any(line.startswith("approval.verdict") for line in verify_report(out).differences)
    answer.unlink()
    assert any(line.startswith("approval") for line in verify_report(out).differences)


def test_an_answer_older_than_the_figures_says_so(copied: tuple[Path, Profile]) -> None:
    out, _ = copied
    write_json(out / "report" / "approval.json", {**ANSWER, "when": "2026-02-01T00:00:00+00:00"})
    assert rerender(out).approval is not None
    assert "the answer is older than these figures" in (out / "report" / "report.txt").read_text(
        encoding="utf-8"
    )
    assert verify_report(out).ok


def test_an_answer_that_was_asked_for_is_pending(copied: tuple[Path, Profile]) -> None:
    out, profile = copied
    assert build_report(out, profile).approval is None
    edit_json(out / "run.json", lambda body: body["spec"].update(approval=True))
    report = write_report(out, profile)
    assert report.approval is not None
    assert (report.approval.verdict, report.approval.reviewer) == ("pending", None)
    write_json(out / "report" / "approval.json", ANSWER)
    assert verify_report(out).ok


def test_an_answer_without_a_verdict_is_a_problem(copied: tuple[Path, Profile]) -> None:
    out, profile = copied
    write_json(out / "report" / "approval.json", {**ANSWER, "verdict": "perhaps"})
    report = build_report(out, profile)
    assert report.approval is None
    assert any("approval.json: verdict: input should be" in warning for warning in report.warnings)


# --- stages over time ------------------------------------------------------------------------------------------------


def test_the_gantt_says_when_each_stage_ran(copied: tuple[Path, Profile]) -> None:
    bars = {bar.label: bar for bar in build_report(*copied).charts.gantt}
    assert (bars["Six-Frame Translation"].start_s, bars["Six-Frame Translation"].end_s) == (
        -3.0,
        0.0,
    )
    assert bars["Sequence Chunking"].start_s == -5.0
    assert bars["ESM-2 on device 2"].start_s == pytest.approx(2.0 + 0.2 * 6)
    last = max(bar.end_s for label, bar in bars.items() if "device" in label)
    assert bars["Model Prediction"].start_s >= last
    assert bars["Consensus Scoring"].start_s == bars["Model Prediction"].end_s


# --- in the UI -------------------------------------------------------------------------------------------------------


def test_the_tables_of_the_ui(tmp_path: Path, production: Profile) -> None:
    pairs_of_runs(tmp_path)
    found = read(tmp_path / OVERHEAD, OverheadFile)
    rows = overhead_rows(found.pairs)
    assert [row["pair"] for row in rows] == [1, 2, 3]
    assert all(str(row["overhead"]).endswith(" %") for row in rows)
    report = build_report(tmp_path, production)
    counted = report_fate_rows(report)
    assert report.accounting is not None
    by_name = {row["What"]: row["Count"] for row in counted}
    assert by_name["sum of the fates"] == report.accounting.reads
    assert by_name["records skipped"] == "not recorded"
    doubtful = report.accounting.model_copy(update={"adds_up": False})
    doubted = report_fate_rows(report.model_copy(update={"accounting": doubtful}))
    assert any("does NOT add up" in str(row["What"]) for row in doubted)
    assert report_fate_rows(report.model_copy(update={"accounting": None})) == []


def test_remarks_of_staging_stand_below_the_fates() -> None:
    summary = RunSummary(n_reads=4, fates={"viral": 1, "others": 3})
    rows = fate_rows(summary, {"reads": 4, "ambiguous": 2, "skipped": 0})
    assert [row["fate"] for row in rows] == [
        "viral",
        "others",
        "**all reads**",
        "remark: ambiguous",
        "remark: skipped",
    ]
    assert rows[3] == {"fate": "remark: ambiguous", "reads": 2, "share": "50.0 %"}
