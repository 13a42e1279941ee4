"""What Prefect shows of a run: tables and texts whose cells are read as meant, progress, and events for automations.

Prefect renders table cells as Markdown, so that `>= 0.9` would appear as a quotation that reads "= 0.9"; one infinite
number empties a whole table; and the list of artifacts loads every body. Hence the rules below.

| event | resource | payload |
| --- | --- | --- |
| `virnuc.criterion.<pass, fail, projected, not-run>` | `virnuc.criterion.<id>` | value, target, profile, report |
| `virnuc.validation.passed`, `virnuc.validation.failed` | `virnuc.validation.<profile>` | met, asked, failed, report |
| `virnuc.prediction.done` | `virnuc.prediction.<folder>` | reads, viral, run |
"""

from __future__ import annotations

import contextvars
import logging
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.context import FlowRunContext, TaskRunContext
from prefect.events import emit_event

MAX_BYTES: Final = 100 * 1024
MAX_KEY: Final = 100
EVERY_S: Final = 5.0
logger = logging.getLogger(__name__)
VERDICT_MARKS: Final[Mapping[str, str]] = {
    "pass": "✓ **PASS**",  # signs that every font has, no emoji
    "fail": "✗ **FAIL**",
    "projected": "≈ projected",
    "not run": "– not run",
}
_SIGNS: Final = (("<=", "≤"), (">=", "≥"))
_MARKDOWN: Final = re.compile(r"([\\`*~|<>\[\]]|^[#+-](?=\s)|^\d+\.(?=\s))")

Rows = list[dict[str, str]]


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


def percent(share: float | None) -> str:
    """A share of one, in percent."""
    return "–" if share is None else f"{100 * share:,.1f} %"


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


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of equal keys as a Markdown table; empty text for no rows."""
    if not rows:
        return ""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(row.get(name, "") for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def publish_table(name: str, rows: Sequence[Mapping[str, str]], description: str) -> None:
    """Record a table under `name`; outside a run, where Prefect has nothing to hang it on, do nothing."""
    if not inside_a_run():
        return
    create_table_artifact(bounded_rows(rows), key=key(name), description=description)


def publish_markdown(name: str, text: str, description: str, full_text: Path | str) -> None:
    """Record a text under `name`, cut to size."""
    if not inside_a_run():
        return
    create_markdown_artifact(bounded_markdown(text, full_text), key=key(name), description=description)


def publish_link(name: str, path: Path, text: str, description: str) -> None:
    """Record a link to a local file."""
    if not inside_a_run():
        return
    create_link_artifact(path.absolute().as_uri(), link_text=text, key=key(name), description=description)


def inside_a_run() -> bool:
    """Whether this code runs inside a Prefect flow or task."""
    return FlowRunContext.get() is not None or TaskRunContext.get() is not None


def emit(event: str, resource: str, name: str, payload: Mapping[str, Any]) -> None:
    """Send `virnuc.<event>` about `virnuc.<resource>`; Prefect adds the flow run as a related resource."""
    emit_event(
        event=f"virnuc.{event}",
        resource={"prefect.resource.id": f"virnuc.{resource}", "prefect.resource.name": name},
        payload=dict(payload),
    )


@contextmanager
def progress_artifact(
    name: str, description: str, *, every_s: float = EVERY_S, send: Callable[[float], None] | None = None
) -> Iterator[Callable[[float], None]]:
    """Gives what takes a share of work done, 0 to 1; the newest is sent every `every_s` seconds, and at the end.

    Outside a run nothing is sent. A server that is away is noted in the log and never stops the work.
    """
    if send is None and not inside_a_run():
        yield lambda share: None
        return
    sends, stop, newest = send or _publisher(name, description), threading.Event(), 0.0

    def show(share: float) -> None:
        nonlocal newest
        newest = round(100 * min(max(share, 0.0), 1.0), 1)

    def loop() -> None:
        shown, ended = -1.0, False
        while not ended:
            ended = stop.wait(every_s)
            if (percent := newest) != shown:
                try:
                    sends(percent)
                    shown = percent
                except (httpx.HTTPError, OSError) as error:
                    logger.warning("progress not shown: %s", error)

    context = contextvars.copy_context()  # the run this thread belongs to
    thread = threading.Thread(target=context.run, args=(loop,), name="progress artifact", daemon=True)
    thread.start()
    try:
        yield show
    finally:
        stop.set()
        thread.join(timeout=2 * every_s)


def _publisher(name: str, description: str) -> Callable[[float], None]:
    """Sends percentages to one progress artifact, created by the first."""
    artifact: list[object] = []

    def send(percent: float) -> None:
        if artifact:
            update_progress_artifact(artifact[0], progress=percent)  # type: ignore[arg-type] # Prefect's own UUID
        else:
            artifact.append(create_progress_artifact(percent, key=key(name), description=description))

    return send
