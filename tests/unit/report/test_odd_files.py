"""Raw files with anything in them give a report, and nothing odd turns into a pass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from virnuc_core.profiles import Profile
from virnuc_core.report.benchmark import benchmark_json
from virnuc_core.report.build import build_report
from virnuc_core.report.render import benchmark_markdown, report_markdown, report_text

from .validate_directory import write_json

FILES = (
    "run.json",
    "comparison.json",
    "regression.json",
    "baseline/summary.json",
    "devices-1/summary.json",
    "devices-2/summary.json",
    "devices-2/run.json",
)
ODD: tuple[Any, ...] = (0, None, -1, "x", 1e308, [], {}, True, 0.0, 1e-300, "NaN", 3.5)


def places(body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield every place in a JSON value; of lists the first three."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(body, dict):
        items = body.items()
    elif isinstance(body, list):
        items = enumerate(body[:3])
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


@pytest.fixture(scope="module")
def spoilt(
    finished: tuple[Path, Profile], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Profile]:
    out_dir = tmp_path_factory.mktemp("odd") / "out"
    shutil.copytree(finished[0], out_dir)
    return out_dir, finished[1]


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(st.data())
def test_whatever_a_raw_file_holds_there_is_a_report(
    spoilt: tuple[Path, Profile], data: st.DataObject
) -> None:
    out_dir, profile = spoilt
    path = out_dir / data.draw(st.sampled_from(FILES))
    text = path.read_text(encoding="utf-8")
    body = json.loads(text)
    all_places = list(places(body))
    try:
        for place in data.draw(st.lists(st.sampled_from(all_places), min_size=1, max_size=3)):
            put(body, place, data.draw(st.sampled_from(ODD)))
        write_json(path, body)
        report = build_report(out_dir, profile)
        for form in (report_text, report_markdown, benchmark_markdown, benchmark_json):
            assert form(report)
        verdicts = {criterion.id: criterion.verdict for criterion in report.criteria}
        assert verdicts["scaling"] != "pass" or "summary.json" in path.name, (
            "the runs' times decide"
        )
    finally:
        path.write_text(text, encoding="utf-8")


def put(body: Any, place: tuple[Any, ...], value: Any) -> None:
    """Set a value, unless an earlier change took the place away."""
    try:
        for key in place[:-1]:
            body = body[key]
        body[place[-1]] = value
    except (KeyError, TypeError, IndexError):
        return
