"""Where an artifact says that results are: a path, and a link if a web server shows the folder."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest
from prefect.settings import PREFECT_UI_URL, temporary_settings

from virnuc.tasks.result_links import (
    RESULTS_URL,
    result_address,
    result_link,
    run_page,
    with_links,
)
from virnuc_core.markdown import Markdown

from ..markdown_pages import HOSTILE_TEXTS, structure


@pytest.mark.parametrize(
    ("setting", "path", "address"),
    [
        ("/srv/out=https://f.org/v", "/srv/out/lung/summary.html", "https://f.org/v/lung/summary.html"),
        ("/srv/out/=http://f.org:8080/", "/srv/out/lung", "http://f.org:8080/lung"),
        ("/srv/a=b=https://f.org/v", "/srv/a=b/x", "https://f.org/v/x"),
        ("/srv/out=https://f.org", "/srv/out/a b/(1)?#.html", "https://f.org/a%20b/%281%29%3F%23.html"),
        ("/srv/out=https://me:p@ss@f.org/v?token=t#f", "/srv/out/x", "https://f.org/v/x"),
        ("/srv/out=https://f.org", "/srv/out/../private/x", None),
        ("/srv/out=https://f.org", "/srv/output/x", None),
        ("", "/srv/out/x", None),
    ],
)  # fmt: skip
def test_a_result_below_the_folder_has_the_address_of_the_web_server(
    setting: str, path: str, address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RESULTS_URL, setting)
    assert result_address(Path(path)) == address


@pytest.mark.parametrize(
    "setting",
    ["https://f.org", "/srv/out", "out=https://f.org", "/srv/out=httpx://f", "/srv=http:"],
)
def test_a_setting_that_names_no_folder_and_address_is_not_used_and_said(
    setting: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(RESULTS_URL, setting)
    assert result_address(Path("/srv/out/x")) is None
    assert "/srv/results=https://files.example.org/results" in caplog.text


def test_the_page_of_a_run_has_no_password() -> None:
    with temporary_settings({PREFECT_UI_URL: "https://me:secret@prefect.example.org:4200"}):
        page = run_page(UUID(int=7))
    assert page == f"https://prefect.example.org:4200/runs/flow-run/{UUID(int=7)}"


def test_without_a_web_server_the_path_is_shown_and_nothing_is_linked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(RESULTS_URL, raising=False)
    description = with_links("Summary of a*b.", result=Path("/srv/out/s.html"), kind="Page")
    assert description == "Summary of a\\*b. Page: /srv/out/s.html"
    assert isinstance(description, Markdown)


@pytest.mark.parametrize("name", HOSTILE_TEXTS)
def test_a_name_of_others_links_to_nothing_but_the_result(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path("/srv/out") / name.replace("/", "_")
    monkeypatch.setenv(RESULTS_URL, "/srv/out=https://f.org")
    harmless = structure(result_link(Path("/srv/out/lung")))
    assert structure(result_link(path)) == harmless
