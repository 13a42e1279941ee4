"""Fills in the templates of reports and pages.

The page of a prediction needs no more than this, and nothing of the reports of validations.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from virnuc_core.markdown import code_block, code_span, front_matter_value
from virnuc_core.report.sections import Section
from virnuc_core.report.text import Mark, cell, markdown_cell

SECTIONS_TEMPLATE: Final = "sections.md.j2"


@dataclass(frozen=True, slots=True)
class Tile:
    """A number in large letters at the top of the page, with a caption."""

    words: str
    value: str


@cache
def environment() -> Environment:
    """Return the Jinja environment with all templates of this package.

    Values are escaped in HTML pages and drawings. A template fails if it uses a value that was not
    given.
    """
    jinja = Environment(
        loader=PackageLoader("virnuc_core.report"),
        autoescape=lambda name: name is not None and name.endswith((".html.j2", ".svg.j2")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    jinja.filters["cell"] = cell
    jinja.filters["markdown"] = markdown_cell
    jinja.filters["markdown_table"] = markdown_table
    jinja.filters["code_block"] = code_block
    jinja.filters["code_span"] = code_span
    jinja.filters["front_matter"] = front_matter_value
    jinja.filters["base64"] = _base64
    jinja.tests["mark"] = _is_mark
    return jinja


def fill_template(name: str, **values: object) -> str:
    """Return the text of a template with these values filled in."""
    return environment().get_template(name).render(values)


def _base64(text: str) -> str:
    """Return a text encoded as Base64, for a `data:` URL."""
    return base64.b64encode(text.encode()).decode()


def _is_mark(value: object) -> bool:
    """Return whether a value is a `Mark`, which templates show in colour."""
    return isinstance(value, Mark)


def sections_markdown(sections: list[Section]) -> str:
    """Return sections in Markdown, each with its heading."""
    return fill_template(SECTIONS_TEMPLATE, sections=sections)


def markdown_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as a Markdown table; no rows give no table."""
    if not rows:
        return ""
    columns = list(rows[0])
    lines = [_markdown_row(columns), "|" + " --- |" * len(columns)]
    lines += [_markdown_row(row.values()) for row in rows]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Iterable[object]) -> str:
    """Return one line of a Markdown table."""
    return f"| {' | '.join(markdown_cell(value) for value in cells)} |"
