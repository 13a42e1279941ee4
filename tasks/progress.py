"""How far a run is, in the UI: one progress artifact, sent by a thread of its own so that the work never waits."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from tasks.artifacts import inside_a_run, key

EVERY_S: Final = 5.0
logger = logging.getLogger(__name__)


def _publisher(name: str, description: str) -> Callable[[float], None]:
    """Sends percentages to one progress artifact, created by the first."""
    artifact: list[object] = []

    def send(percent: float) -> None:
        if artifact:
            update_progress_artifact(artifact[0], progress=percent)  # type: ignore[arg-type] # Prefect's own UUID
        else:
            artifact.append(create_progress_artifact(percent, key=key(name), description=description))

    return send


class ProgressArtifact:
    """`show` a share of work done; the newest is sent every `every_s` seconds, and once more at the end.

    Outside a run nothing is sent. A server that is away is noted in the log and never stops the work.
    """

    def __init__(
        self,
        name: str,
        description: str,
        *,
        every_s: float = EVERY_S,
        send: Callable[[float], None] | None = None,
    ) -> None:
        self._send = send if send is not None else _publisher(name, description) if inside_a_run() else None
        self._every_s = every_s
        self._newest = 0.0
        self._shown = -1.0
        self._stop = threading.Event()
        context = contextvars.copy_context()  # the run this thread belongs to
        self._thread = threading.Thread(target=context.run, args=(self._loop,), name="progress artifact", daemon=True)

    def show(self, share: float) -> None:
        """Remember how much is done, from 0 to 1; returns at once."""
        self._newest = round(100 * min(max(share, 0.0), 1.0), 1)

    def __enter__(self) -> Self:
        if self._send is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * self._every_s)

    def _loop(self) -> None:
        ended = False
        while not ended:
            ended = self._stop.wait(self._every_s)
            percent = self._newest
            if percent != self._shown:
                self._show_now(percent)

    def _show_now(self, percent: float) -> None:
        assert self._send is not None
        try:
            self._send(percent)
        except (httpx.HTTPError, OSError) as error:
            logger.warning("progress not shown: %s", error)
        else:
            self._shown = percent
