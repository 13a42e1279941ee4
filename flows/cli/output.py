"""Writes what commands say on standard output: lines and tables."""

import codecs
import io
import sys
from collections.abc import Iterable
from typing import Any, Final

from virnuc_core.errors import printable

WIDTH_IN_FILES: Final = 160
# What is written for letters that the encoding of a terminal or pipe does not have. No replacement
# may have a special meaning in JSON.
ASCII_REPLACEMENTS: Final = {
    "≥": ">=",
    "≤": "<=",
    "≠": "!=",
    "≈": "~",
    "→": "->",
    "←": "<-",
    "↔": "<->",
    "…": "...",
    "–": "-",
    "—": "-",
    "−": "-",
    "×": "x",
    "÷": "/",
    "±": "+-",
    "·": ".",
    "•": "*",
    "‘": "'",
    "’": "'",
    "“": "'",
    "”": "'",
    "µ": "u",
    "\N{GREEK SMALL LETTER MU}": "u",
    "\N{NO-BREAK SPACE}": " ",
    "\N{NARROW NO-BREAK SPACE}": " ",
}
_ERROR_HANDLER: Final = "virnuc.replace"  # the name by which Python's streams find the function


def replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    """Return what is written for letters that an encoding does not have.

    This is an error handler as `codecs.register_error` takes it.

    Args:
        error: Names the text, and the range of letters that cannot be encoded.

    Returns:
        The replacement, which is ASCII, and the position at which encoding continues. A letter
        without an entry in `ASCII_REPLACEMENTS` becomes an escape sequence such as `\\u0142`.

    Raises:
        UnicodeError: The error is not one of encoding.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    replacements: list[str] = []
    for letter in error.object[error.start : error.end]:
        escaped = letter.encode("ascii", "backslashreplace").decode("ascii")
        replacements.append(ASCII_REPLACEMENTS.get(letter, escaped))
    return "".join(replacements), error.end


def accept_all_letters(*streams: Any) -> None:
    """Let text streams replace letters that they cannot encode, instead of raising an error.

    The encoding of standard output depends on the user's locale, and texts of ours contain letters
    beyond ASCII. Streams that are closed or replaced, as in a notebook, stay as they are.

    Args:
        streams: Standard output and standard error. A stream is None if it is closed.
    """
    codecs.register_error(_ERROR_HANDLER, replace_unencodable)
    for stream in streams:
        if not isinstance(stream, io.TextIOWrapper):
            continue
        # Streams in UTF-8 that already replace letters on their own stay as they are. Strict ones
        # raise an error at file names whose bytes are no text. Other encodings lack letters.
        is_utf = stream.encoding.lower().replace("_", "-").startswith("utf")
        if stream.errors == "strict" or not is_utf:
            stream.reconfigure(errors=_ERROR_HANDLER)


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
        title: What stands above the table. None if nothing does.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*row)
    width = None  # that of the terminal
    if not sys.stdout.isatty():
        width = WIDTH_IN_FILES
    console = Console(markup=False, emoji=False, highlight=False, width=width)
    console.print(table)
