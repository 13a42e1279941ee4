"""A worker before its first shard, and when its heartbeat says that it last did something."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from virnuc_core.config import EngineSpec
from virnuc_core.encoders import checkpoint, classifier
from virnuc_core.encoders.checkpoint import load_encoder
from virnuc_core.encoders.models import DnabertS, Esm2
from virnuc_core.engine.loader import Source, pack, tokenise
from virnuc_core.engine.process import Closed, Message
from virnuc_core.engine.shards import Computed, ShardResult, ShardTask
from virnuc_core.engine.worker import MAX_WAITING_SHARDS, Worker, is_waiting_allowed
from virnuc_core.reads.stage import StageSummary
from virnuc_core.reads.store import OrfStore

TASK = ShardTask(run="", store="", reads_fingerprint="", shard=3, lo=0, hi=9)


def test_waiting_with_a_shard_in_hand_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch or a commit that hangs leaves the feeder asking for tasks: that must not pass for work."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    messages, answers = deque[Message | None]([TASK, Closed()]), list[Message]()
    parent: Any = SimpleNamespace(
        receive=lambda _: messages.popleft(), send=answers.append, progress=None
    )
    worker: Any = Worker(parent, None)  # type: ignore[arg-type]
    assert parent.progress() == pytest.approx(time.monotonic(), abs=60), (
        "nothing to do is no silence"
    )
    assert worker._receive() == TASK
    told_s = parent.progress()
    time.sleep(0.01)
    assert worker._receive() is None
    assert parent.progress() == told_s
    worker._answer(Computed(done=None))
    assert answers == [Computed(done=None)]
    assert parent.progress() > told_s


def test_a_shard_waits_only_for_one_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    same_run = TASK.model_copy(update={"shard": 4})
    other_run = TASK.model_copy(update={"run": "another"})
    smaller_batches = TASK.model_copy(update={"budget_divisor": 2})
    for here, in_the_pipe, is_awaited in (
        ([], None, False),
        ([], Closed(), False),
        ([], same_run, True),
        ([], other_run, False),
        ([same_run], None, True),
        ([same_run], other_run, True),
        ([other_run], same_run, False),
        ([smaller_batches], same_run, False),
    ):
        parent: Any = SimpleNamespace(peek=lambda message=in_the_pipe: message)
        worker: Any = Worker(parent, None)  # type: ignore[arg-type]
        worker._waiting.append(SimpleNamespace(pending=SimpleNamespace(task=TASK)))
        worker._unanswered_tasks.extend([TASK, *here])
        assert worker._is_next_shard_awaited() == is_awaited, (here, in_the_pipe)
        worker._in_haste.set()
        assert not worker._is_next_shard_awaited(), "a worker that is stopped commits what it has"


def test_waiting_shards_hold_little_memory() -> None:
    def shards_of(n_shards: int, n_rows: int) -> Any:
        result = ShardResult(np.empty((n_rows, 0), np.float32), np.empty((n_rows, 2), np.float32))
        result = result._replace(embeddings=np.broadcast_to(np.float32(0), (n_rows, 3328)))
        repeated = SimpleNamespace(result=result)
        return [SimpleNamespace(repeated=repeated) for _ in range(n_shards)]

    assert is_waiting_allowed(shards_of(MAX_WAITING_SHARDS, 3_150)), "of the usual size"
    assert not is_waiting_allowed(shards_of(MAX_WAITING_SHARDS + 1, 10))
    assert is_waiting_allowed(shards_of(1, 70_000))
    assert not is_waiting_allowed(shards_of(2, 70_000))


def test_kernels_are_compiled_for_the_lengths_of_the_first_shard(
    tiny_models: Path, staged: tuple[Path, StageSummary], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as the task is known, which here is while those for the shortest rows are made."""
    store = OrfStore.open(staged[0])
    task = TASK.model_copy(
        update={
            "store": str(staged[0]),
            "reads_fingerprint": store.fingerprint,
            "lo": 0,
            "hi": store.n_uniques,
        }
    )
    device = torch.device("cpu")
    encoder = load_encoder(Esm2, tiny_models, device)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    parent: Any = SimpleNamespace(progress=None, peek=lambda: None)
    worker: Any = Worker(parent, SimpleNamespace(models=str(tiny_models)))  # type: ignore[arg-type]
    worker._device = device
    worker._all_length_groups = [64, 128, 256]
    shapes: list[tuple[int, int]] = []

    def warm_up(_: object, budget: int, on: torch.device, length: int) -> None:
        shapes.append((length, budget))
        parent.peek = lambda: task

    monkeypatch.setattr("virnuc_core.engine.worker.warm_up", warm_up)
    worker._warm_up(encoder, 1024)
    lengths = {plan.max_seqlen for plan in pack(np.diff(store.protein_offsets) + 2, 1024)}
    assert lengths < {64, 128, 256}
    assert shapes == [
        (length, 1024 // part) for length, part in zip(sorted(lengths), (1, 16, 16), strict=False)
    ]
    dna = load_encoder(DnabertS, tiny_models, device)
    source = Source(Path(task.store), task.reads_fingerprint, tiny_models)
    dna_rows = tokenise(source, (task.lo, task.hi))["dnabert_s"]
    assert {plan.max_seqlen for plan in pack(dna_rows.lengths, 1024)} <= {
        *worker._next_length_groups(dna)
    }
    for nothing in (
        Closed(),
        None,
        task.model_copy(update={"reads_fingerprint": "of another store"}),
    ):
        parent.peek = lambda nothing=nothing: nothing
        assert worker._next_length_groups(dna) == worker._all_length_groups, (
            "whatever is wrong with a task is told when its turn comes"
        )


class Heavy:
    """An encoder that needs so much of a memory of one to warm up."""

    used, most, together, warmed = 0.0, 0.0, threading.Barrier(2), 0

    def __init__(self, needs: float) -> None:
        self.needs = needs

    def warm(self) -> None:
        Heavy.used += self.needs
        Heavy.most = max(Heavy.most, Heavy.used)
        try:
            if Heavy.most <= 1:
                self.together.wait(120)
            if Heavy.used > 1:
                self.together.abort()
                raise torch.OutOfMemoryError
        except threading.BrokenBarrierError:
            pass
        finally:
            Heavy.used -= self.needs
        Heavy.warmed += 1


@pytest.mark.parametrize(("needs", "fits"), [(0.4, True), (0.6, True), (1.2, False)])
def test_encoders_warm_up_at_once_or_if_they_do_not_fit_one_after_the_other(
    needs: float, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Heavy.used, Heavy.most, Heavy.together, Heavy.warmed = 0.0, 0.0, threading.Barrier(2), 0
    monkeypatch.setattr(checkpoint, "load_encoder", lambda *_: Heavy(needs))
    monkeypatch.setattr(checkpoint, "open_part", lambda *_: ())
    monkeypatch.setattr(classifier, "Head", lambda *_: None)
    arguments: Any = (Path(), torch.device("cpu"), EngineSpec(), Heavy.warm)
    if fits:
        checkpoint.load_models(*arguments)
        assert Heavy.most == 2 * needs, "they were never there at once"
        assert Heavy.warmed == 2
    else:
        with pytest.raises(torch.OutOfMemoryError):
            checkpoint.load_models(*arguments)


def test_shards_that_wait_have_the_memory_of_a_batch_that_did_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else they would run out of memory, too, and the error would be taken for theirs."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    parent: Any = SimpleNamespace(started_s=0.0, send=lambda _: None)
    worker: Any = Worker(parent, None)  # type: ignore[arg-type]
    activations = []
    is_freed = []

    def launch(_: object) -> None:
        tensor = torch.ones(8)
        activations.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError

    def write() -> None:
        assert worker._writes.get(timeout=60) is None
        is_freed.append(activations[0]() is None)

    monkeypatch.setattr(worker, "_load", lambda: None)
    monkeypatch.setattr(worker, "_receive", lambda: TASK)
    monkeypatch.setattr(worker, "_start_loader", lambda _: None)
    monkeypatch.setattr(worker, "_launch_all", launch)
    monkeypatch.setattr(worker, "_write", write)
    worker._report = {}
    with pytest.raises(torch.OutOfMemoryError):
        worker.run()
    assert is_freed == [True]
