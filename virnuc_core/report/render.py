"""Write a report in all its forms.

`render` is a pure function: the same `Report` gives the same bytes, whenever and wherever. What the
forms show is decided by `views` and `printed`. The templates hold only the layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from virnuc_core.checked_files import with_own_digest
from virnuc_core.report.benchmark import (
    BenchmarkResults,
    DeviceResult,
    StageResult,
    benchmark_json,
    benchmark_name,
    benchmark_title,
)
from virnuc_core.report.charts import GENERATOR, all_charts
from virnuc_core.report.filling import Tile, fill_template, sections_markdown
from virnuc_core.report.model import Criterion, Report, ScalingMetrics
from virnuc_core.report.printed import (
    criteria_block,
    further_block,
    overall_verdict,
    summary_block,
    verdict_counts,
)
from virnuc_core.report.sections import Chart, Row, Section
from virnuc_core.report.text import (
    Mark,
    cell,
    clock,
    format_value,
    gibibytes,
    number,
    percent,
    target_text,
)
from virnuc_core.report.views.criteria import CRITERIA_TITLE, approval_section
from virnuc_core.report.views.full_report import report_sections
from virnuc_core.report.views.speed import (
    efficiency_rows,
    efficiency_text,
    scaling_rows,
    speedup_text,
)

REPORT_JSON: Final = "report.json"
SHORT_COMMIT: Final = 12  # characters


def render(report: Report) -> dict[str, str]:
    """Return the content of every form of a report, by file name."""
    benchmark = benchmark_name(report.provenance.created)
    return {
        REPORT_JSON: with_own_digest(report.model_dump_json(indent=1)),
        "report.txt": report_text(report),
        "report.md": report_markdown(report),
        "report.html": report_html(report),
        f"{benchmark}.md": benchmark_markdown(report),
        f"{benchmark}.json": benchmark_json(report),
    }


# --- Text -----------------------------------------------------------------------------------------


def report_text(report: Report) -> str:
    """Return the printed report: the criteria, and the further lines after them."""
    return criteria_text(report) + further_text(report)


def criteria_text(report: Report) -> str:
    """Return the first part of the printed report. Its layout is that of VirNucPro's report."""
    return fill_template("criteria.txt.j2", block=criteria_block(report))


def further_text(report: Report) -> str:
    """Return the second part of the printed report: facts, checks and warnings."""
    return fill_template("beside.txt.j2", block=further_block(report))


def summary_text(report: Report) -> str:
    """Return the performance summary."""
    return fill_template("summary.txt.j2", block=summary_block(report))


# --- Markdown -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrontMatter:
    """The front matter of `report.md`: facts for other programs."""

    schema_version: int
    profile: str
    created: str
    commit: str
    devices: str
    criteria_met: int
    criteria: int
    outcome: str
    warnings: int


def report_markdown(report: Report) -> str:
    """Return the content of `report.md`: front matter, then the report in Markdown."""
    run = report.run
    settings = FrontMatter(
        schema_version=report.schema_version,
        profile=report.profile.name,
        created=report.provenance.created,
        commit=report.provenance.git_commit or "unknown",
        devices="none" if run is None else run.label,
        criteria_met=report.num_met,
        criteria=len(report.requested),
        outcome=report.outcome,
        warnings=len(report.warnings),
    )
    return fill_template("report.md.j2", settings=settings, body=report_body(report))


def report_body(report: Report) -> str:
    """Return the report in Markdown without the front matter."""
    return fill_template(
        "body.md.j2",
        title=report_title(report),
        overall=overall_verdict(report),
        counts=verdict_counts(report),
        criteria=criteria_text(report),
        sections=sections_markdown(report_sections(report)),
        summary=summary_text(report),
    )


def report_title(report: Report) -> str:
    """Return the title of a report, in which the title of the profile is marked as such.

    A profile may be named after other devices or other numbers of reads than those of the run.
    """
    return f"Validation by the criteria of “{report.profile.title}”"


def benchmark_markdown(report: Report) -> str:
    """Return `benchmark_<time>.md`: the main results as tables.

    The first three tables are those of VirNucPro's benchmark reports, with their titles, columns
    and numbers of decimals. Then come verdicts, bottlenecks with advice, and costs.
    """
    results = BenchmarkResults.of(report)
    utilisation = [criterion for criterion in report.criteria if criterion.perf_id == "PERF-02"]
    return fill_template(
        "benchmark.md.j2",
        title=benchmark_title(report.provenance.created),
        scaling=[_scaling_row(figure) for figure in report.scaling],
        devices=[_device_row(device, use) for device, use in results.gpu_stats.items()],
        stages=[_stage_row(stage) for stage in results.throughput.values()],
        verdicts=_scaling_verdict_rows(report),
        bottlenecks=_bottleneck_rows(results),
        advice=_advice_lines(results),
        utilisation=[_criterion_row(criterion) for criterion in utilisation],
        efficiency=efficiency_rows(report),
    )


def _scaling_row(figure: ScalingMetrics) -> Row:
    """Return the table row on one number of devices."""
    return {
        "GPUs": figure.num_gpus,
        "Time (s)": _fixed(figure.time_seconds, 1),
        "Speedup": speedup_text(figure),
        "Efficiency": efficiency_text(figure),
    }


def _device_row(device: str, use: DeviceResult) -> Row:
    """Return the table row on the use of one device."""
    return {
        "GPU": device,
        "Avg Util %": _fixed(use.gpu_util_avg, 1, "%"),
        "Peak Mem (GB)": cell(gibibytes(use.mem_used_peak)),
    }


