"""Workers started before there is a job: they import and load the weights while the reads are still being staged."""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from virnuc_core.engine.messages import WorkerSpec
from virnuc_core.engine.process import Child, end_children, generation, spawn

PREFIX: Final = "virnuc-standby-"


def start_worker(spec: WorkerSpec, inbox: queue.Queue[Any], log: Path, born: int) -> Child:
    """A worker process on its device, loading; what it writes to standard error goes to `log`. Raises as `spawn`."""
    return spawn(
        "virnuc_core.engine.worker",
        spec.to_json(),
        name=spec.device.id,
        inbox=inbox,
        log=log,
        born=born,
        environment=spec.device.environment(),
    )


def _sweep() -> None:
    """Remove the folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)  # another user's stays


class Standby:
    """Workers that wait for a job. A pool takes those it can use; `close` ends the others.

    Until then they write to a folder of their own: the run's directory may come to nothing, and is not touched. The
    thread that makes a standby must live as long as its workers do (see `spawn`).
    """

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        self.inbox: queue.Queue[tuple[Child, dict[str, Any]]] = queue.Queue()
        _sweep()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._waiting: list[tuple[WorkerSpec, Child]] = []
        self._taken: list[Child] = []
        born = generation()
        try:
            for place, spec in enumerate(specs):
                self._waiting.append((spec, start_worker(spec, self.inbox, self._folder / f"{place}.log", born)))
        except BaseException:
            self.close()
            raise

    def take(self, spec: WorkerSpec, log: Path) -> Child | None:
        """The living worker that was started with exactly this; None when there is none, or it was taken before.

        From its job on it writes to `log`.
        """
        for place, (started_with, child) in enumerate(self._waiting):
            if started_with == spec and child.process.poll() is None:
                del self._waiting[place]
                self._taken.append(child)
                child.earlier_log, child.log = child.log, log
                return child
        return None

    def close(self) -> None:
        """End the workers that nobody took. What the others wrote before their job is put to the end of their logs."""
        end_children([child for _, child in self._waiting])
        self._waiting.clear()
        for child in self._taken:
            if child.earlier_log is not None and child.log.is_file():
                with child.log.open("ab") as log:
                    log.write(child.earlier_log.read_bytes())
            child.earlier_log = None
        self._taken.clear()
        shutil.rmtree(self._folder, ignore_errors=True)  # of logs only; what remains does no harm
