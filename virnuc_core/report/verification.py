"""What verifying a report finds: values that were compared, and those that differ."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final

from pydantic import BaseModel

from virnuc_core.runfiles import RunFile

RELATIVE_TOLERANCE: Final = 1e-9  # the last digits of a sum may depend on the machine
ABSENT: Final = "nothing"
MAX_SHOWN_CHARACTERS: Final = 90
CHARACTERS_BEFORE_DIFFERENCE: Final = 30  # shown of a line


@dataclass
class Verification:
    """What was compared, and what differs."""

    figures: int = 0
    differences: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # worth a word, but no difference

    @property
    def ok(self) -> bool:
        """Return whether values were compared and none differs."""
        return self.figures > 0 and not self.differences

    def compare(self, where: str, claimed: object, computed: object) -> None:
        """Compare a value, or all values in nested lists and dicts. Each value counts as a figure.

        Args:
            where: The name of the value, for the message about a difference.
            claimed: The value in the report or in another file.
            computed: The value that was computed again from the raw files.
        """
        if isinstance(claimed, BaseModel) and isinstance(computed, BaseModel):
            claimed = claimed.model_dump(mode="json")
            computed = computed.model_dump(mode="json")
        if isinstance(claimed, dict) and isinstance(computed, dict):
            self._compare_dicts(where, claimed, computed)
        elif _are_lists_of_one_length(claimed, computed):
            pairs = zip(claimed, computed, strict=True)  # type: ignore[call-overload]
            for index, (claimed_item, computed_item) in enumerate(pairs):
                self.compare(f"{where}[{index}]", claimed_item, computed_item)
        else:
            self.figures += 1
            if not _are_equal(claimed, computed):
                self.differences.append(
                    f"{where}: says {_brief(claimed)}, the raw files give {_brief(computed)}"
                )

    def _compare_dicts(
        self, where: str, claimed: Mapping[Any, object], computed: Mapping[Any, object]
    ) -> None:
        """Compare the values of two dicts. A key that only one of them has is a difference."""
        for key in dict.fromkeys((*claimed, *computed)):
            name = f"{where}.{key}" if where else str(key)
            self.compare(name, claimed.get(key, ABSENT), computed.get(key, ABSENT))

    def compare_fields(self, where: str, file: RunFile, computed: Mapping[str, object]) -> None:
        """Compare fields of a file with what was computed.

        Args:
            where: The name of the file, for messages.
            file: Its content. Fields that it does not have, or that are `None`, are not compared.
            computed: The computed values by field. `None` is not compared.
        """
        for name, value in computed.items():
            claimed = getattr(file, name, None)
            if claimed is not None and value is not None:
                self.compare(f"{where}: {name}", claimed, value)

    def compare_lines(
        self, where: str, claimed: Iterable[bytes], computed: Iterable[bytes], source: str
    ) -> None:
        """Compare two texts line by line. Only the first difference is recorded.

        Args:
            where: The name of the text.
            claimed: The lines of the file.
            computed: The lines that were written again.
            source: Name of the files from which they were written again, in the plural.
        """
        self.figures += 1
        pairs = zip_longest(claimed, computed, fillvalue=b"")
        for number, (line, computed_line) in enumerate(pairs, start=1):
            if line != computed_line:
                # Long lines are shown from a little before the first difference.
                start = max(0, _common_length(line, computed_line) - CHARACTERS_BEFORE_DIFFERENCE)
                shown_line = _brief(_text_from(line, start))
                computed_shown = _brief(_text_from(computed_line, start))
                self.differences.append(
                    f"{where}: line {number} says {shown_line}, {source} give {computed_shown}"
                )
                return

    def add_difference(self, text: str) -> None:
        """Add a difference that is not between two values."""
        self.figures += 1
        self.differences.append(text)


def _are_lists_of_one_length(a: object, b: object) -> bool:
    """Return whether both values are lists with the same length."""
    return isinstance(a, list) and isinstance(b, list) and len(a) == len(b)


def _are_equal(a: object, b: object) -> bool:
    """Return whether two values are equal. Numbers may differ by `RELATIVE_TOLERANCE`."""
    if _is_number(a) and _is_number(b):
        return a == b or math.isclose(a, b, rel_tol=RELATIVE_TOLERANCE)  # type: ignore[arg-type]
    return a == b


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _common_length(a: bytes, b: bytes) -> int:
    """Return the number of bytes at the beginning of two lines that are equal."""
    length = 0
    for byte_a, byte_b in zip(a, b, strict=False):
        if byte_a != byte_b:
            break
        length += 1
    return length


def _text_from(line: bytes, start: int) -> str:
    """Return the part of a line that begins at byte `start`, as text."""
    return line[start:].decode("utf-8", "replace").rstrip("\n")


def _brief(value: object) -> str:
    """Return a value as JSON, shortened for a message."""
    text = json.dumps(value, default=str)
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return text
    return f"{text[: MAX_SHOWN_CHARACTERS - 3]}…"