def _stage_row(stage: StageResult) -> Row:
    """Return the table row on the speed of one stage."""
    return {
        "Stage": stage.stage,
        "Seq/sec": _fixed(stage.throughput_seq_per_sec, 1),
        "Time (s)": _fixed(stage.total_time_seconds, 1),
    }


def _fixed(value: float | None, digits: int, unit: str = "") -> str:
    """Return a number with so many decimals and without separators of thousands, and its unit.

    Without a value the text is `n/a`.
    """
    if value is None:
        return cell(None)
    return f"{value:.{digits}f}{unit}"


def _scaling_verdict_rows(report: Report) -> list[Row]:
    """Return the verdict on the scaling of each number of devices, also of those not measured."""
    columns = ("GPUs", "Speedup", "Efficiency", "Required", "Verdict", "Why")
    # A number of devices that was not measured has no figures, only a verdict and the reason.
    return [{name: row.get(name) for name in columns} for row in scaling_rows(report)]


def _bottleneck_rows(results: BenchmarkResults) -> list[Row]:
    """Return the share of the time and the use of the GPU of each stage, with a mark if it is a
    bottleneck.
    """
    return [
        {
            "Stage": stage.stage,
            "Time": percent(stage.share_of_time, unit="%"),
            "GPU Util": number(stage.gpu_util_avg, 1, "%"),
            "Bottleneck": "yes" if stage.is_bottleneck else "no",
        }
        for stage in results.throughput.values()
    ]


def _advice_lines(results: BenchmarkResults) -> list[str]:
    """Return advice on each bottleneck, and on each loss of time that is worth a person's time."""
    lines = list(results.findings)
    for loss in results.losses:
        if not loss.expected:
            saving = "" if loss.share is None else f", at most {100 * loss.share:.1f} % of the time"
            lines.append(f"{loss.kind} ({loss.detail}{saving}): {loss.advice}.")
    return lines


def _criterion_row(criterion: Criterion) -> Row:
    """Return the table row on a criterion."""
    return {
        "Criterion": criterion.title,
        "Measured": format_value(criterion),
        "Required": target_text(criterion.target, criterion.unit),
        "Verdict": Mark(criterion.verdict),
        "Why": criterion.reason,
    }


def approval_markdown(report: Report, rows: Sequence[Mapping[str, object]]) -> str:
    """Return the text in Markdown that a reviewer reads above the questions.

    Args:
        report: The report to be approved.
        rows: Its criteria, with verdicts as Prefect shows them.
    """
    columns = ("Verdict", "Criterion", "Measured", "Required")
    criteria = [{name: row[name] for name in columns} for row in rows]
    largest_loss = report.losses[0]  # there is always one, perhaps of the kind "unknown"
    return fill_template(
        "approval.md.j2",
        criteria=criteria,
        bottleneck=largest_loss.kind,
        advice=largest_loss.advice,
    )


def answer_markdown(report: Report) -> str:
    """Return the reviewer's answer in Markdown, or an empty text if no answer is required."""
    if report.approval is None:
        return ""
    return sections_markdown([approval_section(report.approval)])


def charts_markdown(charts: list[Chart]) -> str:
    """Return charts in Markdown. They get a white background, because Prefect's UI may be dark."""
    return fill_template("charts.md.j2", charts=charts)


# --- HTML -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReportPage:
    """The texts for the template `report.html.j2`."""

    generator: str
    title: str
    overall: str
    counts: str
    profile: str
    created: str
    commit: str
    devices: str
    verdict_class: str
    tiles: list[Tile]
    first_sections: list[Section]  # before the charts
    charts: list[Chart]
    further_sections: list[Section]
    printed_report: str
    summary: str


def report_html(report: Report) -> str:
    """Return the content of `report.html`, a single page that loads no other files.

    The charts follow the section with the criteria.
    """
    run = report.run
    sections = report_sections(report)
    titles = [section.title for section in sections]
    charts = []
    num_first_sections = 0
    if CRITERIA_TITLE in titles:
        num_first_sections = titles.index(CRITERIA_TITLE) + 1
        charts = all_charts(report)
    verdict_classes = {"passed": "pass", "failed": "fail", "not judged": "none"}
    commit = report.provenance.git_commit or "unknown"
    page = ReportPage(
        generator=GENERATOR,
        title=report_title(report),
        overall=overall_verdict(report),
        counts=verdict_counts(report),
        profile=report.profile.name,
        created=report.provenance.created,
        commit=commit[:SHORT_COMMIT],
        devices="no run" if run is None else run.label,
        verdict_class=verdict_classes[report.outcome],
        tiles=_tiles(report),
        first_sections=sections[:num_first_sections],
        charts=charts,
        further_sections=sections[num_first_sections:],
        printed_report=report_text(report),
        summary=summary_text(report),
    )
    return fill_template("report.html.j2", page=page)


def _tiles(report: Report) -> list[Tile]:
    """Return the large numbers at the top of the page."""
    run = report.run
    tiles = [Tile(f"total time, {run.label}", cell(clock(run.total_s))) for run in report.runs]
    criteria = {
        "scaling": "scaling",
        f"speed-up over {report.baseline_title}": "speedup",
        "consensus agreement": "consensus",
        "GPU utilisation, lowest": "gpu_utilisation",
        "packing efficiency": "packing",
    }
    for words, name in criteria.items():
        tiles.append(Tile(words, format_value(report.criterion(name))))
    num_reads = tokens_per_s = None
    if run is not None:
        num_reads = run.n_reads
        tokens_per_s = None if run.telemetry is None else run.telemetry.tokens_per_s
    tiles.append(Tile("reads", cell(num_reads)))
    tiles.append(Tile("tokens/s", cell(number(tokens_per_s, 0))))
    return tiles
