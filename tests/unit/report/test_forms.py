"""The forms of the report: pure, complete, and nothing from a file or a user becomes markup."""

from __future__ import annotations

import base64
import json
import re
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.damage import edit_json
from virnuc_core.errors import InputError
from virnuc_core.profiles import Profile, load_profile
from virnuc_core.report.benchmark import former_benchmark_name
from virnuc_core.report.build import build_report, read_report, rerender, write_report
from virnuc_core.report.model import Report
from virnuc_core.report.render import render, report_markdown
from virnuc_core.report.text import format_value

from .validate_directory import Recipe, build, digest_of

pytestmark = pytest.mark.usefixtures("telemetry_once")

EVIL = '<script>alert(1)</script>"><img src=x onerror=alert(2)>|`${7*7}`'


class Page(HTMLParser):
    """What a browser would see of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.problems: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(tag)


@pytest.fixture(scope="module")
def report(finished: tuple[Path, Profile]) -> Report:
    return read_report(finished[0] / "report" / "report.json")


def test_the_report_is_a_pure_function_of_its_data(
    finished: tuple[Path, Profile], report: Report
) -> None:
    forms = render(report)
    assert forms == render(Report.model_validate_json(report.model_dump_json()))
    for name, content in forms.items():
        assert (finished[0] / "report" / name).read_text(encoding="utf-8") == content


def test_gathering_twice_gives_the_same(finished: tuple[Path, Profile]) -> None:
    assert build_report(*finished) == build_report(*finished)


def test_rendering_again_needs_the_data_only(copied: tuple[Path, Profile]) -> None:
    folder = copied[0] / "report"
    digest_before = digest_of(folder)
    for path in folder.iterdir():
        if path.name != "report.json":
            path.unlink()
    rerender(copied[0])
    assert digest_of(folder) == digest_before


def test_the_page_is_whole_and_loads_nothing(report: Report) -> None:
    text = render(report)["report.html"]
    page = Page(text)
    assert page.problems == []
    assert page.open == []
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "form"}
    sources = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert len(sources) >= 7
    assert all(
        source is not None and source.startswith("data:image/svg+xml;base64,") for source in sources
    )
    assert not re.search(r"url\(|@import|https?://", text)
    assert all(attributes.get("alt") for tag, attributes in page.tags if tag == "img")
    assert (
        "meta",
        {"name": "viewport", "content": "width=device-width, initial-scale=1"},
    ) in page.tags


def test_the_charts_are_drawings_without_scripts(report: Report) -> None:
    for data in re.findall(r"base64,([A-Za-z0-9+/=]+)", render(report)["report.html"]):
        svg = base64.b64decode(data).decode("utf-8")
        assert svg.startswith("<?xml")
        assert "<script" not in svg


def test_every_figure_of_the_verdict_stands_on_every_form(report: Report) -> None:
    forms = render(report)
    for criterion in report.criteria:
        assert format_value(criterion) in forms["report.html"]
        assert format_value(criterion) in forms["report.md"]
    assert "6 of 7 CRITERIA MET" in forms["report.html"]


def test_names_from_files_never_become_markup(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    edit_json(out_dir / "devices-2" / "run.json", lambda b: b["devices"][0].update(name=EVIL))
    edit_json(
        out_dir / "devices-2" / "summary.json",
        lambda b: b.update(warnings=[EVIL, "two\nlines\x07"]),
    )
    edit_json(
        out_dir / "comparison.json", lambda b: b["comparisons"][0]["frames"].update(examples=[EVIL])
    )
    report = build_report(out_dir, profile.model_copy(update={"title": EVIL}))
    forms = render(report)
    page = Page(forms["report.html"])
    assert page.problems == []
    assert not {tag for tag, _ in page.tags} & {"script"}
    assert not any("onerror" in attributes for _, attributes in page.tags)
    outside_code = re.sub(r"^```$.*?^```$", "", forms["report.md"], flags=re.MULTILINE | re.DOTALL)
    assert "<script" not in outside_code
    assert "\x07" not in forms["report.html"]
    rendered = "".join(
        base64.b64decode(d).decode()
        for d in re.findall(r"base64,([A-Za-z0-9+/=]+)", forms["report.html"])
    )
    assert "<script>alert" not in rendered


def test_a_device_named_in_the_verdict_never_becomes_markup(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    edit_json(out_dir / "devices-2" / "run.json", lambda b: b["devices"][0].update(name=EVIL))
    edit_json(out_dir / "devices-2" / "summary.json", lambda b: b.update(stopped_at_limit=True))
    forms = render(build_report(out_dir, profile))
    assert "not met: time limit on 1x &lt;script&gt;" in forms["report.html"]
    assert not {tag for tag, _ in Page(forms["report.html"]).tags} & {"script"}
    outside_code = re.sub(r"^```$.*?^```$", "", forms["report.md"], flags=re.MULTILINE | re.DOTALL)
    assert "<script" not in outside_code


def test_markdown_tables_keep_their_columns(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    edit_json(
        out_dir / "devices-2" / "run.json",
        lambda b: b["devices"][0].update(name="a|b|c", id="GPU|x"),
    )
    lines = report_markdown(build_report(out_dir, profile)).splitlines()
    width = 0
    for line in lines:
        if not line.startswith("|"):
            width = 0
            continue
        cells = len(re.findall(r"(?<!\\)\|", line))
        assert width in (0, cells), line
        width = cells


def test_front_matter_says_what_the_report_is_of(report: Report) -> None:
    text = report_markdown(report)
    assert text.startswith('---\nschema_version: 5\nprofile: "phase10-1m"\n')
    assert 'criteria_met: 6\ncriteria: 7\noutcome: "failed"\n' in text


def benchmark_files(report: Report) -> tuple[str, str, dict[str, Any]]:
    """Return the common name, the Markdown and the data of the benchmark files of a report."""
    forms = render(report)
    (name,) = [name for name in forms if re.fullmatch(r"benchmark_\w+\.md", name)]
    stem = name.removesuffix(".md")
    return stem, forms[name], json.loads(forms[f"{stem}.json"])


def seed_markdown(timestamp: datetime, results: dict[str, Any]) -> str:
    """Return the Markdown of a benchmark as VirNucPro's own function writes it.

    The body is `generate_benchmark_report` of its phase 6 research, line by line, except that it
    returns the text and takes the time.
    """
    lines = [f"# Benchmark Report - {timestamp.strftime('%Y-%m-%d %H:%M:%S')}\n\n"]
    lines.append("## GPU Scaling\n\n")
    lines.append("| GPUs | Time (s) | Speedup | Efficiency |\n")
    lines.append("|------|----------|---------|------------|\n")
    for data in results["scaling"].values():
        num_gpus = data["num_gpus"]
        speedup = data["speedup"]
        efficiency = (speedup / num_gpus * 100) if num_gpus > 0 else 0
        lines.append(
            f"| {num_gpus} | {data['time_seconds']:.1f} | {speedup:.2f}x | {efficiency:.1f}% |\n"
        )
    lines.append("\n## GPU Utilization\n\n")
    lines.append("| GPU | Avg Util % | Peak Mem (GB) |\n")
    lines.append("|-----|------------|---------------|\n")
    for gpu_id, stats in results["gpu_stats"].items():
        peak = stats["mem_used_peak"] / 1024**3
        lines.append(f"| {gpu_id} | {stats['gpu_util_avg']:.1f}% | {peak:.2f} |\n")
    lines.append("\n## Throughput by Stage\n\n")
    lines.append("| Stage | Seq/sec | Time (s) |\n")
    lines.append("|-------|---------|----------|\n")
    for stage, metrics in results["throughput"].items():
        speed = metrics["throughput_seq_per_sec"]
        lines.append(f"| {stage} | {speed:.1f} | {metrics['total_time_seconds']:.1f} |\n")
    return "".join(lines)


def test_benchmark_files_are_those_of_virnucpro(report: Report) -> None:
    """A program that reads VirNucPro's benchmark files can read ours."""
    stem, markdown, data = benchmark_files(report)
    time = datetime.fromisoformat(report.provenance.created)
    assert stem == f"benchmark_{time:%Y%m%d_%H%M%S}"
    assert datetime.fromisoformat(data["timestamp"]) == time
    assert {"pytorch_version", "cuda_version", "gpu_count"} <= set(data["metadata"])
    assert data["metadata"]["gpu_count"] == 2

    results = data["results"]
    assert list(results["scaling"]) == ["0", "0,1"]
    assert {"num_gpus", "time_seconds", "speedup", "efficiency"} <= set(results["scaling"]["0,1"])
    assert list(results["scaling"].values()) == results["scaling_list"], "as readers of ours had it"
    assert {
        "gpu_util_avg",
        "gpu_util_min",
        "gpu_util_max",
        "mem_used_avg",
        "mem_used_peak",
        "sample_count",
    } <= set(next(iter(results["gpu_stats"].values())))
    assert {
        "stage",
        "total_sequences",
        "total_time_seconds",
        "throughput_seq_per_sec",
        "avg_time_per_sequence_ms",
    } <= set(results["throughput"]["ESM-2"])
    assert markdown.startswith(seed_markdown(time, results))


