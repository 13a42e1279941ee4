"""The report's forms from its data: figures as text, sections and tables as templates tell them, and the texts.

`render` is a pure function: the same `Report` gives the same bytes, whenever and wherever. `report.json` is that data;
the other forms are `templates/`, filled with what `view.j2` tells of it. No figure is rounded across its target:
89.96 % never reads 90 %."""

import base64
import json
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from virnuc_core.profiles import Target
from virnuc_core.report.charts import GENERATOR, all_charts
from virnuc_core.report.model import Criterion, Report, Verdict
from virnuc_core.telemetry.live import clock_text
from virnuc_core.telemetry.tables import GPU_STAGES, OVERLAPPED, ROWS, STAGES
from virnuc_core.validation import QUESTIONS

REPORT_JSON: Final = "report.json"
UNKNOWN: Final = "n/a"


class Number(str):
    """A figure as text; a column of them is set to the right."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """A verdict, and the word for it where that is another one."""

    verdict: Verdict
    word: str = ""

    def __str__(self) -> str:
        return f"[{(self.word or self.verdict).upper()}]"


@dataclass(slots=True)
class Section:
    """One part of the report; one without prose and rows is left out. A cell is text, a `Number`, a count, a `Mark`, or
    `None` for what was not measured."""

    title: str
    lead: Mark | str = ""  # what the prose begins with, set off
    prose: list[str] = field(default_factory=list)
    tables: dict[str, list[dict[str, object]]] = field(
        default_factory=lambda: {"": []}
    )  # rows of cells, by title


class View(list[Section]):
    """The sections that a template tells, one part after the other."""

    def section(self, title: str, lead: Mark | str = "") -> None:
        """Begin a section, and its first table."""
        self.append(Section(title, lead))

    def say(self, *lines: str) -> None:
        """Add to the prose of the section."""
        self[-1].prose += lines

    def table(self, title: str) -> None:
        """Begin a further table."""
        self[-1].tables[title] = []

    def row(self, cells: dict[str, object]) -> None:
        """Add to the table; a column of its first row that is not among `cells` was not measured."""
        rows = list(self[-1].tables.values())[-1]
        rows.append(dict.fromkeys(rows[0] if rows else ()) | cells)


def figures(rows: list[dict[str, object]]) -> set[str]:
    """The columns of a table that hold figures."""
    return {name for row in rows for name, value in row.items() if isinstance(value, int | Number)}


def cell(value: object) -> str:
    """A cell as plain text, without what a terminal or a page would obey."""
    if value is None:
        return UNKNOWN
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return "".join(c if c in "\t\n" or c.isprintable() else "�" for c in text)


def number(
    value: float | None,
    digits: int = 1,
    unit: str = "",
    scale: float = 1.0,
    target: Target | None = None,
) -> Number | None:
    """A figure with its unit, on its own side of `target` (which is in the unit shown); `None` stays `None`."""
    if value is None:
        return None
    value *= scale
    return Number(
        (f"{value:,.{digits}f}" if target is None else round_beside_target(value, digits, target))
        + unit
    )


def round_beside_target(value: float, decimals: int, target: Target | None) -> str:
    """`value` rounded to `decimals`, or to as many more as keep it on its side of the target.

    >>> near(89.96, 1, Target(op=">", value=90)), near(89.96, 1, None), near(1.9, 2, Target(op=">=", value=1.9))
    ('89.96', '90.0', '1.90')
    """
    for places in range(decimals, 7):
        digits = f"{value:.{places}f}"
        if target is None or value == float(digits):
            return digits
        misses = not target.met(value)  # then it must not seem to sit on the target either
        if target.met(float(digits)) != misses and not (misses and float(digits) == target.value):
            return digits
    return repr(value)


def format_value(found: Criterion) -> str:
    """A criterion's value, with decimals enough that it stands to its target as the exact value does."""
    value, target = found.value, found.target
    if value is None:
        return UNKNOWN
    match found.unit:
        case "s":
            whole = target is None or target.met(value) == target.met(float(int(value)))
            return clock_text(value) + ("" if whole else f"{value % 1:.3f}".lstrip("0"))
        case "x":
            return f"{round_beside_target(value, 1 if found.id == 'speedup' else 2, target)}x"
        case "%":
            return f"{round_beside_target(value, 2 if found.id == 'consensus' else 1, target).removesuffix('.0')}%"
        case _:
            return round_beside_target(value, 0 if value == int(value) else 4, target)


