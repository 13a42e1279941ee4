"""A finished validation, made once and copied for each test that changes it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from virnuc_core.profiles import Profile
from virnuc_core.report.build import build_report, write_report
from virnuc_core.report.model import Report

from .measured_once import MeasuredOnce
from .validate_directory import build


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Profile]:
    """A validate directory on two GPUs with its report; not to be changed."""
    out_dir = tmp_path_factory.mktemp("validate") / "out"
    profile = build(out_dir)
    write_report(out_dir, profile, history=tmp_path_factory.mktemp("history") / "history.jsonl")
    return out_dir, profile


@pytest.fixture(scope="session")
def judged(finished: tuple[Path, Profile]) -> Report:
    """The report of that directory, made once."""
    return build_report(*finished)


@pytest.fixture(scope="session")
def measured_once() -> MeasuredOnce:
    """What reports of this process have read from telemetry, see `telemetry_once`."""
    return MeasuredOnce()


@pytest.fixture(scope="module")
def telemetry_once(measured_once: MeasuredOnce) -> Iterator[None]:
    """Let reports of a module read and summarise each content of a telemetry file once."""
    with measured_once.in_reports():
        yield


@pytest.fixture
def copied(finished: tuple[Path, Profile], tmp_path: Path) -> tuple[Path, Profile]:
    """The same, to be changed."""
    out_dir = tmp_path / "out"
    shutil.copytree(finished[0], out_dir)
    return out_dir, finished[1]
