"""Dated directories: the newest is linked, the oldest of ours go, and nothing of others does."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from contextvars import Context
from pathlib import Path

import pytest

from virnuc.flows.settings.measured import keep_newest
from virnuc_core.rundir import run_lock

PARTS = (
    "run.json",
    "orfs.h5",
    "report/report.html",
    "devices-1/shards/00000.h5",
    "devices-1/logs/worker-0.log",
)


def night(root: Path, name: str) -> Path:
    """A directory as a validation leaves it."""
    night_dir = root / name
    for part in PARTS:
        (night_dir / part).parent.mkdir(parents=True, exist_ok=True)
    with run_lock(night_dir), run_lock(night_dir / "devices-1"):
        for part in PARTS:
            (night_dir / part).write_text("x")
    return night_dir


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_newest_stay_and_latest_points_to_the_last(tmp_path: Path) -> None:
    days = ["2026-11-20T0200", "2026-11-21T0200", "2026-11-22T0200"]
    for day in days:
        keep_newest(night(tmp_path, day), 2)
    assert names(tmp_path) == [*days[1:], "latest"]
    assert (tmp_path / "latest" / "run.json").samefile(tmp_path / days[-1] / "run.json")


def test_what_is_not_ours_or_is_worked_in_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = tmp_path / "2020-01-01T0000"
    theirs.mkdir()
    (theirs / "holiday.jpg").write_text("x")
    (tmp_path / "2020-01-02T0000").symlink_to(theirs)
    held_night, old = night(tmp_path, "2020-01-03T0000"), night(tmp_path, "2020-01-04T0000")
    (old / "notes.txt").write_text("mine")
    (tmp_path / "latest").mkdir()
    with ExitStack() as second_holder, caplog.at_level(logging.WARNING):
        Context().run(second_holder.enter_context, run_lock(held_night))
        keep_newest(night(tmp_path, "2026-11-22T0200"), 1)
    assert (theirs / "holiday.jpg").exists()
    assert (held_night / "devices-1" / "shards" / "00000.h5").exists()
    assert [path.relative_to(old).as_posix() for path in old.rglob("*")] == ["notes.txt"]
    assert (tmp_path / "latest").is_dir()
    assert not (tmp_path / "latest").is_symlink()
    messages = " ".join(record.message for record in caplog.records)
    assert "is working here" in messages
    assert "is no link" in messages
