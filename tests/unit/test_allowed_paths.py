"""One function decides which paths a user may name, and links do not lead around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from virnuc_core.allowed_paths import own_folder, require_allowed, require_allowed_options
from virnuc_core.errors import ConfigError
from virnuc_core.inbox import Ledger
from virnuc_core.reads.parse import parse
from virnuc_core.reads.sources import find_inputs

FASTA = ">r\nACGT\n"
REFUSED = "lies in none of the folders that VIRNUC_ROOTS names"


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only allowed folder. Beside it lies a file that no user may name."""
    folder = tmp_path / "inside"
    folder.mkdir()
    (tmp_path / "secret.fa").write_text(FASTA)
    monkeypatch.setenv("VIRNUC_ROOTS", str(folder))
    return folder


def test_links_are_followed_before_a_path_is_judged(inside: Path) -> None:
    (inside / "good").write_text("")
    (inside / "link-to-good").symlink_to("good")
    require_allowed(inside / "link-to-good", "reads")
    require_allowed(inside / "not-made-yet" / "x", "out")
    (inside / "link").symlink_to("../secret.fa")
    (inside / "folder").symlink_to("..")
    (inside / "dangling").symlink_to("../not-there")
    for name in ("link", "folder/secret.fa", "dangling", "../inside/../secret.fa"):
        with pytest.raises(ConfigError, match=REFUSED):
            require_allowed(inside / name, "reads")


def test_a_folder_whose_name_begins_like_an_allowed_one_is_outside(inside: Path) -> None:
    with pytest.raises(ConfigError, match=REFUSED):
        require_allowed(inside.with_name("inside-too") / "x", "reads")


def test_without_the_variable_every_path_is_allowed(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("", ":"):
        monkeypatch.setenv("VIRNUC_ROOTS", value)
        require_allowed(Path("/etc/passwd"), "reads")


def test_links_that_lead_to_each_other_end_the_search(inside: Path) -> None:
    (inside / "a").mkdir()
    (inside / "a" / "up").symlink_to("..")
    (inside / "b").symlink_to("a")
    (inside / "loop").symlink_to("loop")
    require_allowed_options([("models", inside)])


def test_links_behind_an_allowed_link_to_a_folder_are_found(inside: Path) -> None:
    (inside / "store").mkdir()
    (inside / "store" / "w.safetensors").symlink_to("../../secret.fa")
    (inside / "models").mkdir()
    (inside / "models" / "esm2").symlink_to("../store")
    with pytest.raises(ConfigError, match=rf"^models: .*esm2/w\.safetensors {REFUSED}"):
        require_allowed_options([("models", inside / "models")])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reads", ("-", "https://a.b/c.fa", "ncbi:NC_045512.2")),
        ("profile", "ci-smoke"),
        ("cluster", "tcp://10.0.0.1:8786"),
        ("cluster", "local:2"),
        ("sample", "/not/a/path"),
        ("keep", 3),
        ("history", None),
    ],
)
def test_values_that_are_no_paths_are_left_alone(inside: Path, name: str, value: Any) -> None:
    require_allowed_options([(name, value)])


def test_the_history_beside_the_output_is_checked(inside: Path) -> None:
    (inside / "virnuc-history.jsonl").symlink_to("../secret.fa")
    with pytest.raises(ConfigError, match=r"^history: "):
        require_allowed_options([("out", inside / "run"), ("history", None)])


def test_reads_are_checked_where_they_are_opened(inside: Path, tmp_path: Path) -> None:
    """A name may come from a sheet, a record or a folder, and not from an option."""
    with pytest.raises(ConfigError, match=REFUSED):
        list(parse((str(tmp_path / "secret.fa"),)))
    (inside / "link.fa").symlink_to(tmp_path / "secret.fa")
    with pytest.raises(ConfigError, match=REFUSED):
        find_inputs((str(inside),))


def test_a_link_in_an_inbox_fails_alone(inside: Path, tmp_path: Path) -> None:
    inbox = inside / "inbox"
    inbox.mkdir()
    (inbox / "good.fa").write_text(FASTA)
    (inbox / "link.fa").symlink_to(tmp_path / "secret.fa")
    require_allowed_options([("inbox", inbox), ("out", inside / "out")])
    rows = Ledger(inbox, inside / "out").scan(settle_s=0, now_s=2 * inbox.stat().st_mtime)
    row_of_file = {row.file: row for row in rows}
    assert row_of_file["good.fa"].fate == "waiting"
    assert row_of_file["link.fa"].fate == "failed"
    assert REFUSED in row_of_file["link.fa"].note
    assert row_of_file["link.fa"].sha256 == ""


def test_a_temporary_folder_of_ours_is_allowed_while_it_is_used(
    inside: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "ours"
    with own_folder(folder):
        require_allowed(folder / "x", "reads")
    with pytest.raises(ConfigError, match=REFUSED):
        require_allowed(folder / "x", "reads")
