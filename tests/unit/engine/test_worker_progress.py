"""A worker before its first shard, and when its heartbeat says that it last did something."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from virnuc_core.engine.process import Closed, Message
from virnuc_core.engine.shards import Computed, JobSpec, ShardTask
from virnuc_core.engine.worker import Runner, Worker

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


class Heavy:
    """An encoder that needs so much of a memory of one."""

    used, most, together = 0.0, 0.0, threading.Barrier(2)

    def __init__(self, needs: float) -> None:
        self.needs = needs

    def embed(self, _: object) -> None:
        Heavy.used += self.needs
        Heavy.most = max(Heavy.most, Heavy.used)
        try:
            if Heavy.most <= 1:
                self.together.wait(20)
            if Heavy.used > 1:
                self.together.abort()
                raise torch.OutOfMemoryError
        except threading.BrokenBarrierError:
            pass
        finally:
            Heavy.used -= self.needs


@pytest.mark.parametrize(("needs", "fits"), [(0.4, True), (0.6, True), (1.2, False)])
def test_encoders_warm_up_at_once_or_if_they_do_not_fit_one_after_the_other(needs: float, fits: bool) -> None:
    Heavy.used, Heavy.most, Heavy.together = 0.0, 0.0, threading.Barrier(2)
    made: Any = [Heavy(needs), Heavy(needs), None]
    runner, budgets = Runner(*made, torch.device("cpu")), {"dnabert_s": 64, "esm2": 64}
    if fits:
        runner.warm_up(budgets, 8)
        assert Heavy.most == 2 * needs, "they were never there at once"
    else:
        with pytest.raises(torch.OutOfMemoryError):
            runner.warm_up(budgets, 8)
