"""Workers started before there is a job: they import and load the weights while the reads are still being staged."""

from __future__ import annotations

import queue
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from virnuc_core.engine.process import Child, end_children, generation, spawn
from virnuc_core.engine.spec import WorkerSpec


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


class Standby:
    """Workers that wait for a job. A pool takes those it can use; `close` ends the others.

    Until then they write to a folder of their own: the run's directory may come to nothing, and is not touched. The
    thread that makes a standby must live as long as its workers do (see `spawn`).
    """

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        self.inbox: queue.Queue[tuple[Child, dict[str, Any]]] = queue.Queue()
        self._folder = Path(tempfile.mkdtemp(prefix="virnuc-standby-"))
        born = generation()
        self._waiting: list[tuple[WorkerSpec, Child]] = []
        for place, spec in enumerate(specs):
            self._waiting.append((spec, start_worker(spec, self.inbox, self._folder / f"{place}.log", born)))

    def take(self, spec: WorkerSpec, log: Path) -> Child | None:
        """The living worker that was started with exactly this; None when there is none, or it was taken before.

        What it wrote so far is put into `log`, where its job tells it to go on.
        """
        for place, (started_with, child) in enumerate(self._waiting):
            if started_with == spec and child.process.poll() is None:
                del self._waiting[place]
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("ab") as run_log:
                    run_log.write(child.log.read_bytes())
                child.log = log
                return child
        return None

    def close(self) -> None:
        """End the workers that nobody took."""
        end_children([child for _, child in self._waiting])
        self._waiting.clear()
        if self._folder.exists():
            shutil.rmtree(self._folder)
