"""Real processes in tests: waited for by what they leave behind, and surely ended. Nothing here measures time."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.changing_folders import content_of, paths_below
from tests.process_lookup import family_of, has_ended, kill_all

ROOT = Path(__file__).resolve().parents[2]
PREFECT = (sys.executable, "-m", "prefect", "--no-prompt")
VIRNUC = (sys.executable, "-m", "virnuc.flows.cli")
PATIENCE_S = 280


def wait_for(truth: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """The first true answer of `truth`."""
    deadline = time.monotonic() + patience_s
    while not (result := truth()):
        assert time.monotonic() < deadline, f"waited {patience_s} s for {what}"
        time.sleep(0.02)
    return result


def ask_server(method: str, url: str, **options: Any) -> Any:
    """Send a request to the API of a Prefect server, and return the parsed answer.

    A busy server may answer 503, because its database is locked. Prefect's clients then ask again,
    and so does this function.

    Args:
        method: "GET" or "POST".
        url: The whole address.
        options: As `httpx.request` takes them.

    Raises:
        httpx.HTTPStatusError: The answer is another error.
    """

    def answer() -> httpx.Response | None:
        response = httpx.request(method, url, timeout=PATIENCE_S, **options)
        is_unavailable = response.status_code == httpx.codes.SERVICE_UNAVAILABLE
        return None if is_unavailable else response

    response: httpx.Response = wait_for(answer, f"an answer to {url}")
    return response.raise_for_status().json()


def committed(out: Path) -> int:
    """Number of shards whose results a run directory holds."""
    return len(list((out / "shards").glob("0*.h5")))


def gone(processes: list[psutil.Process]) -> bool:
    """Whether none of them runs; a zombie waiting for its parent is gone."""
    return all(has_ended(process) for process in processes)


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port that nobody else gets meanwhile.

    The socket here is bound and never listens, so that connections are refused until a server
    listens at the port. asyncio's servers and PostgreSQL can, since they reuse addresses.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def files_with(secret: str, *folders: Path) -> list[str]:
    """Return the files in folders whose bytes or names contain a text.

    A server may be at work in the folders.
    """
    holders = []
    for folder in folders:
        for path in paths_below(folder):
            if secret in path.name or secret.encode() in content_of(path):
                holders.append(str(path))
    return holders


def own_server(home: Path, database: Path) -> dict[str, str]:
    """Environment of a process that starts a Prefect server for itself, as an ad hoc run does.

    `database` is copied: an empty one takes a server some ten seconds to fill with tables.
    """
    home.mkdir(exist_ok=True)
    shutil.copy(database, home / "prefect.db")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "VIRNUC_"))
    }
    return {**environment, "PREFECT_HOME": str(home)}


@contextmanager
def background(
    command: tuple[str, ...], environment: dict[str, str], log: Path, *, cwd: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a session of its own; it and all it started are killed afterwards."""
    with log.open("ab") as handle:
        process = subprocess.Popen(
            command, stdout=handle, stderr=handle, env=environment, cwd=cwd, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_all(family_of(process.pid))
        process.wait(PATIENCE_S)