def target_text(target: Target | None, unit: str, decimals: int = 0) -> str:
    """A target as people say it: `>=1.9x`, `<30 min`; `none` where the profile does not ask."""
    if target is None:
        return "none"
    if unit == "s":
        for length_s, name in ((3600, "hour"), (60, "min")):
            count, rest = divmod(target.value, length_s)
            if count and not rest:
                return f"{target.op}{count:.0f} {name}{'s' if name == 'hour' and count > 1 else ''}"
        return f"{target.op}{target.value:g} s"
    digits = f"{target.value:g}"
    if decimals and "." not in digits:
        digits = f"{target.value:.{decimals}f}"
    return f"{target.op}{digits}{unit}"


def skipped(report: Report) -> dict[int, str]:
    """Numbers of devices of which there is no figure: those that were not here for a band, and runs without a time."""
    here = max((len(run.devices) for run in report.runs), default=0)
    bands = sorted(map(int, report.profile.scaling_bands))
    why = {len(run.devices): run.untimed for run in report.runs if run.untimed}
    return why | {count: f"there were {here} devices" for count in bands if count > here > 0}


def markdown_cell(value: object) -> str:
    """A value that cannot break a Markdown table or become markup."""
    text = cell(value).replace("\\", "\\\\").replace("|", "\\|").replace("`", "'")
    return " ".join(text.replace("<", "&lt;").replace(">", "&gt;").split())


@cache
def templates() -> Environment:
    """`templates/`, with how figures read; in HTML every value is escaped. A name that is not there is an error."""
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
        "percent": lambda share, digits=1: number(share, digits, " %", 100),
        "figure": Number,
        "one_line": lambda text: " ".join(cell(text).split()),
        "clock": lambda seconds: None if seconds is None else clock_text(seconds),
        "markdown": markdown_cell,
        "json": lambda value: json.dumps(value, indent=1, allow_nan=False),
        "base64": lambda text: base64.b64encode(text.encode()).decode(),
    }
    found.globals |= {
        one.__name__: one for one in (format_value, target_text, skipped, figures, Mark)
    }
    found.globals |= {
        "rows": ROWS,
        "stages": STAGES,
        "overlapped": OVERLAPPED,
        "questions": QUESTIONS,
    }
    found.tests["mark"] = lambda value: isinstance(value, Mark)
    return found


def render_sections(template: str, report: Report | None = None, **facts: Any) -> list[Section]:
    """The sections of prose and tables that a template tells of a report and of `facts`; without those that say
    nothing."""
    view = View()
    templates().get_template(template).render(facts | _known(report), view=view)
    return [one for one in view if one.prose or any(one.tables.values())]


def message(name: str, *about: object) -> str:
    """What the macro of this name in `messages.j2` tells, in one line."""
    return " ".join(getattr(templates().get_template("messages.j2").module, name)(*about).split())


def render_rows(
    template: str, report: Report | None = None, **facts: Any
) -> list[dict[str, object]]:
    """The rows of the tables that a template tells, those of one table after those of the other."""
    return [
        row
        for part in render_sections(template, report, **facts)
        for rows in part.tables.values()
        for row in rows
    ]


def render_template(template: str, report: Report, **more: object) -> str:
    """The report by one of `templates/`; `only` a section by its title, of `sections.md.j2`."""
    return templates().get_template(template).render(_known(report), **more)


def _known(report: Report | None) -> dict[str, Any]:
    """What the templates of a report know by name."""
    if report is None:
        return {}
    return {f.__name__: f for f in (render_template, render_sections, render_rows, all_charts)} | {
        "report": report,
        "criteria": {criterion.id: criterion for criterion in report.criteria},
        "telemetry": report.run.telemetry if report.run else None,
        "generator": GENERATOR,
        "encoder_titles": dict(reversed(GPU_STAGES.items())),
    }


def render(report: Report) -> dict[str, str]:
    """File name to content, for every form of the report."""
    stamp = re.sub(r"[^0-9A-Za-z]+", "_", report.provenance.created).strip("_") or "unknown"
    return {
        REPORT_JSON: report.model_dump_json(indent=1) + "\n",
        **{
            name: render_template(f"{name}.j2", report)
            for name in ("report.txt", "report.md", "report.html")
        },
        f"benchmark_{stamp}.md": render_template("benchmark.md.j2", report),
        f"benchmark_{stamp}.json": render_template("benchmark.json.j2", report),
    }
