"""Whatever a name is, a Markdown program shows exactly that name, and nothing else."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import example, given

from virnuc_core.markdown import (
    Markdown,
    code_block,
    code_span,
    escape_markdown,
    front_matter_value,
)
from virnuc_core.report.filling import markdown_table
from virnuc_core.report.text import cell, markdown_cell

from .markdown_pages import HOSTILE_TEXTS, PARSER, names, shown_texts, structure


def one_line(name: str) -> str:
    """Return a name without line breaks and repeated blanks, as pages show it."""
    return " ".join(cell(name).split())


@given(names)
def test_a_name_in_a_paragraph_is_shown_as_it_is(name: str) -> None:
    name = one_line(name)
    page = escape_markdown(name)
    if not name:
        assert page == ""
        return
    assert set(structure(page)) <= {
        "paragraph_open",
        "inline",
        "inline.text",
        "paragraph_close",
    }
    assert shown_texts(page) == [name]


@given(names)
def test_a_name_in_a_list_is_shown_as_it_is(name: str) -> None:
    name = one_line(name) or "x"
    page = f"- {markdown_cell(name)}\n- {markdown_cell(name)}\n"
    assert structure(page) == structure("- x\n- x\n")
    assert shown_texts(page) == [name, name]


@given(names, names)
def test_names_in_a_table_are_shown_as_they_are(column: str, name: str) -> None:
    column = one_line(column) or "column"
    page = markdown_table([{"first": name, column: name}, {"first": "x", column: name}])
    expected = markdown_table([{"first": "x", "y": "x"}, {"first": "x", "y": "x"}])
    if not one_line(name):
        return
    assert structure(page) == structure(expected)
    assert shown_texts(page) == [
        "first",
        column,
        one_line(name),
        one_line(name),
        "x",
        one_line(name),
    ]


@given(names)
@example("`")
@example("``a`")
def test_a_name_in_a_code_span_is_shown_as_it_is(name: str) -> None:
    name = one_line(name)
    page = f"- {code_span(name)}: text\n"
    assert structure(page) == structure("- `x`: text\n")
    assert shown_texts(page) == [f"{name or ' '}: text"]


@given(names)
def test_lines_of_a_code_block_do_not_end_it(name: str) -> None:
    lines = f"first\n{cell(name)}\n{one_line(name)}\n"
    page = f"# title\n\n{code_block(lines)}\nafter\n"
    assert structure(page) == structure("# title\n\n```\nx\n```\nafter\n")
    assert shown_texts(page) == ["title", lines, "after"]


@given(names)
def test_a_value_of_the_front_matter_is_read_as_it_is_and_is_no_markup(name: str) -> None:
    quoted = front_matter_value(name)
    assert json.loads(quoted) == name
    if name.isprintable() and max(name, default="") < "\U00010000":
        # YAML reads two numbers, as JSON writes the characters beyond, as two characters.
        assert yaml.safe_load(f"name: {quoted}\n") == {"name": name}
    # This is what a program sees that does not know front matter.
    page = f"---\nname: {quoted}\nnumber: 1\n---\n\ntext\n"
    expected = '---\nname: "x"\nnumber: 1\n---\n\ntext\n'
    assert structure(page) == structure(expected)


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_no_program_makes_a_link_of_an_address_in_a_name(text: str) -> None:
    """GitHub, Prefect and editors make links of these sequences, without any markup."""
    for escaped in (escape_markdown(text), front_matter_value(text)):
        assert "//" not in escaped
        assert "www." not in escaped
        assert "@evil." not in escaped


@pytest.mark.parametrize(
    "text",
    [
        "no_open_frame",
        "[NOT RUN] no NVML sample of cpu-core-0, cpu-core-1",
        "reads.fastq.gz, 2,000 reads, SHA-256 14289b",
        "devices-2/telemetry/telemetry_20261125_032706.h5",
        "-6.7% (median of 2 pairs of runs, -12.1 to -1.4%; 3 are needed)",
        "cuda:0@node-7",
        "R&D 2.13.0+cpu × 1,000 = 5.",
    ],
)
def test_ordinary_texts_stay_as_they_are(text: str) -> None:
    assert escape_markdown(text) == text
    assert json.loads(front_matter_value(text)) == text


def test_markdown_of_our_own_is_not_escaped() -> None:
    assert markdown_cell(Markdown("**all reads**")) == "**all reads**"
    assert markdown_cell("**all reads**") == "\\*\\*all reads\\*\\*"


def test_the_parser_of_these_tests_would_see_markup() -> None:
    page = "[x](http://evil.example) <b>y</b> ![z](q)\n\n# h\n"
    assert {"inline.link_open", "inline.html_inline", "inline.image", "heading_open"} <= set(
        structure(page)
    )
    assert PARSER.options["html"]
