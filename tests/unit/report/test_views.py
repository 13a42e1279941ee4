"""The sections of the report: every form shows their cells, and no number crosses its target."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
from jinja2 import UndefinedError, meta

from virnuc_core.profiles import Profile, Target
from virnuc_core.report.build import read_report
from virnuc_core.report.filling import environment, fill_template
from virnuc_core.report.model import Report
from virnuc_core.report.render import render, report_text
from virnuc_core.report.sections import Table
from virnuc_core.report.text import Mark, Number, cell, markdown_cell, number
from virnuc_core.report.views.devices import utilisation_section, windows_section
from virnuc_core.report.views.full_report import report_sections
from virnuc_core.report.views.speed import scaling_rows, stage_time_rows
from virnuc_core.telemetry.starvation import Starvation, StarvationVerdict
from virnuc_core.telemetry.tables import OVERLAPPED, OVERLAPPED_TITLE


@pytest.fixture(scope="module")
def report(finished: tuple[Path, Profile]) -> Report:
    return read_report(finished[0] / "report" / "report.json")


def test_every_cell_stands_on_the_page_and_in_the_markdown(report: Report) -> None:
    forms = render(report)
    page = unescape(re.sub(r"<[^>]+>", "\n", forms["report.html"]))
    for section in report_sections(report):
        assert f"## {section.title}" in forms["report.md"]
        for line in section.sentences:
            assert line in page
            assert markdown_cell(line) in forms["report.md"]
        for table in section.tables:
            for row in table.rows:
                assert list(row) == table.columns
                assert f"| {' | '.join(map(markdown_cell, row.values()))} |" in forms["report.md"]
                for value in row.values():
                    text = value.label if isinstance(value, Mark) else cell(value)
                    assert text in page


def test_a_column_of_figures_is_set_to_the_right() -> None:
    table = Table([{"n": 1, "t": "a", "x": None}, {"n": 2, "t": "b", "x": Number("1.0")}])
    assert table.numeric_columns == {"n", "x"}


def test_scaling_that_misses_its_target_is_not_shown_as_meeting_it(report: Report) -> None:
    alone_figure, figure = report.scaling
    assert figure.judged is not None
    judgement = {"value": 1.8996, "target": Target(op=">=", value=1.9), "verdict": "fail"}
    criterion = figure.judged.model_copy(update=judgement)
    values = {"speedup": 1.8996, "efficiency": 0.9498, "judged": criterion}
    missed_figure = figure.model_copy(update=values)
    row = scaling_rows(report.model_copy(update={"scaling": (alone_figure, missed_figure)}))[1]
    assert row["Speedup"] == "1.8996x"
    assert row["Efficiency"] == "94.98%"
    assert str(row["Verdict"]) == "[FAIL]"


def test_a_baseline_without_frames_has_no_agreement_of_frames(report: Report) -> None:
    comparisons = [pair.model_copy(update={"frames": None}) for pair in report.comparisons]
    text = report_text(report.model_copy(update={"comparisons": tuple(comparisons)}))
    assert "Per-frame label agreement: n/a" in text


def test_what_was_not_measured_is_no_number() -> None:
    assert number(None) is None
    assert cell(None) == "n/a"
    assert cell(number(0.0)) == "0.0"


def test_the_page_follows_a_dark_setting(report: Report) -> None:
    assert "@media (prefers-color-scheme: dark)" in render(report)["report.html"]


def test_a_value_that_a_template_is_not_given_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'overall' is undefined"):
        fill_template("body.md.j2", title="a title")


def test_no_template_reads_the_report_itself() -> None:
    """Templates get texts and records of texts, so that mypy sees every use of a report's field."""
    jinja = environment()
    assert jinja.loader is not None
    for name in jinja.list_templates(extensions=["j2"]):
        source, _, _ = jinja.loader.get_source(jinja, name)
        names = meta.find_undeclared_variables(jinja.parse(source))
        assert not names & {"report", "run", "telemetry", "profile", "training"}, name


def test_the_report_has_a_table_of_windows_that_add_up_to_the_run(report: Report) -> None:
    """The batches and starved batches of all windows are those of the run."""
    assert report.run is not None
    assert report.run.telemetry is not None
    telemetry = report.run.telemetry
    long_run = telemetry.model_copy(update={"windows": telemetry.windows * 3})
    section = windows_section(long_run)
    assert section.title == "Windows"
    assert len(section.rows) == 3 * len(telemetry.windows)
    assert sum(window.batches for window in telemetry.windows) == telemetry.batches
    assert sum(window.tokens for window in telemetry.windows) == telemetry.tokens
    assert {"Tokens/s", "Packing", "Starved", "Lowest GPU %", "CPU %"} <= set(section.rows[0])
    assert cell(section.rows[0]["CPU %"]) == "35.0", "as the host was sampled"
    assert windows_section(telemetry.model_copy(update={"windows": ()})).is_empty


def test_no_time_of_a_stage_is_negative(report: Report) -> None:
    """Time that is in two rows is told as such. A minus sign before it looks like an error."""
    run = report.runs[0]
    stages = run.stages | {OVERLAPPED: 12.0}
    rows = stage_time_rows([run.model_copy(update={"stages": stages})])
    [time] = [row[run.label] for row in rows if row["Stage"] == OVERLAPPED_TITLE]
    assert str(time).startswith("12s (")
    for row in rows:
        assert not str(row[run.label]).startswith("-"), row


def test_a_stall_is_said_above_the_windows(report: Report) -> None:
    assert report.run is not None
    assert report.run.telemetry is not None
    telemetry = report.run.telemetry
    window = telemetry.windows[0].model_copy(update={"start_s": 0.0, "end_s": 10.0})
    stall = window.model_copy(update={"start_s": 10.0, "end_s": 95.0, "batches": 0, "tokens": 0})
    section = windows_section(telemetry.model_copy(update={"windows": (window, stall, window)}))
    assert "No batch was launched for 85.0 s." in section.sentences[0]


@pytest.mark.parametrize(
    ("share", "core_share", "verdict", "advice"),
    [
        (0.0, 0.0, "not starved", "Nothing to do"),
        (0.5, 0.4, "CPU is the bottleneck", "more cores"),
        (0.5, 0.1, "waits for other things", "commits"),
    ],
)
def test_who_waited_for_whom_is_said_beside_the_utilisation(
    report: Report, share: float, core_share: float, verdict: StarvationVerdict, advice: str
) -> None:
    assert report.run is not None
    assert report.run.telemetry is not None
    starvation = Starvation(
        moments=100,
        idle_share=share,
        idle_cpu_busy_share=0.0,
        idle_core_busy_share=core_share,
        verdict=verdict,
    )
    telemetry = report.run.telemetry.model_copy(update={"starvation": starvation})
    section = utilisation_section(telemetry, report.criterion("gpu_utilisation"))
    sentence = section.sentences[-1]
    assert f"GPU and CPU on one clock: {verdict}." in sentence
    assert advice in sentence
