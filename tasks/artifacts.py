"""Tables and reports as Prefect shows them: cells that are read as meant, keys it accepts, sizes it can carry.

Prefect renders table cells as Markdown, so that `>= 0.9` would appear as a quotation that reads "= 0.9"; one infinite
number empties a whole table; and the list of artifacts loads every body. Hence the rules below; everything but
`publish_*` is pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

MAX_BYTES: Final = 100 * 1024
MAX_KEY: Final = 100
VERDICT_MARKS: Final[Mapping[str, str]] = {
    "pass": "✓ **PASS**",  # signs that every font has, no emoji
    "fail": "✗ **FAIL**",
    "projected": "≈ projected",
    "not run": "– not run",
}
_SIGNS: Final = (("<=", "≤"), (">=", "≥"))
_MARKDOWN: Final = re.compile(r"([\\`*~|<>\[\]]|^[#+-](?=\s)|^\d+\.(?=\s))")

Row = Mapping[str, Any]


def key(*parts: object) -> str:
    """An artifact key: lower-case letters, digits and dashes; `ValueError` when nothing is left of `parts`."""
    text = "-".join(re.sub(r"[^a-z0-9]+", "-", str(part).lower()).strip("-") for part in parts)
    cleaned = re.sub(r"-{2,}", "-", text).strip("-")[:MAX_KEY].strip("-")
    if not cleaned:
        raise ValueError(f"no artifact key can be made of {parts!r}")
    return cleaned


def cell(value: Any) -> str:
    """One value as the text of a table cell: comparison signs as signs, no infinite number, nothing read as Markdown.

    >>> cell(">= 0.9"), cell(float("inf")), cell(None), cell(0.12345678), cell("a*b*")
    ('≥ 0.9', '∞', '–', '0.1235', 'a\\\\*b\\\\*')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if math.isnan(value):
            return "–"
        if math.isinf(value):
            return "∞" if value > 0 else "-∞"
        return f"{value:.4g}" if abs(value) < 1e6 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    text = str(value).replace("\r", " ").replace("\n", " ")
    for written, sign in _SIGNS:
        text = text.replace(written, sign)
    return _MARKDOWN.sub(r"\\\1", text)


def verdict_cell(verdict: str) -> str:
    """A verdict that is seen at a glance."""
    return VERDICT_MARKS.get(verdict, cell(verdict))


def bounded_rows(rows: Sequence[Mapping[str, str]], limit: int = MAX_BYTES) -> list[dict[str, str]]:
    """The first rows that stay below `limit` bytes, and a last row that says how many were left out."""
    kept: list[dict[str, str]] = []
    used = 0
    for row in rows:
        used += sum(len(k.encode()) + len(v.encode()) + 8 for k, v in row.items())
        if used > limit:
            first = next(iter(row))
            note = dict.fromkeys(row, "")
            note[first] = f"… {len(rows) - len(kept):,} more rows: see the files of the run"
            return [*kept, note]
        kept.append(dict(row))
    return kept


def bounded_markdown(text: str, full_text: Path | str, limit: int = MAX_BYTES) -> str:
    """The text, cut at a line's end below `limit` bytes with a word on where the whole stands."""
    if len(text.encode()) <= limit:
        return text
    note = f"\n\n… cut here; the whole text is `{full_text}`\n"
    head = text.encode()[: limit - len(note.encode())].decode("utf-8", "ignore")
    return head[: head.rfind("\n")] + note


def without_front_matter(text: str) -> str:
    """A Markdown text without the block of settings it may begin with, which Prefect would show as headings."""
    if not text.startswith("---\n"):
        return text
    _, end, rest = text[4:].partition("\n---\n")
    return rest.lstrip("\n") if end else text


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of equal keys as a Markdown table; empty text for no rows."""
    if not rows:
        return ""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(row.get(name, "") for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def file_link(path: Path) -> str:
    """The address of a local file, safe inside Markdown."""
    return "file://" + quote(str(path.absolute()))


def publish_table(name: str, rows: Sequence[Mapping[str, str]], description: str) -> None:
    """Record a table under `name`; outside a run, where Prefect has nothing to hang it on, do nothing."""
    if not inside_a_run():
        return
    from prefect.artifacts import create_table_artifact

    create_table_artifact(bounded_rows(rows), key=key(name), description=description)


def publish_markdown(name: str, text: str, description: str, full_text: Path | str) -> None:
    """Record a text under `name`, cut to size."""
    if not inside_a_run():
        return
    from prefect.artifacts import create_markdown_artifact

    create_markdown_artifact(bounded_markdown(text, full_text), key=key(name), description=description)


def publish_link(name: str, path: Path, text: str, description: str) -> None:
    """Record a link to a local file."""
    if not inside_a_run():
        return
    from prefect.artifacts import create_link_artifact

    create_link_artifact(file_link(path), link_text=text, key=key(name), description=description)


def inside_a_run() -> bool:
    """Whether this code runs inside a Prefect flow or task."""
    from prefect.context import FlowRunContext, TaskRunContext

    return FlowRunContext.get() is not None or TaskRunContext.get() is not None
