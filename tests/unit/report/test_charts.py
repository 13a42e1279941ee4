"""The charts of the report: their series, and drawings that hold no markup."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from virnuc_core.profiles import Profile
from virnuc_core.report.build import build_report
from virnuc_core.report.charts import all_charts
from virnuc_core.report.model import Report

from .validate_directory import Recipe, build


def test_the_gantt_says_when_each_stage_ran(copied: tuple[Path, Profile]) -> None:
    bars = {bar.label: bar for bar in build_report(*copied).charts.gantt}
    assert (bars["Six-Frame Translation"].start_s, bars["Six-Frame Translation"].end_s) == (
        -3.0,
        0.0,
    )
    assert bars["Sequence Chunking"].start_s == -5.0
    assert bars["ESM-2 on device 2"].start_s == pytest.approx(2.0 + 0.2 * 6)
    last_end_s = max(bar.end_s for label, bar in bars.items() if "device" in label)
    assert bars["Model Prediction"].start_s >= last_end_s
    assert bars["Consensus Scoring"].start_s == bars["Model Prediction"].end_s


def test_lengths_of_reads_are_counted_in_bins_of_whole_bases(judged: Report) -> None:
    lengths = judged.charts.read_lengths
    assert lengths is not None
    assert sum(lengths.counts) == 300
    widths = np.diff(lengths.edges)
    assert set(widths) == {widths[0]}
    assert widths[0] == int(widths[0])
    assert len(lengths.counts) <= 30


def test_a_chart_is_drawn_for_everything_that_was_measured(judged: Report) -> None:
    titles = [chart.title for chart in all_charts(judged)]
    assert titles == [
        "Stages over time",
        "Utilisation",
        "Throughput",
        "Scaling",
        "Queue states",
        "Read lengths",
        "Scores",
    ]


def test_what_was_not_measured_has_no_chart(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(gpu=None, devices=1))
    titles = [chart.title for chart in all_charts(build_report(tmp_path, profile))]
    assert "Scaling" not in titles, "there was one device"
    assert "History" not in titles, "there was no earlier run"


def test_a_line_of_many_samples_is_thinned_to_their_means(judged: Report) -> None:
    gpu, cpu = judged.charts.utilisation[0], judged.charts.utilisation[-1]
    assert cpu.label == "CPU"
    assert len(gpu.x) <= 240
    values = [value for value in gpu.y if value is not None]
    assert np.mean(values) == pytest.approx(92.0, abs=0.5)
