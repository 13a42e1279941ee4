"""Every form of the report from its data, and the folder they lie in.

`render` is a pure function: the same `Report` gives the same bytes, whenever and wherever. `report.json` is that data.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from virnuc_core.errors import InputError
from virnuc_core.profiles import Profile
from virnuc_core.report.approval import with_answer
from virnuc_core.report.build import REGRESSION, build_report
from virnuc_core.report.charts import all_charts, generator
from virnuc_core.report.formatting import UNKNOWN, cell, fill, number, shown
from virnuc_core.report.model import Report, Verdict
from virnuc_core.report.printed import benchmark_json, benchmark_markdown, printed, printed_block, summary
from virnuc_core.report.regression import RegressionFile, append_history, earlier, entry_of, read_history
from virnuc_core.report.views import (
    baseline_title,
    criterion,
    overall,
    overview_runs,
    sections,
    telemetry_of,
    warnings_of,
)
from virnuc_core.rundir import RunDir, write_text_whole
from virnuc_core.runfiles import read_usable
from virnuc_core.telemetry.live import clock_text
from virnuc_core.validation import ValidationRecord

REPORT_JSON = "report.json"
KEPT_HISTORY = 100  # entries of a series that a report carries
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
        why = f"not a report of this version ({place}: {first['msg']})"
        raise InputError(why, file=path, hint="virnuc report DIR writes it anew") from error


def write_report(out: Path, profile: Profile, history: Path | None = None) -> Report:
    """Judge a finished validate directory and write every form of the report to `out/report/`.

    With `history`, the run is first held against the earlier runs in that file, and added to it.
    """
    report = build_report(out, profile)
    if history is not None and (entry := entry_of(report)) is not None:
        compared = RegressionFile(entry=entry, history=tuple(earlier(read_history(history), entry)[-KEPT_HISTORY:]))
        write_text_whole(out / REGRESSION, compared.model_dump_json(indent=1) + "\n")
        append_history(history, entry)
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
    return fill(
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
    return fill(
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
