"""A worker that the system ends with a bus error, as if its mapped file could not be read."""

from __future__ import annotations

import os
import signal

from virnuc_core.engine.process import Parent, Ready, WorkerSpec
from virnuc_core.engine.shards import ShardTask


def work(parent: Parent, spec: WorkerSpec) -> None:
    """Say that the models are loaded, and end with the first task."""
    parent.send(Ready(record={"pid": os.getpid(), "ready_s": 0.0}))
    assert isinstance(parent.receive(), ShardTask)
    os.kill(os.getpid(), signal.SIGBUS)
