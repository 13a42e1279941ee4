"""`virnuc serve` and the option `--serve`: what the command line accepts, and when a server is asked."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from virnuc.flows.cli.prestart import use_server
from virnuc.flows.cli.serve_command import parse_duration
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
