"""Cells of tables are never run as formulas, and their values can be restored."""

import pytest

from virnuc_core.spreadsheets import escape_formula, restore_formula


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "'=", "''-"])
def test_a_formula_is_escaped_and_restored(start: str) -> None:
    value = start + "HYPERLINK(1)"
    assert escape_formula(value) == "'" + value
    assert restore_formula("'" + value) == value


@pytest.mark.parametrize("value", ["", "a=b", "lung-1", "'", "'quoted'", "1.5"])
def test_other_values_stay(value: str) -> None:
    assert escape_formula(value) == value
    assert restore_formula(value) == value