def test_benchmark_files_name_verdicts_bottlenecks_and_advice(report: Report) -> None:
    _, markdown, data = benchmark_files(report)
    headings = [line for line in markdown.splitlines() if line.startswith("## ")]
    assert headings[3:] == [
        "## Scaling Verdicts",
        "## Bottlenecks",
        "## Recommendations",
        "## PERF-02",
        "## Efficiency and cost",
    ]
    two_devices = data["results"]["scaling"]["0,1"]
    assert two_devices["verdict"] == report.scaling[1].judged.verdict == "fail"
    assert re.search(r"\| 2 \| 1\.82x \| .*FAIL", markdown, re.IGNORECASE)
    esm2 = data["results"]["throughput"]["ESM-2"]
    chunking = data["results"]["throughput"]["Sequence Chunking"]
    assert esm2["is_bottleneck"]
    assert esm2["share_of_time"] > 0.3
    assert esm2["gpu_util_avg"] == report.run.telemetry.lowest_percent("protein")
    assert esm2["advice"] in markdown
    assert not chunking["is_bottleneck"]
    assert chunking["gpu_util_avg"] is None


def test_the_seed_of_the_baselines_reads_is_told(copied: tuple[Path, Profile]) -> None:
    out_dir, profile = copied
    edit_json(out_dir / "baseline" / "run.json", lambda body: body.update(seeds={"baseline": 7}))
    report = build_report(out_dir, profile)
    assert benchmark_files(report)[2]["metadata"]["seeds"] == {"baseline": 7}
    assert "| seed of baseline | 7 |" in report_markdown(report)


