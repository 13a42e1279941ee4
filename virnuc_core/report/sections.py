"""The parts of a report that every form shows: sections of sentences, and tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from virnuc_core.report.text import Cell, Mark, Number

Row = dict[str, Cell]  # cells by the name of their column


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with the same columns.

    Attributes:
        rows: The rows. The first one has every column.
        title: A heading, where a section has several tables.
    """

    rows: Sequence[Row]
    title: str = ""

    @property
    def columns(self) -> list[str]:
        """Return the names of the columns."""
        return list(self.rows[0]) if self.rows else []

    @property
    def numeric_columns(self) -> set[str]:
        """Return the columns that hold numbers, which are aligned to the right."""
        names = set()
        for row in self.rows:
            for name, value in row.items():
                if isinstance(value, int | Number):
                    names.add(name)
        return names


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report.

    Attributes:
        title: The heading.
        lead: What the sentences begin with, set off from them.
        sentences: One sentence or one remark each.
        tables: The tables; those without rows are not shown.
    """

    title: str
    lead: Mark | str = ""
    sentences: Sequence[str] = ()
    tables: Sequence[Table] = ()

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to show."""
        return not self.sentences and not any(table.rows for table in self.tables)

    @property
    def rows(self) -> list[Row]:
        """Return the rows of all tables, one table after the other."""
        return [row for table in self.tables for row in table.rows]


def with_columns_of_first(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with all columns of the first row. Missing cells become None."""
    if not rows:
        return []
    columns: Row = dict.fromkeys(rows[0])
    return [columns | row for row in rows]


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing with what it shows."""

    title: str
    description: str
    svg: str
