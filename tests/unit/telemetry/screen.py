"""What a terminal shows after a text with the few control sequences that live bars use."""

from __future__ import annotations

import re

CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")


def screen(text: str, width: int) -> list[str]:
    """The lines of a terminal so wide and as high as need be; whatever was wiped or written over is gone."""
    lines, row, column = [""], 0, 0
    for match in CONTROL.finditer(text):
        number, kind = match[1], match[2]
        if match[0] == "\r":
            column = 0
        elif match[0] == "\n":
            row, column = row + 1, 0
        elif kind == "A":
            row -= int(number or 1)
        elif kind == "K":
            lines[row] = "" if number == "2" else lines[row][:column]
        elif kind is None:
            for letter in match[0]:
                if column == width:  # as terminals do: the next letter stands on the next line
                    row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
                lines[row] = lines[row][:column].ljust(column) + letter + lines[row][column + 1 :]
                column += 1
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines if line.strip()]
