"""Tables that people open with a spreadsheet program, in which no cell may be run as a formula."""

import re
from typing import Final

# Spreadsheet programs run a cell that begins with one of these characters. Apostrophes before them
# are part of the pattern, so that a value that already begins with an apostrophe can be restored.
_FORMULA_START: Final = re.compile(r"'*[=+\-@\t\r]")


def escape_formula(text: str) -> str:
    """Return the text of a table cell, changed so that no spreadsheet program runs it.

    Names and notes from outside may begin like a formula. An apostrophe is put before these texts,
    and all other texts stay as they are. `restore_formula` removes the apostrophe.

    Args:
        text: The value of one cell.

    Returns:
        The text to write into the table.
    """
    if _FORMULA_START.match(text):
        return "'" + text
    return text


def restore_formula(cell: str) -> str:
    """Return the value that `escape_formula` made safe, without the added apostrophe.

    Args:
        cell: The text of one cell, as it is in the table.

    Returns:
        The value. A cell without an added apostrophe is returned as it is.
    """
    if cell.startswith("'") and _FORMULA_START.match(cell):
        return cell.removeprefix("'")
    return cell
