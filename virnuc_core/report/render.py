"""Every form of the report from its data, and the folder they lie in.

`render` is a pure function: the same `Report` gives the same bytes, whenever and wherever. `report.json` is that data.
"""

from __future__ import annotations

import base64
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import ValidationError

from virnuc_core.config import Profile
from virnuc_core.errors import InputError
from virnuc_core.report.approval import with_answer
from virnuc_core.report.build import REGRESSION, build_report
from virnuc_core.report.charts import all_charts, generator
from virnuc_core.report.formatting import UNKNOWN, Mark, Section, cell, number, shown, table, target_text
from virnuc_core.report.model import Report, Verdict
from virnuc_core.report.printed import printed, printed_block
from virnuc_core.report.regression import RegressionFile, append_history, entry_of, read_history
from virnuc_core.report.views import (
    GIB,
    baseline_title,
    criterion,
    economy,
    overall,
    overview_runs,
    sections,
    telemetry_of,
    warnings_of,
)
from virnuc_core.rundir import RunDir, write_text_whole
from virnuc_core.telemetry.clock import clock_text

REPORT_JSON = "report.json"
KEPT_HISTORY = 100  # entries of a series that a report carries
BENCHMARK_SCHEMA: Final = 1
SCALING: Final = ("num_gpus", "time_seconds", "speedup", "efficiency")
SIGNS: Final = {"pass": "✓", "fail": "✗", "projected": "≈", "not run": "–"}
VERDICTS: Final[tuple[Verdict, ...]] = ("pass", "fail", "projected", "not run")


def read_report(path: Path) -> Report:
    """Read `report.json`; `InputError` says what is wrong with it."""
    try:
        return Report.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path, hint="run virnuc report DIR") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(step) for step in first["loc"])
        raise InputError(f"not a report of this version ({place}: {first['msg']})", file=path) from error


def write_report(out: Path, profile: Profile, history: Path | None = None) -> Report:
    """Judge a finished validate directory and write every form of the report to `out/report/`.

    With `history`, the run is first held against the earlier runs in that file, and added to it.
    """
    report = build_report(out, profile)
    if history is not None and (entry := entry_of(report)) is not None:
        earlier = [old for old in read_history(history) if old.place() == entry.place() and old.created < entry.created]
        compared = RegressionFile(entry=entry, history=tuple(earlier[-KEPT_HISTORY:]))
        write_text_whole(out / REGRESSION, compared.model_dump_json(indent=1) + "\n")
        append_history(history, entry)
        report = build_report(out, profile)
    _write(out, render(report))
    return report


def rerender(out: Path) -> Report:
    """Render `out/report/report.json` again, from nothing but that file and a reviewer's answer beside it."""
    before = read_report(RunDir(out).report / REPORT_JSON)
    report = with_answer(out, before)
    _write(out, {name: text for name, text in render(report).items() if name != REPORT_JSON or report != before})
    return report


def _write(out: Path, forms: dict[str, str]) -> None:
    for name, content in forms.items():
        write_text_whole(RunDir(out).report / name, content)


# --- the forms -------------------------------------------------------------------------------------------------------


def render(report: Report) -> dict[str, str]:
    """File name to content, for every form of the report."""
    stamp = re.sub(r"[^0-9A-Za-z]+", "_", report.provenance.created).strip("_") or "unknown"
    return {
        REPORT_JSON: report.model_dump_json(indent=1) + "\n",
        "report.txt": printed(report),
        "report.md": markdown(report),
        "report.html": page(report),
        f"benchmark_{stamp}.md": benchmark_markdown(report),
        f"benchmark_{stamp}.json": benchmark_json(report),
    }


def markdown(report: Report) -> str:
    """The whole report as Markdown, with front matter."""
    front = {
        "schema_version": report.schema_version,
        "profile": report.profile.name,
        "created": report.provenance.created,
        "commit": report.provenance.git_commit or "unknown",
        "devices": report.run.label if report.run else "none",
        "criteria_met": report.met,
        "criteria": len(report.criteria),
        "warnings": len(warnings_of(report)),
    }
    return _fill(
        "report.md.j2",
        front=front,
        title=report.profile.title,
        overall=overall(report),
        counts=counts(report),
        printed=printed_block(report),
        summary=summary(report),
        sections=sections(report),
    )


