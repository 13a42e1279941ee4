"""Every form of the report from its data, and the folder they lie in.

`render` is a pure function: the same `Report` gives the same bytes, whenever and wherever. `report.json` is that data.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import ValidationError

from virnuc_core.config import Profile
from virnuc_core.errors import InputError
from virnuc_core.report.approval import with_answer
from virnuc_core.report.build import REGRESSION, build_report
from virnuc_core.report.html import render_html
from virnuc_core.report.markdown import render_benchmark_json, render_benchmark_markdown, render_markdown
from virnuc_core.report.model import Report
from virnuc_core.report.regression import RegressionFile, append_history, entry_of, read_history
from virnuc_core.report.sections import render_extras
from virnuc_core.report.text import render_text
from virnuc_core.rundir import RunDir, write_text_whole

REPORT_JSON = "report.json"
KEPT_HISTORY = 100  # entries of a series that a report carries


def render(report: Report) -> dict[str, str]:
    """File name to content, for every form of the report."""
    stamp = re.sub(r"[^0-9A-Za-z]+", "_", report.provenance.created).strip("_") or "unknown"
    return {
        REPORT_JSON: report.model_dump_json(indent=1) + "\n",
        "report.txt": render_text(report) + render_extras(report),
        "report.md": render_markdown(report),
        "report.html": render_html(report),
        f"benchmark_{stamp}.md": render_benchmark_markdown(report),
        f"benchmark_{stamp}.json": render_benchmark_json(report),
    }


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
    folder = RunDir(out).report
    for name, content in render(report).items():
        write_text_whole(folder / name, content)
    return report


def rerender(out: Path) -> Report:
    """Render `out/report/report.json` again, from nothing but that file and a reviewer's answer beside it."""
    folder = RunDir(out).report
    before = read_report(folder / REPORT_JSON)
    report = with_answer(out, before)
    for name, content in render(report).items():
        if name != REPORT_JSON or report != before:
            write_text_whole(folder / name, content)
    return report
