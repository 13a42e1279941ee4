"""Compare the tables that a run writes with the columns that docs/tables.json documents."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

SCHEMAS: dict[str, Any] = json.loads(
    Path(__file__).parents[1].joinpath("docs", "tables.json").read_text("utf-8")
)


def documented(path: Path, name: str = "") -> int:
    """Check the header and each row of a table against its documentation; return its rows' number.

    Args:
        path: The table.
        name: The table's name in docs/tables.json, if it is not the name of the file.
    """
    schema = SCHEMAS[name or path.name]
    columns, check = schema["properties"], Draft202012Validator(schema)
    with path.open(encoding="utf-8", newline="") as handle:
        lines = csv.reader(handle, delimiter="\t", quoting=csv.QUOTE_NONE)
        header = next(lines)
        assert header == list(columns), f"{path}: columns {header}"
        count = 0
        for count, line in enumerate(lines, start=1):
            row = {
                column: _typed(text, columns[column].get("type", "string"))
                for column, text in zip(header, line, strict=True)
            }
            wrong = [
                f"{path}:{count + 1}: {'.'.join(map(str, error.path))}: {error.message}"
                for error in check.iter_errors(row)
            ]
            assert not wrong, wrong
    return count


def _typed(text: str, kind: str | list[str]) -> object:
    kinds = [kind] if isinstance(kind, str) else kind
    if text == "" and "null" in kinds:
        return None
    try:
        return int(text) if "integer" in kinds else float(text) if "number" in kinds else text
    except ValueError:
        return text