def page(report: Report) -> str:
    """The whole report as one HTML page that loads nothing; whatever came from a file or a user is escaped."""
    made = report.provenance
    facts = (
        f"profile {report.profile.name}",
        f"made {made.created}",
        f"commit {(made.git_commit or 'unknown')[:12]}",
        report.run.label if report.run else "no run",
    )
    return _fill(
        "report.html.j2",
        generator=generator(),
        title=report.profile.title,
        overall=overall(report),
        verdict="pass" if report.all_met else "fail" if report.failed else "none",
        counts=counts(report),
        facts=facts,
        tiles=tiles(report),
        sections=sections(report),
        charts=all_charts(report),
        printed=printed(report),
        summary=summary(report),
    )


def summary(report: Report) -> str:
    """The judged run in words and columns; what was not measured is `n/a`, and what is projected says so."""
    asked = (("two_device_time", "time"), ("gpu_utilisation", "GPU"), ("packing", "packing"))
    requirements = [(criterion(report, name), words) for name, words in asked]
    reads = f"{report.profile.projection_reads:,}"
    return _fill("summary.txt.j2", run=report.run, reads=reads, requirements=requirements)


def _fill(template: str, **values: object) -> str:
    return _templates().get_template(template).render(values)


@cache
def _templates() -> Environment:
    """Templates that escape in HTML, and refuse a name that is not there."""
    found = Environment(
        loader=PackageLoader("virnuc_core.report"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= {"cell": cell, "number": number, "markdown": markdown_cell, "quoted": _quoted, "base64": _base64}
    found.tests["mark"] = lambda value: isinstance(value, Mark)
    found.globals |= {"signs": SIGNS, "shown": shown, "target_text": target_text}
    return found


def markdown_cell(value: object) -> str:
    """A value that cannot break a Markdown table or become markup."""
    text = cell(value).replace("\\", "\\\\").replace("|", "\\|").replace("`", "'")
    return " ".join(text.replace("<", "&lt;").replace(">", "&gt;").split())


def _quoted(value: object) -> str:
    """A value in quotes that no reader of Markdown takes for markup."""
    return json.dumps(value).replace("<", "\\u003c").replace(">", "\\u003e")


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def counts(report: Report) -> str:
    """`6 pass · 1 fail · 0 projected · 0 not run · 2 warnings`."""
    found = [f"{sum(c.verdict == verdict for c in report.criteria)} {verdict}" for verdict in VERDICTS]
    return " · ".join([*found, f"{len(warnings_of(report)) or 'no'} warnings"])


def tiles(report: Report) -> list[tuple[str, str]]:
    """The figures people look for first: words and value."""
    telemetry = telemetry_of(report)
    names = {
        "scaling": "scaling",
        "speedup": f"speed-up over {baseline_title(report)}",
        "consensus": "consensus agreement",
        "gpu_utilisation": "GPU utilisation, lowest",
        "packing": "packing efficiency",
    }
    times = [(r.label, UNKNOWN if r.total_s is None else clock_text(r.total_s)) for r in overview_runs(report)]
    return [
        *((f"total time, {label}", time) for label, time in times),
        *((words, shown(criterion(report, name))) for name, words in names.items()),
        ("reads", cell(report.run.n_reads if report.run else None)),
        ("tokens/s", cell(number(telemetry.tokens_per_s, 0) if telemetry else None)),
    ]


# --- benchmark files, for other tools --------------------------------------------------------------------------------


def benchmark_markdown(report: Report) -> str:
    """The three tables of a benchmark report, and what it took."""
    telemetry = telemetry_of(report)
    scaling = table(
        scaling_results(report),
        {
            "GPUs": lambda r: r["num_gpus"],
            "Time (s)": lambda r: number(r["time_seconds"]),
            "Speedup": lambda r: number(r["speedup"], 2, "x"),
            "Efficiency": lambda r: number(r["efficiency"], 1, "%", 100),
        },
    )
    gpus = table(
        telemetry.devices if telemetry else (),
        {
            "GPU": lambda d: d.device,
            "Avg Util %": lambda d: number(d.embedding_percent, 1, "%"),
            "Peak Mem (GB)": lambda d: number(d.memory_peak_bytes, 2, scale=1 / GIB),
        },
    )
    stages = table(
        stage_results(report),
        {
            "Stage": lambda r: r["stage"],
            "Seq/sec": lambda r: number(r["throughput_seq_per_sec"]),
            "Time (s)": lambda r: number(r["total_time_seconds"]),
        },
    )
    parts = {"GPU Scaling": scaling, "GPU Utilization": gpus, "Throughput by Stage": stages}
    found = [Section(title, (), (part,)) for title, part in {**parts, "Efficiency and cost": economy(report)}.items()]
    return _fill("benchmark.md.j2", created=report.provenance.created, sections=found)


def scaling_results(report: Report) -> list[dict[str, float]]:
    """One entry a number of devices: `num_gpus`, `time_seconds`, `speedup`, `efficiency`."""
    one = report.single
    alone = one is not None and one.total_s and not one.resumed
    first = {"num_gpus": 1, "time_seconds": one.total_s, "speedup": 1.0, "efficiency": 1.0} if one and alone else {}
    return [*([first] if first else []), *(found.model_dump(include=set(SCALING)) for found in report.scaling)]


def stage_results(report: Report) -> list[dict[str, Any]]:
    """Throughput of each measured stage: reads for chunking and translation, rows after that."""
    found, run = [], report.run
    for place, stage in enumerate(run.stages if run else ()):
        sequences = None if run is None else run.n_reads if place < 2 else run.n_rows
        if stage.seconds is not None and sequences:
            found.append(
                {
                    "stage": stage.name,
                    "total_sequences": sequences,
                    "total_time_seconds": stage.seconds,
                    "throughput_seq_per_sec": sequences / stage.seconds if stage.seconds else None,
                    "avg_time_per_sequence_ms": 1000.0 * stage.seconds / sequences,
                }
            )
    return found


def benchmark_json(report: Report) -> str:
    """The same results for machines, with metadata; null where something was not measured."""
    telemetry, run, made = telemetry_of(report), report.run, report.provenance
    gpu_stats = {
        d.device: {
            "gpu_util_avg": d.embedding_percent,
            "gpu_util_min": d.embedding_min_percent,
            "gpu_util_max": d.embedding_max_percent,
            "mem_used_avg": d.memory_mean_bytes,
            "mem_used_peak": d.memory_peak_bytes,
            "sample_count": d.embedding_samples,
        }
        for d in (telemetry.devices if telemetry else ())
    }
    mfu = {
        e.encoder: {
            "tokens_per_sec": e.tokens_per_s,
            "ceiling_tokens_per_sec": e.ceiling_tokens_per_s,
            "of_ceiling": e.mfu_of_ceiling,
            "of_datasheet": e.mfu_of_datasheet,
        }
        for e in (telemetry.encoders if telemetry else ())
    }
    results = {
        "scaling": scaling_results(report),
        "gpu_stats": gpu_stats,
        "throughput": {r["stage"]: r for r in stage_results(report)},
        "efficiency": {
            "mfu": mfu,
            "device_hours_per_million_reads": run.device_hours_per_million if run else None,
            "kwh_per_million_reads": run.kwh_per_million if run else None,
            "price_per_million_reads": run.price_per_million if run else None,
            "checkpoint_overhead": report.overhead.median if report.overhead else None,
        },
        "findings": [f.model_dump(mode="json") for f in report.findings],
    }
    metadata = {
        "pytorch_version": made.versions.get("torch"),
        "cuda_version": made.versions.get("cuda"),
        "driver_version": made.versions.get("driver"),
        "cuda_driver_version": made.versions.get("cuda_driver"),
        "gpu_count": sum(d.kind == "cuda" for d in (run.devices if run else ())),
        "devices": [d.name for d in (run.devices if run else ())],
        "git_commit": made.git_commit,
        "weights": made.fingerprints,
        "profile": report.profile.name,
        "seeds": made.seeds,
    }
    body = {"schema_version": BENCHMARK_SCHEMA, "timestamp": made.created, "results": results, "metadata": metadata}
    return json.dumps(body, indent=1, allow_nan=False) + "\n"
