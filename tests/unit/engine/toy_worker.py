"""A worker for tests of `virnuc serve`: it loads nothing, and answers each task at once.

Shard 13 ends it, and at shard 99 it hangs.
"""

from __future__ import annotations

import os
import sys
import time

from virnuc_core.engine.process import Parent, Ready, WorkerSpec
from virnuc_core.engine.shards import Computed, ShardTask


def work(parent: Parent, spec: WorkerSpec) -> None:
    """Answer tasks until the parent ends this process."""
    is_ready = False
    while True:
        task = parent.receive()
        if not isinstance(task, ShardTask):
            return
        if not is_ready:
            times = {"import_s": 0.0, "load_s": 0.0, "ready_s": 0.0, "waited_s": 0.0}
            parent.send(Ready(record={"pid": os.getpid(), "started_s": parent.started_s, **times}))
            is_ready = True
        print(f"computes shard {task.shard}", file=sys.stderr, flush=True)
        if task.shard == 13:
            os._exit(3)
        if task.shard == 99:
            time.sleep(600)
        parent.send(Computed(done=None))
