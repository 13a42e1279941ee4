"""Artifacts: the tables, texts and progress bars that Prefect shows of a run."""

import math
import platform
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from prefect import artifacts
from prefect.context import FlowRunContext, TaskRunContext

from virnuc.tasks.background import background_thread
from virnuc.tasks.server_connection import connection, with_server
from virnuc_core.errors import (
    printable,
)

MAX_BYTES: Final = 100 * 1024


_MARKDOWN: Final = re.compile(r"([\\`*~|<>\[\]]|^[#+-](?=\s)|^\d+\.(?=\s))")


Rows = Sequence[Mapping[str, object]]  # of equal keys


class Markdown(str):
    """Text that is Markdown already; all other text in a table is shown as it stands."""


def artifact_key(name: str) -> str:
    """A name as an artifact's key: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:100].strip("-")


def host_key(name: str) -> str:
    """The key of an artifact whose figures depend on this machine."""
    return artifact_key(f"{name}-{platform.node()}")


def table_cell(value: object) -> str:
    """One value as a table cell's text: comparison signs as signs, no infinite number, nothing read as Markdown."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float() if math.isfinite(value):
            return f"{value:.4g}" if abs(value) < 1e6 else f"{value:,.0f}"
        case float():
            return "–" if math.isnan(value) else "∞" if value > 0 else "-∞"
        case Markdown():
            return value
    text = (
        printable(str(value).replace("\r", " ").replace("\n", " "))
        .replace("<=", "≤")
        .replace(">=", "≥")
    )
    return _MARKDOWN.sub(r"\\\1", text)


def bounded_rows(rows: Rows) -> list[dict[str, str]]:
    """The cells of the first rows that stay below `MAX_BYTES`, and a last row that says how many were left out."""
    kept: list[dict[str, str]] = []
    used = 0
    for row in rows:
        texts = {name: table_cell(value) for name, value in row.items()}
        used += sum(len(name.encode()) + len(text.encode()) + 8 for name, text in texts.items())
        if used > MAX_BYTES:
            note = f"… {len(rows) - len(kept):,} more rows: see the files of the run"
            return [*kept, dict.fromkeys(row, "") | {next(iter(row)): note}]
        kept.append(texts)
    return kept


def publish_table(name: str, rows: Rows, description: str) -> None:
    """Record a table under `name`, inside a run; a description that is not `Markdown` is shown as it stands."""
    if inside_a_run():
        with connection.reporting(f"table {name}"):
            artifacts.create_table_artifact(
                bounded_rows(rows), key=artifact_key(name), description=table_cell(description)
            )


def publish_markdown(name: str, text: str, description: str, full_text: Path | str) -> None:
    """Record a text under `name`, cut at a line's end below `MAX_BYTES` with a word on where the whole stands."""
    if not inside_a_run():
        return
    if len(text.encode()) > MAX_BYTES:
        note = f"\n\n… cut here; the whole text is `{full_text}`\n"
        head = text.encode()[: MAX_BYTES - len(note.encode())].decode("utf-8", "ignore")
        text = head[: head.rfind("\n")] + note
    with connection.reporting(f"text {name}"):
        artifacts.create_markdown_artifact(
            text, key=artifact_key(name), description=table_cell(description)
        )


def inside_a_run() -> bool:
    """Whether this code runs inside a Prefect flow or task."""
    return with_server() and (FlowRunContext.get() is not None or TaskRunContext.get() is not None)


@contextmanager
def progress_artifact(
    name: str, description: str, *, every_s: float = 5.0
) -> Iterator[Callable[[float], None]]:
    """Gives what takes a share of work done, 0 to 1; in a run the newest is sent every `every_s` s, and at the end."""
    if not inside_a_run():
        yield lambda share: None
        return
    newest = 0.0

    def show(share: float) -> None:
        nonlocal newest
        newest = round(100 * min(max(share, 0.0), 1.0), 1)

    def publish(stop: threading.Event) -> None:
        shown, ended = -1.0, False
        made: Any = None  # Prefect's id of the artifact
        while not ended:
            ended = stop.wait(every_s)
            if (percent := newest) != shown:
                with connection.reporting(f"progress {name}"):
                    if made is None:
                        made = artifacts.create_progress_artifact(
                            percent, key=artifact_key(name), description=description
                        )
                    else:
                        artifacts.update_progress_artifact(made, progress=percent)
                    shown = percent

    with background_thread(publish):
        yield show