def test_a_benchmark_without_a_gpu_or_a_time_says_so(report: Report) -> None:
    devices = tuple(
        device.model_copy(update={"gpu_util_avg": None, "mem_used_peak": None})
        for device in report.run.telemetry.devices
    )
    telemetry = report.run.telemetry.model_copy(update={"devices": devices})
    bare = report.model_copy(
        update={
            "run": report.run.model_copy(update={"telemetry": telemetry}),
            "provenance": report.provenance.model_copy(update={"created": "unknown"}),
        }
    )
    stem, markdown, _ = benchmark_files(bare)
    assert stem == "benchmark_unknown"
    assert re.search(r"\| n/a \| n/a \|", markdown)


def test_rendering_again_replaces_benchmark_files_of_the_former_name(
    copied: tuple[Path, Profile], report: Report
) -> None:
    folder = copied[0] / "report"
    stem, *_ = benchmark_files(report)
    former = folder / f"{former_benchmark_name(report.provenance.created)}.json"
    of_earlier_run = folder / "benchmark_20200101_000000.json"
    for path in (former, of_earlier_run):
        path.write_text("{}")
    rerender(copied[0])
    assert not former.exists()
    assert of_earlier_run.exists()
    assert (folder / f"{stem}.json").exists()


@pytest.mark.parametrize("name", ["ci-smoke", "phase10-1m", "production-6m"])
def test_a_report_of_nothing_is_still_a_report(tmp_path: Path, name: str) -> None:
    report = write_report(tmp_path, load_profile(name))
    forms = render(report)
    assert Page(forms["report.html"]).problems == []
    assert f"0 of {len(report.requested)} CRITERIA MET" in forms["report.md"]
    assert read_report(tmp_path / "report" / "report.json") == report


def test_zero_reads_and_zero_rows(tmp_path: Path) -> None:
    profile = build(tmp_path)
    for run in ("devices-1", "devices-2"):
        edit_json(
            tmp_path / run / "summary.json",
            lambda b: b.update(
                n_reads=0, n_rows=0, n_chunks=0, n_uniques=0, wall_s=0.0, staging_s=0.0, fates={}
            ),
        )
    report = write_report(tmp_path, profile)
    assert {c.verdict for c in report.criteria if c.id != "consensus"} <= {"not run", "pass"}
    assert {c.id for c in report.criteria if c.verdict == "pass"} <= {"consensus"}


def test_limits_of_the_figures_are_said(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(reads=120)).model_copy(update={"min_reads": 10_000})
    edit_json(
        tmp_path / "devices-2" / "summary.json", lambda b: b["fates"].update(failed=2, others=0)
    )
    (tmp_path / "devices-2" / "reads.tsv").unlink()
    report = build_report(tmp_path, profile)
    notes, warnings = "\n".join(report.notes), "\n".join(report.warnings)
    for words in (
        "Not evidence: 120 reads",
        "Overhead-dominated",
        "Projection, not a measurement: 6,000,000 reads",
        "have no open frame",
    ):
        assert words in notes
    for words in ("Reads are not all accounted for", "2 reads failed", "reads.tsv is missing"):
        assert words in warnings


