"""Every form of the report from its data, and the folder they lie in.

`render` is a pure function: the same `Report` gives the same bytes, whenever and wherever. `report.json` is that data;
the other forms are `templates/`, filled with what `view.j2` tells of it, and the benchmark's figures for other tools.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from virnuc_core.errors import ConfigError, InputError
from virnuc_core.profiles import Profile
from virnuc_core.report.build import REGRESSION, build_report, with_answer
from virnuc_core.report.charts import GENERATOR, all_charts
from virnuc_core.report.formatting import Section, Table, templates, told
from virnuc_core.report.model import Report
from virnuc_core.report.regression import RegressionFile, append_history, earlier, entry_of, read_history
from virnuc_core.rundir import RunDir, write_text_whole
from virnuc_core.runfiles import read
from virnuc_core.telemetry.tables import GPU_STAGES
from virnuc_core.validation import Comparison, ValidationRecord, read_usable

REPORT_JSON: Final = "report.json"


def read_report(path: Path) -> Report:
    """Read `report.json`; `InputError` says what is wrong with it."""
    try:
        return read(path, Report)
    except ConfigError as error:
        why = f"not a report of this version ({str(error).removeprefix(f'{path}: ')})"
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
        record = read_usable(RunDir(out).record, ValidationRecord)
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
        f"benchmark_{stamp}.json": fill("benchmark.json.j2", report),
    }


def fill(template: str, report: Report, **more: object) -> str:
    """The report by one of `templates/`; `only` a section by its title, of `sections.md.j2`."""
    return templates().get_template(template).render(_known(report), **more)


def _known(report: Report) -> dict[str, Any]:
    """What the templates of a report know by name."""
    return {f.__name__: f for f in (fill, sections, tables, all_charts)} | {
        "report": report,
        "criteria": {criterion.id: criterion for criterion in report.criteria},
        "telemetry": report.run.telemetry if report.run else None,
        "generator": GENERATOR,
        "encoder_titles": dict(reversed(GPU_STAGES.items())),
    }


def sections(report: Report, template: str = "view.j2") -> list[Section]:
    """What every form shows of the report, from top to bottom; or of it what one of `templates/*.view.j2` tells."""
    return told(template, **_known(report))


def tables(template: str, report: Report) -> list[Table]:
    """The tables that one of `templates/*.view.j2` tells."""
    return [table for section in sections(report, template) for table in section.tables]


def correctness(comparisons: Iterable[Comparison]) -> Section:
    """Who was held against whom, and how well they agree: a row for frames, a row for the consensus."""
    return next(iter(told("correctness.view.j2", comparisons=tuple(comparisons))), Section("Correctness"))
