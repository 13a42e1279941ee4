"""`virnuc serve` and the option `--serve`: what the command line accepts, and when a server is asked."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from virnuc.flows.cli.prestart import use_server
from virnuc.flows.cli.serve_command import _report, parse_duration
from virnuc_core.engine import process
from virnuc_core.errors import ConfigError
from virnuc_core.private_socket import SOCKET


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7200), ("0.5m", 30), (" 1s ", 1)]
)
def test_durations_have_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "15", "m", "-1s", "1d", "1m30s", "inf", "nans", "1e3s"])
def test_what_is_no_duration_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--idle"):
        parse_duration(text)


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for sockets of this login; the user's home has none either."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("mode", "has_socket", "cluster", "asks"),
    [
        ("auto", False, None, False),
        ("auto", True, None, True),
        ("auto", True, "local:1", False),
        ("off", True, None, False),
        ("require", False, None, True),
    ],
)
def test_a_server_is_asked_only_if_there_may_be_one_and_the_user_wants_it(
    runtime: Path, mode: str, has_socket: bool, cluster: str | None, asks: bool
) -> None:
    if has_socket:
        (runtime / "virnuc").mkdir()
        (runtime / "virnuc" / SOCKET).touch()
    settings = SimpleNamespace(serve=mode, cluster=cluster)
    with ExitStack() as stack:
        use_server(settings, stack)
        assert (process._lender is not None) == asks
    assert process._lender is None


def test_commands_without_the_option_ask_no_server(runtime: Path) -> None:
    (runtime / "virnuc").mkdir()
    (runtime / "virnuc" / SOCKET).touch()
    with ExitStack() as stack:
        use_server(SimpleNamespace(), stack)
        assert process._lender is None


def test_a_full_disk_under_its_log_does_not_end_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FullDisk(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "stderr", FullDisk())
    _report("cpu-core-0 is lent to process 1")


def test_a_terminal_that_is_gone_does_not_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    _report("cpu-core-0 is lent to process 1")


@pytest.mark.parametrize("cluster", ["local:2", "slurm.toml"])
def test_a_server_that_is_required_for_a_run_that_cannot_use_it_is_an_error(
    runtime: Path, cluster: str
) -> None:
    settings = SimpleNamespace(serve="require", cluster=cluster)
    with ExitStack() as stack, pytest.raises(ConfigError, match=r"--serve require.*--cluster"):
        use_server(settings, stack)
