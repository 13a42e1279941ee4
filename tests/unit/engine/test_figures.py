"""Figures of a real run agree with each other, with what was embedded, and with the clock."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from virnuc_core.config import ClassifySpec, Devices
from virnuc_core.engine.embedding import RunMonitor
from virnuc_core.engine.shards import read_scores
from virnuc_core.pipeline import prepare
from virnuc_core.profiles import load_profile
from virnuc_core.reads.stage import StageSummary
from virnuc_core.reads.store import OrfStore
from virnuc_core.report.metrics import run_metrics
from virnuc_core.report.model import RunMetrics
from virnuc_core.report.raw_files import RawFolder
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunSummary, read, read_record
from virnuc_core.telemetry.journal import journal
from virnuc_core.telemetry.log import Telemetry, latest, read_telemetry
from virnuc_core.telemetry.statistics import batch_metrics, windows
from virnuc_core.telemetry.tables import OVERLAPPED, HostSample

from .runs import ONE_CORE, PAUSE_S, SMALL, classify_store

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture(scope="module")
def measured(reference: Path) -> Telemetry:
    return read_telemetry(latest(reference))


@pytest.fixture(scope="module")
def told(reference: Path) -> dict:
    """The summary that the telemetry's JSON holds."""
    summary: dict = json.loads(latest(reference).with_suffix(".json").read_text())["summary"]
    return summary


@pytest.fixture(scope="module")
def run(reference: Path) -> RunMetrics:
    metrics = run_metrics(RawFolder(reference.parent), reference.name, load_profile("ci-smoke"))
    assert metrics is not None
    return metrics


def test_a_sequence_counts_once_though_two_encoders_embed_it(
    measured: Telemetry, staged: tuple[Path, StageSummary]
) -> None:
    uniques, totals = OrfStore.open(staged[0]).n_uniques, batch_metrics(measured.batches)
    assert totals.rows == uniques
    assert totals.rows_per_s == pytest.approx(uniques / totals.span_s)
    assert (
        sum(window.rows for window in windows(measured.batches, 0.5, measured.origin_s)) == uniques
    )


def test_the_rates_have_the_names_that_other_tools_ask_for(measured: Telemetry, told: dict) -> None:
    rates = measured.get_throughput()
    assert {"tokens_per_sec", "sequences_per_sec"} <= rates.keys()
    assert rates["sequences_per_sec"] == batch_metrics(measured.batches).rows_per_s
    assert told["throughput"] == pytest.approx(rates)


def test_the_first_and_the_last_window_are_divided_by_their_own_length(measured: Telemetry) -> None:
    """A run of one window has the rate of the whole: not that of the window's nominal length."""
    (window,) = windows(measured.batches, 3600.0, measured.origin_s)
    totals = batch_metrics(measured.batches)
    assert window.end_s - window.start_s == pytest.approx(totals.span_s)
    assert window.tokens_per_s == pytest.approx(totals.tokens_per_s)


def test_sequences_per_hour_are_one_number(reference: Path, told: dict, run: RunMetrics) -> None:
    summary = read(RunDir(reference).summary, RunSummary)
    assert summary.n_reads
    assert summary.total_s
    assert summary.sequences_per_hour == pytest.approx(3600 * summary.n_reads / summary.total_s)
    assert told["sequences_per_hour"] == run.sequences_per_hour == summary.sequences_per_hour


def test_reads_per_hour_are_reported_for_uninterrupted_runs_only(reference: Path) -> None:
    summary = read(RunDir(reference).summary, RunSummary)
    doubled = {"attempts": summary.attempts * 2}
    for change in ({"stopped_at_limit": True}, {"resumed": True}, {"shards_reused": 1}, doubled):
        assert summary.model_copy(update=change).sequences_per_hour is None


def test_encoder_rates_count_what_was_embedded(
    run: RunMetrics, staged: tuple[Path, StageSummary]
) -> None:
    assert run.telemetry is not None
    uniques = OrfStore.open(staged[0]).n_uniques
    assert [encoder.rows for encoder in run.telemetry.encoders] == [uniques, uniques]
    for encoder in run.telemetry.encoders:  # of a device at work, as its ceiling is
        assert encoder.device_s


def test_the_host_is_in_the_metrics(run: RunMetrics) -> None:
    assert run.telemetry is not None
    assert run.telemetry.host.rss_peak_bytes
    assert run.telemetry.host.cpu_percent_avg is not None
    assert [busy.allocated_peak_bytes for busy in run.telemetry.busy] == [None], (
        "a CPU has no allocator of torch's"
    )


