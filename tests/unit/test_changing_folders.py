"""The tests' own functions for folders in which other processes work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.changing_folders import content_of, paths_below


def test_a_folder_that_vanishes_after_it_was_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    (folder / "gone" / "deep").mkdir(parents=True)
    (folder / "kept").mkdir()
    (folder / "kept" / "file").touch()
    (folder / "link").symlink_to("kept")
    scan_folder = os.scandir

    def scan_and_remove(path: Any) -> Any:
        """List a folder, of which another process has removed a part since it was named."""
        if Path(path).name == "gone":
            (folder / "gone").rename(tmp_path / "elsewhere")
        return scan_folder(path)

    monkeypatch.setattr(os, "scandir", scan_and_remove)
    names = [str(path.relative_to(folder)) for path in paths_below(folder)]
    assert names == ["gone", "kept", "kept/file", "link"]
    assert paths_below(tmp_path / "absent") == []


def test_only_regular_files_have_a_content(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    contents = [content_of(path) for path in paths_below(tmp_path)]
    assert contents == [b"content", b"", b"", b""]
    assert content_of(tmp_path / "absent") == b""
    assert content_of(file / "below a file") == b""
