"""Cells that read as meant, keys Prefect accepts, sizes it can carry."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc.tasks.artifacts import (
    MAX_BYTES,
    artifact_key,
    bounded_rows,
    publish_markdown,
    publish_table,
    table_cell,
)
from virnuc_core.errors import printable
from virnuc_core.markdown import Markdown
from virnuc_core.report.filling import markdown_table

from ..markdown_pages import HOSTILE_TEXTS, names, shown_texts, structure


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (">= 0.9", "≥ 0.9"),
        ("<= 10 h", "≤ 10 h"),
        ("< 1 h", "\\< 1 h"),
        ("> 80 %", "\\> 80 %"),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
        (math.nan, "–"),
        (None, "–"),
        (True, "yes"),
        (1234567, "1,234,567"),
        (0.98765432, "0.9877"),
        ("# 7", "\\# 7"),
        ("~1.9x~", "\\~1.9x\\~"),
        ("a|b", "a\\|b"),
        ("a_b_c", "a_b_c"),
        ("two\nlines", "two lines"),
        ("<script>", "\\<script\\>"),
        ("a\x1b[2J\u202e", "a\\\\x1b\\[2J\\\\u202e"),
    ],
)
def test_cells(value: object, shown: str) -> None:
    assert table_cell(value) == shown


@given(st.one_of(st.text(), st.floats(), st.integers(), st.booleans(), st.none()))
def test_a_cell_is_always_one_line_of_valid_json_without_a_quotation(value: object) -> None:
    text = table_cell(value)
    assert "\n" not in text
    assert json.loads(json.dumps(text)) == text
    assert not text.startswith(">")


@given(names)
def test_a_cell_is_shown_as_the_name_that_it_is(name: str) -> None:
    """Prefect reads each cell as a page of its own, so that a cell could even be a heading."""
    shown = " ".join(printable(" ".join(name.split())).split())
    text = table_cell(name)
    if not shown:
        assert text == ""
        return
    assert structure(text) == structure("x")
    assert [text.replace("≤", "<=").replace("≥", ">=") for text in shown_texts(text)] == [
        shown.replace("≤", "<=").replace("≥", ">=")
    ]


@pytest.mark.parametrize("name", HOSTILE_TEXTS)
def test_names_of_columns_are_shown_as_they_are(name: str) -> None:
    ((column,),) = bounded_rows([{name: 1}])
    assert structure(column) == structure("x")
    assert shown_texts(column) == [" ".join(name.split())]


@pytest.mark.parametrize("name", HOSTILE_TEXTS)
def test_the_name_of_the_whole_text_does_not_end_the_note(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    monkeypatch.setattr("virnuc.tasks.artifacts.inside_a_run", lambda: True)
    monkeypatch.setattr(
        "prefect.artifacts.create_markdown_artifact",
        lambda text, **_: texts.append(text),
    )
    long_text = "line\n" * MAX_BYTES
    publish_markdown("report", long_text, "", name)
    publish_markdown("report", long_text, "", "name")
    hostile, plain = (text.rpartition("… cut here")[2] for text in texts)
    assert structure(hostile) == structure(plain)


@given(st.text())
def test_a_key_is_one_prefect_accepts(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9](?:[a-z0-9-]{0,98}[a-z0-9])?", artifact_key(f"reads-{name}"))


def test_keys_say_what_they_are_of() -> None:
    assert artifact_key("criteria-Lung_R1-cpu:2") == "criteria-lung-r1-cpu-2"


def test_a_long_table_is_cut_and_says_so() -> None:
    rows = [{"name": f"row {i}", "text": "x" * 1000} for i in range(500)]
    bounded = bounded_rows(rows)
    assert len(json.dumps(bounded).encode()) < MAX_BYTES * 1.05
    assert (
        bounded[-1]["name"] == f"… {500 - (len(bounded) - 1):,} more rows: see the files of the run"
    )
    assert bounded_rows(rows[:3]) == rows[:3]


def test_a_long_report_is_cut_at_a_line_and_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr("virnuc.tasks.artifacts.inside_a_run", lambda: True)
    monkeypatch.setattr(
        "prefect.artifacts.create_markdown_artifact",
        lambda text, **_: texts.append(text),
    )
    for text in ("\n".join("ä" * 100 for _ in range(2000)), "short"):
        publish_markdown("report", text, "", Path("/r/report.md"))
    cut, short = texts
    assert len(cut.encode()) <= MAX_BYTES
    assert cut.endswith("the whole text is `/r/report.md`\n")
    assert set(cut.split("\n\n…")[0]) == {"ä", "\n"}
    assert short == "short"


def test_tables_as_markdown() -> None:
    table = "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
    assert markdown_table([{"a": "1", "b": "2"}]) == table
    assert markdown_table([]) == ""


def test_outside_a_run_nothing_is_published() -> None:
    publish_table("criteria", [{"a": "b"}], "")
    publish_markdown("report", "text", "", "file")


def test_a_file_name_in_a_description_is_no_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr("virnuc.tasks.artifacts.inside_a_run", lambda: True)
    for kind in ("table", "markdown"):
        target = f"prefect.artifacts.create_{kind}_artifact"
        monkeypatch.setattr(target, lambda *_, description, **__: messages.append(description))
    odd = "[x](javascript:alert(1))\x1b"
    publish_table("t", [{"a": 1}], f"What became of {odd}")
    publish_markdown("m", "text", odd, Path("/r"))
    publish_table("t", [{"a": 1}], Markdown(f"**7 of 9** {table_cell(odd)}"))
    escaped = "\\[x\\](javascript:alert(1))\\\\x1b"
    assert messages == [f"What became of {escaped}", escaped, f"**7 of 9** {escaped}"]
