"""When a worker's heartbeat says that it last did something."""

from __future__ import annotations

import signal
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from virnuc_core.engine.process import Closed, Message
from virnuc_core.engine.shards import Computed, JobSpec, ShardTask
from virnuc_core.engine.worker import Worker

TASK = ShardTask(job=JobSpec(run="", store="", reads=""), shard=3, lo=0, hi=9)


def test_waiting_with_a_shard_in_hand_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch or a commit that hangs leaves the feeder asking for tasks: that must not pass for work."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    messages, sent = deque[Message | None]([TASK, Closed()]), list[Message]()
    parent: Any = SimpleNamespace(receive=lambda _: messages.popleft(), send=sent.append, progress=None)
    worker: Any = Worker(parent, None)  # type: ignore[arg-type]
    worker.runner = SimpleNamespace(progress_s=0.0)
    assert parent.progress() == pytest.approx(time.monotonic(), abs=5), "nothing to do is no silence"
    assert worker._receive() == TASK
    told_s = parent.progress()
    time.sleep(0.01)
    assert worker._receive() is None
    assert parent.progress() == told_s
    worker._answer(Computed(done=None))
    assert sent == [Computed(done=None)]
    assert parent.progress() > told_s
