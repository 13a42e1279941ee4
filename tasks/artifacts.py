"""Artifacts: the tables, texts and progress bars that Prefect shows of a run.

Prefect renders table cells as Markdown, so that `>= 0.9` would appear as a quotation that reads "=
0.9". One infinite number empties a whole table. The list of artifacts loads the body of each. Hence
the rules of `table_cell`, and the limits on sizes.
"""

import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from uuid import UUID

from virnuc.tasks.background import background_thread
from virnuc.tasks.server_use import with_server
from virnuc_core.errors import printable
from virnuc_core.machine_name import machine_name
from virnuc_core.markdown import Markdown, code_span, escape_markdown

MAX_BYTES: Final = 100 * 1024  # of an artifact
MAX_KEY_LENGTH: Final = 100
CELL_MARKUP_BYTES: Final = 8  # what JSON adds to a cell, about
# A target such as `>= 0.9`, which Prefect shows without its first character.
_TARGET: Final = re.compile(r"(?<!\S)([<>])=(?=\s?\d)")

Rows = Sequence[Mapping[str, object]]  # all rows have the same keys


def artifact_key(name: str) -> str:
    """Turn a name into the key of an artifact: lower-case letters, digits and dashes."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower())
    return words.strip("-")[:MAX_KEY_LENGTH].strip("-")


def host_key(name: str) -> str:
    """Return the key of an artifact whose figures depend on this machine."""
    return artifact_key(f"{name}-{machine_name()}")


def table_cell(value: object) -> str:
    """Return a value as the text of a table cell, with nothing that is taken for Markdown."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return _float_cell(value)
        case Markdown():
            return value
    text = _TARGET.sub(_target_sign, printable(" ".join(str(value).split())))
    return escape_markdown(text)


def _target_sign(match: re.Match[str]) -> str:
    """Return `≤` or `≥` for the two characters of a target."""
    return "≤" if match[1] == "<" else "≥"


def _float_cell(value: float) -> str:
    """Return a number as text, also one that is not finite."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if abs(value) < 1e6:
        return f"{value:.4g}"
    return f"{value:,.0f}"


def bounded_rows(rows: Rows) -> list[dict[str, str]]:
    """Return the rows as text, shortened to about `MAX_BYTES`.

    If rows are left out, the last row says how many.
    """
    kept_rows: list[dict[str, str]] = []
    n_bytes = 0
    for row in rows:
        cells = {table_cell(column): table_cell(value) for column, value in row.items()}
        for column, text in cells.items():
            n_bytes += len(column.encode()) + len(text.encode()) + CELL_MARKUP_BYTES
        if n_bytes > MAX_BYTES:
            n_left_out = len(rows) - len(kept_rows)
            note = dict.fromkeys(cells, "")
            first_column = next(iter(cells))
            note[first_column] = f"… {n_left_out:,} more rows: see the files of the run"
            kept_rows.append(note)
            break
        kept_rows.append(cells)
    return kept_rows


def publish_table(name: str, rows: Rows, description: str) -> None:
    """Show a table. Outside a Prefect run nothing happens.

    Args:
        name: Name from which the artifact's key is made.
        rows: Rows by column name.
        description: Text above the table. Markdown characters in it are escaped, unless it is of
            the class `Markdown`.
    """
    if not inside_a_run():
        return
    from prefect import artifacts

    from virnuc.tasks.server_connection import connection

    with connection.reporting(f"table {name}"):
        artifacts.create_table_artifact(
            bounded_rows(rows), key=artifact_key(name), description=table_cell(description)
        )


def publish_markdown(name: str, text: str, description: str, full_text: Path | str) -> None:
    """Show a text. Outside a Prefect run nothing happens.

    Args:
        name: Name from which the artifact's key is made.
        text: The Markdown text. If it is longer than `MAX_BYTES`, it is cut at the end of a line.
        description: Text above the artifact.
        full_text: File with the whole text, which is named where the text was cut.
    """
    if not inside_a_run():
        return
    from prefect import artifacts

    from virnuc.tasks.server_connection import connection

    n_bytes = len(text.encode())
    if n_bytes > MAX_BYTES:
        note = f"\n\n… cut here; the whole text is {code_span(str(full_text))}\n"
        beginning = text.encode()[: MAX_BYTES - len(note.encode())].decode("utf-8", "ignore")
        whole_lines = beginning[: beginning.rfind("\n")]
        text = whole_lines + note
    with connection.reporting(f"text {name}"):
        artifacts.create_markdown_artifact(
            text, key=artifact_key(name), description=table_cell(description)
        )


def inside_a_run() -> bool:
    """Tell whether this code runs inside a Prefect flow or task."""
    if not with_server():
        return False
    from prefect.context import FlowRunContext, TaskRunContext

    return FlowRunContext.get() is not None or TaskRunContext.get() is not None


class Progress:
    """The progress of some work: the newest share that is done, and a line about it.

    Call it with a share, 0 to 1.
    """

    def __init__(self) -> None:
        self.percent = 0.0
        self.status = ""  # a line of live figures; empty if there is none

    def __call__(self, share: float) -> None:
        """Store the newest share."""
        self.percent = round(100 * min(max(share, 0.0), 1.0), 1)

    def show_status(self, line: str) -> None:
        """Store the newest line of live figures, which is shown below the description."""
        self.status = line


@contextmanager
def progress_artifact(name: str, description: str, *, every_s: float = 5.0) -> Iterator[Progress]:
    """Yield an object that takes the share of work that is done, and live figures.

    In a Prefect run the newest share and figures are sent in intervals, and at the end.

    Args:
        name: Name from which the artifact's key is made.
        description: Text above the bar.
        every_s: Seconds between two updates.
    """
    progress = Progress()
    if not inside_a_run():
        yield progress
        return
    from virnuc.tasks.server_connection import connection

    def publish(stop: threading.Event) -> None:
        """Send the progress every few seconds, and a last time after the body has ended."""
        sent: tuple[float, str] | None = None
        artifact_id: UUID | None = None
        is_over = False
        while not is_over:
            is_over = stop.wait(every_s)
            newest = (progress.percent, progress.status)
            if newest == sent:
                continue
            percent, status = newest
            text = f"{description}: {status}" if status else description
            with connection.reporting(f"progress {name}"):
                artifact_id = _send_progress(artifact_id, percent, name, text)
                sent = newest

    with background_thread(publish):
        yield progress


def _send_progress(
    artifact_id: UUID | None, percent: float, name: str, description: str
) -> UUID | None:
    """Create a progress artifact, or update the one with this id; return its id."""
    from prefect import artifacts

    if artifact_id is not None:
        artifacts.update_progress_artifact(
            artifact_id, progress=percent, description=table_cell(description)
        )
        return artifact_id
    return artifacts.create_progress_artifact(  # type: ignore[return-value]
        percent, key=artifact_key(name), description=table_cell(description)
    )
