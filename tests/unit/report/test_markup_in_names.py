"""Texts from outside in all pages of Markdown: a page has the same structure whatever they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from virnuc_core.report.model import Report
from virnuc_core.report.render import benchmark_markdown, report_html, report_markdown

from ..markdown_pages import HOSTILE_TEXTS, HtmlPage, structure

pytestmark = pytest.mark.usefixtures("telemetry_once")

PLAIN = "name"  # a text that no program takes for anything


def texts_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each text in nested dicts and lists."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from texts_in(part, (*path, key))
    elif isinstance(value, list):
        for place, part in enumerate(value):
            yield from texts_in(part, (*path, place))
    elif isinstance(value, str):
        yield path


def put(data: Any, path: tuple[Any, ...], text: str) -> None:
    """Replace the text at a path of nested dicts and lists."""
    for step in path[:-1]:
        data = data[step]
    data[path[-1]] = text


def with_texts(record: Report, text: str, paths: list[tuple[Any, ...]]) -> Report:
    """Return a report with a text at each of these paths, as a warning, and as a name of a package."""
    data = record.model_dump(mode="json")
    for path in paths:
        put(data, path, text)
    data["warnings"] = [text, text]
    data["provenance"]["versions"][text] = text
    return Report.model_validate_json(json.dumps(data))


@pytest.fixture(scope="module")
def paths(judged: Report) -> list[tuple[Any, ...]]:
    """The places of a report with texts that may be any text.

    The other texts are names of our own, such as those of verdicts and encoders, without which the
    report is refused or no page can be made.
    """
    free_places = []
    for path in texts_in(judged.model_dump(mode="json")):
        try:
            report_markdown(with_texts(judged, PLAIN, [path]))
        except (ValidationError, KeyError, ValueError):
            continue
        free_places.append(path)
    return free_places


def test_many_texts_of_a_report_may_be_any_text(paths: list[tuple[Any, ...]]) -> None:
    names = {".".join(step for step in path if isinstance(step, str)) for path in paths}
    assert {"provenance.host", "profile.title", "runs.name"} <= names


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_a_report_has_the_same_structure_whatever_its_texts_are(
    judged: Report, paths: list[tuple[Any, ...]], text: str
) -> None:
    plain = with_texts(judged, PLAIN, paths)
    hostile = with_texts(judged, text, paths)
    for make in (report_markdown, benchmark_markdown):
        assert structure(make(hostile)) == structure(make(plain))


def test_the_page_for_browsers_has_the_same_tags_whatever_its_texts_are(
    judged: Report, paths: list[tuple[Any, ...]]
) -> None:
    hostile_text = "<a href='//y'>\"><img src=x onerror=z>&lt;"
    plain = HtmlPage(report_html(with_texts(judged, PLAIN, paths)))
    hostile = HtmlPage(report_html(with_texts(judged, hostile_text, paths)))
    assert hostile.tags == plain.tags
    assert hostile_text in hostile.texts
