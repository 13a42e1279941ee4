"""Progress that Prefect shows: sent seldom, and without harm when the server is away."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from virnuc.tasks.artifacts import progress_artifact
from virnuc.tasks.server_connection import connection


@pytest.fixture
def descriptions() -> list[str]:
    """Texts beside the percentages, of updates."""
    return []


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, descriptions: list[str]) -> list[float]:
    """Percentages that reach Prefect, as if this were a run."""
    rates: list[float] = []
    monkeypatch.setattr("virnuc.tasks.artifacts.inside_a_run", lambda: True)
    monkeypatch.setattr(
        "prefect.artifacts.create_progress_artifact",
        lambda percent, **_: rates.append(percent) or "id",
    )
    monkeypatch.setattr(
        "prefect.artifacts.update_progress_artifact",
        lambda _, progress, description: rates.append(progress) or descriptions.append(description),
    )
    return rates


def test_progress_is_sent_seldom_and_at_the_end(sent: list[float]) -> None:
    with progress_artifact("p", "", every_s=0.05) as show:
        began = time.monotonic()
        for step in range(1000):
            show(step / 1000)
        while sent[-1:] != [99.9]:
            time.sleep(0.01)
        show(1.0)
    assert sent[-1] == 100.0
    assert len(sent) <= (time.monotonic() - began) / 0.05 + 2
    assert sent == sorted(set(sent))


def test_live_figures_are_sent_beside_the_share(sent: list[float], descriptions: list[str]) -> None:
    """A new line is sent even if the share is the same, and is plain text."""
    with progress_artifact("p", "Embedding x", every_s=0.01) as show:
        show(0.5)
        while sent[-1:] != [50.0]:  # before, the share at the start may have been sent
            time.sleep(0.005)
        show.show_status("12 of 24 sequences | 3 viral sequences so far <b>")
    assert sent[-2:] == [50.0, 50.0]
    assert (
        descriptions[-1] == "Embedding x: 12 of 24 sequences \\| 3 viral sequences so far \\<b\\>"
    )


@pytest.mark.usefixtures("sent")
def test_a_server_that_is_away_does_not_stop_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: float, **_given: str) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr("prefect.artifacts.create_progress_artifact", refuse)
    with progress_artifact("p", "", every_s=0.01) as show:
        show(0.5)
    assert "progress p" in connection.unreported
    connection.unreported.clear()


@pytest.mark.usefixtures("sent")
def test_no_thread_is_left_behind() -> None:
    threads_before = set(threading.enumerate())
    with progress_artifact("p", "", every_s=0.01):
        pass
    # Threads of other tests may have ended meanwhile.
    assert set(threading.enumerate()) <= threads_before
