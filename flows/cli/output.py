"""Writes what commands say on standard output: lines and tables."""

import sys
from collections.abc import Iterable
from typing import Final

from virnuc_core.errors import printable

WIDTH_IN_FILES: Final = 160


def say(*lines: object) -> None:
    """Write lines to standard output. Control characters, as in file names, are escaped."""
    for line in lines:
        sys.stdout.write(f"{printable(str(line))}\n")


def show_table(
    header: Iterable[str], rows: Iterable[Iterable[str]], title: str | None = None
) -> None:
    """Write a table, as wide as the terminal, or `WIDTH_IN_FILES` characters in a file.

    Args:
        header: The names of the columns.
        rows: The cells of each row. Names are shown as they are, without markup.
        title: What stands above the table.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*row)
    width = None
    if not sys.stdout.isatty():
        width = WIDTH_IN_FILES
    console = Console(markup=False, emoji=False, highlight=False, width=width)
    console.print(table)