def test_what_repeats_add_to_the_speedup_is_said(tmp_path: Path) -> None:
    profile = build(tmp_path)
    assert not any("Repeats" in note for note in build_report(tmp_path, profile).notes), (
        "no two frames are alike"
    )
    edit_json(
        tmp_path / "devices-2" / "summary.json", lambda b: b.update(n_rows=1_000, n_uniques=800)
    )
    (said,) = (note for note in build_report(tmp_path, profile).notes if "Repeats" in note)
    assert "200 of 1,000 open frames (20.0 %)" in said
    assert "1.25x of the speed-up" in said


def test_cost_of_a_million_reads(tmp_path: Path) -> None:
    profile = build(tmp_path).model_copy(update={"price_per_device_hour": 2.0})
    run = build_report(tmp_path, profile).run
    assert run is not None
    hours = 2 * 44 / 3600 / 300e-6
    assert run.device_hours_per_million == pytest.approx(hours)
    assert run.price_per_million == pytest.approx(2 * hours)
    assert run.kwh_per_million is not None


def test_reports_stay_small(report: Report) -> None:
    forms = render(report)
    assert len(forms["report.html"]) < 600_000
    assert len(forms["report.json"]) < 200_000


def test_the_performance_summary_has_its_sections(report: Report) -> None:
    text = report_markdown(report)
    for words in (
        "Performance Validation Summary",
        "Projected 6,000,000:",
        "hours (projection)",
        "Throughput (PERF-05):",
        "Batches <80%:",
        "P95 wait time:",
        "GPU Utilization (PERF-02):",
        "PERF-01 (time <30 min):",
        "PERF-05 (packing >90%):",
    ):
        assert words in text


def test_scaling_has_a_verdict_for_each_number_of_devices(tmp_path: Path) -> None:
    profile = load_profile("phase6-scaling").model_copy(
        update={"min_reads": 1, "scaling_bands": {"2": (1.6, 2.0), "4": (3.9, 4.0)}}
    )
    build(tmp_path, Recipe(devices=2, shards=16), profile)
    build(tmp_path, Recipe(devices=4, shards=16), profile)
    report = build_report(tmp_path, profile)
    assert [(f.num_gpus, f.judged.verdict) for f in report.scaling if f.judged] == [
        (2, "pass"),
        (4, "fail"),
    ]
    scaling = report_markdown(report).split("## GPU Scaling")[1].split("##")[0]
    assert "| &gt;=1.6x | [PASS] |" in scaling
    assert "| &gt;=3.9x | [FAIL] |" in scaling


def test_a_report_of_another_version_names_the_command_that_judges_anew(
    copied: tuple[Path, Profile],
) -> None:
    path = copied[0] / "report" / "report.json"
    edit_json(path, lambda body: body["run"].pop("telemetry"))
    with pytest.raises(InputError, match="virnuc report DIR --profile NAME"):
        rerender(copied[0])


def test_the_contents_of_the_page_lead_to_every_closed_part(report: Report) -> None:
    tags = Page(render(report)["report.html"]).tags
    targets = [str(attributes["href"]).removeprefix("#") for tag, attributes in tags if tag == "a"]
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    closed_parts = [attributes for tag, attributes in tags if tag == "details"]
    assert targets == ids
    assert len(closed_parts) == len(targets) > 8
    assert not any("open" in attributes for attributes in closed_parts)


def test_the_title_says_that_the_profile_may_be_of_other_devices(report: Report) -> None:
    profile = report.profile.model_copy(update={"title": "1 M reads on 2x RTX 4090"})
    forms = render(report.model_copy(update={"profile": profile}))
    title = "Validation by the criteria of “1 M reads on 2x RTX 4090”"
    assert f"<h1>{title}</h1>" in forms["report.html"]
    assert f"\n# {title}\n" in forms["report.md"]


@pytest.mark.parametrize(
    ("warnings", "text"),
    [((), "no warnings"), (("a",), "1 warning"), (("a", "b"), "2 warnings")],
)
def test_the_verdict_counts_warnings(report: Report, warnings: tuple[str, ...], text: str) -> None:
    forms = render(report.model_copy(update={"warnings": warnings}))
    assert re.search(rf"\(.* · {text}( · .*)?\)", forms["report.md"])