def test_worker_logs_are_searched_for_errors(
    tmp_path: Path, reference: Path, staged: tuple[Path, StageSummary], tiny_models: Path
) -> None:
    summary = read(RunDir(reference).summary, RunSummary)
    assert (summary.log_errors, summary.warnings) == (0, ())
    root = tmp_path / "devices-1"
    shutil.copytree(reference, root)
    (root / "summary.json").unlink()
    (root / "logs").mkdir(exist_ok=True)
    lines = (
        "all is well, 0 errors",
        "Traceback (most recent call last):",
        "RuntimeError: CUDA error: gone",
        "bye",
    )
    (root / "logs" / "worker-cpu-core-0.log").write_text("\n".join(lines))
    second_summary = classify_store(root, staged, tiny_models, Devices.parse("cpu:1"))
    assert second_summary.log_errors == 2
    metrics = run_metrics(RawFolder(tmp_path), root.name, load_profile("ci-smoke"))
    assert metrics is not None
    assert metrics.warnings == (
        "2 lines of the workers' logs tell of errors; "
        "the first: worker-cpu-core-0.log: Traceback (most recent call last):",
    )


def test_the_rows_of_the_stage_table_sum_to_the_whole(reference: Path, run: RunMetrics) -> None:
    """Less what overlaps, within 1 %; start-up and shutdown are among them, and so is each of their parts."""
    summary = read(RunDir(reference).summary, RunSummary)
    assert summary.total_s
    stage_seconds = {
        name: seconds for name, seconds in summary.stages.items() if seconds is not None
    }
    sum_of_stages_s = sum(stage_seconds.values()) - 2 * stage_seconds[OVERLAPPED]
    assert sum_of_stages_s == pytest.approx(summary.total_s, rel=0.01, abs=PAUSE_S)
    assert all(
        stage_seconds[f"Start-up: {part}"] > 0 for part in ("import", "weights", "first batch")
    )
    assert stage_seconds["Shutdown"] > 0
    assert stage_seconds[OVERLAPPED] < 0.01, "nothing was loaded while the reads were staged"
    assert {**run.stages} == summary.stages


def test_measurements_of_a_killed_attempt_are_counted_once(
    tmp_path: Path, staged: tuple[Path, StageSummary], tiny_models: Path
) -> None:
    """Also where the attempt after it was killed before it measured anything."""
    run, spec = (
        RunDir(tmp_path / "run"),
        ClassifySpec(models=tiny_models, devices=Devices.parse("cpu:1"), engine=SMALL),
    )
    prepare(run, staged[0], spec)
    with journal(run.journal, 100.0, datetime(2026, 3, 1, tzinfo=UTC), ["cpu-core-0"]) as note:
        note(HostSample(107.0, 50.0, 1 << 20))
        note("worker on cpu-core-0 ended")
    with run.journal.open("ab") as file:
        file.write(b'{"device": "cpu-co')  # cut off by the kill
    for _ in range(2):
        prepare(run, staged[0], spec)
    first_attempt, second, third = read_record(run).attempts
    assert (first_attempt.wall_s, first_attempt.deaths, first_attempt.shards) == (
        7.0,
        ("worker on cpu-core-0 ended",),
        0,
    )
    assert [path.name for path in run.telemetry.glob("*.json")] == [first_attempt.telemetry]
    assert second.wall_s is None
    assert third.wall_s is None


def test_the_live_figures_end_with_those_of_the_results(
    tmp_path: Path, staged: tuple[Path, StageSummary], tiny_models: Path, reference: Path
) -> None:
    """The count of viral sequences is that of the stored scores, and all sequences are done."""
    path = tmp_path / "live.prom"
    root = tmp_path / "run"
    lines: list[str] = []
    monitor = RunMonitor(on_progress=lambda _: None, on_status=lines.append)
    scores, _ = read_scores(RunDir(reference))
    threshold = float(np.median(scores[:, 1]))  # about half of the sequences are viral
    n_viral = int((scores[:, 1] >= threshold).sum())
    options = {"metrics_file": path, "monitor": monitor, "threshold": threshold}
    classify_store(root, staged, tiny_models, ONE_CORE, **options)
    text = path.read_text()
    assert f'virnuc_sequences_done{{run="live"}} {len(scores)}\n' in text
    assert f'virnuc_sequences_viral{{run="live"}} {n_viral}\n' in text
    assert 'virnuc_state{run="live",state="completed"} 1\n' in text
    assert f"| {n_viral:,} viral sequences so far |" in lines[-1]
    assert f"{len(scores):,} of {len(scores):,} sequences (100.0 %)" in lines[-1]


def test_a_run_without_verdicts_calls_nothing_viral(
    tmp_path: Path, staged: tuple[Path, StageSummary], tiny_models: Path
) -> None:
    """A training embeds with a classifier of random weights."""
    lines: list[str] = []
    monitor = RunMonitor(on_progress=lambda _: None, on_status=lines.append, has_verdicts=False)
    classify_store(tmp_path / "run", staged, tiny_models, ONE_CORE, monitor=monitor)
    assert "(100.0 %)" in lines[-1]
    assert not any("viral" in line for line in lines)
