"""Every form of the report from its data, and the folder they lie in.

`render` is a pure function: the same `Report` gives the same bytes, whenever and wherever. `report.json` is that data;
the other forms are `templates/`, filled with what `view.j2` tells of it, and the benchmark's figures for other tools.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import ValidationError

from virnuc_core.errors import InputError
from virnuc_core.profiles import Profile
from virnuc_core.report.build import REGRESSION, build_report, with_answer
from virnuc_core.report.charts import GENERATOR, all_charts
from virnuc_core.report.formatting import (
    Mark,
    Number,
    Section,
    Table,
    View,
    all_warnings,
    baseline_title,
    cell,
    number,
    percent,
    runs_text,
    share_of,
    shown,
    skipped,
    target_text,
)
from virnuc_core.report.model import Report
from virnuc_core.report.regression import RegressionFile, append_history, earlier, entry_of, read_history
from virnuc_core.rundir import RunDir, write_text_whole
from virnuc_core.telemetry.live import clock_text
from virnuc_core.telemetry.tables import OVERLAPPED, ROWS, STAGES
from virnuc_core.validation import QUESTIONS, Comparison, ValidationRecord, read_usable

REPORT_JSON: Final = "report.json"
COSTS: Final = ("device_hours", "kwh", "price")  # of a million reads
ENCODER_TITLES: Final = {"esm2": "ESM-2", "dnabert_s": "DNABERT-S"}
GPU_STATS: Final = {"gpu_util_avg", "gpu_util_min", "gpu_util_max", "mem_used_avg", "mem_used_peak", "sample_count"}
SCALING: Final = {"num_gpus", "time_seconds", "speedup", "efficiency"}


def read_report(path: Path) -> Report:
    """Read `report.json`; `InputError` says what is wrong with it."""
    try:
        return Report.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path, hint="run virnuc report DIR") from error
    except ValidationError as error:
        first = error.errors()[0]
        why = f"not a report of this version ({'.'.join(map(str, first['loc']))}: {first['msg']})"
        raise InputError(why, file=path, hint="virnuc report DIR writes it anew") from error


def write_report(out: Path, profile: Profile, history: Path | None = None) -> Report:
    """Judge a finished validate directory and write every form of the report to `out/report/`.

    With `history`, the run is first held against the earlier runs in that file, and added to it.
    """
    report = build_report(out, profile)
    if history is not None:
        (out / REGRESSION).unlink(missing_ok=True)  # of an earlier run
        if (entry := entry_of(report)) is not None:
            append_history(history, entry)  # first: what is broken there is set aside, and told once
            last = tuple(earlier(read_history(history), entry)[-100:])
            compared = RegressionFile(entry=entry, history=last)
            write_text_whole(out / REGRESSION, compared.model_dump_json(indent=1) + "\n")
        report = build_report(out, profile)
    _write(out, render(report))
    return report


def rerender(out: Path) -> Report:
    """Render `out/report/report.json` again, from nothing but that file and a reviewer's answer beside it.

    A report of an earlier version is written anew from the raw files, by the profile that the
    validation was started with.
    """
    path = RunDir(out).report / REPORT_JSON
    try:
        before = read_report(path)
    except InputError:
        record = read_usable(RunDir(out).record, ValidationRecord)[0]
        if not path.is_file() or record is None or record.profile is None:
            raise
        return write_report(out, record.profile)
    report = with_answer(out, before)
    _write(out, {name: text for name, text in render(report).items() if name != REPORT_JSON or report != before})
    return report


def _write(out: Path, forms: dict[str, str]) -> None:
    for name, content in forms.items():
        write_text_whole(RunDir(out).report / name, content)


def render(report: Report) -> dict[str, str]:
    """File name to content, for every form of the report."""
    stamp = re.sub(r"[^0-9A-Za-z]+", "_", report.provenance.created).strip("_") or "unknown"
    return {
        REPORT_JSON: report.model_dump_json(indent=1) + "\n",
        **{name: fill(f"{name}.j2", report) for name in ("report.txt", "report.md", "report.html")},
        f"benchmark_{stamp}.md": fill("benchmark.md.j2", report),
        f"benchmark_{stamp}.json": benchmark_json(report),
    }


def fill(template: str, report: Report, **more: object) -> str:
    """The report by one of `templates/`; `only` a section by its title, of `sections.md.j2`.

    In HTML every value is escaped. A name that is not there is an error.
    """
    criteria = {criterion.id: criterion for criterion in report.criteria}
    telemetry = report.run.telemetry if report.run else None
    return templates().get_template(template).render(report=report, criteria=criteria, telemetry=telemetry, **more)


def sections(report: Report, template: str = "view.j2") -> list[Section]:
    """What every form shows of the report, from top to bottom; or of it what one of `templates/*.view.j2` tells."""
    view = View()
    fill(template, report, view=view)
    return view.sections


def tables(template: str, report: Report) -> list[Table]:
    """The tables that one of `templates/*.view.j2` tells."""
    return [table for section in sections(report, template) for table in section.tables]


def correctness(comparisons: Iterable[Comparison]) -> Section:
    """Who was held against whom, and how well they agree: a row for frames, a row for the consensus."""
    return next(iter(told("correctness.view.j2", comparisons=tuple(comparisons))), Section("Correctness"))


def told(template: str, **values: object) -> list[Section]:
    """What one of `templates/*.view.j2` tells of other things than a report."""
    view = View()
    templates().get_template(template).render(view=view, **values)
    return view.sections


@cache
def templates() -> Environment:
    """The templates, with what they may use."""
    found = Environment(
        loader=PackageLoader("virnuc_core.report"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        extensions=["jinja2.ext.do"],
    )
    found.filters |= {
        "cell": cell,
        "number": number,
        "percent": percent,
        "figure": Number,
        "one_line": lambda text: " ".join(cell(text).split()),
        "clock": lambda seconds: None if seconds is None else clock_text(seconds),
        "markdown": markdown_cell,
        "base64": lambda text: base64.b64encode(text.encode()).decode(),
    }
    texts = (shown, target_text, runs_text, all_warnings, baseline_title, skipped, share_of)
    found.globals |= {f.__name__: f for f in (*texts, Mark, fill, sections, tables, stage_results, all_charts)}
    found.globals |= {"rows": ROWS, "stages": STAGES, "overlapped": OVERLAPPED, "encoder_titles": ENCODER_TITLES}
    found.globals |= {"generator": GENERATOR, "questions": QUESTIONS, "gib": 1 / (1 << 30)}
    found.tests["mark"] = lambda value: isinstance(value, Mark)
    return found


def markdown_cell(value: object) -> str:
    """A value that cannot break a Markdown table or become markup."""
    text = cell(value).replace("\\", "\\\\").replace("|", "\\|").replace("`", "'")
    return " ".join(text.replace("<", "&lt;").replace(">", "&gt;").split())


def stage_results(report: Report) -> list[dict[str, Any]]:
    """Throughput of each measured stage: reads for chunking and translation, rows after that, and for an encoder the
    sequences that it embedded."""
    run, counted = report.run, dict[str, int | None]()
    if run is not None:
        counted |= dict.fromkeys(STAGES, run.n_rows) | dict.fromkeys(STAGES[:2], run.n_reads)
        encoders = run.telemetry.encoders if run.telemetry else ()
        counted |= {ENCODER_TITLES[encoder.encoder]: encoder.rows for encoder in encoders}
    return [
        {
            "stage": stage,
            "total_sequences": sequences,
            "total_time_seconds": seconds,
            "throughput_seq_per_sec": sequences / seconds if seconds else None,
            "avg_time_per_sequence_ms": 1000.0 * seconds / sequences,
        }
        for stage, seconds in (run.stages if run else {}).items()
        if seconds is not None and (sequences := counted.get(stage))
    ]


def benchmark_json(report: Report) -> str:
    """The results for machines, with metadata; null where something was not measured."""
    run, made = report.run, report.provenance
    telemetry = run.telemetry if run else None
    mfu = {
        e.encoder: {
            "tokens_per_sec": e.tokens_per_device_s,
            "ceiling_tokens_per_sec": e.ceiling_tokens_per_s,
            "of_ceiling": e.mfu_of_ceiling,
            "of_datasheet": e.mfu_of_datasheet,
        }
        for e in (telemetry.encoders if telemetry else ())
    }
    results = {
        "scaling": [one.model_dump(include=SCALING) for one in report.scaling],
        "gpu_stats": {d.device: d.model_dump(include=GPU_STATS) for d in (telemetry.devices if telemetry else ())},
        "throughput": {r["stage"]: r for r in stage_results(report)},
        "efficiency": {
            "mfu": mfu,
            **{f"{what}_per_million_reads": getattr(run, f"{what}_per_million", None) for what in COSTS},
            "checkpoint_overhead": report.overhead.median if report.overhead else None,
        },
        "losses": [loss.model_dump(mode="json") for loss in report.losses],
        "findings": report.findings,
    }
    ran_on = run.devices if run else ()
    metadata = {
        "pytorch_version": made.versions.get("torch"),
        **{f"{part}_version": made.versions.get(part) for part in ("cuda", "driver", "cuda_driver")},
        "gpu_count": sum(d.kind == "cuda" for d in ran_on),
        "devices": [d.name for d in ran_on],
        "git_commit": made.git_commit,
        "weights": made.fingerprints,
        "profile": report.profile.name,
        "seeds": made.seeds,
    }
    body = {"schema_version": 1, "timestamp": made.created, "results": results, "metadata": metadata}
    return json.dumps(body, indent=1, allow_nan=False) + "\n"
